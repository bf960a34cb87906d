"""A rank that is killed within a pass is named by all others."""

import os
import signal
from pathlib import Path
from unittest import mock

import pytest
import torch

import tilewise as tw
from multiprocess.launcher import run_processes
from tilewise.expressions import read_plan
from tilewise.transport.posted import Posted
from tilewise.transport.process_group import DistTransport

N, LOST, NUM_TOKENS = 5, 2, 4000
# Which sends or receives are its last, in forward and in backward.
KILLED_AT = {"ring(5)": (4, 14), "ulysses(5)": (7, 23)}


def die_within_a_pass(rank: int, folder: str, strategy: str, backward: bool) -> None:
    layout = tw.contiguous(NUM_TOKENS, N)
    q, k, v = (torch.ones(layout.size(rank), N, 32, requires_grad=True) for _ in range(3))
    plan = read_plan(strategy)

    def once() -> None:
        out = tw.attention(q, k, v, plan=plan, layout=layout, mask=tw.Full())
        if backward:
            out.sum().backward()

    once()
    posted, post = 0, DistTransport._post_each

    def until_killed(self: DistTransport, *messages) -> list[Posted]:
        nonlocal posted
        posted += 1
        if rank == LOST and posted == KILLED_AT[strategy][backward]:
            os.kill(os.getpid(), signal.SIGKILL)
        return post(self, *messages)

    with (
        mock.patch.object(DistTransport, "_post_each", until_killed),
        pytest.raises(RuntimeError) as caught,
    ):
        once()
    (Path(folder) / str(rank)).write_text(str(caught.value))
    raise caught.value


@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize("strategy", KILLED_AT)
def test_every_rank_names_the_one_that_was_killed(tmp_path: Path, strategy: str, backward: bool):
    with pytest.raises(AssertionError, match=f"rank {LOST} "):
        run_processes(N, die_within_a_pass, str(tmp_path), strategy, backward)
    told = {rank: (tmp_path / str(rank)).read_text() for rank in range(N) if rank != LOST}
    for text in told.values():
        assert f"rank {LOST} failed" in text
