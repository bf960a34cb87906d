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


Arrival = tuple[Handle, Transfer, Message]


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
                incoming = _incoming(work, step, recvs)
                if not transport.receives_ahead:
                    outgoing = _outgoing(work, step, sends)
                    handles = [transport.exchange(outgoing, incoming, lane)] * len(recvs)
                else:  # each receive can be waited for on its own
                    handles = [transport.exchange((), (x,), lane) for x in incoming]
                    if sends:
                        transport.exchange(_outgoing(work, step, sends), (), lane)
                if recvs:
                    under_way[handle] = list(zip(handles, recvs, incoming, strict=True))
            case Collective(handle, kind, step, lane, sends, recvs):
                incoming = _incoming(work, step, recvs)
                outgoing = _outgoing(work, step, sends)
                handles = [transport.collective(kind, outgoing, incoming, lane)] * len(recvs)
                under_way[handle] = list(zip(handles, recvs, incoming, strict=True))
            case Wait(handle, arrivals):
                launched = under_way[handle]
                for index in arrivals:
                    started, hop, message = launched[index]
                    started.wait()
                    work.arrive(hop, message.tensor)
                if len(arrivals) == len(launched):
                    del under_way[handle]
            case Free(item):
                work.free(item)
    transport.finish()


def _outgoing(work: Work, step: int, sends: Sequence[Transfer]) -> list[Message]:
    return [Message(work.departure(hop), hop.dst, Label(step, hop.item)) for hop in sends]


def _incoming(work: Work, step: int, recvs: Sequence[Transfer]) -> list[Message]:
    return [Message(work.room(hop), hop.src, Label(step, hop.item)) for hop in recvs]
