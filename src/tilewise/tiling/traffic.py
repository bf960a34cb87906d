"""What travels for a placement: every range goes from its owner to its readers along a tree.

A row that many ranks read would load its owner: so readers pass it on (relays), and partial
outputs are merged on the way home. Inner nodes of the trees are the ranks that have least to do.
"""

from __future__ import annotations

from heapq import heapify, heappop
from typing import NamedTuple

import numpy as np

from tilewise.tiling.ownership import segments

LSE = 4 / 256  # bytes of lse beside those of one head of a row: bf16, head_dim 128
FAN = 2  # ranks that one rank passes a range on to, where more than CHAIN read it
CHAIN = 4  # so few readers form a chain: the most level, and not deeper than a tree of many


class Flow(NamedTuple):
    """Rows [start, stop), their owner, and the other ranks that compute with q, and with k and v."""

    start: int
    stop: int
    owner: int
    q: tuple[int, ...]
    kv: tuple[int, ...]


class Hop(NamedTuple):
    """Rows [start, stop) of "q", "kv" or the partial "out" from one rank to another."""

    kind: str
    start: int
    stop: int
    src: int
    dst: int


def flows(placement) -> list[Flow]:
    """The readers of every owned range, where there are any beside the owner."""
    cut = sorted(segments(list(placement.pieces)))
    found, i = [], 0
    for start, stop, owner in placement.owned:
        at = start
        while at < stop:
            while cut[i].stop <= at:
                i += 1
            end = min(stop, cut[i].stop)
            q = tuple(r for r in cut[i].q if r != owner)
            kv = tuple(r for r in cut[i].kv if r != owner)
            if q or kv:
                found.append(Flow(at, end, owner, q, kv))
            at = end
    return found


def received(placement, kv_ratio: float) -> np.ndarray:
    """Units (a row of q) every rank receives in forward, with trees as `hops` builds them."""
    found = flows(placement)
    load = _fixed(found, placement.world_size, kv_ratio)[0]
    for f in sorted(found, key=lambda f: (f.start - f.stop) * len(f.q)):
        if f.q:
            _children((f.stop - f.start) * (1 + LSE), f.owner, f.q, load)
    return np.array(load)


def hops(placement, kv_ratio: float) -> list[Hop]:
    """Every transfer of forward, those of one kind and range in an order that can be followed."""
    found = flows(placement)
    into, out = _fixed(found, placement.world_size, kv_ratio)
    jobs = [(1 + LSE, "out", f, f.q, into) for f in found if f.q]
    jobs += [(1.0, "q", f, f.q, out) for f in found if f.q]
    jobs += [(2 * kv_ratio, "kv", f, f.kv, out) for f in found if f.kv]
    made: list[Hop] = []
    for unit, kind, f, readers, load in sorted(
        jobs, key=lambda j: -j[0] * (j[2].stop - j[2].start) * len(j[3])
    ):
        counts = _children((f.stop - f.start) * unit, f.owner, readers, load)
        tree = _tree(counts, f.owner, readers)
        if kind == "out":
            made += [Hop(kind, f.start, f.stop, dst, src) for src, dst in reversed(tree)]
        else:
            made += [Hop(kind, f.start, f.stop, src, dst) for src, dst in tree]
    return made


def _fixed(found: list[Flow], n: int, kv_ratio: float) -> tuple[list[float], list[float]]:
    """What every rank receives and sends whatever the trees: a reader gets q, k, v, returns out."""
    into, out = [0.0] * n, [0.0] * n
    for start, stop, _, q, kv in found:
        rows = stop - start
        for r in q:
            into[r] += rows
            out[r] += rows * (1 + LSE)
        for r in kv:
            into[r] += rows * 2 * kv_ratio
    return into, out


def _children(
    size: float, owner: int, readers: tuple[int, ...], load: list[float]
) -> dict[int, int]:
    """How many children each rank of a tree has: one the owner, some the least loaded."""
    load[owner] += size
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
    return list(zip(slots, order))


def tally(placement, kv_ratio: float) -> tuple[np.ndarray, np.ndarray]:
    """Units (a row of q) received and sent by every rank in forward."""
    into, out = np.zeros(placement.world_size), np.zeros(placement.world_size)
    unit = {"q": 1.0, "out": 1 + LSE, "kv": 2 * kv_ratio}
    for kind, start, stop, src, dst in hops(placement, kv_ratio):
        into[dst] += (stop - start) * unit[kind]
        out[src] += (stop - start) * unit[kind]
    return into, out
