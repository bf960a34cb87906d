"""Records over a tree of sockets: who is late, who is a stranger, and groups made anew."""

from __future__ import annotations

import socket
import time
from datetime import timedelta
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from multiprocess.launcher import run_processes
from tilewise.transport import record_tree
from tilewise.transport.lost_rank import LostRankError
from tilewise.transport.nccl_groups import group_store
from tilewise.transport.resolve import transport_for

RANKS, LATE, SECONDS = 6, 5, 2.0


def gathered(group: Any, value: int) -> list[int]:
    record = torch.full((8,), value, dtype=torch.uint8)
    return [int(one[0]) for one in transport_for(group).gather_records(record)]


def answer_too_late(rank: int) -> list[int]:
    """Rank 5, below rank 1, is later than the time limit; nobody takes what it says then."""
    groups = [dist.new_group(timeout=timedelta(seconds=SECONDS)) for _ in range(2)]
    assert gathered(groups[0], rank) == [*range(RANKS)]
    dist.barrier()
    lost = []
    for _ in range(2):
        time.sleep(3 * SECONDS * (rank == LATE and not lost))
        with pytest.raises(LostRankError) as error:
            gathered(groups[0], 7)
        lost.append(error.value.rank)
    dist.barrier()
    assert gathered(groups[1], rank) == [*range(RANKS)]
    return lost


@pytest.mark.slow
def test_a_rank_that_is_too_late_is_named_by_all_and_left_out():
    told = run_processes(RANKS, answer_too_late)
    assert told[:LATE] == [[LATE, LATE]] * LATE


def meet_strangers(rank: int) -> list[list[int]]:
    """Before each rank greets the one above, somebody else does, and one that knows no secret."""
    connect, found = socket.create_connection, []

    def after_strangers(place: Any, timeout: float) -> socket.socket:
        with connect(place) as silent, connect(place) as wrong:
            wrong.sendall(record_tree._GREETING.pack(bytes(16), rank))
            silent.shutdown(socket.SHUT_RDWR)
            return connect(place, timeout)

    for _ in range(2):  # the second world finds no address of the first one
        group: Any = dist.new_group()
        with mock.patch.object(socket, "create_connection", after_strangers):
            found.append(gathered(group, rank))
        assert not any(group_store(group, "records").check([str(i)]) for i in range(3))
    return found


def test_strangers_are_turned_away():
    assert run_processes(3, meet_strangers) == [[[0, 1, 2]] * 2] * 3
