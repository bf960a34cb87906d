"""The executor: runs one rank's program, for any strategy, mask and pass.

It moves bytes and keeps order; what the bytes mean is the work's business.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from torch import Tensor

from tilewise.messages import Handle, Message, Transport
from tilewise.plan import Item, Tile, Transfer
from tilewise.program import Collective, Free, Launch, Program, Run, Wait


class Work(Protocol):
    """A rank's values during one pass, as the executor sees them."""

    def travels(self, item: Item) -> bool:
        """Whether an item has any bytes in this pass."""
        ...

    def departure(self, transfer: Transfer) -> Tensor:
        """The bytes to send; a partial leaves its place."""
        ...

    def room(self, transfer: Transfer) -> Tensor:
        """Where to receive."""
        ...

    def arrive(self, transfer: Transfer, wire: Tensor) -> None:
        """Take in what was received; a partial is merged."""
        ...

    def run(self, tile: Tile) -> None: ...
    def free(self, item: Item) -> None: ...


Arrival = tuple[Handle, Transfer, Tensor] | None


def execute(program: Program, work: Work, transport: Transport) -> None:
    """Run a program to its end; returns when all that was sent has left.

    Merges happen in program order, so every run gives the same bits.
    """
    under_way: dict[int, list[Arrival]] = {}
    for instruction in program.instructions:
        match instruction:
            case Run(tile):
                work.run(tile)
            case Launch(handle, step, lane, sends, recvs):
                outgoing = _outgoing(work, step, sends)
                rooms, incoming = _incoming(work, step, recvs)
                if transport.receives_ahead:
                    started = [transport.exchange((), (m,), lane) if m else None for m in incoming]
                    transport.exchange(outgoing, (), lane)
                else:
                    together = transport.exchange(outgoing, [m for m in incoming if m], lane)
                    started = [together] * len(recvs)
                under_way[handle] = _arrivals(started, recvs, rooms)
            case Collective(handle, kind, step, lane, sends, recvs):
                outgoing = _outgoing(work, step, sends)
                rooms, incoming = _incoming(work, step, recvs)
                if outgoing:
                    together = transport.collective(
                        kind, outgoing, [m for m in incoming if m], lane
                    )
                    under_way[handle] = _arrivals([together] * len(recvs), recvs, rooms)
            case Wait(handle, arrivals):
                for index in arrivals if handle in under_way else ():
                    _arrive(work, under_way[handle], index)
            case Free(item):
                work.free(item)
    transport.finish()


def _outgoing(work: Work, step: int, sends: Sequence[Transfer]) -> list[Message]:
    return [
        Message(work.departure(hop), hop.dst, f"step {step}, {hop.item}")
        for hop in sends
        if work.travels(hop.item)
    ]


def _incoming(
    work: Work, step: int, recvs: Sequence[Transfer]
) -> tuple[list[Tensor | None], list[Message | None]]:
    rooms = [work.room(hop) if work.travels(hop.item) else None for hop in recvs]
    messages = [
        None if room is None else Message(room, hop.src, f"step {step}, {hop.item}")
        for room, hop in zip(rooms, recvs, strict=True)
    ]
    return rooms, messages


def _arrivals(
    started: Sequence[Handle | None], recvs: Sequence[Transfer], rooms: Sequence[Tensor | None]
) -> list[Arrival]:
    return [
        None if handle is None or room is None else (handle, hop, room)
        for handle, hop, room in zip(started, recvs, rooms, strict=True)
    ]


def _arrive(work: Work, launched: list[Arrival], index: int) -> None:
    arrival, launched[index] = launched[index], None
    if arrival is not None:
        handle, hop, room = arrival
        handle.wait()
        work.arrive(hop, room)
