"""Launches: what a rank sends and receives is packed and handed to the transport."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from tilewise.compiler.program import Launch
from tilewise.execution.head_exchange import Exchange
from tilewise.execution.work import PassWork
from tilewise.plan.ir import Item, Transfer
from tilewise.transport.protocol import (
    Handle,
    Message,
    TeamMessages,
    Transport,
    shares_message,
    team_transport,
)


class Label(NamedTuple):
    """What a message carries, written out only if an error names it."""

    step: int
    item: Item

    def __str__(self) -> str:
        return f"step {self.step}, {self.item}"


Arrival = tuple[Handle, Transfer | None, Tensor]
"""What to wait for, and what is then on_receive's."""


def launch_apart(launch: Launch, work: PassWork, transport: Transport) -> list[Arrival]:
    """Post every receive by itself, to be waited for by itself; small ones of a rank together."""
    handle, step, lane, sends, recvs, _ = launch
    arrivals: list[Arrival] = []
    alone = ()
    if len(recvs) == 1:  # one exchange serves both
        (hop,) = recvs
        alone = (Message(work.recv_buffer(hop), hop.src, Label(step, hop.item)),)
        if not sends:
            return [(transport.exchange((), alone, lane), hop, alone[0].tensor)]
    elif recvs:
        messages = _incoming(work, launch)
        started: dict[int, Handle] = {}
        for peer in dict.fromkeys([hop.src for hop in recvs]):
            mine = [message for message in messages if message.peer == peer]
            if shares_message([message.tensor.nbytes for message in mine]):
                started[peer] = transport.exchange((), mine, lane)
        for message, hop in zip(messages, recvs, strict=True):
            handed = started.get(hop.src) or transport.exchange((), (message,), lane)
            arrivals.append((handed, hop, message.tensor))
    if sends:
        posted = transport.exchange(_outgoing(work, launch), alone, lane)
        work.launched(handle, lane)
        arrivals += [(posted, recvs[0], message.tensor) for message in alone]
    return arrivals


def launch_together(launch: Launch, work: PassWork, transport: Transport) -> list[Arrival]:
    """Post all sends and receives at once."""
    incoming = _incoming(work, launch)
    started = transport.exchange(_outgoing(work, launch), incoming, launch.lane)
    work.launched(launch.handle, launch.lane)
    return [(started, hop, x.tensor) for x, hop in zip(incoming, launch.recvs, strict=True)]


def launch_team(launch: Launch, work: PassWork, transport: Transport) -> list[Arrival]:
    """Exchange within a team, as all its ranks do."""
    teams = team_transport(transport)
    assert launch.team is not None and teams is not None
    team, parts = launch.team
    hops = launch.recvs or launch.sends
    label = Label(launch.step, hops[0].item) if hops else "an exchange of a team"
    most = sum(map(work.shard_bytes, parts))
    whole = work.exchange(launch)
    if whole is not None:
        handle = teams.exchange_all(TeamMessages(*whole[:3], team, label, most))
        return [(_Exchanging(handle, whole.take_in), None, whole.arriving)] * len(launch.recvs)
    incoming = _incoming(work, launch)
    messages = _joined(_outgoing(work, launch), incoming, team)
    started = teams.exchange_all(TeamMessages(*messages[:3], team, label, most))
    handle = _Exchanging(started, messages.take_in)
    work.launched(launch.handle, launch.lane)
    return [(handle, hop, x.tensor) for x, hop in zip(incoming, launch.recvs, strict=True)]


def _incoming(work: PassWork, launch: Launch) -> list[Message]:
    step = launch.step
    return [Message(work.recv_buffer(hop), hop.src, Label(step, hop.item)) for hop in launch.recvs]


def _outgoing(work: PassWork, launch: Launch) -> list[Message]:
    step = launch.step
    return [Message(work.pack_send(hop), hop.dst, Label(step, hop.item)) for hop in launch.sends]


class _Exchanging:
    """An exchange on its way, taken in once when it is first waited for."""

    def __init__(self, handle: Handle, take_in: Callable[[], None]):
        self._handle, self._take_in = handle, take_in
        self._taken_in = False

    def wait(self) -> None:
        if not self._taken_in:
            self._handle.wait()
            self._taken_in = True
            self._take_in()


def _joined(sends: Sequence[Message], recvs: Sequence[Message], team: range) -> Exchange:
    """Messages as an exchange, those of each rank one after the other."""
    (leaving, sending), (arriving, receiving) = (_by_rank(x, team) for x in (sends, recvs))
    out = torch.cat(leaving) if leaving else torch.empty(0, dtype=torch.uint8)
    arrived = out.new_empty(sum(receiving))

    def take_in() -> None:
        pieces = arrived.split([room.numel() for room in arriving])
        for room, piece in zip(arriving, pieces, strict=True):
            room.copy_(piece)

    return Exchange(out, arrived, (sending, receiving), take_in)


def _by_rank(messages: Sequence[Message], team: range) -> tuple[list[Tensor], list[int]]:
    """Flat bytes in order of ranks, and how many are each rank's."""
    sizes = [0] * len(team)
    for message in messages:
        sizes[message.peer - team.start] += message.tensor.nbytes
    ordered = sorted(messages, key=lambda message: message.peer)
    return [message.tensor.view(-1) for message in ordered if message.tensor.nbytes], sizes
