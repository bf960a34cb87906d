"""A rank that is killed within a pass is named by all others."""

import os
import signal
from pathlib import Path
from unittest import mock

import pytest
import torch

import tilewise as tw
from multiprocess.launcher import run_processes
from tilewise.transport.process_group import DistTransport
from tilewise.transport.protocol import Handle

N, LOST, NUM_TOKENS = 5, 2, 4000


def die_within_a_pass(rank: int, folder: str, backward: bool) -> None:
    layout = tw.contiguous(NUM_TOKENS, N)
    q, k, v = (torch.ones(layout.size(rank), 2, 32, requires_grad=True) for _ in range(3))

    def once() -> None:
        out = tw.attention(q, k, v, plan=tw.ring(N), layout=layout, mask=tw.Full())
        if backward:
            out.sum().backward()

    once()
    posted, exchange = 0, DistTransport.exchange

    def until_killed(self: DistTransport, *messages, **lane) -> Handle:
        nonlocal posted
        posted += 1
        if rank == LOST and posted == 3 + 4 * backward:
            os.kill(os.getpid(), signal.SIGKILL)
        return exchange(self, *messages, **lane)

    with (
        mock.patch.object(DistTransport, "exchange", until_killed),
        pytest.raises(RuntimeError) as caught,
    ):
        once()
    (Path(folder) / str(rank)).write_text(str(caught.value))
    raise caught.value


@pytest.mark.parametrize("backward", [False, True])
def test_every_rank_names_the_one_that_was_killed(tmp_path: Path, backward: bool):
    with pytest.raises(AssertionError, match=f"rank {LOST} "):
        run_processes(N, die_within_a_pass, str(tmp_path), backward)
    told = {rank: (tmp_path / str(rank)).read_text() for rank in range(N) if rank != LOST}
    for text in told.values():
        assert f"rank {LOST} failed" in text
