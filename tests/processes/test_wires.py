"""Ranks that compare nothing but disagree on the wire hear of it, in bounded time."""

from unittest import mock

import pytest
import torch
import torch.distributed as dist

import tilewise as tw
from processes.launcher import run_processes
from tilewise.transport import watch

N = 3


def attend_with_another_wire(rank: int, other: int) -> str:
    layout = tw.contiguous(24, N)
    q = torch.ones(layout.size(rank), 2, 16)
    call = {"plan": tw.ring(N), "layout": layout, "mask": tw.Full(), "validate": "never"}
    wire = None if rank == other else tw.wire.Float8(64)
    group = dist.new_group()
    with (
        mock.patch.object(watch, "PATIENCE_SECONDS", 0.3),
        pytest.raises(ValueError) as caught,
    ):
        tw.attention(q, q, q, **call, wire=wire, group=group)
    return str(caught.value)


@pytest.mark.parametrize("other", [0, pytest.param(2, marks=pytest.mark.slow)])
def test_a_rank_without_the_others_wire_does_not_wait_for_ever(other: int):
    first, *others = run_processes(N, attend_with_another_wire, other)
    assert others == [first] * (N - 1)
    assert "validate='never', no wire that rounds" in first and "pass forward" in first, first
