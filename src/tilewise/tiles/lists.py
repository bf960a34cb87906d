"""Calls of lists: a tile's slices in rows of the buffers in which its operands lie.

    rows of the call      0 . . . 3 4 . . . 7          in the order of their positions
    rows of the buffer    8 . . 11  2 . . . 5          where they are: two pieces

A kernel that skips what no slice has can read such rows in place. Nothing is copied together.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import numpy as np

from tilewise.plan.row_ranges import union
from tilewise.tiles.calls import KernelCall, Kind, Slice
from tilewise.tiles.cover import clip


class PlacedPiece(NamedTuple):
    """Rows that follow each other both in a call and in a buffer.

    Attributes:
        call: the first one's number in the call.
        place: its number in the buffer.
    """

    call: int
    place: int
    num_rows: int


def pieces_of(places: np.ndarray) -> list[PlacedPiece]:
    """Return the pieces of a call's rows.

    Args:
        places: int64, in the order of the call, where each row lies in the buffer.
    """
    starts = np.flatnonzero(np.append(True, np.diff(places) != 1)) if len(places) else places
    counts = np.diff(np.append(starts, len(places)))
    columns = (x.tolist() for x in (starts, places[starts], counts))
    return [PlacedPiece(*one) for one in zip(*columns, strict=True)]


def call_of_slices(slices: Iterable[Slice]) -> tuple[KernelCall, tuple[int, int]]:
    """Return slices in rows of buffers, of which there must be some, as a call of lists.

    Returns:
        the call, of what the buffers hold from its first row and its first key on; and these.
    """
    joined = _joined(slices)
    q, k = min(x.q0 for x in joined), min(_keys(x)[0] for x in joined)
    moved = tuple(sorted(_shifted(x, -q, -k) for x in joined))
    rows, keys = union((x.q0, x.q1) for x in moved), union(map(_keys, moved))
    return KernelCall(rows, keys, Kind.LISTS, moved), (q, k)


def _shifted(x: Slice, rows: int, keys: int) -> Slice:
    """Return a slice whose rows and keys have larger numbers."""
    lo, hi = (at + keys - slope * rows for at, slope in (x[2:4], x[4:6]))
    return Slice(x.q0 + rows, x.q1 + rows, lo, x.lo_slope, hi, x.hi_slope)


def _keys(x: Slice) -> tuple[int, int]:
    """All keys that a slice meets: they follow each other, as no row of it is empty."""
    return x.lo + x.lo_slope * x.q0, x.hi + x.hi_slope * (x.q1 - 1)


def moved_slices(
    slices: Iterable[Slice], q: Sequence[PlacedPiece], k: Sequence[PlacedPiece]
) -> Iterator[Slice]:
    """Cut slices of a call where pieces end, and count their rows and keys in the buffers.

    Args:
        q, k: the pieces of the call's rows and of its keys, all of them, in the order of the call.
    """
    q_starts, k_starts = [x.call for x in q], [x.call for x in k]
    for one in slices:
        for rows in q[max(bisect_right(q_starts, one.q0) - 1, 0) :]:
            if rows.call >= one.q1:
                break
            start, stop = max(one.q0, rows.call), min(one.q1, rows.call + rows.num_rows)
            part = one._replace(q0=start, q1=stop)
            low, high = _keys(part)
            by_rows = rows.place - rows.call
            for keys in k[max(bisect_right(k_starts, low) - 1, 0) :]:
                if keys.call >= high:
                    break
                by_keys = keys.place - keys.call
                for x in clip([part], keys.call, keys.call + keys.num_rows):
                    yield _shifted(x, by_rows, by_keys)


def _joined(slices: Iterable[Slice]) -> list[Slice]:
    """Join rectangles of the same rows whose keys follow each other."""
    found: list[Slice] = []
    by_rows: defaultdict[tuple[int, int], list[tuple[int, int]]] = defaultdict(list)
    for x in slices:
        if x.lo_slope or x.hi_slope:
            found.append(x)
        else:
            by_rows[x.q0, x.q1].append((x.lo, x.hi))
    for rows, keys in by_rows.items():
        found += [Slice(*rows, low, 0, high, 0) for low, high in union(keys)]
    return found
