"""A tile meets layout and mask: the few kernel calls that compute exactly its allowed cells.

On sorted rows each query sees intervals of keys. Neighbouring intervals make linear slices; these
are covered by rectangles and causal squares, and those are grouped to calls as few and large as
pay.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable
from itertools import pairwise
from typing import NamedTuple, TypeAlias

import numpy as np

from tilewise.masks.base import Mask
from tilewise.masks.strips import Strips, expand
from tilewise.plan.row_ranges import Ranges, count_rows, row_index, to_ranges, union
from tilewise.tiles.calls import KernelCall, Kind, Slice

Span = tuple[int, int]
Rectangle = tuple[Span, Span]  # rows, keys


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
    """Return what strips allow of q x k, both sorted.

    A strip's two lines ascend, so its keys on sorted rows are intervals [lo, hi) that ascend; rows
    whose ends move by 0 or by 1 at a time are one slice.
    """
    row, lo, hi = _row_intervals(q, k, strips)
    if not len(row):
        return AllowedCells(np.empty((0, 6), np.int64), np.empty(0, bool))
    lo_step, hi_step = np.diff(lo), np.diff(hi)
    continues = (np.diff(row) == 1) & (lo_step >= 0) & (hi_step >= 0) & (lo[1:] < hi[:-1])
    first_rows, lo_slope, hi_slope = _linear_runs(continues, lo_step, hi_step)
    start, stop = row[first_rows], row[np.append(first_rows[1:], len(row)) - 1] + 1
    lo_offset, hi_offset = lo[first_rows] - lo_slope * start, hi[first_rows] - hi_slope * start
    is_short = stop - start < SHORT
    return AllowedCells(
        np.stack((start, stop, lo_offset, lo_slope, hi_offset, hi_slope), 1),
        continues[first_rows[1:] - 1] & is_short[1:] & is_short[:-1],
    )


def _row_intervals(
    q: np.ndarray, k: np.ndarray, strips: Strips
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(row, lo, hi) of every strip on every row where it holds a key, strip by strip."""
    start, stop = np.searchsorted(q, strips.q0), np.searchsorted(q, strips.q1)
    meeting = np.flatnonzero(start < stop)
    strips, start, stop = strips.take(meeting), start[meeting], stop[meeting]
    low = np.searchsorted(k, strips.lo + strips.lo_slope * q[start])
    high = np.searchsorted(k, strips.hi + strips.hi_slope * q[stop - 1])
    nonempty = np.flatnonzero(low < high)
    strips, low, high = strips.take(nonempty), low[nonempty], high[nonempty]
    index, row = expand(start[nonempty], stop[nonempty])
    lo, hi = low[index], high[index]
    for ends, offset, slope in ((lo, strips.lo, strips.lo_slope), (hi, strips.hi, strips.hi_slope)):
        moving = np.flatnonzero(slope[index])
        ends[moving] = np.searchsorted(k, offset[index[moving]] + q[row[moving]])
    nonempty = lo < hi
    return row[nonempty], lo[nonempty], hi[nonempty]


def _linear_runs(
    joined: np.ndarray, lo_step: np.ndarray, hi_step: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return where runs of entries with constant steps of 0 or 1 begin, and their two slopes."""
    code = np.where(joined & (lo_step <= 1) & (hi_step <= 1), 2 * lo_step + hi_step, -1)
    begins = np.append(True, code < 0)
    begins[2:] |= (code[1:] != code[:-1]) & (code[:-1] >= 0)
    first = np.flatnonzero(begins)
    single = np.diff(np.append(first, len(begins))) == 1
    code = np.where(single, 0, np.append(code, 0)[first])
    return first, code >> 1, code & 1


CALL_CELLS = 8192  # cost of a kernel call beside its cells, in cells
WASTE_CELLS = 128 * 128 * 2  # cells that a SLICES call may waste: as a causal square of 256 tokens
MAX_CELLS = 1 << 20  # of a SLICES call: kernels may hold it as a dense additive mask


class CallPiece(NamedTuple):
    """A part of a tile that one kernel call computes: ranges of its rows and keys, in sorted order.

    Attributes:
        slices: its cells, if kind is SLICES; in sorted order, too.
    """

    kind: Kind
    q: Ranges
    k: Ranges
    slices: tuple[Slice, ...] = ()

    @property
    def computed(self) -> int:
        """Cells that a kernel works on."""
        m, n = count_rows(self.q), count_rows(self.k)
        return m * n - (m * (m - 1) // 2 if self.kind is Kind.CAUSAL else 0)


def cover(block: Block, square_causal: bool) -> list[CallPiece]:
    """Pieces that hold each cell of a block once, and no other."""
    if not block:
        return []
    first_slice, last_slice = block[0], block[-1]
    a, b = first_slice.q0, last_slice.q1
    lo_a = first_slice.lo + first_slice.lo_slope * a
    hi_a = first_slice.hi + first_slice.hi_slope * a
    lo_b = last_slice.lo + last_slice.lo_slope * (b - 1)
    hi_b = last_slice.hi + last_slice.hi_slope * (b - 1)
    if lo_a == lo_b and hi_a == hi_b:
        return [CallPiece(Kind.FULL, ((a, b),), ((lo_a, hi_a),))]
    if len(block) == 1 and lo_a == lo_b:
        return _causal(first_slice, square_causal)
    box = (b - a) * (hi_b - lo_a)
    if box <= MAX_CELLS and box - sum(s.area for s in block) <= WASTE_CELLS:
        return [CallPiece(Kind.SLICES, ((a, b),), ((lo_a, hi_b),), tuple(block))]
    if 4 * (hi_a - lo_b) >= hi_b - lo_a:
        parts = [CallPiece(Kind.FULL, ((a, b),), ((lo_b, hi_a),))]
        parts += cover(clip(block, lo_a, lo_b), square_causal)
        return parts + cover(clip(block, hi_a, hi_b), square_causal)
    middle = (a + b) // 2
    top, bottom = _rows(block, a, middle), _rows(block, middle, b)
    return cover(top, square_causal) + cover(bottom, square_causal)


def _causal(s: Slice, square_causal: bool) -> list[CallPiece]:
    """A slice with a level left and a slanted right end: a rectangle and a causal square."""
    m, corner, last_end = s.q1 - s.q0, s.hi + s.q0 - 1, s.hi + s.q1 - 1
    rows = ((s.q0, s.q1),)
    if not square_causal or corner == s.lo:
        return [CallPiece(Kind.CAUSAL, rows, ((s.lo, last_end),))]
    if m * m <= 2 * CALL_CELLS and m * (last_end - s.lo) <= MAX_CELLS:
        return [CallPiece(Kind.SLICES, rows, ((s.lo, last_end),), (s,))]
    return [
        CallPiece(Kind.FULL, rows, ((s.lo, corner),)),
        CallPiece(Kind.CAUSAL, rows, ((corner, last_end),)),
    ]


def clip(block: Block, low: int, high: int) -> Block:
    """The cells of a block with keys in [low, high); rows without any are dropped."""
    parts: Block = []
    for s in block if low < high else ():
        lo_cross = low - s.lo if s.lo_slope else s.q0  # from here on the left end is the line's
        hi_cross = high - s.hi if s.hi_slope else s.q1  # up to here the right end is the line's
        cuts = sorted({s.q0, s.q1, *(c for c in (lo_cross, hi_cross) if s.q0 < c < s.q1)})
        for a, b in pairwise(cuts):
            parts += _clip_linear(s, (a, b), (low, high))
    return parts


def _clip_linear(s: Slice, rows: tuple[int, int], keys: tuple[int, int]) -> Block:
    """`clip` between rows where neither end crosses the limits but at empty cells."""
    a, b = rows
    low, high = keys
    left = (s.lo, s.lo_slope) if s.lo + s.lo_slope * a >= low else (low, 0)
    right = (s.hi, s.hi_slope) if s.hi + s.hi_slope * (b - 1) <= high else (high, 0)
    if right[1] > left[1]:
        a = max(a, left[0] - right[0] + 1)
    elif right[1] < left[1]:
        b = min(b, right[0] - left[0])
    elif right[0] <= left[0]:
        return []
    return [Slice(a, b, *left, *right)] if a < b else []


def _rows(block: Block, a: int, b: int) -> Block:
    """The rows [a, b) of a block."""
    return [s._replace(q0=max(s.q0, a), q1=min(s.q1, b)) for s in block if s.q0 < b and a < s.q1]


def group(pieces: Iterable[CallPiece]) -> list[CallPiece]:
    """The same cells in as few and large pieces as pay, in order of their first rows and keys."""
    rectangles, others = [], []
    for piece in pieces:
        if piece.kind is Kind.FULL:
            rectangles += [(q, k) for q in piece.q for k in piece.k]
        else:
            others.append(piece)
    return _join_small(sorted(merge_rectangles(rectangles) + others, key=lambda p: (p.q, p.k)))


def merge_rectangles(rectangles: list[Rectangle]) -> list[CallPiece]:
    """Disjoint rectangles as FULL pieces, rows x keys of several ranges, as few as found.

    Rectangles of the same rows are one piece, whatever their keys, and so are those of the same
    keys. Tried as they are, cut at every row where one begins or ends, and cut at every such key.
    """
    flipped = [(k, q) for q, k in rectangles]
    by_rows = _by_rows(rectangles)
    by_rows_cut = _by_rows(_cut(rectangles))
    by_keys_cut = [(q, k) for k, q in _by_rows(_cut(flipped))]
    best = min((by_rows, by_rows_cut, by_keys_cut), key=len)
    return [CallPiece(Kind.FULL, q, k) for q, k in best]


def _by_rows(rectangles: list[Rectangle]) -> list[tuple[Ranges, Ranges]]:
    keys_of, rows_of = defaultdict(list), defaultdict(list)
    for rows, keys in rectangles:
        keys_of[rows].append(keys)
    for rows, keys in keys_of.items():
        rows_of[union(keys)].append(rows)
    return [(union(rows), keys) for keys, rows in rows_of.items()]


def _cut(rectangles: list[Rectangle]) -> list[Rectangle]:
    """Cut at every row where a rectangle begins or ends, unless that makes too many."""
    edges = sorted({row for rows, _ in rectangles for row in rows})
    spans = np.searchsorted(edges, np.array([q for q, _ in rectangles], int).reshape(-1, 2))
    if np.diff(spans).sum() > 4 * len(rectangles) + 64:
        return rectangles
    return [
        ((edges[i], edges[i + 1]), keys)
        for (first, last), (_, keys) in zip(spans.tolist(), rectangles, strict=True)
        for i in range(first, last)
    ]


def _join_small(pieces: list[CallPiece]) -> list[CallPiece]:
    """Join small pieces to SLICES where a call saved outweighs the cells wasted."""
    pieces_done: list[CallPiece] = []
    members: list[CallPiece] = []
    q, k = (), ()  # rows and keys of the open call
    cells = cells_apart = 0  # its cells, and those of its members
    for piece in pieces:
        computed = piece.computed
        if computed > 2 * WASTE_CELLS:
            pieces_done.append(piece)
            continue
        joined_q, joined_k = _widen(q, piece.q), _widen(k, piece.k)
        joined_cells = count_rows(joined_q) * count_rows(joined_k)
        cells_apart += computed
        if members and joined_cells <= min(
            cells + computed + CALL_CELLS, cells_apart + WASTE_CELLS, MAX_CELLS
        ):
            members.append(piece)
            q, k, cells = joined_q, joined_k, joined_cells
        else:
            pieces_done += _joined(members, q, k)
            members, q, k, cells, cells_apart = [piece], piece.q, piece.k, computed, computed
    return sorted(pieces_done + _joined(members, q, k), key=lambda p: (p.q, p.k))


def _joined(members: list[CallPiece], q: Ranges, k: Ranges) -> list[CallPiece]:
    if len(members) < 2:
        return members
    return [CallPiece(Kind.SLICES, q, k, tuple(s for piece in members for s in _slices(piece)))]


def _slices(piece: CallPiece) -> tuple[Slice, ...]:
    match piece.kind:
        case Kind.FULL:
            return tuple(Slice(*q, k0, 0, k1, 0) for q in piece.q for k0, k1 in piece.k)
        case Kind.CAUSAL:
            ((q0, q1),), ((k0, k1),) = piece.q, piece.k
            return (Slice(q0, q1, k0, 0, k1 - q1 + 1, 1),)
        case Kind.SLICES | Kind.LISTS:
            return piece.slices


def _widen(ranges: Ranges, other_ranges: Ranges) -> Ranges:
    """Return the union of two sets of ranges."""
    if len(ranges) == len(other_ranges) == 1 and ranges[0][1] == other_ranges[0][0]:
        return ((ranges[0][0], other_ranges[0][1]),)
    return other_ranges if not ranges or ranges == other_ranges else union(ranges, other_ranges)


MANY_SLICES = 64  # with more slices a tile is also tried cut into arithmetic progressions
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
    """Some of a tile's rows in sorted order, and the cells of them that the mask allows."""

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
        """Make a view of rows q_rows x k_rows (None: all) of a tile at positions q, k."""
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
    pieces = (piece for block in view.region.blocks() for piece in cover(block, square_causal))
    return [_call(piece, view.q_rows, view.k_rows) for piece in group(pieces)]


def _whole(view: _View) -> tuple[KernelCall, ...]:
    """All slices of a view as one call, on its rows in sorted order."""
    slices = tuple(map(Slice._make, view.region.columns.tolist()))
    if not slices:
        return ()
    return (KernelCall(to_ranges(view.q_rows), to_ranges(view.k_rows), Kind.SLICES, slices),)


def _call(piece: CallPiece, q_rows: np.ndarray, k_rows: np.ndarray) -> KernelCall:
    """A piece of sorted index space as a call on memory rows."""
    q, k = q_rows[row_index(piece.q)], k_rows[row_index(piece.k)]
    if piece.kind is Kind.FULL:  # any order will do: the one with the fewest ranges
        q, k = np.sort(q), np.sort(k)
    slices = tuple(_local(s, piece) for s in piece.slices)
    return KernelCall(to_ranges(q), to_ranges(k), piece.kind, slices)


def _local(s: Slice, piece: CallPiece) -> Slice:
    """Return a slice of a piece in local rows and keys of the piece's call, which have no gaps."""
    rows_moved, keys_moved = _shift(piece.q, s.q0), _shift(piece.k, s.lo + s.lo_slope * s.q0)
    lo = s.lo - keys_moved + s.lo_slope * rows_moved
    hi = s.hi - keys_moved + s.hi_slope * rows_moved
    return Slice(s.q0 - rows_moved, s.q1 - rows_moved, lo, s.lo_slope, hi, s.hi_slope)


def _shift(ranges: Ranges, index: int) -> int:
    """Return how much smaller an index becomes when the gaps between ranges are closed."""
    i = bisect_right(ranges, (index, 1 << 62)) - 1
    return ranges[i][0] - count_rows(ranges[:i])


def _progressions(positions: np.ndarray) -> list[np.ndarray]:
    """Rows in order, cut into runs of constant stride."""
    step = np.diff(positions)
    cuts = np.flatnonzero(step[1:] != step[:-1]) + 2
    # a lone step between two runs is no run
    cuts = cuts[np.append(True, np.diff(cuts) > 1)] if len(cuts) else cuts
    return np.split(np.arange(len(positions)), cuts)
