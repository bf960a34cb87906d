"""A model of a mesh tile's rank: one port, two neighbours, one block at a time.

The model is the simulator's where all ranks do the same: a rank runs its program in order,
transfers to one neighbour go one after the other, and those to both share the port evenly. It knows
shards by local index only and takes microseconds a step, so that many orders can be tried while a
plan is built.
"""

from collections.abc import Iterable, Sequence
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
        return sum(seconds for queue in self.queues for _, seconds in queue)

    def next_end(self) -> float:
        """Seconds until the next transfer is through."""
        one, other = self.queues
        if one and other:
            return 2 * min(one[0][1], other[0][1])
        return (one or other)[0][1]

    def advance(self, seconds: float) -> None:
        end = self.now + seconds
        one, other = self.queues
        while one or other:
            step = self.next_end()
            if self.now + step > end + 1e-9 * step:
                break
            self._pass(step)
        if end > self.now:
            self._pass(end - self.now)
            self.now = end

    def _pass(self, seconds: float) -> None:
        one, other = self.queues
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
        self.now += seconds


def seconds_of(tile_steps: Iterable[TileStep], costs: ShardWeights, block: float) -> float:
    """Return the seconds that the steps take if a block takes so long."""
    port, arrived = Port(), {(kind, 0) for kind in range(4)}

    def wait(move: Move) -> None:
        while move not in arrived:
            if not port.arrived:
                port.advance(port.next_end())
            arrived.update(port.arrived)
            port.arrived.clear()

    for tiles, *moves in tile_steps:
        for kind, index in enumerate(moves):
            if index:
                wait((kind, index - 1))
        for kind, index in enumerate(moves):
            if index:
                port.post((kind, index), costs[kind])
        for rows, columns in tiles:
            wait((0, rows[-1]))
            wait((1, columns[-1]))
            port.advance(block * len(rows) * len(columns))
    return port.now + port.seconds_left()


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
