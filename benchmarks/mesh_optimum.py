"""The least time that any program takes for a mesh tile, on the simulator's terms.

OR-tools' CP-SAT bounds it from below (`relaxed`), programs found so far from above. Where they
differ, every program that could end in between is tried, act by act (`tile_programs.least`).

The bound's model: a rank computes one block at a time, without a break; its port is one second per
second of Costs, whatever the neighbour, and may leave a message for another and come back to it.
Shards arrive in local order; partials leave in local order, once their line is done. A message may
begin at any time. The simulator's ranks, whose messages share the port and begin only between
blocks, can do no better: what they do with shared time can be done one after the other, no later.

Two facts make the model small. Messages that arrive have nothing to wait for, so they may come
first, each whole: that delays no partial's end. Partials then leave whole as they become ready.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from fractions import Fraction
from itertools import pairwise
from math import inf, lcm
from typing import Any, NamedTuple

from tilewise.plan.payload import ShardWeights
from tilewise.strategies.mesh_schedules.model import Block, Line, Move, TileStep, tile_steps_of

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


Queue = tuple[tuple[int, float], ...]
"""(kind, seconds left) of the messages to one neighbour, in order."""
Counts = tuple[int, ...]

NEARLY = 1e-9


class Act(NamedTuple):
    """One thing that a program does: a message is posted, or else a block computed."""

    post: Move | None
    block: Block | None
    waited: bool  # whether the rank stood still before
    arrived: Counts  # highest local index by kind of message when it is done or begins


class Prefix(NamedTuple):
    """What is so after some acts."""

    now: float  # seconds
    queues: tuple[Queue, ...]  # messages under way, by side
    arrived: Counts  # highest local index by kind of message
    posted: Counts
    done: int  # computed blocks, as bits

    def left(self) -> float:
        return sum(seconds for queue in self.queues for _, seconds in queue)


class TileState:
    """A tile: what follows a prefix, and bounds of its end.

    Args:
        shape: query and KV shards.
        costs: seconds of the port.
        block: seconds of a block.
    """

    def __init__(self, shape: tuple[int, int], costs: ShardWeights, block: float):
        self.shape, self.costs, self.block = shape, costs, block
        last = [size - 1 for size in shape]
        self.last = (*last, last[0] * (costs[2] > 0), last[1] * (costs[3] > 0))
        rows, columns = shape
        bits = [[1 << (k * columns + c) for c in range(columns)] for k in range(rows)]
        self.lines = [sum(row) for row in bits], [sum(c) for c in zip(*bits, strict=True)]
        self.all = sum(self.lines[0])
        self.acts = rows * columns + sum(self.last)
        awaited = [partials > 0 for partials in self.last[2:]]
        self.scan = [  # own lines last where partials leave
            [(i + leave) % size for i in range(size)]
            for size, leave in zip(shape, awaited, strict=True)
        ]
        own = [line[0] for line, leave in zip(self.lines, awaited, strict=True) if leave]
        self.idle = self.all if not own else own[0] & own[-1]  # blocks that no partial awaits
        self.tail = min([c for c, leave in zip(costs[2:], awaited, strict=True) if leave] or [0.0])
        self.rest = self._rest()

    def first(self) -> Prefix:
        return Prefix(0.0, ((), ()), (0, 0, 0, 0), (0, 0, 0, 0), 0)

    def next(self, at: Prefix) -> Iterator[tuple[Act, Prefix]]:
        """Every act that may come next, but for blocks that may as well come later."""
        for kind in range(4):
            index = at.posted[kind] + 1
            line = self.lines[kind % 2][index] if kind > 1 and index <= self.last[kind] else 0
            if index <= self.last[kind] and at.done & line == line:
                after = self._until(at, kind, index - 1)
                act = Act((kind, index), None, after.now > at.now, after.arrived)
                yield act, self._posted(after, kind, index)
        for block in self._blocks(at, None):
            yield Act(None, block, False, at.arrived), self._computed(at, block)
        for side in (0, 1):
            index = at.posted[side]
            if index > at.arrived[side]:
                after = self._until(at, side, index)
                for block in self._blocks(after, (side, index)):
                    yield Act(None, block, True, after.arrived), self._computed(after, block)

    def _posted(self, at: Prefix, kind: int, index: int) -> Prefix:
        queues, posted = list(at.queues), list(at.posted)
        queues[kind % 2] += ((kind, self.costs[kind]),)
        posted[kind] = index
        return Prefix(at.now, tuple(queues), at.arrived, tuple(posted), at.done)

    def _computed(self, at: Prefix, block: Block) -> Prefix:
        bit = 1 << (block[0] * self.shape[1] + block[1])
        return _advanced(at, at.now + self.block, bit)

    def _until(self, at: Prefix, kind: int, index: int) -> Prefix:
        while at.arrived[kind] < index:
            heads = [queue[0][1] for queue in at.queues if queue]
            at = _advanced(at, at.now + min(heads) * len(heads))
        return at

    def _blocks(self, at: Prefix, line: Move | None) -> list[Block]:
        """What can be computed (of one line), but for blocks that another may go before.

        One that is awaited as early may: partials leave in order, and own lines never do.
        """
        found: list[Block] = []
        least = self.shape[1]
        rows, columns = ([i for i in self.scan[s] if i <= at.arrived[s]] for s in (0, 1))
        if line is not None:
            rows, columns = (rows, [line[1]]) if line[0] else ([line[1]], columns)
        for k in rows:
            for place, c in enumerate(columns[:least]):
                if not at.done >> (k * self.shape[1] + c) & 1:
                    found.append((k, c))
                    least = place if self.last[3] else 0
                    break
        return found

    def bound(self, at: Prefix) -> tuple[float, float]:
        """No program that begins so ends before; and a second number that ranks equal ones."""
        costs, last, posted = self.costs, self.last, at.posted
        unsent = [(last[kind] - posted[kind]) * costs[kind] for kind in range(4)]
        coming = [
            unsent[side] + sum(seconds for kind, seconds in at.queues[side] if kind == side)
            for side in (0, 1)
        ]
        moving = at.left() + sum(unsent)
        computing = (self.all & ~at.done).bit_count() * self.block
        awaited = (self.all & ~at.done & ~self.idle).bit_count() * self.block
        served = sum((p - x) * c for p, x, c in zip(posted, at.arrived, costs[:2], strict=False))
        served -= sum(coming) - unsent[0] - unsent[1]
        least = max(
            moving,
            computing,
            awaited + self.tail if awaited else 0.0,
            self.rest[at.arrived[0]][at.arrived[1]] - served,
            self._last_arrivals(coming, unsent),
        )
        return at.now + least, at.now + (moving + computing) / 2

    def _last_arrivals(self, coming: list[float], unsent: list[float]) -> float:
        """The last shard of a side is awaited by all partials of the other, and one of its own."""
        if not any(coming):
            return 0.0
        after = [unsent[3], unsent[2]]
        if not all(coming):
            side = 0 if coming[0] else 1
            return coming[side] + self.block + after[side]
        own = [self.costs[2] * (self.last[2] > 0), self.costs[3] * (self.last[3] > 0)]
        return sum(coming) + self.block + min(a + o for a, o in zip(after, own, strict=True))

    def _rest(self) -> list[list[float]]:
        """Least seconds to the end once so many more rows and columns than the own have arrived.

        What has not arrived by then is computed after its arrival, in whatever order they arrive.
        """
        rows, columns = self.shape
        rest = [[0.0] * columns for _ in range(rows)]
        for x, y in [(x, y) for x in range(rows)[::-1] for y in range(columns)[::-1]][1:]:
            later = rows * columns - (x + 1) * (y + 1)
            awaited = later - self.idle.bit_count()
            least = max(later * self.block, awaited * self.block + self.tail if awaited > 0 else 0)
            rest[x][y] = min(
                self.costs.q + max(least, rest[x + 1][y]) if x + 1 < rows else inf,
                self.costs.kv + max(least, rest[x][y + 1]) if y + 1 < columns else inf,
            )
        return rest


def _advanced(at: Prefix, end: float, computed: int = 0) -> Prefix:
    """The port goes on until then, while nothing is posted; rounded, so that equals are equal."""
    now, queues, arrived = at.now, [*map(list, at.queues)], list(at.arrived)
    while queues[0] or queues[1]:
        active = [queue for queue in queues if queue]
        step = min(queue[0][1] for queue in active) * len(active)
        through = now + step <= end + NEARLY
        passed = (step if through else end - now) / len(active)
        for queue in active:
            kind, left = queue[0]
            if left - passed > NEARLY:
                queue[0] = kind, round(left - passed, 9)
            else:
                arrived[kind] += 1
                del queue[0]
        now += passed * len(active)
        if not through:
            break
    port = tuple(map(tuple, queues)), tuple(arrived)
    return Prefix(round(max(now, end), 9), *port, at.posted, at.done | computed)


Path = tuple["Path", Act] | None
Level = list[tuple[Prefix, Path]]
Bounded = tuple[tuple[float, float], Prefix, Path]
MOST = 4
"""Times its width that a beam may be wide for the sake of variety."""


class BeamResult(NamedTuple):
    """A program: when it ends, and its steps."""

    seconds: float
    tile_steps: tuple[TileStep, ...]


def search(
    shape: tuple[int, int],
    costs: ShardWeights,
    block: float,
    width: int,
    below: float = inf,
) -> BeamResult | None:
    """The fastest program of a tile that a search of some width finds.

    Args:
        shape: query and KV shards.
        costs, block: seconds of messages and of a block.
        width: programs of each length that are followed.
        below: seconds; programs that end no earlier are not looked for.
    Returns:
        None if no program ends earlier.
    """
    grid = TileState(shape, costs, block)
    level: Level = [(grid.first(), None)]
    for _ in range(grid.acts):
        level = _best(longer(grid, level, below), width)
    return _fastest(level) if level else None


def least(
    shape: tuple[int, int], costs: ShardWeights, block: float, below: float, most: int
) -> float | None:
    """The least seconds of any program, or `below` if none ends earlier; None: too many to try.

    Args:
        shape, costs, block: as for search.
        most: programs of one length.
    """
    grid = TileState(shape, costs, block)
    level: Level = [(grid.first(), None)]
    for _ in range(grid.acts):
        level = [(at, None) for _, at, _ in longer(grid, level, below)]
        if len(level) > most:
            return None
    return min([below, *(at.now + at.left() for at, _ in level)])


def longer(grid: TileState, level: Level, below: float) -> Iterable[Bounded]:
    """Programs of one act more that can end before `below`, each once, after their bounds."""
    found: dict[Prefix, Bounded] = {}
    for before, path in level:
        for act, at in grid.next(before):
            if at not in found:
                bound = grid.bound(at)
                if bound[0] < below * (1 - 1e-9):
                    found[at] = bound, at, (path, act)
    return found.values()


def _best(longer: Iterable[Bounded], width: int) -> Level:
    level: Level = []
    seen: set[Counts] = set()
    for _, at, path in sorted(longer, key=lambda one: one[0]):
        if len(level) < width or at.posted not in seen:
            level.append((at, path))
            seen.add(at.posted)
            if len(level) == MOST * width:
                break
    return level


def _fastest(level: Level) -> BeamResult:
    at, path = min(level, key=lambda one: one[0].now + one[0].left())
    acts: list[Act] = []
    while path is not None:
        path, act = path
        acts.append(act)
    return BeamResult(at.now + at.left(), tuple(_steps(reversed(acts))))


def _steps(acts: Iterable[Act]) -> list[TileStep]:
    """Acts as steps: in each first messages that need not wait for one another, then blocks.

    Blocks become rectangles where all of them are there when the first begins.
    """
    steps, here = [(list[list[Block]](), [0, 0, 0, 0])], (0, 0)
    for post, block, waited, arrived in acts:
        runs, moves = steps[-1]
        if post is not None:
            if runs or any(moves[post[0] :]) or (waited and any(moves)):
                steps.append(([], moves := [0, 0, 0, 0]))
            moves[post[0]] = post[1]
        elif block is not None:
            if moves[0] == block[0] > 0 or moves[1] == block[1] > 0:  # counts from the next step
                steps.append((runs := [], [0, 0, 0, 0]))
            if not runs or block[0] > here[0] or block[1] > here[1]:
                runs.append([])
                here = arrived[:2]
            runs[-1].append(block)
    return tile_steps_of(steps)
