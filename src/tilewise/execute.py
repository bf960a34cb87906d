"""The executor: runs one rank's program, for any strategy, mask and pass.

It moves bytes and keeps order; what the bytes mean is the work's business.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

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


class Label(NamedTuple):
    """What a message carries, written out only if an error names it."""

    step: int
    item: Item

    def __str__(self) -> str:
        return f"step {self.step}, {self.item}"


Arrival = tuple[Handle, Transfer, Tensor]


def execute(program: Program, work: Work, transport: Transport) -> None:
    """Run a program to its end; returns when all that was sent has left.

    Merges happen in program order, so every run gives the same bits.
    """
    under_way: dict[int, list[Arrival | None]] = {}
    for instruction in program.instructions:
        match instruction:
            case Run(tile):
                work.run(tile)
            case Launch(handle, step, lane, sends, recvs):
                incoming = _incoming(work, step, recvs)
                if transport.receives_ahead:
                    handles = [transport.exchange((), (x[1],), lane) for x in incoming]
                    if sends:
                        transport.exchange(_outgoing(work, step, sends), (), lane)
                else:
                    outgoing = _outgoing(work, step, sends)
                    together = transport.exchange(outgoing, [x[1] for x in incoming], lane)
                    handles = [together] * len(incoming)
                _remember(under_way, handle, handles, incoming, recvs)
            case Collective(handle, kind, step, lane, sends, recvs):
                incoming = _incoming(work, step, recvs)
                if incoming:
                    outgoing = _outgoing(work, step, sends)
                    together = transport.collective(kind, outgoing, [x[1] for x in incoming], lane)
                    _remember(under_way, handle, [together] * len(incoming), incoming, recvs)
            case Wait(handle, arrivals):
                launched = under_way.get(handle, [])
                for index in arrivals if launched else ():
                    arrival, launched[index] = launched[index], None
                    if arrival is not None:
                        arrival[0].wait()
                        work.arrive(arrival[1], arrival[2])
            case Free(item):
                work.free(item)
    transport.finish()


def _outgoing(work: Work, step: int, sends: Sequence[Transfer]) -> list[Message]:
    return [
        Message(work.departure(hop), hop.dst, Label(step, hop.item))
        for hop in sends
        if work.travels(hop.item)
    ]


def _incoming(work: Work, step: int, recvs: Sequence[Transfer]) -> list[tuple[int, Message]]:
    """The messages to receive, each with its place among the receives of its launch."""
    return [
        (index, Message(work.room(hop), hop.src, Label(step, hop.item)))
        for index, hop in enumerate(recvs)
        if work.travels(hop.item)
    ]


def _remember(
    under_way: dict[int, list[Arrival | None]],
    handle: int,
    handles: Sequence[Handle],
    incoming: Sequence[tuple[int, Message]],
    recvs: Sequence[Transfer],
) -> None:
    if incoming:
        launched: list[Arrival | None] = [None] * len(recvs)
        for started, (index, message) in zip(handles, incoming, strict=True):
            launched[index] = started, recvs[index], message.tensor
        under_way[handle] = launched
