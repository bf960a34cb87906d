"""Parity over gloo processes and inside the ranks of a torchrun world says what threads say."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from verification.zoo import CASES, Settings, made, share

import tilewise as tw
from tilewise.transport.processes import gather_yields

SLOWLY = pytest.mark.slow
SLOW = [pytest.param(case, marks=SLOWLY) for case in CASES]


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


def in_a_world(
    rank: int, fault: str, window: int | None, timeout: float
) -> Iterator[tuple[str | None, str]]:
    made_one = made(Settings(window=window))
    report = tw.parity(*made_one, partial(gathered_by_torch, fault=fault), timeout=timeout)
    yield report.cause, str(report)


def on_all_ranks(function: Any, *args: Any) -> set[Any]:
    """What the ranks yield; then they are ended, for some may wait for ever."""
    world = gather_yields(4, function, args)
    answers = next(world)
    world.close()
    return set(answers)


@pytest.mark.parametrize(
    "fault, cause, words",
    [
        pytest.param("", None, "equal: ", marks=SLOWLY),
        ("window_ignored", "window_ignored", "first deviates: layers.0.attention"),
        pytest.param("dk_wrong", "dk_wrong", "first deviates: layers.1.attention", marks=SLOWLY),
        pytest.param("raises", "unknown", "rank 1 raised KeyError: 'no such shard'", marks=SLOWLY),
        pytest.param("hangs", "unknown", "rank 2 gave no answer in time", marks=SLOWLY),
    ],
)
def test_all_ranks_of_a_torchrun_world_get_one_report(fault, cause, words):
    window, timeout = (5 if "window" in fault else None), (6.0 if words[:4] == "rank" else 60.0)
    (answer,) = on_all_ranks(in_a_world, fault, window, timeout)
    assert answer[0] == cause and words in answer[1], answer[1]


TYPED = """
import torch.distributed as dist
import tilewise as tw
from verification.zoo import Settings, made, share

class Fault:
    name = "window_ignored"

def split(model, inputs, rank, group):
    assert dist.get_world_size(group) == 4
    return share(model, inputs, rank, group, fault=Fault.name)

print(tw.parity(*made(Settings(window=5)), split).cause)
"""


@SLOWLY
def test_what_is_typed_runs_in_processes():
    tests = str(Path(__file__).parents[1])
    given = {"PYTHONPATH": os.pathsep.join((tests, os.environ.get("PYTHONPATH", "")))}
    ran = subprocess.run(
        [sys.executable, "-"],
        input=TYPED,
        capture_output=True,
        text=True,
        env={**os.environ, **given},
    )
    assert ran.stdout.split() == ["window_ignored"], ran.stderr


def without_labels(rank: int) -> Iterator[str]:
    model, inputs = made()
    with pytest.raises(ValueError) as error:
        tw.parity(model, inputs | {"labels": inputs["labels"] * 0 - 100}, share)
    yield str(error.value)


def test_bad_input_is_an_error_on_all_ranks_of_a_torchrun_world():
    (text,) = on_all_ranks(without_labels)
    assert "loss is not a number" in text
