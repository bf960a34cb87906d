"""Pushes into symmetric memory: right, without a race on a device, and races are found."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from cuda_model.played_cuda import PlayedDevice, play
from cuda_model.played_symmetric import over_symmetric
from cuda_model.race_cases import MASKS, ONE_WAY, PLANS, Case, adopt, case_of, run
from cuda_model.test_race_seeds import seeded
from support.thinned import thinned

import tilewise as tw
from tilewise.execution.workspace import Workspace, WorkspacePool
from tilewise.transport import symmetric
from tilewise.transport.loopback import LoopbackGroup
from tilewise.transport.protocol import Message
from tilewise.transport.symmetric import SymmetricTransport

OFTEN = "ring", "one way", "mesh"


@pytest.fixture
def device(monkeypatch) -> PlayedDevice:
    return play(monkeypatch)


@pytest.mark.parametrize("bound", [True, False], ids=["workspaces", "fresh"])
@pytest.mark.parametrize(
    "plan",
    [
        plan if plan in OFTEN else pytest.param(plan, marks=pytest.mark.slow)
        for plan in (*PLANS, "one way")
    ],
)
def test_pushes_give_what_loopback_gives_without_a_race(plan, bound, device, monkeypatch):
    adopt(monkeypatch, bound)
    case = case_of(plan)
    want = run(case, device)
    for ours, theirs in zip(run(case, device, over_symmetric(device)), want, strict=True):
        assert all(torch.equal(x, y) for x, y in zip(ours, theirs, strict=True))
    assert device.races == [] and device.operations > 100


@pytest.mark.slow
@pytest.mark.parametrize("mask", MASKS)
def test_other_masks_have_no_race(mask, device, monkeypatch):
    adopt(monkeypatch, False)
    for plan in ("mesh", "double ring", "ulysses"):
        run(Case(PLANS[plan], MASKS[mask]), device, over_symmetric(device))
    assert device.races == []


def test_messages_come_straight_into_workspaces(device, monkeypatch):
    """Of the first pass on; where there is too little for workspaces, staging takes them."""
    adopt(monkeypatch, False)
    staged: list[int] = []
    give = symmetric._Staging.give

    def counted(self: Any, piece: torch.Tensor) -> None:
        staged.append(piece.nbytes)
        give(self, piece)

    monkeypatch.setattr(symmetric._Staging, "give", counted)
    case = Case(tw.ring(3), tw.Causal())
    run(case, device, over_symmetric(device))
    assert not staged
    run(case, device, over_symmetric(device, TOO_LITTLE))
    assert staged and device.races == []


TOO_LITTLE = 2**12  # bytes, for workspaces
RACES = {
    "a push does not wait for room": (
        SymmetricTransport, "_push",
        "self.memory.wait_signal(peer, Signal.ROOM, self._put[peer])", "pass",
    ),
    "a push does not wait for what it sends": (
        SymmetricTransport, "_push", "follow(ready)", "pass",
    ),
    "nobody waits for data": (
        symmetric._Pushing, "wait",
        "self._transport.memory.wait_signal(peer, Signal.DATA, count)", "pass",
    ),
    "data is said to be there before it is": (
        SymmetricTransport, "_push",
        "mine = [message",
        "self.memory.write_signal(peer, Signal.DATA, self._put[peer]); mine = [message",
    ),
    "room is said to be free before it is": (
        SymmetricTransport, "exchange",
        "self.memory.write_signal(peer, Signal.ROOM, self.offered[peer])",
        "with on_stream(new_stream(device)):"
        " self.memory.write_signal(peer, Signal.ROOM, self.offered[peer])",
    ),
    "what is sent is used again at once": (
        symmetric._Pushing, "leave", "follow(self.pushed)", "pass",
    ),
    "staging is used again at once": (symmetric._Staging, "room", "follow(moment)", "pass"),
}  # fmt: skip


@pytest.mark.parametrize("seed", thinned(RACES, of=1))
def test_a_seeded_race_is_found(seed, device, monkeypatch):
    adopt(monkeypatch, False)
    seeded(monkeypatch, *RACES[seed])
    case = Case(tw.double_ring(2, 2), tw.Causal())
    if "staging" in seed:  # passes of several plans, that have no workspace in common
        monkeypatch.setattr(WorkspacePool, "take", lambda self: Workspace())
        monkeypatch.setattr(SymmetricTransport, "workspace", lambda self, num_bytes: None)
        case = Case(*ONE_WAY)
    run(case, device, over_symmetric(device))
    assert device.races


def test_sizes_that_differ_and_too_little_memory_are_errors(device):
    transports = over_symmetric(device, 4096)

    def exchange(sent: int, expected: int) -> None:
        def on_rank(rank: int, group: LoopbackGroup) -> None:
            end = transports(rank, group)
            x = torch.zeros(expected if rank else sent, dtype=torch.uint8)
            message = [Message(x, 1 - rank, "step 0, kv0")]
            end.exchange(*(((), message) if rank else (message, ()))).wait()

        tw.loopback(2, on_rank)

    with pytest.raises(RuntimeError, match=r"rank 0 sends 8 bytes .*, but rank 1 expects 9"):
        exchange(8, 9)
    with pytest.raises(RuntimeError, match=r"5000 bytes of symmetric memory .* 4096 of 4096"):
        exchange(5000, 5000)


def test_a_graph_is_refused(device):
    transports = over_symmetric(device)

    def on_rank(rank: int, group: LoopbackGroup) -> None:
        transports(rank, group).exchange(
            (), [Message(torch.zeros(8).view(torch.uint8), 1 - rank, "x")]
        )

    with device.capturing(), pytest.raises(RuntimeError, match="cannot be captured in a graph"):
        tw.loopback(2, on_rank)
