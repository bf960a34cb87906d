"""A mesh tile's steps, paced by a model of its rank: one port, two neighbours, one block at a time.

The model is the simulator's where all ranks do the same: a rank runs its program in order, messages
to one neighbour go one after the other, and those to both share the port evenly. It knows shards by
local index only and takes microseconds a step, so that many orders can be tried while a plan is
built.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Sequence
from itertools import groupby
from typing import NamedTuple

Block = tuple[int, int]
Move = tuple[int, int]
"""(kind, local index); the kind is a place in Costs."""
Line = tuple[int, int]
"""(side, local index): a row of the tile (side 0) or a column."""
Need = tuple[Move, Line | None]
"""A move, and the line whose blocks are all done before it."""
Rectangle = tuple[tuple[int, ...], tuple[int, ...]]

NEVER = 1 << 60


class Costs(NamedTuple):
    """Relative bytes: a query shard, a KV shard, a query partial, a KV partial."""

    q: float
    kv: float
    q_partial: float
    kv_partial: float


class Beat(NamedTuple):
    """One step: the tiles computed, and the local index that moves on each chain (0: none)."""

    tiles: tuple[Rectangle, ...]
    q: int = 0
    kv: int = 0
    q_partial: int = 0
    kv_partial: int = 0


class Order(NamedTuple):
    """What arrives and what leaves, each in order."""

    receives: tuple[Need, ...]
    sends: tuple[Need, ...]


class Pace(NamedTuple):
    """How a rank spends its time.

    Args:
        block: seconds of a block, where one of Costs is one second of the port.
        early: post the next message when the last one ends within so many blocks.
        patience: rather wait up to so many blocks than compute while the port idles.
    """

    block: float
    early: float = 0.0
    patience: float = 0.0


class Port:
    """Two queues of messages that share one port, side by side, each in order."""

    def __init__(self) -> None:
        self.queues: tuple[list[tuple[Move, float]], ...] = ([], [])
        self.now = 0.0
        self.arrived: list[Move] = []

    def post(self, move: Move, seconds: float) -> None:
        if seconds:
            self.queues[move[0] % 2].append((move, seconds))
        else:
            self.arrived.append(move)

    def left(self) -> float:
        """Seconds until the port is idle."""
        return sum(seconds for queue in self.queues for _, seconds in queue)

    def next_end(self) -> float:
        """Seconds until the next message is through."""
        heads = [queue[0][1] for queue in self.queues if queue]
        return min(heads) * len(heads)

    def advance(self, seconds: float) -> None:
        end = self.now + seconds
        while self.queues[0] or self.queues[1]:
            step = self.next_end()
            if self.now + step > end + 1e-9 * step:
                break
            self._pass(step)
        if end > self.now:
            self._pass(end - self.now)
            self.now = end

    def _pass(self, seconds: float) -> None:
        active = [queue for queue in self.queues if queue]
        for queue in active:
            move, left = queue[0]
            left -= seconds / len(active)
            if left > 1e-9 * seconds:
                queue[0] = move, left
            else:
                self.arrived.append(move)
                del queue[0]
        self.now += seconds


def seconds_of(beats: Iterable[Beat], costs: Costs, block: float) -> float:
    """How long the steps take if a block takes so long."""
    port, arrived = Port(), {(kind, 0) for kind in range(4)}

    def wait(move: Move) -> None:
        while move not in arrived:
            if not port.arrived:
                port.advance(port.next_end())
            arrived.update(port.arrived)
            port.arrived.clear()

    for tiles, *moves in beats:
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
    return port.now + port.left()


class Pacer:
    """Writes the steps of one order at one pace; blocks that the next moves need come first."""

    def __init__(self, rows: int, columns: int, order: Order, costs: Costs, pace: Pace):
        self.costs, self.pace = costs, pace
        self.moves = [*reversed(order.receives)], [*reversed(order.sends)]
        self.port, self.shape = Port(), (rows, columns)
        self.left = [columns] * rows, [rows] * columns
        self.due: tuple[list[int], ...] = ([NEVER] * rows, [NEVER] * columns)
        for place, (_, line) in reversed([*enumerate((*order.receives, *order.sends))]):
            if line is not None:
                self.due[line[0]][line[1]] = place
        self.here: tuple[list[int], ...] = ([0], [0])
        self.ready: list[tuple[int, bool, int, int, float]] = []
        self._unlock([(0, 0)])
        self.began = 0.0  # when the last run of blocks did, which takes only what was there
        self.steps: list[tuple[list[list[Block]], list[int]]] = [([], [0, 0, 0, 0])]

    def beats(self) -> list[Beat]:
        blocks = self.shape[0] * self.shape[1]
        while blocks or self.moves[0] or self.moves[1]:
            if any(self._post(moves) for moves in self.moves):
                continue
            if self.ready and not any(self._rather_waits(moves) for moves in self.moves):
                self._compute()
                blocks -= 1
            else:
                self.port.advance(self.port.next_end())
            self._take_in()
        return [
            Beat(tuple(t for run in runs for t in rectangles(run)), *moves)
            for runs, moves in self.steps
        ]

    def _begin_step(self) -> None:
        self.steps.append(([], [0, 0, 0, 0]))

    def _possible(self, moves: list[Need]) -> bool:
        if not moves:
            return False
        line = moves[-1][1]
        return line is None or not self.left[line[0]][line[1]]

    def _post(self, moves: list[Need]) -> bool:
        if not self._possible(moves):
            return False
        kind, index = moves[-1][0]
        left = self.port.left()
        if self.port.queues[kind % 2] or (left and left >= self.pace.block * self.pace.early):
            return False
        if self.steps[-1][0] or self.steps[-1][1][kind]:
            self._begin_step()
        self.steps[-1][1][kind] = index
        self.port.post((kind, index), self.costs[kind])
        self._take_in()
        moves.pop()
        return True

    def _rather_waits(self, moves: list[Need]) -> bool:
        """Whether a message follows soon on the same way, so that posting it waits."""
        if not self._possible(moves):
            return False
        soon = self.port.left() <= self.pace.block * self.pace.patience
        return bool(soon and self.port.queues[moves[-1][0][0] % 2])

    def _compute(self) -> None:
        _, _, k, c, unlocked = heapq.heappop(self.ready)
        if self.steps[-1][1][0] == k > 0 or self.steps[-1][1][1] == c > 0:
            self._begin_step()  # arrivals count from the next step
        runs = self.steps[-1][0]
        if not runs or unlocked > self.began:
            runs.append([])
            self.began = self.port.now
        runs[-1].append((k, c))
        self.left[0][k] -= 1
        self.left[1][c] -= 1
        self.port.advance(self.pace.block)

    def _take_in(self) -> None:
        for kind, index in self.port.arrived:
            if kind < 2:
                others = self.here[1 - kind]
                self._unlock((o, index) if kind else (index, o) for o in others)
                self.here[kind].append(index)
        self.port.arrived.clear()

    def _unlock(self, blocks: Iterable[Block]) -> None:
        for k, c in blocks:
            due = min(self.due[0][k], self.due[1][c])
            heapq.heappush(self.ready, (due, k == 0, k, c, self.port.now))


def rectangles(blocks: Sequence[Block]) -> list[Rectangle]:
    """Blocks as rectangles: rows that meet the same columns together."""
    columns: dict[int, list[int]] = {}
    for k, c in sorted(blocks):
        columns.setdefault(k, []).append(c)
    grouped = groupby(columns, key=columns.__getitem__)
    return [(tuple(rows), tuple(same)) for same, rows in grouped]
