"""Pairs of leaves as kernel calls of fixed shape: the calls of a canonical reduction.

A call's shape and mask depend on the two leaves alone. Rows of a leaf that are not here, because
the mask lets nobody read them, are zero rows of the call.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from tilewise.layouts.layout import Run, runs_of_positions
from tilewise.masks.base import Mask
from tilewise.masks.strips import expand
from tilewise.tiles.calls import KernelCall, Kind, Slice
from tilewise.tiles.cover import tile_calls

ROW_UNIT = 16
"""Rows of calls are a multiple of it: kernels compute what is left over by other instructions."""

Rows = tuple[Run, ...]


class Leaf(NamedTuple):
    """Rows of a leaf in one operand.

    Attributes:
        start: position of the leaf's first token.
        num_rows: of a call, padded.
        slots: rows of the call at which the rows stand that are here.
        held: the same rows in the operand.
        local: the same rows in the partial.
    """

    start: int
    num_rows: int
    slots: Rows
    held: Rows
    local: Rows


class LeafPair(NamedTuple):
    """A call: numbers of a query and a key leaf, and which of their rows meet."""

    q: int
    k: int
    call: KernelCall


class LeafPairs(NamedTuple):
    """All calls of a shard of queries and one of keys.

    Attributes:
        pairs: those of one query leaf side by side.
        q_heads, kv_heads: which of the group's heads they are for; None: all.
    """

    q: tuple[Leaf, ...]
    k: tuple[Leaf, ...]
    pairs: tuple[LeafPair, ...]
    q_heads: tuple[int, int] | None = None
    kv_heads: tuple[int, int] | None = None


class LeafSide(NamedTuple):
    """One side of a tile.

    Attributes:
        edges: where leaves begin, and the sequence ends.
        positions: of the operand's rows.
        local: which rows of the partial they are.
    """

    edges: tuple[int, ...]
    positions: NDArray[np.int64]
    local: NDArray[np.int64]


def leaf_pairs(q: LeafSide, k: LeafSide, mask: Mask) -> LeafPairs:
    """The calls of a tile, for a mask that is the same for all heads."""
    sides = _leaves(q), _leaves(k)
    pairs: list[LeafPair] = []
    for i, a in enumerate(sides[0]):
        for j, b in enumerate(sides[1]):
            call = pair_call(_span(q.edges, a.start), _span(k.edges, b.start), mask)
            if call is not None:
                pairs.append(LeafPair(i, j, call))
    return LeafPairs(*sides, tuple(pairs))


def _span(edges: Sequence[int], start: int) -> tuple[int, int]:
    return start, edges[int(np.searchsorted(edges, start)) + 1]


def _leaves(side: LeafSide) -> tuple[Leaf, ...]:
    """The leaves of which rows are here."""
    edges, positions, local = side
    leaf = np.searchsorted(edges, positions, "right") - 1
    found: list[Leaf] = []
    for number in np.unique(leaf).tolist():
        held = np.flatnonzero(leaf == number)
        start, stop = edges[number], edges[number + 1]
        slots, in_operand, in_partial = map(
            runs_of_positions, (positions[held] - start, held, local[held])
        )
        found.append(Leaf(start, _padded(stop - start), slots, in_operand, in_partial))
    return tuple(found)


def _padded(num_rows: int) -> int:
    return -(-num_rows // ROW_UNIT) * ROW_UNIT


@lru_cache(maxsize=4096)
def pair_call(q: tuple[int, int], k: tuple[int, int], mask: Mask) -> KernelCall | None:
    """The call of two leaves, of padded shape; None if the mask allows none of their pairs.

    Args:
        q, k: half-open ranges of positions.
    """
    area, (m, n) = mask.area(q, k), (q[1] - q[0], k[1] - k[0])
    if not area:
        return None
    keys = _padded(n)
    whole = ((0, _padded(m)),), ((0, keys),)
    if area == m * n:
        if keys == n:
            return _shared(KernelCall(*whole, Kind.FULL))
        return _shared(KernelCall(*whole, Kind.SLICES, (Slice(0, m, 0, 0, n, 0),)))
    (call,) = tile_calls(np.arange(*q), np.arange(*k), mask, whole_tile=True)
    if m == n and _is_causal(call):
        return _shared(KernelCall(*whole, Kind.CAUSAL))
    return _shared(KernelCall(*whole, Kind.SLICES, tuple(sorted(call.slices))))


def _is_causal(call: KernelCall) -> bool:
    """Return whether each row of a call sees the keys up to its own, and no other."""
    q0, q1, lo, lo_slope, hi, hi_slope = np.asarray(call.slices, np.int64).T
    index, row = expand(q0, q1)
    first = lo[index] + lo_slope[index] * row
    last = hi[index] + hi_slope[index] * row
    return len(row) == call.num_q and not first.any() and bool((last == row + 1).all())


@lru_cache(maxsize=4096)
def _shared(call: KernelCall) -> KernelCall:
    """One object for equal calls, so that what kernels keep for a call is kept once."""
    return call
