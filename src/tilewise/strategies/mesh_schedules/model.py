"""A model of a mesh tile's rank: one port, two neighbours, one block at a time.

The model is the simulator's where all ranks do the same: a rank runs its program in order,
transfers to one neighbour go one after the other, and those to both share the port evenly. It knows
shards by local index only and takes microseconds a step, so that many orders can be tried while a
plan is built.
"""

from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby
from typing import NamedTuple

from tilewise.plan.payload import ShardWeights

Block = tuple[int, int]
Move = tuple[int, int]
"""(kind, local index); the kind is a place in ShardWeights."""
Line = tuple[int, int]
"""(side, local index): a row of the tile (side 0) or a column."""
Need = tuple[Move, Line | None]
"""A move, and the line whose blocks are all done before it."""
Rectangle = tuple[tuple[int, ...], tuple[int, ...]]


def transfer_bytes(shape: tuple[int, int], costs: ShardWeights) -> float:
    """Return the bytes of all transfers of a tile; 1 if there are none."""
    lengths = [size - 1 for size in (*shape, *shape)]
    return sum(length * cost for length, cost in zip(lengths, costs, strict=True)) or 1.0


class TileStep(NamedTuple):
    """One step: the tiles computed, and the local index that moves on each chain (0: none)."""

    tiles: tuple[Rectangle, ...]
    q: int = 0
    kv: int = 0
    q_partial: int = 0
    kv_partial: int = 0


class Order(NamedTuple):
    """The receives and the sends of a rank, each in order."""

    receives: tuple[Need, ...]
    sends: tuple[Need, ...]


class Port:
    """Two queues of transfers that share one port, side by side, each in order."""

    def __init__(self) -> None:
        self.queues: tuple[list[tuple[Move, float]], ...] = ([], [])
        self.now = 0.0
        self.arrived: list[Move] = []

    def post(self, move: Move, seconds: float) -> None:
        if seconds:
            self.queues[move[0] % 2].append((move, seconds))
        else:
            self.arrived.append(move)

    def seconds_left(self) -> float:
        """Seconds until the port is idle."""
        total = 0.0
        for queue in self.queues:
            for _, seconds in queue:
                total += seconds
        return total

    def next_end(self) -> float:
        """Seconds until the next transfer is through."""
        one, other = self.queues
        if one and other:
            return 2 * min(one[0][1], other[0][1])
        return (one or other)[0][1]

    def advance(self, seconds: float) -> None:
        """Let time pass, and note what arrives."""
        now, end = self.now, self.now + seconds
        one, other = self.queues
        while one or other:
            # The most frequent lines of a search for plans: nothing here is a call of our own.
            share = seconds = one[0][1] if one else other[0][1]
            if one and other:
                share = min(share, other[0][1])
                seconds = 2 * share
            if now + seconds > end + 1e-9 * seconds:
                if now >= end:
                    break
                seconds = end - now
                share = seconds / 2 if one and other else seconds
            for queue in self.queues:
                if queue:
                    move, seconds_left = queue[0]
                    seconds_left -= share
                    if seconds_left > 1e-9 * seconds:
                        queue[0] = move, seconds_left
                    else:
                        self.arrived.append(move)
                        del queue[0]
            now += seconds
        self.now = max(now, end)


def seconds_of(tile_steps: Iterable[TileStep], costs: ShardWeights, block: float) -> float:
    """Return the seconds that the steps take if a block takes so long."""
    (seconds,) = seconds_at(tile_steps, costs, [block])
    return seconds


def seconds_at(
    tile_steps: Iterable[TileStep], costs: ShardWeights, blocks: Iterable[float]
) -> list[float]:
    """Return the seconds that the steps take for each of several times of a block."""
    events = list(_events(tile_steps))
    found: list[float] = []
    for block in blocks:
        port, arrived = Port(), set[Move]()
        for awaited, posted, (rows, columns) in events:
            for move in awaited:
                while move not in arrived:
                    if not port.arrived:
                        port.advance(port.next_end())
                    arrived.update(port.arrived)
                    port.arrived.clear()
            for move in posted:
                port.post(move, costs[move[0]])
            if rows:
                port.advance(block * rows * columns)
        found.append(port.now + port.seconds_left())
    return found


class _Event(NamedTuple):
    """Moves that are waited for, each once in a program, then what begins: transfers or a tile."""

    awaited: list[Move]
    posted: list[Move]
    shape: tuple[int, int] = (0, 0)


def _events(tile_steps: Iterable[TileStep]) -> Iterator[_Event]:
    """Yield what happens in a program, whatever the times."""
    known = {(kind, 0) for kind in range(4)}

    def new(*moves: Move) -> list[Move]:
        found = [move for move in moves if move not in known]
        known.update(found)
        return found

    for tiles, *indices in tile_steps:
        posted = [move for move in enumerate(indices) if move[1]]
        if posted:
            yield _Event(new(*((kind, index - 1) for kind, index in posted)), posted)
        for rows, columns in tiles:
            awaited = new((0, rows[-1]), (1, columns[-1]))
            yield _Event(awaited, [], (len(rows), len(columns)))


def rectangles(blocks: Sequence[Block]) -> list[Rectangle]:
    """Blocks as rectangles: rows that meet the same columns together."""
    columns: dict[int, list[int]] = {}
    for k, c in sorted(blocks):
        columns.setdefault(k, []).append(c)
    rows_by_columns = groupby(columns, key=columns.__getitem__)
    return [(tuple(rows), tuple(same_columns)) for same_columns, rows in rows_by_columns]


def tile_steps_of(steps: Iterable[tuple[list[list[Block]], list[int]]]) -> list[TileStep]:
    """Runs of blocks and the four moves of every step, as steps."""
    return [
        TileStep(tuple(t for x in runs for t in rectangles(x)), *moves) for runs, moves in steps
    ]
