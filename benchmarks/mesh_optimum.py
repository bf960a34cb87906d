"""The least time that any program takes for a mesh tile, on the simulator's terms.

OR-tools' CP-SAT bounds it from below (`relaxed`), programs found so far from above. Where they
differ, every program that could end in between is tried, act by act (`beam.least`).

The bound's model: a rank computes one block at a time, without a break; its port is one second per
second of Costs, whatever the neighbour, and may leave a message for another and come back to it.
Shards arrive in local order; partials leave in local order, once their line is done. A message may
begin at any time. The simulator's ranks, whose messages share the port and begin only between
blocks, can do no better: what they do with shared time can be done one after the other, no later.

Two facts make the model small. Messages that arrive have nothing to wait for, so they may come
first, each whole: that delays no partial's end. Partials then leave whole as they become ready.
"""

from __future__ import annotations

from fractions import Fraction
from itertools import pairwise
from math import lcm
from typing import Any, NamedTuple

from tilewise.strategies.mesh_schedules.beam import least, search
from tilewise.strategies.mesh_schedules.model import Block, Line, ShardWeights

WIDTHS = (8, 128)
NEARLY = 1e-6


class Optimum(NamedTuple):
    """seconds: no program takes less; proven: and one takes just that."""

    seconds: float
    proven: bool


class Bound(NamedTuple):
    """seconds: no program takes less; reached: an order of this model takes just that."""

    seconds: float
    reached: bool


def optimum(
    shape: tuple[int, int], costs: ShardWeights, block: float, known: float, most: int = 20_000
) -> Optimum:
    """The least time of a tile whose blocks take so many seconds each.

    Args:
        shape: query and KV shards.
        costs: seconds of the port.
        block: seconds of a block.
        known: seconds that some program takes.
        most: programs of one length that are tried before the bound is returned instead.
    Raises:
        ImportError, ValueError: as relaxed does.
    """
    bound = relaxed(shape, costs, block).seconds
    for width in WIDTHS:
        if known > bound * (1 + NEARLY):
            found = search(shape, costs, block, width, known)
            known = found.seconds if found else known
    if known > bound * (1 + NEARLY):
        tried = least(shape, costs, block, known, most)
        if tried is None:
            return Optimum(bound, False)
        known = tried
    return Optimum(known, True)


def relaxed(
    shape: tuple[int, int], costs: ShardWeights, block: float, limit_seconds: float = 60.0
) -> Bound:
    """A time below which no program of a tile ends.

    Args:
        shape: query and KV shards.
        costs: seconds of the port; they and block are taken as fractions over 1024 at most.
        block: seconds of a block.
        limit_seconds: of search, after which the best proven bound is returned.
    Raises:
        ImportError: without OR-tools.
        ValueError: if a size or a time is not positive (partials may cost nothing).
    """
    if min(shape) < 1 or not block > 0 or min(costs[:2]) <= 0 or min(costs[2:]) < 0:
        raise ValueError(
            f"shape {shape}, block ({block}) and the operands of {costs} must be above 0, "
            "partials at least 0"
        )
    cp_model = _solver()
    times = [Fraction(x).limit_denominator(1024) for x in (*costs, block)]
    scale = lcm(*(x.denominator for x in times))
    *units, unit_block = (int(x * scale) for x in times)
    tile = _Tile(cp_model, shape, units, unit_block)
    solver = cp_model.CpSolver()
    solver.parameters.max_time_in_seconds = limit_seconds
    solver.parameters.num_workers = 1
    status = solver.solve(tile.model)
    return Bound(solver.best_objective_bound / scale, status == cp_model.OPTIMAL)


def _solver() -> Any:
    try:
        from ortools.sat.python import cp_model
    except ImportError:
        raise ImportError(
            "the exact solver needs OR-tools: pip install 'tilewise[solver]'"
        ) from None
    return cp_model


class _Tile:
    """The model of one tile, all times whole numbers: then so are those of some best order."""

    def __init__(self, cp_model: Any, shape: tuple[int, int], units: list[int], block: int):
        self.model, self.shape, self.units, self.block = cp_model.CpModel(), shape, units, block
        self.received = sum(units[side] * (shape[side] - 1) for side in (0, 1))
        sent = sum(units[2 + side] * (shape[side] - 1) for side in (0, 1))
        self.horizon = self.received + sent + shape[0] * shape[1] * block
        self.end = self._time(max(self.received + sent, shape[0] * shape[1] * block))
        self.messages: list[Any] = []
        here = self._arrivals(0), self._arrivals(1)
        self.starts = {(k, c): self._time(0) for k in range(shape[0]) for c in range(shape[1])}
        self._compute(here)
        for side in (0, 1):
            if units[2 + side]:
                self._leave(side)
        self.model.add_no_overlap(self.messages)
        self.model.minimize(self.end)

    def _time(self, least: int) -> Any:
        return self.model.new_int_var(least, self.horizon, "")

    def _message(self, end: Any, size: int) -> None:
        self.messages.append(self.model.new_interval_var(end - size, size, end, ""))

    def _arrivals(self, side: int) -> list[Any]:
        size = self.units[side]
        ends = [self.model.new_int_var(0, self.received, "") for _ in range(self.shape[side])]
        self.model.add(ends[0] == 0)
        for before, end in pairwise(ends):
            self.model.add(end - size >= before)
            self._message(end, size)
        return ends

    def _compute(self, here: tuple[list[Any], list[Any]]) -> None:
        blocks = []
        for (k, c), start in self.starts.items():
            self.model.add(start >= here[0][k])
            self.model.add(start >= here[1][c])
            self.model.add(self.end >= start + self.block)
            blocks.append(self.model.new_interval_var(start, self.block, start + self.block, ""))
            for before in self._before((k, c)):
                self.model.add(start >= self.starts[before] + self.block)
        self.model.add_no_overlap(blocks)

    def _before(self, block: Block) -> list[Block]:
        """Blocks that may as well come first: there as early, and awaited as early.

        Own lines are awaited by nobody, so they are compared only where no column is awaited.
        """
        k, c = block
        by_column = c > 1 or (c == 1 and not self.units[3])
        by_row = k > 1 or (k == 1 and not self.units[2])
        return [*([(k, c - 1)] if by_column else []), *([(k - 1, c)] if by_row else [])]

    def _leave(self, side: int) -> None:
        size, before = self.units[2 + side], None
        for index in range(1, self.shape[side]):
            end = self._time(self.received + size)
            for start in self._line((side, index)):
                self.model.add(end - size >= start + self.block)
            if before is not None:
                self.model.add(end - size >= before)
            self._message(end, size)
            self.model.add(self.end >= end)
            before = end

    def _line(self, line: Line) -> list[Any]:
        side, index = line
        return [start for place, start in self.starts.items() if place[side] == index]
