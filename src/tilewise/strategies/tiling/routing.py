"""What travels for a placement: every range goes from its owner to its readers along a tree.

A row that many ranks read would load its owner: so readers pass it on (relays), and partial
outputs are merged on the way home. Inner nodes of the trees are the ranks that have least to do.
"""

from __future__ import annotations

from collections.abc import Sequence
from heapq import heapify, heappop
from typing import NamedTuple

import numpy as np

from tilewise.plan.builder import operand, partial
from tilewise.plan.ir import Item, Role, Rows, Side

LSE = 4 / 256  # bytes of lse beside those of one head of a row: bf16, head_dim 128
FAN = 2  # ranks that one rank passes a range on to, where more than CHAIN read it
CHAIN = 4  # so few readers form a chain: the most level, and not deeper than a tree of many


class Flow(NamedTuple):
    """Rows of a shard, their owner, and the other ranks that compute with q, and with k and v.

    rows None: all of the shard; size: how many they are.
    """

    size: int
    owner: int
    q: tuple[int, ...]
    kv: tuple[int, ...]
    shard: int = 0
    rows: Rows | None = None


class Hop(NamedTuple):
    """One transfer; level: how many hops of its tree have to be over before it."""

    item: Item
    rows: Rows | None
    src: int
    dst: int
    level: int


def received(flows: Sequence[Flow], n: int, kv_bytes: float) -> np.ndarray:
    """Units (a row of q) every rank receives in forward, with trees as `hops` builds them."""
    load = _fixed(flows, n, kv_bytes)[0]
    for f in sorted(flows, key=lambda f: -f.size * len(f.q)):
        if f.q:
            _children(f.size * (1 + LSE), f.owner, f.q, load)
    return np.array(load)


def hops(flows: Sequence[Flow], n: int, kv_bytes: float) -> list[Hop]:
    """Every transfer of both passes: copies from the owner down a tree, partials up another."""
    into, out, back = _fixed(flows, n, kv_bytes)
    q, kv = Side.Q, Side.KV
    jobs = [(1 + LSE, partial(q, f.shard), f, f.q, into) for f in flows if f.q]
    jobs += [(1.0, operand(q, f.shard), f, f.q, out) for f in flows if f.q]
    jobs += [(kv_bytes, operand(kv, f.shard), f, f.kv, out) for f in flows if f.kv]
    jobs += [(kv_bytes, partial(kv, f.shard), f, f.kv, back) for f in flows if f.kv]
    made: list[Hop] = []
    for unit, item, f, readers, load in sorted(jobs, key=lambda j: -j[0] * j[2].size * len(j[3])):
        tree = _tree(_children(f.size * unit, f.owner, readers, load), f.owner, readers)
        if item.role is Role.PARTIAL:
            heights: dict[int, int] = {}
            for parent, child in reversed(tree):
                level = heights.get(child, 0)
                made.append(Hop(item, f.rows, child, parent, level))
                heights[parent] = max(heights.get(parent, 0), level + 1)
        else:
            depths = {f.owner: 0}
            for parent, child in tree:
                made.append(Hop(item, f.rows, parent, child, depths[parent]))
                depths[child] = depths[parent] + 1
    return made


def _fixed(flows: Sequence[Flow], n: int, kv_bytes: float) -> tuple[list[float], ...]:
    """What every rank receives and sends whatever the trees, and what it receives in backward.

    A reader gets q, k, v and returns out, dk, dv; an owner sends one copy and gets one partial.
    """
    into, out, back = [0.0] * n, [0.0] * n, [0.0] * n
    for size, owner, q, kv, _, _ in flows:
        for r in q:
            into[r] += size
            out[r] += size * (1 + LSE)
            back[r] += size * (2 + 2 * LSE)
        for r in kv:
            into[r] += size * kv_bytes
            back[r] += size * kv_bytes
        if q:
            into[owner] += size * (1 + LSE)
            out[owner] += size
            back[owner] += size
        if kv:
            out[owner] += size * kv_bytes
            back[owner] += size * kv_bytes
    return into, out, back


def _children(
    size: float, owner: int, readers: tuple[int, ...], load: list[float]
) -> dict[int, int]:
    """How many children each rank of a tree has: one the owner, some the least loaded."""
    counts = {owner: 1}
    left = len(readers) - 1
    heap = [(load[r], r) for r in readers] if left else []
    heapify(heap)
    while left:
        weight, r = heappop(heap)
        counts[r] = min(FAN, left) if len(readers) > CHAIN else 1
        load[r] = weight + size * counts[r]
        left -= counts[r]
    return counts


def _tree(counts: dict[int, int], owner: int, readers: tuple[int, ...]) -> list[tuple[int, int]]:
    """(parent, child) pairs, parents first, for these numbers of children."""
    order = sorted(readers, key=lambda r: -counts.get(r, 0))
    parents = [owner, *order]
    slots = [p for p in parents for _ in range(counts.get(p, 0))]
    return list(zip(slots, order, strict=True))
