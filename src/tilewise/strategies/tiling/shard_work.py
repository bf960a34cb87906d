"""A placement on a layout as work: shards are what one rank owns and the same others read."""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Mapping

import numpy as np

from tilewise.layouts.layout import Layout
from tilewise.layouts.support import Cell, cells
from tilewise.masks.base import Mask
from tilewise.strategies.tiling.assembly import Cells, Work
from tilewise.strategies.tiling.placement import Placement


def work_of(placement: Placement, mask: Mask | None, layout: Layout) -> Work:
    """Who computes which shards against which.

    Args:
        placement: its owners are the layout's.
        mask: to look up which rows of its blocks are read; None: all are.
    """
    parts = placement.readings
    starts = [part.start for part in parts]
    local = _local_starts(placement.world_size, parts)
    shard_of, homes, cuts = _shards(parts, local)
    sizes = tuple(stop - start for start, stop in cuts)
    own: list[Cells] = [defaultdict(set) for _ in range(placement.world_size)]
    for _, rank, (q0, q1, k0, k1), area in placement.pieces:
        if area or mask is not None:
            keys = shard_of[bisect_left(starts, k0) : bisect_left(starts, k1)]
            for q in set(shard_of[bisect_left(starts, q0) : bisect_left(starts, q1)]):
                own[rank][q].update(keys)
    table = None
    if mask is not None:
        cut = layout.cut(homes, cuts)
        table = cells(mask, cut, cut)
        own = [_existing(cells_of, table) for cells_of in own]
    return Work(tuple(homes), sizes, tuple(cuts), own, table)


def _local_starts(n: int, parts) -> list[int]:
    """The local row at which every part starts, in its owner's ascending rows."""
    done, local = [0] * n, []
    for part in parts:
        local.append(done[part.owner])
        done[part.owner] += part.stop - part.start
    return local


def _shards(parts, local) -> tuple[list[int], list[int], list[tuple[int, int]]]:
    """The shard of every part, and the shards' homes and local rows.

    A part that travels is a shard; neighbouring rows of a rank that nobody else reads are one.
    """
    shard_of, homes, cuts = [], [], []
    resting: dict[int, int] = {}  # rank -> its last shard, if that stays at home
    for part, start in zip(parts, local, strict=True):
        stop = start + part.stop - part.start
        travels = bool(part.q or part.kv)
        if not travels and part.owner in resting:
            shard = resting[part.owner]
            cuts[shard] = cuts[shard][0], stop
        else:
            shard = len(homes)
            homes.append(part.owner)
            cuts.append((start, stop))
            resting[part.owner] = shard
        if travels:
            resting.pop(part.owner)
        shard_of.append(shard)
    return shard_of, homes, cuts


def _existing(mine: Cells, table: Mapping[tuple[int, int], Cell]) -> Cells:
    """The cells that hold an allowed pair."""
    kept = {q: {kv for kv in kvs if (q, kv) in table} for q, kvs in mine.items()}
    return {q: kvs for q, kvs in kept.items() if kvs}


def areas_of(work: Work) -> np.ndarray:
    """Allowed pairs by rank, of a work with a table."""
    assert work.table is not None
    return np.array(
        [sum(work.table[q, kv].area for q in mine for kv in mine[q]) for mine in work.cells], float
    )
