"""Layouts whose ranks have equal work under a mask (load balancing), and the layout by default."""

from collections.abc import Iterable
from functools import reduce
from itertools import pairwise
from math import inf

import numpy as np
from numpy.typing import NDArray

from tilewise.arguments import (
    MOST_RANKS,
    checks_arguments,
    listed,
    require_range,
    require_type,
    whole_number,
)
from tilewise.layouts.cells import cells
from tilewise.layouts.layout import Layout, Run, contiguous, zigzag
from tilewise.masks.base import Causal, Full, Mask
from tilewise.masks.components import components, row_areas
from tilewise.plan.row_ranges import count_rows, union

Owned = tuple[int, int, int]  # start, stop, rank
LEVEL = 1.02  # largest over mean area up to which a sequence is just cut in n parts
EVEN = 0.004  # of the mean area: the deviation that an even run of rows may have
ROUGH = 2  # factor of that deviation which short runs may have
CHUNK = 128  # rows
SAMPLES = 8  # points at which evenness is looked at

Floats = NDArray[np.float64]


class _Component:
    """A run of rows [start, stop), from whose start, or both ends, rows are taken."""

    def __init__(self, start: int, stop: int, total: Floats, folded: bool) -> None:
        self.start, self.stop, self.folded = start, stop, folded
        self.density = float(total[stop] - total[start]) / (stop - start)

    def __len__(self) -> int:
        return self.stop - self.start

    def take(self, rows: int) -> list[tuple[int, int]]:
        """Remove rows and say which."""
        if rows >= len(self):
            parts = [(self.start, self.stop)]
            self.start = self.stop
            return parts
        rows_of_top = rows // 2 if self.folded else rows
        parts = [
            (self.start, self.start + rows_of_top),
            (self.stop - rows + rows_of_top, self.stop),
        ]
        self.start, self.stop = self.start + rows_of_top, self.stop - rows + rows_of_top
        return [p for p in parts if p[0] < p[1]]


class _Queue:
    """Runs of rows, the heaviest first, to be taken from either end."""

    def __init__(self, runs: list[_Component]) -> None:
        self._runs = sorted(runs, key=lambda run: -run.density)
        self._counts = np.array([len(run) for run in self._runs])
        self._densities = np.array([run.density for run in self._runs])
        self._left = slice(0, len(runs))

    @property
    def left(self) -> tuple[NDArray[np.int64], Floats]:
        """Rows of each run, and pairs a row."""
        return self._counts[self._left], self._densities[self._left]

    def take(self, rows: int, *, lightest: bool) -> list[tuple[int, int]]:
        """Remove rows from one end and say which."""
        parts: list[tuple[int, int]] = []
        first, last = self._left.start, self._left.stop
        while rows:
            run_index = last - 1 if lightest else first
            num_taken = min(rows, len(self._runs[run_index]))
            parts += self._runs[run_index].take(num_taken)
            self._counts[run_index] -= num_taken
            rows -= num_taken
            if not self._counts[run_index]:
                first, last = (first, run_index) if lightest else (run_index + 1, last)
        self._left = slice(first, last)
        return parts


@checks_arguments
def balanced(
    mask: Mask | Iterable[Mask],
    num_tokens: int,
    n: int,
    chunk: int | None = None,
    slack: float = 0.0,
) -> Layout:
    """Tokens on n ranks so that all have the same number of them and of allowed pairs.

    A rank's tokens ascend. Areas come out equal to about half a percent where the rows' own areas
    allow it; the documents that a rank takes part in are few. Where neighbouring parts are level to
    2 % (windows, full attention) they are left as they are.

    Args:
        mask: one or several (the layers' of a model), whose areas are summed.
        num_tokens: length of the sequence.
        chunk: heavy rows stay together in multiples of this many, where that keeps areas level;
            None: 128, or all tokens of a shorter sequence.
        slack: max / mean tokens - 1 that a rank may have beyond its share; spent on leaving
            light documents whole. 0: numbers of tokens differ by at most one.
    Raises:
        ValueError: if a mask does not fit num_tokens, or chunk or slack is out of range.
    """
    masks = [mask] if isinstance(mask, Mask) else listed("mask", mask, "masks")
    if not masks:
        raise ValueError("balanced has 0 masks; give at least one")
    for single_mask in masks:
        require_type(Mask, "mask", single_mask).check_tokens(num_tokens)
    whole_number("n", n, most=MOST_RANKS)
    chunk = min(CHUNK, num_tokens) if chunk is None else chunk
    require_range("chunk", chunk, 1, num_tokens)
    if not 0 <= slack < inf:
        raise ValueError(f"slack ({slack}) must be at least 0 and finite: max / mean tokens - 1")
    total = running(reduce(np.add, (row_areas(single_mask, num_tokens) for single_mask in masks)))
    equal_parts = contiguous(num_tokens, n)
    if _is_level(equal_parts, total):
        return Layout(num_tokens, equal_parts.runs, "balanced")
    edges = reduce(np.intersect1d, (components(single_mask, num_tokens) for single_mask in masks))
    return layout_of(
        num_tokens, n, assign_rows(total, edges, n, chunk=chunk, slack=slack), "balanced"
    )


def running(areas: Floats) -> Floats:
    """Return the sum of all rows before each, float64 [num_tokens + 1]."""
    total = np.zeros(len(areas) + 1)
    np.cumsum(areas, out=total[1:])
    return total


def _is_level(equal_parts: Layout, total: Floats) -> bool:
    """Return whether a contiguous layout gives ranks about equal areas."""
    largest = max(
        total[r.start + r.count] - total[r.start] for runs in equal_parts.runs for r in runs
    )
    return largest * equal_parts.world_size <= LEVEL * total[-1]


def layout_of(num_tokens: int, n: int, owned: Iterable[Owned], name: str) -> Layout:
    """The layout in which these ranges belong to these ranks."""
    runs: list[list[Run]] = [[] for _ in range(n)]
    for start, stop, rank in sorted(owned):
        runs[rank].append(Run(start, stop - start))
    return Layout(num_tokens, runs, name)


def assign_rows(
    total: Floats, edges: NDArray[np.int64], n: int, *, chunk: int = 128, slack: float = 0.0
) -> list[Owned]:
    """Assign rows to ranks: areas equal to about half a percent, tokens equal to one (or slack).

    Args:
        total: allowed pairs of all rows before each, of `running`; of several masks, their sum.
        edges: of the components, from 0 to num_tokens, strictly ascending; of several
            masks, the edges that all have.
        chunk: heavy runs are taken in multiples of this many rows, where that keeps areas level.
        slack: max / mean tokens - 1; spent on leaving light components whole.
    """
    num_tokens = len(total) - 1
    mean = float(total[-1]) / n
    shortest_run = max(1, min(chunk, num_tokens // (16 * n)))
    runs = [
        run
        for a, b in pairwise(edges.tolist())
        for run in _runs(a, b, total, EVEN * mean, shortest_run)
    ]
    queue = _Queue(runs)
    owned: list[Owned] = []
    rows_assigned, area_assigned = 0, 0.0
    for rank in range(n):
        quota = num_tokens // n * (rank + 1) + min(rank + 1, num_tokens % n)
        spare_rows = int(slack / 2 * (num_tokens / n)) if rank < n - 1 else 0
        area_needed = (float(total[-1]) - area_assigned) / (n - rank)
        parts = _hand(queue, quota - rows_assigned, area_needed, EVEN * mean, (chunk, spare_rows))
        owned += [(start, stop, rank) for start, stop in union(parts)]
        rows_assigned += count_rows(parts)
        for start, stop in parts:
            area_assigned += float(total[stop] - total[start])
    return sorted(owned)


def _runs(
    start: int, stop: int, total: Floats, tolerance: float, shortest_run: int
) -> list[_Component]:
    """Cut a component into runs of rows that are even, straight or folded, to within tolerance."""
    size = float(total[stop] - total[start])
    sample_rows = np.arange(1, SAMPLES) * (stop - start) // SAMPLES
    straight = total[start + sample_rows] - total[start]
    if np.abs(straight - size * sample_rows / (stop - start)).max() <= tolerance:
        return [_Component(start, stop, total, folded=False)]
    folded = (
        total[start + sample_rows // 2]
        - total[start]
        + total[stop]
        - total[stop - sample_rows + sample_rows // 2]
    )
    # a fold of an odd number of rows takes one more from the end
    slope = float(np.diff(total[[stop - 1, stop]])[0]) + tolerance
    deviation = np.abs(folded - size * sample_rows / (stop - start)).max()
    if deviation <= slope or (stop - start <= shortest_run and deviation <= ROUGH * tolerance):
        return [_Component(start, stop, total, folded=True)]
    middle = (start + stop) // 2
    return _runs(start, middle, total, tolerance, shortest_run) + _runs(
        middle, stop, total, tolerance, shortest_run
    )


def _hand(
    queue: _Queue, num_rows: int, area_needed: float, tolerance: float, grains: tuple[int, int]
) -> list[tuple[int, int]]:
    """Take one rank's rows from the heaviest and the lightest runs, mixed to the area it needs."""
    if num_rows == 0:
        return []
    chunk, spare_rows = grains
    counts, densities = queue.left
    tokens = np.concatenate([[0], np.cumsum(counts)])
    areas = running(counts * densities)
    rows_behind = int(tokens[-1]) - num_rows
    # with x rows from the front and room - x from the back, area grows with x, line by line
    x = np.concatenate([tokens, tokens - rows_behind, [num_rows]])
    x = np.sort(x[(x >= 0) & (x <= num_rows)])
    area: Floats = (
        np.interp(x, tokens, areas) + areas[-1] - np.interp(x + rows_behind, tokens, areas)
    )
    rows = float(np.interp(area_needed, area, x))
    nearest_ends = [
        float(v)
        for v, a in ((num_rows, area[-1]), (0, area[0]))
        if abs(a - area_needed) <= 2 * tolerance
    ]
    rows = nearest_ends[0] if nearest_ends else rows
    gap = float(densities[0] - densities[-1])
    step = next((g for g in (chunk, 32, 8, 1) if g * gap <= 2 * tolerance), 1)
    front_rows = min(round(rows / step) * step, num_rows)
    back_rows = num_rows - front_rows
    edge_rows = tokens[-1] - int(tokens[np.abs(tokens[-1] - tokens - back_rows).argmin()])
    back_rows = (
        edge_rows
        if abs(edge_rows - back_rows) <= spare_rows and front_rows + edge_rows <= tokens[-1]
        else back_rows
    )
    return queue.take(front_rows, lightest=False) + queue.take(back_rows, lightest=True)


ZIGZAG_LEVEL = 1.03
"""max / mean of the ranks' work up to which a layout counts as level."""


@checks_arguments
def default_layout(mask: Mask, num_tokens: int, world_size: int) -> Layout:
    """Contiguous for Full; zigzag for Causal, and where it is level; else balanced."""
    if isinstance(mask, Full):
        return contiguous(num_tokens, world_size)
    layout = zigzag(num_tokens, world_size)
    if isinstance(mask, Causal):
        return layout
    work = [0] * world_size
    for (rank, _), cell in cells(mask, layout, layout).items():
        work[rank] += cell.area
    if max(work) * world_size <= ZIGZAG_LEVEL * sum(work):
        return layout
    return balanced(mask, num_tokens, world_size, chunk=max(1, min(128, num_tokens // world_size)))
