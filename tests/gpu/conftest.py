"""Everything here needs a CUDA device: run with -m gpu.

Tests run in the order of their files, and stop where the device no longer works: whatever came
after would fail too, and say nothing.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

TIMEOUT_SECONDS = 120  # a first launch compiles; nothing else here takes more than seconds


def pytest_report_header() -> str:
    if not torch.cuda.is_available():
        return "no CUDA device here"
    free, total = (x >> 20 for x in torch.cuda.mem_get_info())
    name = torch.cuda.get_device_name()
    return f"{name}, {free} of {total} MiB free, torch {torch.__version__}"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """A hang in CUDA is no Python's to interrupt: a thread writes all stacks and ends the run.

    Warnings are no errors: libraries warn of devices, drivers and networks that are new to them.
    """
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.filterwarnings("default"))
            if not item.get_closest_marker("timeout"):
                item.add_marker(pytest.mark.timeout(TIMEOUT_SECONDS, method="thread"))


@pytest.fixture(autouse=True)
def _device(request: pytest.FixtureRequest) -> Iterator[None]:
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device here")
    torch.empty(0, device="cuda")  # loopback has streams where CUDA is in use
    torch.manual_seed(0)
    yield
    try:
        torch.cuda.synchronize()
    except RuntimeError as error:
        pytest.exit(f"{request.node.nodeid} has broken the device: {error}", returncode=3)
