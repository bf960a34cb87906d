"""Runs: rows as arithmetic progressions, and the one way to write a sequence of positions so."""

from collections.abc import Iterable, Iterator, Sequence
from itertools import chain, pairwise
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray


class Run(NamedTuple):
    """The positions start, start + stride, ... (count of them)."""

    start: int
    count: int  # pyright: ignore[reportIncompatibleMethodOverride]
    stride: int = 1


class _Gaps(NamedTuple):
    """So many neighbouring positions in a row lie this far from the one before."""

    distance: int
    repeats: int


def canonical_runs(runs: Sequence[Run]) -> tuple[Run, ...]:
    """Return the runs that depend on the positions alone, not on how they were written.

    Positions that follow one another are one run, then three or more at an equal distance; what is
    left are runs of one position.
    """
    if not runs:
        return ()
    return tuple(_runs(runs[0].start, _joined(_gaps_of_runs(runs))))


def runs_of_positions(positions: NDArray[np.int64]) -> tuple[Run, ...]:
    """Return the canonical runs of positions in any order.

    Args:
        positions: int64 [num_rows].
    """
    if not len(positions):
        return ()
    distances = np.diff(positions)
    edges = np.flatnonzero(np.diff(distances)) + 1
    starts = np.concatenate([[0], edges, [len(distances)]]).tolist()
    gaps = (_Gaps(int(distances[a]), b - a) for a, b in pairwise(starts) if a < b)
    return tuple(_runs(int(positions[0]), gaps))


def _gaps_of_runs(runs: Sequence[Run]) -> Iterator[_Gaps]:
    for run, after in pairwise(chain(runs, [None])):
        assert run is not None
        if run.count > 1:
            yield _Gaps(run.stride, run.count - 1)
        if after is not None:
            yield _Gaps(after.start - (run.start + (run.count - 1) * run.stride), 1)


def _joined(gaps: Iterable[_Gaps]) -> Iterator[_Gaps]:
    """Gaps of which neighbours differ in distance."""
    distance, count = 0, 0
    for gap in gaps:
        if count and gap.distance != distance:
            yield _Gaps(distance, count)
            count = 0
        distance, count = gap.distance, count + gap.repeats
    if count:
        yield _Gaps(distance, count)


def _runs(first: int, gaps: Iterable[_Gaps]) -> Iterator[Run]:
    """The runs of positions that begin at first; neighbouring gaps differ in distance."""
    position, first_is_taken = first, False  # the gaps' first position, and whether a run has it
    for gap, after in pairwise(chain(gaps, [None])):
        assert gap is not None
        distance, last = gap.distance, position + gap.distance * gap.repeats
        begin, count = position + distance * first_is_taken, gap.repeats + 1 - first_is_taken
        if distance > 1 and after is not None and after.distance == 1:
            count -= 1  # the last position begins a run of neighbours
        if (distance == 1 and count > 1) or (distance > 1 and count > 2):
            yield Run(begin, count, distance)
            first_is_taken = begin + (count - 1) * distance == last
        else:
            yield from (Run(begin + i * distance, 1) for i in range(gap.repeats - first_is_taken))
            first_is_taken = False
        position = last
    if not first_is_taken:
        yield Run(position, 1)
