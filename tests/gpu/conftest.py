"""Everything here needs a CUDA device: run with -m gpu."""

import pytest
import torch


@pytest.fixture(autouse=True)
def _device() -> None:
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device here")
