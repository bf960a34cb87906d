"""The reference: chunks of 1024 tokens, blocks placed by a general hypergraph partitioner.

Blocks (query chunk x key chunk) are nodes that weigh their area; each chunk's q, and each chunk's
k and v, is a net that costs its bytes for every rank beside the first that reads it. mtkahypar
(the extra `partition`) cuts it; then chunks get the owners that save most, equally many a rank.
Source: the approach of DCP (SOSP 2025). Departs from it: of a chunk a rank is sent only as many
rows as the largest need of one of its blocks, which counts in the reference's favour.
"""

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple

import numpy as np

import tilewise as tw
from tilewise.layouts.cells import cells
from tilewise.plan.row_ranges import count as rows_in
from tilewise.strategies.tiling.placement import assign
from tilewise.strategies.tiling.routing import LSE

CHUNK = 1024
UNIT = 256  # weights of nets are whole numbers: a row of q weighs this much
IMBALANCE = 0.03


class Reference(NamedTuple):
    """Forward, in rows of q: received and sent by rank; areas by rank."""

    received: np.ndarray
    sent: np.ndarray
    areas: np.ndarray


class Blocks(NamedTuple):
    """Non-empty blocks of a mask: query and key chunk, area, rows needed of each."""

    q: np.ndarray
    kv: np.ndarray
    areas: np.ndarray
    q_rows: np.ndarray
    kv_rows: np.ndarray


def blocks(mask: tw.masks.Mask, num_tokens: int, count: int) -> Blocks:
    """The blocks between this many chunks."""
    chunks = tw.contiguous(num_tokens, count)
    rows = [
        (*pair, cell.area, rows_in(cell.q_rows, 0), rows_in(cell.k_rows, 0))
        for pair, cell in cells(mask, chunks, chunks).items()
    ]
    return Blocks(*np.array(rows, np.int64).T)


def reference(
    mask: tw.masks.Mask,
    num_tokens: int,
    n: int,
    kv_bytes: float,
    *,
    chunk: int = CHUNK,
    seed: int = 0,
) -> Reference:
    """Place a mask on n ranks.

    Args:
        num_tokens: a multiple of chunk * n.
        kv_bytes: of a row's k and v, beside its q.
    Raises:
        ImportError: without mtkahypar.
    """
    count = num_tokens // chunk
    found = blocks(mask, num_tokens, count)
    part = _partition(found, n, kv_bytes, seed)
    q, kv = np.zeros((count, n)), np.zeros((count, n))
    np.maximum.at(q, (found.q, part), found.q_rows)
    np.maximum.at(kv, (found.kv, part), found.kv_rows)
    worth = (2 + LSE) * q + kv_bytes * kv
    owner = assign(np.repeat(worth, count // n, axis=1)) // (count // n)
    away = np.ones((count, n))
    away[np.arange(count), owner] = 0
    q, kv = q * away, kv * away
    received, sent = q.sum(0) + kv_bytes * kv.sum(0), (1 + LSE) * q.sum(0)
    np.add.at(received, owner, (1 + LSE) * q.sum(1))
    np.add.at(sent, owner, q.sum(1) + kv_bytes * kv.sum(1))
    return Reference(received, sent, np.bincount(part, found.areas, n))


@cache
def _library() -> Any:
    import mtkahypar

    return mtkahypar, mtkahypar.initialize(1)


def _partition(found: Blocks, n: int, kv_bytes: float, seed: int) -> np.ndarray:
    mtkahypar, library = _library()
    mtkahypar.set_seed(seed)
    context = library.context_from_preset(mtkahypar.PresetType.DEFAULT)
    context.set_partitioning_parameters(n, IMBALANCE, mtkahypar.Objective.KM1)
    nets, weights = [], []
    for side, weight in ((found.q, UNIT * (2 + LSE)), (found.kv, UNIT * kv_bytes)):
        for chunk in np.unique(side).tolist():
            nodes = np.flatnonzero(side == chunk)
            if len(nodes) > 1:
                nets.append(nodes.tolist())
                weights.append(round(weight))
    areas = np.maximum(1, np.rint(found.areas / UNIT)).astype(int).tolist()
    graph = library.create_hypergraph(context, len(areas), len(nets), nets, areas, weights)
    return np.array(graph.partition(context).get_partition())
