"""A rank that is killed within a pass is named by all others."""

import os
import signal
import time
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

import tilewise as tw
from processes.launcher import TIMEOUT_SECONDS, run_processes
from tilewise.expressions import read_plan
from tilewise.transport import process_group
from tilewise.transport.process_group import DistTransport

N, LOST, NUM_TOKENS = 5, 2, 4000
# Which sends or receives are its last; or which exchange of all ranks at once.
KILLED_AT = [("ring(5)", "each", at) for at in (4, 8, 14)]
KILLED_AT += [("ulysses(5)", "rounds", at) for at in (2, 7, 14, 23)]
KILLED_AT += [("ulysses(5)", "at once", at) for at in (1, 2, 4)]


def die_within_a_pass(rank: int, folder: str, strategy: str, way: str, at: int) -> None:
    layout = tw.contiguous(NUM_TOKENS, N)
    q, k, v = (torch.ones(layout.size(rank), N, 32, requires_grad=True) for _ in range(3))
    plan = read_plan(strategy)

    def once() -> None:
        tw.attention(q, k, v, plan=plan, layout=layout, mask=tw.Full()).sum().backward()

    if way == "rounds":
        process_group.MARKED_BYTES_ON_A_HOST = process_group.MARKED_BYTES
    once()
    name = "exchange_all" if way == "at once" else "_post_each"
    num_posted, post = 0, getattr(DistTransport, name)

    def until_killed(self: DistTransport, *messages: Any) -> Any:
        nonlocal num_posted
        num_posted += 1
        if rank == LOST and num_posted == at:
            os.kill(os.getpid(), signal.SIGKILL)
        return post(self, *messages)

    with (
        mock.patch.object(DistTransport, name, until_killed),
        pytest.raises(RuntimeError) as caught,
    ):
        once()
    (Path(folder) / str(rank)).write_text(str(caught.value))
    # One that ended would end the waits of others.
    until = time.monotonic() + TIMEOUT_SECONDS / 4
    while len(list(Path(folder).iterdir())) < N - 1:
        assert time.monotonic() < until, "another rank still waits"
        time.sleep(0.02)
    raise caught.value


@pytest.mark.parametrize("strategy, way, at", KILLED_AT)
def test_every_rank_names_the_one_that_was_killed(tmp_path: Path, strategy: str, way: str, at: int):
    with pytest.raises(AssertionError, match=f"rank {LOST} "):
        run_processes(N, die_within_a_pass, str(tmp_path), strategy, way, at)
    told = {rank: (tmp_path / str(rank)).read_text() for rank in range(N) if rank != LOST}
    for text in told.values():
        assert f"rank {LOST} failed" in text
