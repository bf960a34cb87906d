"""The program of one rank's pass: in three kinds of instruction what is launched, awaited and
computed, in order. The compiler's passes make the operations of it, and need not know the strategy.
"""

from collections.abc import Iterable, Iterator
from typing import NamedTuple

from tilewise.plan.ir import Item, Role, Rows, Side, Tile, Transfer
from tilewise.plan.row_ranges import Ranges, joined_ranges

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


class Await(NamedTuple):
    """Let these receives of a launch arrive (by their place in recvs)."""

    handle: int
    arrivals: tuple[int, ...]


class Compute(NamedTuple):
    """Compute a tile into this rank's partials."""

    tile: Tile

    def __str__(self) -> str:
        return compute_label(self.tile)


Instruction = Launch | Await | Compute


class Program(NamedTuple):
    """One rank's instructions; str() prints their labels, one a line.

    arenas: received and own operands that tiles read together, all of which arrive before the first
    is used for the last time, so that their rows can lie side by side in one buffer, in this order.
    """

    rank: int
    world_size: int
    instructions: tuple[Instruction, ...]
    arenas: tuple[tuple[Item, ...], ...]

    def __str__(self) -> str:
        return "\n".join(self.labels())

    def labels(self) -> Iterator[str]:
        """Yield the label of each instruction: "launch kv0>2 kv1<1", "wait kv1<1", "compute q0 x
        kv1".
        """
        launched: dict[int, tuple[Transfer, ...]] = {}
        for instruction in self.instructions:
            if isinstance(instruction, Await):
                recvs = launched[instruction.handle]
                yield wait_label([recvs[index] for index in instruction.arrivals])
                continue
            if isinstance(instruction, Launch):
                launched[instruction.handle] = instruction.recvs
            yield str(instruction)


def wait_label(transfers: Iterable[Transfer]) -> str:
    return " ".join(["wait", *(transfer.arrival() for transfer in transfers)])


def compute_label(tile: Tile) -> str:
    q, kv = _shards("q", tile.q), _shards("kv", tile.kv)
    group = f", head group {tile.heads}" if tile.heads else ""
    return f"compute {q} x {kv}{group}"


def _launch_label(sends: Iterable[Transfer], recvs: Iterable[Transfer]) -> str:
    return " ".join(["launch", *map(str, sends), *(transfer.arrival() for transfer in recvs)])


def _shards(prefix: str, shards: tuple[int, ...]) -> str:
    if len(shards) > 3:
        return f"{prefix}{shards[0]}..{shards[-1]} ({len(shards)})"
    return " ".join(f"{prefix}{shard}" for shard in shards)


def held_ranges(held: Rows | None, wanted: Rows) -> Ranges:
    """Return where the wanted rows of a shard lie in a buffer, which has the held rows one after
    the other.

    Args:
        held: None: all of the shard's rows. Both ascend.
    """
    if held is None:
        return joined_ranges(wanted)
    found: list[tuple[int, int]] = []
    offset = at = 0  # at: of the first wanted range that ends after this held one starts
    for start, stop in held:
        while at < len(wanted) and wanted[at][1] <= start:
            at += 1
        place = at
        while place < len(wanted) and wanted[place][0] < stop:
            first, last = max(wanted[place][0], start), min(wanted[place][1], stop)
            found.append((offset + first - start, offset + last - start))
            place += 1
        offset += stop - start
    return joined_ranges(found)
