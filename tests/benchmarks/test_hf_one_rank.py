"""A step of transformers on one rank is measured in both ways."""

from __future__ import annotations

import pytest

pytest.importorskip("transformers", reason="needs transformers, of the extra hf")

from benchmarks.hf_one_rank import WAYS, measure


@pytest.mark.parametrize("way", WAYS)
def test_a_step_takes_time_and_memory(way: str):
    found = measure(0, way, 16)
    assert found.seconds > 0 and found.peak_bytes > 1 << 20
