"""The fastest programs of a mesh tile at one pace, searched act by act.

A beam: of all programs of so many acts go on those whose end is bound lowest, and for every set of
posted messages one. `least` follows all that can end in time.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from math import inf
from typing import NamedTuple

from tilewise.strategies.mesh_schedules.beam import Act, Counts, Grid, Prefix
from tilewise.strategies.mesh_schedules.model import Beat, Block, Costs, rectangles

Path = tuple["Path", Act] | None
Level = list[tuple[Prefix, Path]]


MOST = 4
"""Times its width that a beam may be wide for the sake of variety."""


class Found(NamedTuple):
    """A program: when it ends, and its steps."""

    seconds: float
    beats: tuple[Beat, ...]


def search(
    shape: tuple[int, int],
    costs: Costs,
    block: float,
    width: int,
    below: float = inf,
) -> Found | None:
    """The fastest program of a tile that a search of some width finds.

    Args:
        shape: query and KV shards.
        costs, block: seconds of messages and of a block.
        width: programs of each length that are followed.
        below: seconds; programs that end no earlier are not looked for.
    Returns:
        None if no program ends earlier.
    """
    grid = Grid(shape, costs, block)
    level: Level = [(grid.first(), None)]
    for _ in range(grid.acts):
        level = _best(_longer(grid, level, below), width)
    return _fastest(level) if level else None


def least(
    shape: tuple[int, int], costs: Costs, block: float, below: float, most: int
) -> float | None:
    """The least seconds of any program, or `below` if none ends earlier; None: too many to try.

    Args:
        most: programs of one length.
    """
    grid = Grid(shape, costs, block)
    level: Level = [(grid.first(), None)]
    for _ in range(grid.acts):
        level = [(at, None) for _, at, _ in _longer(grid, level, below)]
        if len(level) > most:
            return None
    return min([below, *(at.now + at.left() for at, _ in level)])


def _longer(
    grid: Grid, level: Level, below: float
) -> Iterable[tuple[tuple[float, float], Prefix, Path]]:
    """Programs of one act more, each once."""
    found: dict[Prefix, tuple[tuple[float, float], Prefix, Path]] = {}
    for before, path in level:
        for act, at in grid.next(before):
            if at not in found:
                bound = grid.bound(at)
                if bound[0] < below * (1 - 1e-9):
                    found[at] = bound, at, (path, act)
    return found.values()


def _best(longer: Iterable[tuple[tuple[float, float], Prefix, Path]], width: int) -> Level:
    level: Level = []
    seen: set[Counts] = set()
    for _, at, path in sorted(longer, key=lambda one: one[0]):
        if len(level) < width or at.posted not in seen:
            level.append((at, path))
            seen.add(at.posted)
            if len(level) == MOST * width:
                break
    return level


def _fastest(level: Level) -> Found:
    at, path = min(level, key=lambda one: one[0].now + one[0].left())
    acts: list[Act] = []
    while path is not None:
        path, act = path
        acts.append(act)
    return Found(at.now + at.left(), tuple(_steps(reversed(acts))))


def _steps(acts: Iterable[Act]) -> Iterator[Beat]:
    """Acts as steps: in each first messages that need not wait for one another, then blocks.

    Blocks become rectangles where all of them are there when the first begins.
    """
    moves, runs, here = [0, 0, 0, 0], list[list[Block]](), (0, 0)
    for post, block, waited, arrived in acts:
        if post is not None:
            if runs or any(moves[post[0] :]) or (waited and any(moves)):
                yield _beat(moves, runs)
                moves, runs = [0, 0, 0, 0], []
            moves[post[0]] = post[1]
        elif block is not None:
            if moves[0] == block[0] > 0 or moves[1] == block[1] > 0:  # counts from the next step
                yield _beat(moves, runs)
                moves, runs = [0, 0, 0, 0], []
            if not runs or block[0] > here[0] or block[1] > here[1]:
                runs.append([])
                here = arrived[:2]
            runs[-1].append(block)
    yield _beat(moves, runs)


def _beat(moves: list[int], runs: list[list[Block]]) -> Beat:
    return Beat(tuple(tile for run in runs for tile in rectangles(run)), *moves)
