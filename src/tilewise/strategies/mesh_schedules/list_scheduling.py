"""A mesh tile's steps written by one rule of the thumb, in one pass: for tiles of any size."""

from __future__ import annotations

import heapq
from collections.abc import Iterable
from typing import NamedTuple

from tilewise.strategies.mesh_schedules.model import (
    Block,
    Need,
    Order,
    Port,
    ShardWeights,
    TileStep,
    rectangles,
)

NEVER = 1 << 60


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


class Pacer:
    """Writes the steps of one order at one pace; blocks that the next moves need come first."""

    def __init__(self, rows: int, columns: int, order: Order, costs: ShardWeights, pace: Pace):
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

    def beats(self) -> list[TileStep]:
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
            TileStep(tuple(t for run in runs for t in rectangles(run)), *moves)
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
