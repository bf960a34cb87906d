"""A mask on a tile's sorted rows: linear slices of allowed cells, pieces that cover them, grouped.

Per row the interval of keys it sees; from these few linear slices; from these rectangles and causal
squares; and from these as few and large pieces as pay.
"""

from collections import defaultdict
from collections.abc import Iterable
from itertools import pairwise
from typing import NamedTuple, TypeAlias

import numpy as np

from tilewise.masks.strips import Strips, expand
from tilewise.plan.row_ranges import Ranges, count_rows, union
from tilewise.tiles.calls import Kind, Slice

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


CALL_CELLS = 8192  # what a kernel call costs beside its cells, in cells
WASTE_CELLS = 128 * 128 * 2  # what a SLICES call may waste: that of a causal square of 256 tokens
MAX_CELLS = 1 << 20  # of a SLICES call: kernels may hold it as a dense additive mask


class Piece(NamedTuple):
    """Rows x keys of sorted index space, as ranges; slices (of SLICES alone) in that space too."""

    kind: Kind
    q: Ranges
    k: Ranges
    slices: tuple[Slice, ...] = ()

    @property
    def computed(self) -> int:
        """Cells that a kernel works on."""
        m, n = count_rows(self.q), count_rows(self.k)
        return m * n - (m * (m - 1) // 2 if self.kind is Kind.CAUSAL else 0)


def cover(block: Block, square_causal: bool) -> list[Piece]:
    """Pieces that hold each cell of a block once, and no other."""
    if not block:
        return []
    first, last = block[0], block[-1]
    a, b = first.q0, last.q1
    lo_a, hi_a = first.lo + first.lo_slope * a, first.hi + first.hi_slope * a
    lo_b, hi_b = last.lo + last.lo_slope * (b - 1), last.hi + last.hi_slope * (b - 1)
    if lo_a == lo_b and hi_a == hi_b:
        return [Piece(Kind.FULL, ((a, b),), ((lo_a, hi_a),))]
    if len(block) == 1 and lo_a == lo_b:
        return _causal(first, square_causal)
    box = (b - a) * (hi_b - lo_a)
    if box <= MAX_CELLS and box - sum(s.area for s in block) <= WASTE_CELLS:
        return [Piece(Kind.SLICES, ((a, b),), ((lo_a, hi_b),), tuple(block))]
    if 4 * (hi_a - lo_b) >= hi_b - lo_a:
        parts = [Piece(Kind.FULL, ((a, b),), ((lo_b, hi_a),))]
        parts += cover(_clip(block, lo_a, lo_b), square_causal)
        return parts + cover(_clip(block, hi_a, hi_b), square_causal)
    middle = (a + b) // 2
    top, bottom = _rows(block, a, middle), _rows(block, middle, b)
    return cover(top, square_causal) + cover(bottom, square_causal)


def _causal(s: Slice, square_causal: bool) -> list[Piece]:
    """A slice with a level left and a slanted right end: a rectangle and a causal square."""
    m, corner, end = s.q1 - s.q0, s.hi + s.q0 - 1, s.hi + s.q1 - 1
    rows = ((s.q0, s.q1),)
    if not square_causal or corner == s.lo:
        return [Piece(Kind.CAUSAL, rows, ((s.lo, end),))]
    if m * m <= 2 * CALL_CELLS and m * (end - s.lo) <= MAX_CELLS:
        return [Piece(Kind.SLICES, rows, ((s.lo, end),), (s,))]
    return [Piece(Kind.FULL, rows, ((s.lo, corner),)), Piece(Kind.CAUSAL, rows, ((corner, end),))]


def _clip(block: Block, low: int, high: int) -> Block:
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
    """`_clip` between rows where neither end crosses the limits but at empty cells."""
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


def group(pieces: Iterable[Piece]) -> list[Piece]:
    """The same cells in as few and large pieces as pay, in order of their first rows and keys."""
    rectangles, others = [], []
    for piece in pieces:
        if piece.kind is Kind.FULL:
            rectangles += [(q, k) for q in piece.q for k in piece.k]
        else:
            others.append(piece)
    return _join_small(sorted(merge_rectangles(rectangles) + others, key=lambda p: (p.q, p.k)))


def merge_rectangles(rectangles: list[Rectangle]) -> list[Piece]:
    """Disjoint rectangles as FULL pieces, rows x keys of several ranges, as few as found.

    Rectangles of the same rows are one piece, whatever their keys, and so are those of the same
    keys. Tried as they are, cut at every row where one begins or ends, and cut at every such key.
    """
    flipped = [(k, q) for q, k in rectangles]
    by_rows = _by_rows(rectangles)
    by_rows_cut = _by_rows(_cut(rectangles))
    by_keys_cut = [(q, k) for k, q in _by_rows(_cut(flipped))]
    best = min((by_rows, by_rows_cut, by_keys_cut), key=len)
    return [Piece(Kind.FULL, q, k) for q, k in best]


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


def _join_small(pieces: list[Piece]) -> list[Piece]:
    """Join small pieces to SLICES where a call saved outweighs the cells wasted."""
    done: list[Piece] = []
    members: list[Piece] = []
    q, k, cells, apart = (), (), 0, 0  # the open call: rows, keys, its cells, those of its members
    for piece in pieces:
        computed = piece.computed
        if computed > 2 * WASTE_CELLS:
            done.append(piece)
            continue
        wide_q, wide_k = _widen(q, piece.q), _widen(k, piece.k)
        wide, apart = count_rows(wide_q) * count_rows(wide_k), apart + computed
        if members and wide <= min(cells + computed + CALL_CELLS, apart + WASTE_CELLS, MAX_CELLS):
            members.append(piece)
            q, k, cells = wide_q, wide_k, wide
        else:
            done += _joined(members, q, k)
            members, q, k, cells, apart = [piece], piece.q, piece.k, computed, computed
    return sorted(done + _joined(members, q, k), key=lambda p: (p.q, p.k))


def _joined(members: list[Piece], q: Ranges, k: Ranges) -> list[Piece]:
    if len(members) < 2:
        return members
    return [Piece(Kind.SLICES, q, k, tuple(s for piece in members for s in _slices(piece)))]


def _slices(piece: Piece) -> tuple[Slice, ...]:
    match piece.kind:
        case Kind.FULL:
            return tuple(Slice(*q, k0, 0, k1, 0) for q in piece.q for k0, k1 in piece.k)
        case Kind.CAUSAL:
            ((q0, q1),), ((k0, k1),) = piece.q, piece.k
            return (Slice(q0, q1, k0, 0, k1 - q1 + 1, 1),)
        case Kind.SLICES:
            return piece.slices


def _widen(ranges: Ranges, more: Ranges) -> Ranges:
    """Their union; at once where one range goes on where another ends, the common case."""
    if len(ranges) == len(more) == 1 and ranges[0][1] == more[0][0]:
        return ((ranges[0][0], more[0][1]),)
    return more if not ranges or ranges == more else union(ranges, more)
