"""A mask as components: ranges of rows and keys that no allowed pair connects, and row areas.

The documents of a document mask, the whole sequence of most others.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from tilewise.arguments import whole_number
from tilewise.masks import strips
from tilewise.masks.base import Mask
from tilewise.masks.strips import Strips

Array = NDArray[np.int64]

MOST_ROWS = 1 << 26
"""Of one sequence: a table has a number for each."""


def documents(mask: Mask, num_tokens: int) -> Array | None:
    """Boundaries of the documents if a mask is causal documents and nothing else."""
    if getattr(mask, "heads", ()):
        return None
    (s,) = within(mask, num_tokens)
    rows = s.q1 - s.q0
    low, high = (line + slope * s.q0 for line, slope in ((s.lo, s.lo_slope), (s.hi, s.hi_slope)))
    straight = (rows == 1) | ((s.lo_slope == 0) & (s.hi_slope == 1))
    if rows.sum() != num_tokens or not (straight & (high == s.q0 + 1)).all():
        return None
    edges = components(mask, num_tokens)
    return edges if (low == edges[np.searchsorted(edges, s.q0, "right") - 1]).all() else None


def within(mask: Mask, num_tokens: int) -> tuple[Strips, ...]:
    """Return a mask's strips cut to a sequence, for each head if the mask differs by head."""
    whole_number("num_tokens", num_tokens, most=MOST_ROWS)
    square = strips.make(0, num_tokens, 0, num_tokens)
    heads: Sequence[Mask] = getattr(mask, "heads", ()) or (mask,)
    return tuple(strips.intersect(head.strips(), square) for head in heads)


def row_areas(mask: Mask, num_tokens: int) -> NDArray[np.float64]:
    """Allowed pairs of every row, float64 [num_tokens]; the mean over heads."""
    heads = within(mask, num_tokens)
    # Sums in place of what changes from row to row: of slopes first, then of pairs.
    areas = np.zeros(num_tokens + 1)
    slopes = [s.hi_slope - s.lo_slope for s in heads]
    for s, slope in zip(heads, slopes, strict=True):
        np.add.at(areas, s.q0 + 1, slope)
        np.subtract.at(areas, s.q1, slope)
    np.cumsum(areas, out=areas)
    for s, slope in zip(heads, slopes, strict=True):
        np.add.at(areas, s.q0, s.hi - s.lo + slope * s.q0)
        np.subtract.at(areas, s.q1, s.hi - s.lo + slope * (s.q1 - 1))
    np.cumsum(areas, out=areas)
    return areas[:-1] if len(heads) == 1 else areas[:-1] / len(heads)


def components(mask: Mask, num_tokens: int) -> Array:
    """Edges of the components, from 0 to num_tokens."""
    crossed = np.zeros(num_tokens + 1, np.int32)
    for s in within(mask, num_tokens):
        itself = (s.lo == 0) & (s.lo_slope == 1) & (s.hi == 1) & (s.hi_slope == 1)
        s = s.take(~itself)
        first = np.minimum(s.q0, s.lo + s.lo_slope * s.q0)
        last = np.maximum(s.q1, s.hi + s.hi_slope * (s.q1 - 1))
        np.add.at(crossed, first + 1, 1)
        np.subtract.at(crossed, np.maximum(last, first + 1), 1)
    free = np.flatnonzero(np.cumsum(crossed, out=crossed) == 0)
    return np.unique([0, *free.tolist(), num_tokens])
