"""The program: what one rank does, in order, in four kinds of instruction.

Its operations (`operations.py`) are what runs and what the simulator prices; neither needs to know
the strategy.
"""

from collections.abc import Iterable, Iterator
from typing import NamedTuple

from tilewise.plan.ir import Item, Role, Rows, Side, Tile, Transfer

LAUNCHES_IN_FLIGHT = 1
"""Launches of a lane whose sends are left to themselves.

By lane, since a slow link's sends last for many launches of a fast one.
"""


class Team(NamedTuple):
    """Ranks that all launch an exchange together, and the sides and roles that travel."""

    ranks: range
    parts: tuple[tuple[Side, Role], ...]


class Launch(NamedTuple):
    """Start sends and receives, in this order on both ends of every pair.

    A partial leaves its place at once; an operand's or result's buffer stays in use until sent.
    step is the plan's, for messages. team: who all launch this together, and exchange with nobody
    else; None: whoever has something to send or receive.
    """

    handle: int
    step: int
    lane: int
    sends: tuple[Transfer, ...]
    recvs: tuple[Transfer, ...]
    team: Team | None = None

    def __str__(self) -> str:
        return _launch_label(self.sends, self.recvs)


class Wait(NamedTuple):
    """Let these receives of a launch arrive (by their place in recvs)."""

    handle: int
    arrivals: tuple[int, ...]


class Compute(NamedTuple):
    """Compute a tile into this rank's partials."""

    tile: Tile

    def __str__(self) -> str:
        return compute_label(self.tile)


class Free(NamedTuple):
    """A received operand is not needed any more."""

    item: Item

    def __str__(self) -> str:
        return f"free {self.item}"


Instruction = Launch | Wait | Compute | Free


class Program(NamedTuple):
    """One rank's instructions; str() prints their labels, one a line.

    arenas: received and own operands that tiles read together, all of which arrive before the first
    is freed, so that their rows can lie side by side in one buffer, in this order.
    """

    rank: int
    world_size: int
    instructions: tuple[Instruction, ...]
    arenas: tuple[tuple[Item, ...], ...]

    def __str__(self) -> str:
        return "\n".join(self.labels())

    def labels(self) -> Iterator[str]:
        """What each instruction does: "launch kv0>2 kv1<1", "wait kv1<1", "compute q0 x kv1"."""
        launched: dict[int, tuple[Transfer, ...]] = {}
        for instruction in self.instructions:
            if isinstance(instruction, Wait):
                recvs = launched[instruction.handle]
                yield wait_label([recvs[index] for index in instruction.arrivals])
                continue
            if isinstance(instruction, Launch):
                launched[instruction.handle] = instruction.recvs
            yield str(instruction)


def wait_label(hops: Iterable[Transfer]) -> str:
    return " ".join(["wait", *(hop.arrival() for hop in hops)])


def compute_label(tile: Tile) -> str:
    q, kv = _shards("q", tile.q), _shards("kv", tile.kv)
    group = f", head group {tile.heads}" if tile.heads else ""
    return f"compute {q} x {kv}{group}"


def _launch_label(sends: Iterable[Transfer], recvs: Iterable[Transfer]) -> str:
    return " ".join(["launch", *map(str, sends), *(hop.arrival() for hop in recvs)])


def _shards(prefix: str, shards: tuple[int, ...]) -> str:
    if len(shards) > 3:
        return f"{prefix}{shards[0]}..{shards[-1]} ({len(shards)})"
    return " ".join(f"{prefix}{shard}" for shard in shards)


def arrivals(program: Program) -> dict[Item, Rows | None]:
    """The operands that a program receives, and which of their rows."""
    return {
        hop.item: hop.rows
        for instruction in program.instructions
        if isinstance(instruction, Launch)
        for hop in instruction.recvs
        if hop.item.role is Role.OPERAND
    }
