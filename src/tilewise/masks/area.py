"""Exact areas of strips within rectangles and over grids of cells, in closed form.

The sum over rows of min(x, line) is a number of constants and an arithmetic series; every area is
four such sums.
"""

from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import ArrayLike, NDArray

from tilewise.masks.strips import LIMIT, Strips, expand

Array = NDArray[np.int64]
Bound = Array | int
"""A position, of all strips or one for each."""
INT64_SAFE = 2**61
CELLS_AT_ONCE = 2**19  # a working set of a few MB


def area(strips: Strips, q_range: tuple[int, int], k_range: tuple[int, int]) -> int:
    """Number of allowed pairs with the query in q_range and the key in k_range."""
    (q0, q1), (k0, k1) = checked_range("q_range", q_range), checked_range("k_range", k_range)
    near = strips.take(slice(0, np.searchsorted(strips.q0, q1)))
    near = near.take(near.q1 > q0)
    first, last = np.maximum(near.q0, q0), np.minimum(near.q1, q1)
    lines = near.columns[2:]
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
        some = block > 0
        full = block == q_sizes[rows, None] * k_sizes[None, columns]
        table[rows, columns] = some.view(np.int8) + (some & full).view(np.int8)
    return table


def checked_range(what: str, bounds: tuple[int, int]) -> tuple[int, int]:
    """The range as two ints, cut at LIMIT.

    Raises:
        ValueError: unless 0 <= start <= stop.
    """
    start, stop = (int(x) for x in bounds)
    if not 0 <= start <= stop:
        raise ValueError(f"{what} ({start}, {stop}) must be (start, stop) with 0 <= start <= stop")
    return min(start, LIMIT), min(stop, LIMIT)


def _row_sum(x: Bound, line: Array, slope: Array, first: Array, rows: Array) -> Array:
    """Sum over q in [first, first + rows) of min(x, line + slope q), slope 0 or 1."""
    start = line + slope * first
    below = np.where(slope == 0, np.where(start < x, rows, 0), np.clip(x - start, 0, rows))
    return below * start + slope * (below * (below - 1) // 2) + (rows - below) * x


def _edges(what: str, edges: ArrayLike) -> Array:
    array = np.asarray(edges, np.int64)
    if array.ndim != 1 or len(array) < 1 or array[0] < 0 or (np.diff(array) < 0).any():
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
    touched = np.maximum(np.searchsorted(k_edges, lo + lo_slope * first, "right") - 1, 0)
    beyond = np.searchsorted(k_edges[:-1], hi + hi_slope * last, "left")
    full = np.clip(np.searchsorted(k_edges, lo + lo_slope * last, "left"), touched, beyond)
    full_end = np.searchsorted(k_edges, hi + hi_slope * first, "right") - 1
    full_end = np.clip(full_end, full, np.maximum(beyond, full))
    start = int(touched.min())
    stop = max(int(beyond.max()), start)
    width = stop - start + 1
    marks = np.zeros(num_rows * width, np.int64)
    inside = full_end > full
    np.add.at(marks, (row * width + full - start)[inside], count[inside])
    np.subtract.at(marks, (row * width + full_end - start)[inside], count[inside])
    table = marks.reshape(num_rows, width)
    np.cumsum(table, axis=1, out=table)
    table = np.ascontiguousarray(table[:, :-1])
    table *= np.diff(k_edges[start : stop + 1])
    for left, right in ((touched, full), (full_end, beyond)):
        index, column = expand(left, right)
        pieces = [line[index] for line in lines]
        pairs = clipped(pieces, first[index], count[index], k_edges[column], k_edges[column + 1])
        np.add.at(table.reshape(-1), row[index] * (width - 1) + column - start, pairs)
    return slice(start, stop), table
