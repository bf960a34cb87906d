"""Parity names the faults that public threads tell of, and finds none in random right splits."""

from __future__ import annotations

import pytest

import tilewise as tw

pytest.importorskip("transformers", reason="needs transformers, of the extra hf")

from verification.peer_bugs import BUGS, made, split_of
from verification.right_splits import right_split

QUICK = ("no sink", "own positions", "labels shifted", "scan")


def _case(bug):
    marks = () if bug.says in QUICK else pytest.mark.slow
    return pytest.param(bug, id=f"{bug.thread}, {bug.says} in {bug.model}", marks=marks)


@pytest.mark.parametrize("bug", [_case(bug) for bug in BUGS])
def test_a_fault_of_a_public_library_is_named(bug):
    report = tw.parity(*made(bug), split_of(bug), backend="loopback")
    assert report.layer == bug.layer and report.cause in bug.causes, str(report)


@pytest.mark.parametrize(
    "seeds", [(*range(5), 150), pytest.param(range(500), marks=pytest.mark.slow)]
)
def test_right_splits_raise_no_alarm(seeds):
    for seed in seeds:
        one = right_split(seed)
        report = tw.parity(
            one.model, one.inputs, one.split, world_size=one.world_size, backend="loopback"
        )
        assert report.equal, f"{seed}: {one.text}\n{report}"
