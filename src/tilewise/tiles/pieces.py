"""From blocks of allowed cells to few, large pieces: rectangles, causal squares, leftovers.

    keys of a band, rows downward      FULL where all rows of a block agree, a CAUSAL square on
    o o o o .  .  .                    a lone slanted right end, and what is left is halved until
      o o o o  .  .                    a dense mask wastes little.
        o o o  o  .

Everything is in the tile's sorted index space; tiles/cover.py maps it to memory.
"""

from __future__ import annotations

from itertools import pairwise
from typing import NamedTuple

from tilewise.tiles.calls import Kind, Ranges, Slice, count_rows
from tilewise.tiles.intervals import Block

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
