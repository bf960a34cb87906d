"""The reference for documents: chunks of 1024 tokens, blocks placed by a hypergraph partitioner.

Blocks (query chunk x key chunk) are nodes that weigh their area; each chunk's q, and each chunk's
k and v, is a net that costs its bytes for every rank beside the first that reads it. mtkahypar
(the extra `partition`) cuts it; then chunks get the owners that save most, equally many a rank.
Source: the approach of DCP (SOSP 2025). Departs from it: only rows that a block needs are counted.
"""

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple

import numpy as np

from tilewise.tiling.matching import assign
from tilewise.tiling.traffic import LSE

CHUNK = 1024
UNIT = 256  # weights of nets are whole numbers: a row of q weighs this much
IMBALANCE = 0.03


class Reference(NamedTuple):
    """Forward, in rows of q: received and sent by rank; areas by rank."""

    received: np.ndarray
    sent: np.ndarray
    areas: np.ndarray


class Blocks(NamedTuple):
    """Non-empty blocks [num_blocks, 2] of causal documents, their areas, and the rows of every
    chunk that blocks off the diagonal need, of q and of k, v."""

    chunks: np.ndarray
    areas: np.ndarray
    q_rows: np.ndarray
    kv_rows: np.ndarray


def blocks(cu: np.ndarray) -> Blocks:
    count = int(cu[-1]) // CHUNK
    chunks, areas = [], []
    first = np.searchsorted(cu, np.arange(count) * CHUNK, side="right") - 1
    last = np.searchsorted(cu, np.arange(1, count + 1) * CHUNK - 1, side="right") - 1
    edges = np.arange(count + 1) * CHUNK
    q_rows = np.minimum(cu[first + 1], edges[1:]) - edges[:-1]
    kv_rows = edges[1:] - np.maximum(cu[last], edges[:-1])
    for i in range(count):
        start = int(cu[first[i]])
        for j in range(start // CHUNK, i):
            chunks.append((i, j))
            areas.append(int(q_rows[i]) * ((j + 1) * CHUNK - max(start, j * CHUNK)))
        inside = np.clip(cu[first[i] : last[i] + 2], edges[i], edges[i + 1])
        lengths = np.diff(inside)
        chunks.append((i, i))
        areas.append(int((lengths * (lengths + 1) // 2).sum()))
    return Blocks(np.array(chunks), np.array(areas), q_rows, kv_rows)


def reference(cu: np.ndarray, n: int, kv_bytes: float, seed: int = 0) -> Reference:
    """Place causal documents on n ranks.

    Args:
        cu: boundaries; the last is a multiple of CHUNK * n.
        kv_bytes: of a row's k and v, beside its q.
    Raises:
        ImportError: without mtkahypar.
    """
    cu = np.unique(np.asarray(cu, np.int64))
    found = blocks(cu)
    part = _partition(found, n, kv_bytes, seed)
    count = int(cu[-1]) // CHUNK
    q, kv = np.zeros((count, n)), np.zeros((count, n))
    rows, columns = found.chunks.T
    diagonal = rows == columns
    q[rows, part], kv[columns, part] = found.q_rows[rows], found.kv_rows[columns]
    q[rows[diagonal], part[diagonal]] = kv[rows[diagonal], part[diagonal]] = CHUNK
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
    for side, weight in ((0, UNIT * (2 + LSE)), (1, UNIT * kv_bytes)):
        for chunk in range(int(found.chunks.max()) + 1):
            nodes = np.flatnonzero(found.chunks[:, side] == chunk)
            if len(nodes) > 1:
                nets.append(nodes.tolist())
                weights.append(round(weight))
    areas = np.maximum(1, np.rint(found.areas / UNIT)).astype(int).tolist()
    graph = library.create_hypergraph(context, len(areas), len(nets), nets, areas, weights)
    return np.array(graph.partition(context).get_partition())
