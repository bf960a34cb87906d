"""A tile meets layout and mask: the few kernel calls that compute exactly its allowed cells."""

from __future__ import annotations

from bisect import bisect_right
from typing import NamedTuple

import numpy as np

from tilewise.masks.base import Mask
from tilewise.masks.strips import Strips
from tilewise.plan.row_ranges import Ranges, count_rows, row_index, to_ranges
from tilewise.tiles.calls import KernelCall, Kind, Slice
from tilewise.tiles.pieces import AllowedCells, Piece, cover, group, region

MANY_SLICES = 64  # from here on a tile is looked at more closely
MAX_PAIRS = 1024  # of arithmetic progressions that a tile may be cut into


def tile_calls(
    q_positions: np.ndarray,
    k_positions: np.ndarray,
    mask: Mask,
    *,
    square_causal: bool = True,
    whole_tile: bool = False,
) -> tuple[KernelCall, ...]:
    """The calls that compute every allowed pair of a tile once, and no other pair.

    Args:
        q_positions, k_positions: global positions of the tile's rows, in memory order: its operands
            one after the other. A mask that differs by KV head is given head by head.
        square_causal: causal calls have as many keys as queries; the rest becomes a rectangle.
        whole_tile: one call of slices at most, for kernels that skip what no slice has.
    """
    q, k = np.asarray(q_positions, np.int64), np.asarray(k_positions, np.int64)
    if not (q.size and k.size):
        return ()
    if _allows_all(q, k, mask):
        return (KernelCall(((0, len(q)),), ((0, len(k)),), Kind.FULL),)
    strips = mask.strips()
    views = [_View.of(q, k, strips)]
    if whole_tile:
        return _whole(views[0])
    if len(views[0].region) > max(MANY_SLICES, len(q) // 16):
        # unequal strides make staircases; between two arithmetic progressions there are none
        views = _fewer_slices(views, _by_progressions(q, k, strips))
    return tuple(call for view in views for call in _calls(view, square_causal))


class _View(NamedTuple):
    """Some of a tile's rows in sorted order, and what the mask allows of them."""

    q_rows: np.ndarray
    k_rows: np.ndarray
    region: AllowedCells

    @classmethod
    def of(
        cls,
        q: np.ndarray,
        k: np.ndarray,
        strips: Strips,
        q_rows: np.ndarray | None = None,
        k_rows: np.ndarray | None = None,
    ) -> _View:
        """Of rows q_rows x k_rows (None: all) of a tile at positions q, k."""
        q_rows, k_rows = _sorted_rows(q, q_rows), _sorted_rows(k, k_rows)
        return cls(q_rows, k_rows, region(q[q_rows], k[k_rows], strips))


def _sorted_rows(positions: np.ndarray, rows: np.ndarray | None) -> np.ndarray:
    if rows is None:
        return np.argsort(positions, kind="stable")
    return rows[np.argsort(positions[rows], kind="stable")]


def _by_progressions(q: np.ndarray, k: np.ndarray, strips: Strips) -> list[_View]:
    """The tile cut into pairs of arithmetic progressions; none if they are too many."""
    q_runs, k_runs = _progressions(q), _progressions(k)
    if len(q_runs) * len(k_runs) > MAX_PAIRS:
        return []
    return [_View.of(q, k, strips, a, b) for a in q_runs for b in k_runs]


def _fewer_slices(a: list[_View], b: list[_View]) -> list[_View]:
    num_a, num_b = (sum(len(view.region) for view in views) for views in (a, b))
    return b if b and 8 * num_b < num_a else a


def _allows_all(q: np.ndarray, k: np.ndarray, mask: Mask) -> bool:
    q_range, k_range = (int(q.min()), int(q.max()) + 1), (int(k.min()), int(k.max()) + 1)
    cells = (q_range[1] - q_range[0]) * (k_range[1] - k_range[0])
    return mask.area(q_range, k_range) == cells


def _calls(view: _View, square_causal: bool) -> list[KernelCall]:
    found = (piece for block in view.region.blocks() for piece in cover(block, square_causal))
    return [_call(piece, view.q_rows, view.k_rows) for piece in group(found)]


def _whole(view: _View) -> tuple[KernelCall, ...]:
    """All slices of a view as one call, on its rows in sorted order."""
    slices = tuple(map(Slice._make, view.region.columns.tolist()))
    if not slices:
        return ()
    return (KernelCall(to_ranges(view.q_rows), to_ranges(view.k_rows), Kind.SLICES, slices),)


def _call(piece: Piece, q_rows: np.ndarray, k_rows: np.ndarray) -> KernelCall:
    """A piece of sorted index space as a call on memory rows."""
    q, k = q_rows[row_index(piece.q)], k_rows[row_index(piece.k)]
    if piece.kind is Kind.FULL:  # any order will do: the one with the fewest ranges
        q, k = np.sort(q), np.sort(k)
    slices = tuple(_local(s, piece) for s in piece.slices)
    return KernelCall(to_ranges(q), to_ranges(k), piece.kind, slices)


def _local(s: Slice, piece: Piece) -> Slice:
    """A slice in the coordinates of its piece's call: each range moves to its place in the call."""
    down, left = _shift(piece.q, s.q0), _shift(piece.k, s.lo + s.lo_slope * s.q0)
    lo, hi = s.lo - left + s.lo_slope * down, s.hi - left + s.hi_slope * down
    return Slice(s.q0 - down, s.q1 - down, lo, s.lo_slope, hi, s.hi_slope)


def _shift(ranges: Ranges, index: int) -> int:
    """How far an index moves when the ranges close up."""
    i = bisect_right(ranges, (index, 1 << 62)) - 1
    return ranges[i][0] - count_rows(ranges[:i])


def _progressions(positions: np.ndarray) -> list[np.ndarray]:
    """Rows in order, cut into runs of constant stride."""
    step = np.diff(positions)
    cuts = np.flatnonzero(step[1:] != step[:-1]) + 2
    # a lone step between two runs is no run
    cuts = cuts[np.append(True, np.diff(cuts) > 1)] if len(cuts) else cuts
    return np.split(np.arange(len(positions)), cuts)
