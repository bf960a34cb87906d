"""Fixed blocks of documents: the order in which whole rows are summed.

A document is a part of the sequence that no allowed pair connects with others. The side whose rows
a rank has is its *own* side, the other one is *walked*. Walked rows stand in blocks at places that
the document alone fixes. Own rows may stand anywhere: they are packed into blocks of one size.

    walked    | block 0 | block 1 | block 2 |      absent rows are zero and masked
    own rows  -> -> -> -> -> -> -> -> -> -> ->     each meets the blocks in this order
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from tilewise.masks import strips
from tilewise.masks.base import Mask
from tilewise.masks.components import components
from tilewise.masks.strips import Strips
from tilewise.plan.ir import Side

LEAST_ROWS = 64
"""Rows of a walked block of a short document."""

USUAL_BLOCKS = 8
"""Blocks of a document of medium length."""

MOST_ROWS = 512
"""Rows of a walked block at most: of a larger one a causal mask hides more, which is computed too.
"""

MOST_OWN_ROWS = 256
"""Rows of an own block at most: its scores of one walked block fit in a processor's cache."""

Array = NDArray[np.int64]


class BlockSizes(NamedTuple):
    """Rows of own and of walked blocks."""

    own: int
    walked: int


def usual_sizes(length: int, walked_length: int) -> BlockSizes:
    """Sizes of a document's blocks for products on the CPU, powers of two.

    Args:
        length, walked_length: tokens of the document on the own side and on the walked one.
    """
    return BlockSizes(min(_rows(length), MOST_OWN_ROWS), _rows(walked_length))


def _rows(length: int) -> int:
    usual = min(-(-length // USUAL_BLOCKS), MOST_ROWS)
    return 1 << (max(LEAST_ROWS, usual) - 1).bit_length()


@lru_cache(maxsize=64)
def document_edges(mask: Mask, num_tokens: tuple[int, int]) -> tuple[Array, Array]:
    """Return the first positions of all documents among the queries and among the keys, each list
    with the number of tokens at its end.

    Where queries and keys are of different sequences, each side is one document.
    """
    if num_tokens[0] == num_tokens[1]:
        edges = components(mask, num_tokens[0])
        return edges, edges
    q, k = (np.array([0, n], np.int64) for n in num_tokens)
    return q, k


class DocumentRows(NamedTuple):
    """One document's rows of a call.

    Attributes:
        own, walked: rows of the operands, in the order of their positions.
        own_positions: of the own rows.
        slots: places of the walked rows in the document.
        start, length: first position of the document's walked side, and its tokens.
        low, high: [depth, own rows]: the walked places that each own row meets are depth intervals
            [low, high) in ascending order; 0, 0 where it has fewer.
        sizes: of its blocks.
    """

    own: Array
    walked: Array
    own_positions: Array
    slots: Array
    start: int
    length: int
    low: Array
    high: Array
    sizes: BlockSizes

    @property
    def num_own_blocks(self) -> int:
        return -(-len(self.own) // self.sizes.own)

    @property
    def num_walked_blocks(self) -> int:
        return -(-self.length // self.sizes.walked)

    def meetings(self) -> Iterator[tuple[int, Array, NDArray[np.bool_]]]:
        """Yield each walked block's number, the own blocks that meet it, ascending, and whether all
        rows of each own block see all of it.
        """
        low, high = (self.in_own_blocks(x) for x in (self.low, self.high))
        for number in range(self.num_walked_blocks):
            start = number * self.sizes.walked
            stop = start + self.sizes.walked
            some = ((low < stop) & (high > start)).any((0, 2))
            whole = np.atleast_2d(((low <= start) & (high >= stop)).any(0)).all(-1)
            yield number, np.flatnonzero(some), np.atleast_1d(whole)

    def in_own_blocks(self, x: Array) -> Array:
        """Values of own rows by block, [..., blocks, rows]; the last row fills up its block."""
        size = self.num_own_blocks * self.sizes.own
        places = np.minimum(np.arange(size), len(self.own) - 1)
        return x[..., places].reshape(*x.shape[:-1], self.num_own_blocks, self.sizes.own)


@lru_cache(maxsize=32)
def documents(
    mask: Mask,
    whole_mask: Mask,
    num_tokens: tuple[int, int],
    own: Side,
    positions: tuple[bytes, bytes],
    sizes: BlockSizes | None = None,
) -> tuple[DocumentRows, ...]:
    """The documents of a call that have rows on both sides.

    Args:
        mask: of the call's heads.
        whole_mask: of all heads; it says where documents begin.
        positions: of the call's queries and keys, int64.
        sizes: of all blocks; None: the usual ones of each document.
    """
    edges = document_edges(whole_mask, num_tokens)
    places = [np.frombuffer(x, np.int64) for x in positions]
    by_side = [_by_document(x, of_side) for x, of_side in zip(places, edges, strict=True)]
    square = strips.make(0, num_tokens[0], 0, num_tokens[1])
    pairs = strips.intersect(mask.strips(), square)
    found: list[DocumentRows] = []
    for number in sorted(by_side[own].keys() & by_side[1 - own].keys()):
        start, stop = (int(x) for x in edges[1 - own][number : number + 2])
        rows, walked = by_side[own][number], by_side[1 - own][number]
        at = places[own][rows]
        low, high = _intervals(pairs, own, at, start)
        own_length = int(np.diff(edges[own][number : number + 2])[0])
        of_blocks = sizes or usual_sizes(own_length, stop - start)
        slots = places[1 - own][walked] - start
        found.append(
            DocumentRows(rows, walked, at, slots, start, stop - start, low, high, of_blocks)
        )
    return tuple(found)


def _by_document(positions: Array, edges: Array) -> dict[int, Array]:
    """Rows of each document, in the order of their positions."""
    order = np.argsort(positions, kind="stable")
    document = np.searchsorted(edges, positions[order], "right") - 1
    starts = np.flatnonzero(np.diff(document, prepend=-1))
    parts = np.split(order, starts[1:])
    return {int(document[s]): part for s, part in zip(starts, parts, strict=True)}


def _intervals(pairs: Strips, own: Side, at: Array, start: int) -> tuple[Array, Array]:
    """Intervals of walked places that each own row meets, [depth, own rows]; see `DocumentRows`.

    Args:
        at: positions of the own rows, ascending.
        start: position of the first walked place.
    """
    row, low, high = strips.of_queries(pairs, at) if own is Side.Q else _by_key(pairs, at)
    return strips.interval_table(row, low - start, high - start, len(at))


def _by_key(pairs: Strips, at: Array) -> tuple[Array, Array, Array]:
    """Row, first and end of the queries of each strip that each key is in.

    Key j meets query i if lo + lo_slope i <= j < hi + hi_slope i, slopes 0 or 1.
    """
    first = pairs.lo + pairs.lo_slope * pairs.q0
    last = pairs.hi + pairs.hi_slope * (pairs.q1 - 1)
    strip, row = strips.expand(np.searchsorted(at, first), np.searchsorted(at, last))
    key, q0, q1 = at[row], pairs.q0[strip], pairs.q1[strip]
    low = np.where(pairs.hi_slope[strip], np.maximum(q0, key - pairs.hi[strip] + 1), q0)
    high = np.where(pairs.lo_slope[strip], np.minimum(q1, key - pairs.lo[strip] + 1), q1)
    meets = low < high
    return row[meets], low[meets], high[meets]
