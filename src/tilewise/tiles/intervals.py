"""A mask on a tile's sorted rows: per row the interval of keys it sees, then few linear slices."""

from __future__ import annotations

from itertools import pairwise
from typing import NamedTuple, TypeAlias

import numpy as np

from tilewise.masks.strips import Strips, expand
from tilewise.tiles.calls import Slice

SHORT = 32  # rows; slices below it are joined to a staircase that is covered as one

Block: TypeAlias = list[Slice]  # neighbouring rows, both ends of the keys never descending


class AllowedCells(NamedTuple):
    """The allowed cells of sorted positions in index coordinates, as disjoint linear slices.

    Attributes:
        columns: int64 [num_slices, 6], as in `Slice`.
        follows: bool [num_slices - 1]: the next slice goes on where this one ends, overlapping its
            keys, and both are short: steps of one staircase (positions of unequal stride).
    """

    columns: np.ndarray
    follows: np.ndarray

    def __len__(self) -> int:
        return len(self.columns)

    def blocks(self) -> list[Block]:
        """Each slice by itself, but staircases together."""
        slices = list(map(Slice._make, self.columns.tolist()))
        cuts = [0, *(np.flatnonzero(~self.follows) + 1).tolist(), len(slices)]
        return [slices[a:b] for a, b in pairwise(cuts) if a < b]


def region(q: np.ndarray, k: np.ndarray, strips: Strips) -> AllowedCells:
    """What strips allow of q x k, both sorted.

    A strip's two lines ascend, so its keys on sorted rows are intervals [lo, hi) that ascend; rows
    whose ends move by 0 or by 1 at a time are one slice.
    """
    row, lo, hi = _row_intervals(q, k, strips)
    if not len(row):
        return AllowedCells(np.empty((0, 6), np.int64), np.empty(0, bool))
    lo_step, hi_step = np.diff(lo), np.diff(hi)
    joined = (np.diff(row) == 1) & (lo_step >= 0) & (hi_step >= 0) & (lo[1:] < hi[:-1])
    first, lo_slope, hi_slope = _linear_runs(joined, lo_step, hi_step)
    start, stop = row[first], row[np.append(first[1:], len(row)) - 1] + 1
    lo_offset, hi_offset = lo[first] - lo_slope * start, hi[first] - hi_slope * start
    short = stop - start < SHORT
    return AllowedCells(
        np.stack((start, stop, lo_offset, lo_slope, hi_offset, hi_slope), 1),
        joined[first[1:] - 1] & short[1:] & short[:-1],
    )


def _row_intervals(
    q: np.ndarray, k: np.ndarray, strips: Strips
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(row, lo, hi) of every strip on every row where it holds a key, strip by strip."""
    start, stop = np.searchsorted(q, strips.q0), np.searchsorted(q, strips.q1)
    near = np.flatnonzero(start < stop)
    strips, start, stop = strips.take(near), start[near], stop[near]
    low = np.searchsorted(k, strips.lo + strips.lo_slope * q[start])
    high = np.searchsorted(k, strips.hi + strips.hi_slope * q[stop - 1])
    held = np.flatnonzero(low < high)
    strips, low, high = strips.take(held), low[held], high[held]
    index, row = expand(start[held], stop[held])
    lo, hi = low[index], high[index]
    for ends, offset, slope in ((lo, strips.lo, strips.lo_slope), (hi, strips.hi, strips.hi_slope)):
        moving = np.flatnonzero(slope[index])
        ends[moving] = np.searchsorted(k, offset[index[moving]] + q[row[moving]])
    held = lo < hi
    return row[held], lo[held], hi[held]


def _linear_runs(
    joined: np.ndarray, lo_step: np.ndarray, hi_step: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Where runs of entries with constant steps of 0 or 1 begin, and their two slopes."""
    code = np.where(joined & (lo_step <= 1) & (hi_step <= 1), 2 * lo_step + hi_step, -1)
    begins = np.append(True, code < 0)
    begins[2:] |= (code[1:] != code[:-1]) & (code[:-1] >= 0)
    first = np.flatnonzero(begins)
    single = np.diff(np.append(first, len(begins))) == 1
    code = np.where(single, 0, np.append(code, 0)[first])
    return first, code >> 1, code & 1
