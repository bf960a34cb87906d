"""The executor: runs one rank's program, for any strategy, mask and pass.

It moves bytes and keeps order; what the bytes mean is the work's business.
"""

from collections.abc import Iterable, Iterator
from typing import NamedTuple, Protocol

from torch import Tensor
from torch.autograd import profiler

from tilewise.compiler.program import Compute, Free, Instruction, Launch, Program, Wait
from tilewise.plan.ir import Item, Tile, Transfer
from tilewise.transport.protocol import Handle, Message, Transport, shares_message, team_transport


class RankState(Protocol):
    """A rank's values during one pass, as the executor sees them."""

    def pack_send(self, transfer: Transfer) -> Tensor:
        """The bytes to send; a partial leaves its place."""
        ...

    def launched(self, handle: int, lane: int) -> None:
        """What has departed last is on its way."""
        ...

    def left(self, handle: int) -> None:
        """What departed with a launch has left."""
        ...

    def recv_buffer(self, transfer: Transfer) -> Tensor:
        """Where to receive."""
        ...

    def on_receive(self, transfer: Transfer, wire: Tensor) -> None:
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


def execute(program: Program, work: RankState, transport: Transport) -> None:
    """Run a program to its end; returns when all that was sent has left.

    Merges happen in program order, so every run gives the same bits where the kernels do: see
    docs/numerics.md.
    """
    under_way: dict[int, list[Arrival]] = {}
    together = not transport.receives_ahead
    profiled = profiler._is_profiler_enabled
    instructions: Iterable[Instruction] = _recorded(program) if profiled else program.instructions
    # Not by match: binding its patterns costs as much as the rest of the loop.
    for instruction in instructions:
        if isinstance(instruction, Compute):
            work.run(instruction.tile)
        elif isinstance(instruction, Wait):
            handle, indices = instruction
            launched = under_way[handle]
            for index in indices:
                started, hop, room = launched[index]
                started.wait()
                work.on_receive(hop, room)
            if together:
                work.left(handle)
            if len(indices) == len(launched):
                del under_way[handle]
        elif isinstance(instruction, Free):
            work.free(instruction.item)
        elif instruction.team is not None:
            under_way[instruction.handle] = _launch_team(instruction, work, transport)
        elif not together:
            arrivals = _launch_apart(instruction, work, transport)
            if arrivals:
                under_way[instruction.handle] = arrivals
        else:
            under_way[instruction.handle] = _launch_together(instruction, work, transport)
    transport.finish()


def _recorded(program: Program) -> Iterator[Instruction]:
    """The instructions; while one runs, a profiler sees a range of its label."""
    for instruction, label in zip(program.instructions, program.labels(), strict=True):
        with profiler.record_function(label):
            yield instruction


def _launch_apart(launch: Launch, work: RankState, transport: Transport) -> list[Arrival]:
    """Post every receive by itself, to be waited for by itself; small ones of a rank together."""
    handle, _, lane, sends, recvs, _ = launch
    arrivals: list[Arrival] = []
    if recvs:
        messages = _incoming(work, launch)
        started: dict[int, Handle] = {}
        if len(recvs) > 1:
            for peer in dict.fromkeys(hop.src for hop in recvs):
                mine = [message for message in messages if message.peer == peer]
                if shares_message([message.tensor.nbytes for message in mine]):
                    started[peer] = transport.exchange((), mine, lane)
        for message, hop in zip(messages, recvs, strict=True):
            handed = started.get(hop.src) or transport.exchange((), (message,), lane)
            arrivals.append((handed, hop, message.tensor))
    if sends:
        transport.exchange(_outgoing(work, launch), (), lane)
        work.launched(handle, lane)
    return arrivals


def _launch_together(launch: Launch, work: RankState, transport: Transport) -> list[Arrival]:
    """Post all sends and receives at once."""
    incoming = _incoming(work, launch)
    started = transport.exchange(_outgoing(work, launch), incoming, launch.lane)
    work.launched(launch.handle, launch.lane)
    return [(started, hop, x.tensor) for x, hop in zip(incoming, launch.recvs, strict=True)]


def _launch_team(launch: Launch, work: RankState, transport: Transport) -> list[Arrival]:
    """Exchange within a team, as all its ranks do."""
    teams = team_transport(transport)
    assert launch.team is not None and teams is not None
    incoming = _incoming(work, launch)
    started = teams.exchange_all(_outgoing(work, launch), incoming, launch.team)
    work.launched(launch.handle, launch.lane)
    return [(started, hop, x.tensor) for x, hop in zip(incoming, launch.recvs, strict=True)]


def _incoming(work: RankState, launch: Launch) -> list[Message]:
    step = launch.step
    return [Message(work.recv_buffer(hop), hop.src, Label(step, hop.item)) for hop in launch.recvs]


def _outgoing(work: RankState, launch: Launch) -> list[Message]:
    step = launch.step
    return [Message(work.pack_send(hop), hop.dst, Label(step, hop.item)) for hop in launch.sends]
