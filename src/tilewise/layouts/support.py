"""What a mask needs of every pair of shards: how many pairs of tokens, and which rows of each side.

Pruning, volumes and the simulator ask this of all query shards x key shards at once, so it is one
join of strips with the runs of two layouts. In the local coordinates of two runs of equal stride a
strip is again a strip (its constants divided, rounded up), which makes contiguous, zigzag and
striped layouts one closed form.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from tilewise.layouts.joins import (
    AT_ONCE,
    Found,
    Pieces,
    Runs,
    join,
    join_blocks,
    merged,
    parts,
    pieces_of,
    rows_of,
    runs_of,
)
from tilewise.layouts.layout import Layout
from tilewise.masks.base import Mask
from tilewise.masks.strips import Strips, expand

__all__ = ["Cell", "cells"]

Array = np.ndarray
Ranges = tuple[tuple[int, int], ...]
MAX_JOIN = 5_000_000  # strips x runs x runs beyond which rows of striped shards are not told apart


class Cell(NamedTuple):
    """What query shard i needs of key shard j; rows are half-open ranges of local rows.

    area: allowed pairs (the mean over heads, rounded up, of a mask that differs by head).
    q_rows: rows of the query shard that see some key of the key shard.
    k_rows: rows of the key shard that some query of the query shard sees.
    """

    area: int
    q_rows: Ranges
    k_rows: Ranges


def cells(mask: Mask, q_layout: Layout, k_layout: Layout) -> dict[tuple[int, int], Cell]:
    """Every pair (query shard, key shard) with an allowed pair of tokens, by ascending shards.

    Areas are exact, and rows too, but for masks of very many strips on striped keys: there the
    whole of both shards is reported.
    """
    found = _search(mask.strips(), q_layout, k_layout)
    heads: Sequence[Mask] = getattr(mask, "heads", ())
    if heads:
        total = sum(_search(head.strips(), q_layout, k_layout).area for head in heads)
        found.area[:] = -(-total // len(heads))
    pairs = np.flatnonzero(found.area)
    q_rows, k_rows = (_by_pair(pairs, ranges) for ranges in found.ranges)
    i, j = (x.tolist() for x in np.divmod(pairs, k_layout.world_size))
    values = zip(found.area[pairs].tolist(), q_rows, k_rows, strict=True)
    return {key: Cell(*cell) for key, cell in zip(zip(i, j, strict=True), values, strict=True)}


def _search(strips: Strips, q_layout: Layout, k_layout: Layout) -> Found:
    q, k = runs_of(q_layout), runs_of(k_layout)
    found = Found(q_layout.world_size, k_layout.world_size)
    if not (len(strips) and len(q.start) and len(k.start)):
        return found
    sloped = bool(strips.lo_slope.any() or strips.hi_slope.any())
    blocks = bool((k.stride == 1).all())
    strides = np.unique(np.concatenate([x.stride[x.size > 1] for x in (q, k)]))
    if sloped and (len(strides) > 1 or (blocks and (q.stride > 1).any())):
        q = rows_of(q)
    striped = not blocks and _is_striped(k, k_layout.num_tokens)
    limit = MAX_JOIN // len(k.start)
    if striped and (q.stride > 1).any() and len(strips) * len(q.start) > limit:
        q = rows_of(q)
    pieces = pieces_of(strips, q)
    if blocks:
        for part in parts(pieces, AT_ONCE):
            join_blocks(part, q, k, found)
    elif striped and len(pieces.run) > limit:
        _count_residues(pieces, q, k, k_layout.num_tokens, found)
        pairs = np.flatnonzero(found.area)
        for side, layout in enumerate((q_layout, k_layout)):
            shard = (pairs // k_layout.world_size, pairs % k_layout.world_size)[side]
            found.add(side, pairs, np.zeros_like(pairs), np.asarray(layout.sizes)[shard])
    else:
        for part in parts(pieces, max(1, AT_ONCE // len(k.start))):
            every = np.zeros_like(part.run)
            join(part, q, k, expand(every, every + len(k.start)), found)
    return found


def _is_striped(k: Runs, num_tokens: int) -> bool:
    """Whether run r holds the tokens t with t mod len(runs) = r."""
    every = np.arange(len(k.start))
    counts = -((every - num_tokens) // len(every))
    strides = np.where(k.size == 1, len(every), k.stride)
    return bool(
        (k.start == every).all() and (k.size == counts).all() and (strides == len(every)).all()
    )


def _count_residues(pieces: Pieces, q: Runs, k: Runs, num_keys: int, found: Found) -> None:
    """Areas alone, row by row: w neighbouring keys are w // n of every residue mod n, and one more
    of the w mod n residues from the first key's on."""
    n, num_q = len(k.start), found.num_q_shards
    marks = np.zeros(num_q * 2 * n, np.int64)
    ends = np.cumsum(pieces.rows)
    cuts = np.searchsorted(ends, np.arange(0, ends[-1] + AT_ONCE, AT_ONCE))
    for a, b in pairwise(np.unique(np.append(cuts, len(ends))).tolist()):
        part = pieces.take(slice(a, b))
        index, i = expand(part.first, part.first + part.rows)
        (lo, lo_slope, hi, hi_slope), _, _, run = part.take(index)
        i = i * q.stride[run]
        lo, hi = np.clip(lo + lo_slope * i, 0, num_keys), np.clip(hi + hi_slope * i, 0, num_keys)
        keys, first, row = hi - lo, lo % n, q.shard[run] * 2 * n
        np.add.at(marks, row, keys // n)
        np.subtract.at(marks, row + n, keys // n)
        np.add.at(marks, row + first, 1)
        np.subtract.at(marks, row + first + keys % n, 1)
    counts = np.cumsum(marks.reshape(num_q, 2 * n), axis=1)
    table = np.zeros((num_q, found.num_k_shards), np.int64)
    table[:, k.shard] = counts[:, :n] + counts[:, n:]
    found.area += table.reshape(-1)


def _by_pair(pairs: Array, found: list[tuple[Array, Array, Array]]) -> list[Ranges]:
    """The ranges of each of the (ascending) pairs."""
    if not len(pairs):
        return []
    pair, start, stop = merged(*(np.concatenate(column) for column in zip(*found, strict=True)))
    ranges = list(zip(start.tolist(), stop.tolist(), strict=True))
    cuts = np.append(np.searchsorted(pair, pairs), len(pair)).tolist()
    return [tuple(ranges[a:b]) for a, b in pairwise(cuts)]
