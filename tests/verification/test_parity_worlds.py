"""Parity over gloo processes and inside the ranks of a torchrun world says what threads say."""

from __future__ import annotations

import time
from functools import partial
from typing import Any

import pytest
import torch.distributed as dist
from verification.zoo import CASES, Settings, made, share

import tilewise as tw
from tilewise.transport.processes import run_ranks

SLOW = [pytest.param(case, marks=pytest.mark.slow) for case in CASES]


@pytest.mark.parametrize("case", SLOW, ids=lambda case: f"{case.fault} in {case.layer}")
def test_the_zoo_is_found_over_gloo(case):
    report = tw.parity(*made(case.settings), case.split)
    assert (report.layer, report.cause) == (case.layer, case.fault), str(report)


def gathered_by_torch(model: Any, inputs: Any, rank: int, group: Any, fault: str = "") -> Any:
    if fault == "raises" and rank == 1:
        raise KeyError("no such shard")
    if fault == "hangs" and rank == 2:
        time.sleep(60)
    if fault == "hangs":
        dist.barrier(group)
    return share(model, inputs, rank, group, fault=fault)


def in_a_world(rank: int, fault: str, window: int | None, timeout: float) -> tuple[Any, ...]:
    try:
        made_one = made(Settings(window=window))
        report = tw.parity(*made_one, partial(gathered_by_torch, fault=fault), timeout=timeout)
    except ValueError as error:
        return "ValueError", str(error)
    return report.cause, report.layer, str(report)


@pytest.mark.parametrize(
    "fault, cause, words",
    [
        ("", None, "equal: "),
        ("window_ignored", "window_ignored", "first deviates: layers.0.attention"),
        ("dk_wrong", "dk_wrong", "first deviates: layers.1.attention"),
        ("raises", "unknown", "rank 1 raised KeyError: 'no such shard'"),
        ("hangs", "unknown", "rank 2 gave no answer in time"),
    ],
)
def test_all_ranks_of_a_torchrun_world_get_one_report(fault, cause, words):
    window, timeout = (5 if "window" in fault else None), (4.0 if fault == "hangs" else 60.0)
    answers = run_ranks(4, in_a_world, fault, window, timeout)
    assert {answer[0] for answer in answers} == {cause}
    assert len(set(answers)) == 1 and words in answers[0][2], answers[0][2]


def without_labels(rank: int) -> str:
    model, inputs = made()
    try:
        tw.parity(model, inputs | {"labels": inputs["labels"] * 0 - 100}, share)
    except ValueError as error:
        return str(error)
    return "nothing"


def test_bad_input_is_an_error_on_all_ranks_of_a_torchrun_world():
    (text,) = set(run_ranks(4, without_labels))
    assert "loss is not a number" in text
