"""Rows as half-open ranges: union, difference, cover, count, and the rows themselves.

Sets of rows ascend, and None stands for all rows; ranges in any order stand for rows in that order.
"""

from collections.abc import Iterable, Iterator
from itertools import chain
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from tilewise.plan.ir import Rows

Ranges: TypeAlias = tuple[tuple[int, int], ...]
"""Half-open ranges of rows, in any order."""
ALL: Rows = ((0, 1 << 40),)


def union(*parts: Iterable[tuple[int, int]] | None) -> Rows:
    """The rows in any of the parts, neighbouring ranges joined."""
    ordered = sorted(set(chain.from_iterable(ALL if part is None else part for part in parts)))
    if len(ordered) < 2:
        return tuple(ordered)
    merged: list[tuple[int, int]] = []
    range_start, range_stop = ordered[0]
    for start, stop in ordered:
        if start > range_stop:
            merged.append((range_start, range_stop))
            range_start, range_stop = start, stop
        elif stop > range_stop:
            range_stop = stop
    return (*merged, (range_start, range_stop))


def without(ranges: Iterable[tuple[int, int]], taken: Rows) -> Rows:
    """The rows of ascending ranges that are in none of some others, which ascend too."""
    found: list[tuple[int, int]] = []
    for start, stop in ranges:
        for low, high in taken:
            if low >= stop:
                break
            if high > start:
                if start < low:
                    found.append((start, low))
                start = max(start, high)
        if start < stop:
            found.append((start, stop))
    return tuple(found)


def covers(have: Rows | None, need: Rows | None) -> bool:
    """Return whether every row needed is there."""
    if have is None or have == ALL:
        return True
    need = ALL if need is None else need
    return all(any(a <= start and stop <= b for a, b in have) for start, stop in need)


def whole_or(rows: Rows, size: int) -> Rows | None:
    """The rows, or None if they are all of a shard of this size."""
    return None if any(start <= 0 and size <= stop for start, stop in rows) else rows


def count(rows: Rows | None, size: int) -> int:
    """Number of rows of a shard of this size."""
    return size if rows is None else count_rows(rows)


def count_rows(ranges: Iterable[tuple[int, int]]) -> int:
    return sum(stop - start for start, stop in ranges)


def row_index(ranges: Ranges) -> NDArray[np.int64]:
    """The rows that ranges name, in order, int64: to gather by when ranges are many and short."""
    edges = np.asarray(ranges, np.int64).reshape(-1, 2)
    counts = edges[:, 1] - edges[:, 0]
    first = np.cumsum(counts) - counts
    return np.arange(int(counts.sum())) + np.repeat(edges[:, 0] - first, counts)


def to_ranges(rows: NDArray[np.int64]) -> Ranges:
    """Rows in order as half-open ranges, consecutive runs merged; the inverse of `row_index`."""
    if rows.size == 0:
        return ()
    cuts = np.flatnonzero(np.diff(rows) != 1)
    starts = rows[np.concatenate([[0], cuts + 1])]
    stops = rows[np.concatenate([cuts, [rows.size - 1]])] + 1
    return tuple(zip(starts.tolist(), stops.tolist(), strict=True))


def packed_ranges(
    ranges: Iterable[tuple[int, int]],
) -> Iterator[tuple[tuple[int, int], tuple[int, int]]]:
    """Yield each range of rows, and where its rows are if all lie one after the other."""
    offset = 0
    for start, stop in ranges:
        yield (start, stop), (offset, offset + stop - start)
        offset += stop - start


def joined_ranges(ranges: Iterable[tuple[int, int]]) -> Ranges:
    """Ranges in order, neighbours as one."""
    joined: list[tuple[int, int]] = []
    for start, stop in ranges:
        if joined and joined[-1][1] == start:
            joined[-1] = joined[-1][0], stop
        else:
            joined.append((start, stop))
    return tuple(joined)
