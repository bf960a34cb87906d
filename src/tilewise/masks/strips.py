"""The normal form of every mask: disjoint strips between two lines of slope 0 or 1.

    k ^        hi + hi_slope q          a strip holds the pairs (q, k) with
      |    ____.-''''|                      q0 <= q < q1,
      |   |    ..----|                      lo + lo_slope q <= k < hi + hi_slope q
      |   |.-''      |                  and is empty on none of its rows
      +---q0---------q1---> q

Rectangles, causal triangles, bands and their intersections, unions and complements are all few
strips, so areas, coverage and shard supports are closed forms over six integer columns, whatever
the mask. The sum over rows of min(x, line) is a number of constants and an arithmetic series; every
area is four such sums.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import ArrayLike, NDArray

from tilewise.arguments import brief, listed, whole_number, whole_numbers

LIMIT = (
    2**40
)  # positions are in [0, LIMIT): past any sequence, and products of slopes stay in int64

Array = NDArray[np.int64]
Line = tuple[Array, Array]  # intercept and slope


@dataclass(frozen=True, slots=True, eq=False)
class Strips:
    """Columns of disjoint strips, int64, of equal length, sorted by (q0, first key on row q0)."""

    q0: Array
    q1: Array
    lo: Array
    lo_slope: Array
    hi: Array
    hi_slope: Array

    def __len__(self) -> int:
        return len(self.q0)

    @property
    def columns(self) -> tuple[Array, ...]:
        """q0, q1, lo, lo_slope, hi, hi_slope."""
        return self.q0, self.q1, self.lo, self.lo_slope, self.hi, self.hi_slope

    def take(self, index: Array | NDArray[np.bool_] | slice) -> Strips:
        """The strips at these indices (or of this bool column), in that order."""
        return Strips(*(column[index] for column in self.columns))


def make(
    q0: ArrayLike,
    q1: ArrayLike,
    lo: ArrayLike,
    hi: ArrayLike,
    *,
    lo_slope: ArrayLike = 0,
    hi_slope: ArrayLike = 0,
) -> Strips:
    """Strips from numbers or columns, cut to [0, LIMIT) on both axes; they must not overlap."""
    columns = np.broadcast_arrays(
        *(np.atleast_1d(np.asarray(x, np.int64)) for x in (q0, q1, lo, lo_slope, hi, hi_slope))
    )
    first, last, low, low_slope, high, high_slope = columns
    zero, limit = np.zeros_like(first), np.full_like(first, LIMIT)
    first, last = np.clip(first, 0, LIMIT), np.clip(last, 0, LIMIT)
    return _sorted(
        _between(first, last, ((low, low_slope), (zero, zero)), ((high, high_slope), (limit, zero)))
    )


def intersect(a: Strips, b: Strips) -> Strips:
    """The pairs in both."""
    ia, ib = overlaps(a.q0, a.q1, b.q0, b.q1)
    a, b = a.take(ia), b.take(ib)
    lows = ((a.lo, a.lo_slope), (b.lo, b.lo_slope))
    highs = ((a.hi, a.hi_slope), (b.hi, b.hi_slope))
    return coalesce(_between(np.maximum(a.q0, b.q0), np.minimum(a.q1, b.q1), lows, highs))


def union(a: Strips, b: Strips) -> Strips:
    """The pairs in either: the smaller one, and what the other has outside of it."""
    small, large = (a, b) if len(a) <= len(b) else (b, a)
    outside = intersect(large, complement(small))
    return coalesce(_concatenate(small, outside))


def complement(strips: Strips) -> Strips:
    """The pairs of [0, LIMIT) x [0, LIMIT) in no strip: the gaps of every band."""
    edges, band, index = bands(strips)
    num_bands, zero = len(edges) - 1, np.zeros(len(edges) - 1, np.int64)
    # one sentinel per band ends at key 0, so that every gap begins where an entry ends
    band = np.concatenate([np.arange(num_bands), band])
    lo = np.concatenate([zero - 1, strips.lo[index]])
    lo_slope = np.concatenate([zero, strips.lo_slope[index]])
    hi = np.concatenate([zero, strips.hi[index]])
    hi_slope = np.concatenate([zero, strips.hi_slope[index]])
    order = np.lexsort((lo + lo_slope * edges[band], band))
    band, lo, lo_slope, hi, hi_slope = (x[order] for x in (band, lo, lo_slope, hi, hi_slope))
    is_last = np.append(band[1:] != band[:-1], True)
    end = np.where(is_last, LIMIT, np.roll(lo, -1))
    end_slope = np.where(is_last, 0, np.roll(lo_slope, -1))
    return coalesce(_trim(Strips(edges[band], edges[band + 1], hi, hi_slope, end, end_slope)))


def coalesce(s: Strips) -> Strips:
    """Join neighbours that share a whole side: first across keys, then across rows."""
    if len(s) == 0:
        return s
    order = np.lexsort((s.lo + s.lo_slope * s.q0, s.q1, s.q0))
    s = s.take(order)
    continues = (s.q0[1:] == s.q0[:-1]) & (s.q1[1:] == s.q1[:-1])
    continues &= (s.lo[1:] == s.hi[:-1]) & (s.lo_slope[1:] == s.hi_slope[:-1])
    first_index, last_index = _groups(continues)
    s = Strips(
        s.q0[first_index],
        s.q1[first_index],
        s.lo[first_index],
        s.lo_slope[first_index],
        s.hi[last_index],
        s.hi_slope[last_index],
    )
    order = np.lexsort((s.q0, s.hi_slope, s.hi, s.lo_slope, s.lo))
    s = s.take(order)
    continues = s.q0[1:] == s.q1[:-1]
    for column in s.columns[2:]:
        continues &= column[1:] == column[:-1]
    first_index, last_index = _groups(continues)
    return _sorted(
        Strips(
            s.q0[first_index], s.q1[last_index], *(column[first_index] for column in s.columns[2:])
        )
    )


def first_overlap(strips: Strips) -> tuple[int, int] | None:
    """A (query, key) that lies in two of these strips, which need not be disjoint; None if none.

    Non-empty intervals whose ends move by 0 or 1 a row can't pass each other unseen, so within a
    band it is enough that neighbours, ordered on its first row, stay apart on its last.
    """
    edges, band, index = bands(strips)
    s = strips.take(index)
    order = np.lexsort((s.lo + s.lo_slope * edges[band], band))
    s, band = s.take(order), band[order]
    first_row, last_row = edges[band], edges[band + 1] - 1
    high = s.hi[:-1] + s.hi_slope[:-1] * last_row[:-1]
    low = s.lo[1:] + s.lo_slope[1:] * last_row[1:]
    on_first = (
        s.hi[:-1] + s.hi_slope[:-1] * first_row[:-1] > s.lo[1:] + s.lo_slope[1:] * first_row[1:]
    )
    overlaps_found = np.flatnonzero((band[:-1] == band[1:]) & (on_first | (high > low)))
    if not len(overlaps_found):
        return None
    i = int(overlaps_found[0])
    q = int(first_row[i]) if on_first[i] else int(s.lo[i + 1] - s.hi[i] + 1)
    return q, int(max(s.lo[j] + s.lo_slope[j] * q for j in (i, i + 1)))


def bands(strips: Strips) -> tuple[Array, Array, Array]:
    """Cut the rows where some strip begins or ends.

    Returns:
        edges of the bands, from 0 to LIMIT; and for each strip within each band: band, strip index.
    """
    edges = np.unique(np.concatenate([[0, LIMIT], strips.q0, strips.q1]))
    index, band = expand(np.searchsorted(edges, strips.q0), np.searchsorted(edges, strips.q1))
    return edges, band, index


def overlaps(a0: Array, a1: Array, b0: Array, b1: Array) -> tuple[Array, Array]:
    """All pairs of intervals [a0, a1) and [b0, b1) that share a point; a0 and b0 are sorted."""
    ia, jb = expand(np.searchsorted(b0, a0, "left"), np.searchsorted(b0, a1, "left"))
    ib, ja = expand(np.searchsorted(a0, b0, "right"), np.searchsorted(a0, b1, "left"))
    return np.concatenate([ia, ja]), np.concatenate([jb, ib])


def expand(start: Array, stop: Array) -> tuple[Array, Array]:
    """Each index i with each number of [start[i], stop[i]), as two columns."""
    count = np.maximum(stop - start, 0)
    index = np.repeat(np.arange(len(count)), count)
    shift = start - (np.cumsum(count) - count)
    return index, np.arange(len(index)) + shift[index]


def of_queries(strips: Strips, queries: Array) -> tuple[Array, Array, Array]:
    """Row, first and end of the keys of each strip that each query is in.

    Args:
        queries: positions, ascending.
    """
    start, stop = np.searchsorted(queries, strips.q0), np.searchsorted(queries, strips.q1)
    strip, row = expand(start, stop)
    position = queries[row]
    low = strips.lo[strip] + strips.lo_slope[strip] * position
    return row, low, strips.hi[strip] + strips.hi_slope[strip] * position


def interval_table(row: Array, low: Array, high: Array, num_rows: int) -> tuple[Array, Array]:
    """First and end of the intervals [low, high) of each row, ascending, as tables [depth, rows];
    0, 0 where a row has fewer. Those that touch are one.
    """
    order = np.lexsort((low, row))
    row, low, high = row[order], low[order], high[order]
    follows = (row[1:] == row[:-1]) & (low[1:] == high[:-1])
    first = np.flatnonzero(np.concatenate([[True], ~follows])[: len(row)])
    last = np.append(first[1:], len(row))[: len(first)] - 1
    row, low, high = row[first], low[first], high[last]
    depth = np.arange(len(row)) - np.searchsorted(row, row)
    table = np.zeros((2, int(depth.max(initial=0)) + 1, num_rows), np.int64)
    table[0, depth, row], table[1, depth, row] = low, high
    return table[0], table[1]


def _between(q0: Array, q1: Array, lows: tuple[Line, Line], highs: tuple[Line, Line]) -> Strips:
    """The rows [q0, q1) between the higher of two lines and the lower of two others.

    A constant and a sloped line cross once, so each gives at most three pieces.
    """
    cut_low = np.clip(_crossing(*lows, q0), q0, q1)
    cut_high = np.clip(_crossing(*highs, q0) + 1, q0, q1)  # where equal, still the steeper
    cuts = (q0, np.minimum(cut_low, cut_high), np.maximum(cut_low, cut_high), q1)
    pieces: list[Strips] = []
    for start, stop in pairwise(cuts):
        rows = np.flatnonzero(start < stop)
        first = start[rows]
        low = _higher(_at(lows[0], rows), _at(lows[1], rows), first)
        high = _lower(_at(highs[0], rows), _at(highs[1], rows), first)
        pieces.append(_trim(Strips(first, stop[rows], *low, *high)))
    return _concatenate(*pieces)


def _at(line: Line, index: Array) -> Line:
    return line[0][index], line[1][index]


def _crossing(a: Line, b: Line, otherwise: Array) -> Array:
    """The first row on which the steeper line is not below the other."""
    return np.where(a[1] == b[1], otherwise, np.where(a[1] > b[1], b[0] - a[0], a[0] - b[0]))


def _higher(a: Line, b: Line, row: Array) -> Line:
    """The line that is higher from this row to the next crossing: where equal, the steeper."""
    at_a, at_b = a[0] + a[1] * row, b[0] + b[1] * row
    second = (at_b > at_a) | ((at_b == at_a) & (b[1] > a[1]))
    return np.where(second, b[0], a[0]), np.where(second, b[1], a[1])


def _lower(a: Line, b: Line, row: Array) -> Line:
    """The line that is lower from this row to the next crossing: where equal, the flatter."""
    at_a, at_b = a[0] + a[1] * row, b[0] + b[1] * row
    second = (at_b < at_a) | ((at_b == at_a) & (b[1] < a[1]))
    return np.where(second, b[0], a[0]), np.where(second, b[1], a[1])


def _trim(s: Strips) -> Strips:
    """Drop the rows on which a strip is empty: an interval, its width being linear in q."""
    widening, narrowing = s.hi_slope > s.lo_slope, s.hi_slope < s.lo_slope
    parallel_empty = (s.hi_slope == s.lo_slope) & (s.hi <= s.lo)
    q0 = np.where(widening, np.maximum(s.q0, s.lo - s.hi + 1), s.q0)
    q1 = np.where(narrowing, np.minimum(s.q1, s.hi - s.lo), s.q1)
    return Strips(q0, q1, *s.columns[2:]).take((q0 < q1) & ~parallel_empty)


def _groups(continues: Array) -> tuple[Array, Array]:
    """First and last index of each run of neighbours that are joined to each other."""
    return np.flatnonzero(np.append(True, ~continues)), np.flatnonzero(np.append(~continues, True))


def _sorted(s: Strips) -> Strips:
    return s.take(np.lexsort((s.lo + s.lo_slope * s.q0, s.q0)))


def _concatenate(*parts: Strips) -> Strips:
    return Strips(
        *(np.concatenate(columns) for columns in zip(*(p.columns for p in parts), strict=True))
    )


Bound = Array | int
"""A position, of all strips or one for each."""
INT64_SAFE = 2**61
CELLS_AT_ONCE = 2**19  # a working set of a few MB


def area(strips: Strips, q_range: tuple[int, int], k_range: tuple[int, int]) -> int:
    """Number of allowed pairs with the query in q_range and the key in k_range."""
    (q0, q1), (k0, k1) = checked_range("q_range", q_range), checked_range("k_range", k_range)
    meeting = strips.take(slice(0, np.searchsorted(strips.q0, q1)))
    meeting = meeting.take(meeting.q1 > q0)
    first, last = np.maximum(meeting.q0, q0), np.minimum(meeting.q1, q1)
    lines = meeting.columns[2:]
    if q1 * k1 >= INT64_SAFE:
        first, last, *lines = (column.astype(object) for column in (first, last, *lines))
    return int(clipped(lines, first, last - first, k0, k1).sum())


def clipped(lines: Sequence[Array], first: Array, rows: Array, k0: Bound, k1: Bound) -> Array:
    """Allowed pairs of each strip on rows [first, first + rows), keys [k0, k1).

    Args:
        lines: lo, lo_slope, hi, hi_slope; never lo > hi on these rows.
    """
    lo, lo_slope, hi, hi_slope = lines
    below_high = _row_sum(k1, hi, hi_slope, first, rows) - _row_sum(k0, hi, hi_slope, first, rows)
    below_low = _row_sum(k1, lo, lo_slope, first, rows) - _row_sum(k0, lo, lo_slope, first, rows)
    return below_high - below_low


def areas(strips: Strips, q_edges: ArrayLike, k_edges: ArrayLike) -> Array:
    """Allowed pairs of every cell between edges, int64 [len(q_edges) - 1, len(k_edges) - 1]."""
    qs, ks = _edges("q_edges", q_edges), _edges("k_edges", k_edges)
    table = np.zeros((len(qs) - 1, len(ks) - 1), np.int64)
    for rows, columns, block in _blocks(strips, qs, ks):
        table[rows, columns] = block
    return table


def coverage(strips: Strips, q_edges: ArrayLike, k_edges: ArrayLike) -> NDArray[np.int8]:
    """int8 table over the cells between edges: 0 empty (or of no pairs), 1 partial, 2 full."""
    qs, ks = _edges("q_edges", q_edges), _edges("k_edges", k_edges)
    q_sizes, k_sizes = np.diff(qs), np.diff(ks)
    table = np.zeros((len(q_sizes), len(k_sizes)), np.int8)
    for rows, columns, block in _blocks(strips, qs, ks):
        is_touched = block > 0
        is_full = block == q_sizes[rows, None] * k_sizes[None, columns]
        table[rows, columns] = is_touched.view(np.int8) + (is_touched & is_full).view(np.int8)
    return table


def checked_range(what: str, bounds: tuple[int, int]) -> tuple[int, int]:
    """The range as two ints, cut at LIMIT.

    Raises:
        ValueError: unless 0 <= start <= stop.
    """
    ends = listed(what, bounds, "two positions")
    if len(ends) != 2:
        raise ValueError(f"{what} {brief(tuple(ends))} must be (start, stop)")
    start, stop = (whole_number(what, x, None) for x in ends)
    if not 0 <= start <= stop:
        raise ValueError(f"{what} ({start}, {stop}) must be (start, stop) with 0 <= start <= stop")
    return min(start, LIMIT), min(stop, LIMIT)


def _row_sum(x: Bound, line: Array, slope: Array, first: Array, rows: Array) -> Array:
    """Sum over q in [first, first + rows) of min(x, line + slope q), slope 0 or 1."""
    start = line + slope * first
    below = np.where(slope == 0, np.where(start < x, rows, 0), np.clip(x - start, 0, rows))
    return below * start + slope * (below * (below - 1) // 2) + (rows - below) * x


def _edges(what: str, edges: ArrayLike) -> Array:
    array = whole_numbers(what, edges)
    if len(array) < 1 or array[0] < 0 or (np.diff(array) < 0).any():
        raise ValueError(
            f"{what} must be one ascending row of positions from 0 on, not {_short(array)}"
        )
    if array[-1] ** 2 >= INT64_SAFE:
        raise ValueError(
            f"{what} ends at {array[-1]}, but tables count up to 2**30 positions; take fewer"
        )
    return array


def _short(array: Array) -> str:
    return np.array2string(array, threshold=8, separator=", ")


def _blocks(strips: Strips, q_edges: Array, k_edges: Array) -> Iterator[tuple[slice, slice, Array]]:
    """The areas of blocks of cells: row slice, column slice, int64 table; the rest is empty."""
    num_rows, num_columns = len(q_edges) - 1, len(k_edges) - 1
    if not num_rows or not num_columns or not len(strips):
        return
    first_row = np.clip(np.searchsorted(q_edges, strips.q0, "right") - 1, 0, None)
    index, row = expand(first_row, np.searchsorted(q_edges[:-1], strips.q1, "left"))
    first = np.maximum(strips.q0[index], q_edges[row])
    count = np.minimum(strips.q1[index], q_edges[row + 1]) - first
    order = np.argsort(row, kind="stable")
    order = order[count[order] > 0]
    index, row, first, count = index[order], row[order], first[order], count[order]
    height = max(1, CELLS_AT_ONCE // num_columns)
    tops = np.arange(0, num_rows, height)
    cuts = np.append(np.searchsorted(row, tops), len(row))
    for top, a, b in zip(tops, cuts, cuts[1:], strict=False):
        if a < b:
            rows = slice(int(top), min(int(top) + height, num_rows))
            lines = strips.take(index[a:b]).columns[2:]
            columns, block = _block(
                lines, row[a:b] - top, first[a:b], count[a:b], k_edges, rows.stop - rows.start
            )
            yield rows, columns, block


def _block(
    lines: Sequence[Array], row: Array, first: Array, count: Array, k_edges: Array, num_rows: int
) -> tuple[slice, Array]:
    """The areas of a block of rows of cells, over the columns that its pieces touch.

    Cells wholly between the lines hold count x width pairs: they are marked at both ends and summed
    up along the columns. Only the cells that a line crosses are counted one by one.
    """
    lo, lo_slope, hi, hi_slope = lines
    last = first + count - 1
    first_touched = np.maximum(np.searchsorted(k_edges, lo + lo_slope * first, "right") - 1, 0)
    after_last = np.searchsorted(k_edges[:-1], hi + hi_slope * last, "left")
    full = np.clip(
        np.searchsorted(k_edges, lo + lo_slope * last, "left"), first_touched, after_last
    )
    full_end = np.searchsorted(k_edges, hi + hi_slope * first, "right") - 1
    full_end = np.clip(full_end, full, np.maximum(after_last, full))
    start = int(first_touched.min())
    stop = max(int(after_last.max()), start)
    width = stop - start + 1
    marks = np.zeros(num_rows * width, np.int64)
    has_full = full_end > full
    np.add.at(marks, (row * width + full - start)[has_full], count[has_full])
    np.subtract.at(marks, (row * width + full_end - start)[has_full], count[has_full])
    table = marks.reshape(num_rows, width)
    np.cumsum(table, axis=1, out=table)
    table = np.ascontiguousarray(table[:, :-1])
    table *= np.diff(k_edges[start : stop + 1])
    for first_column, end_column in ((first_touched, full), (full_end, after_last)):
        index, column = expand(first_column, end_column)
        pieces = [line[index] for line in lines]
        pairs = clipped(pieces, first[index], count[index], k_edges[column], k_edges[column + 1])
        np.add.at(table.reshape(-1), row[index] * (width - 1) + column - start, pairs)
    return slice(start, stop), table
