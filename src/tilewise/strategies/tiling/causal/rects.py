"""Rectangles of query chunks by key/value chunks, less what lies above the causal diagonal.

Stands alone because it is pure geometry: no mask, no layout, no plan.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np


class Rect(NamedTuple):
    """Query chunks [q0, q1) by key/value chunks [k0, k1), less what lies above the diagonal."""

    q0: int
    q1: int
    k0: int
    k1: int

    @property
    def height(self) -> int:
        return self.q1 - self.q0

    @property
    def width(self) -> int:
        return self.k1 - self.k0

    def mirror(self, num_chunks: int) -> Rect:
        """Reflect in the antidiagonal: rows become columns, the triangle stays itself."""
        q0, q1, k0, k1 = (num_chunks - x for x in self)
        return Rect(k1, k0, q1, q0)


Blocks = tuple[tuple[Rect, ...], ...]
"""For each rank its rectangles, disjoint; all ranks' cover each cell up to the diagonal once."""


def cells(q0: np.ndarray, q1: np.ndarray, k0: np.ndarray, k1: np.ndarray) -> np.ndarray:
    """Areas of rectangles in chunks squared; a cell on the diagonal counts one half."""

    def below(q: np.ndarray, k: np.ndarray) -> np.ndarray:
        steps = np.maximum(0, q - k)
        return steps * (steps - 1) // 2

    diagonal = np.maximum(0, np.minimum(q1, k1) - np.maximum(q0, k0))
    return below(q1, k0) - below(q0, k0) - below(q1, k1) + below(q0, k1) + diagonal / 2


def areas(shares: Sequence[Sequence[Rect]]) -> np.ndarray:
    """Cells of each share of the triangle."""
    rects = np.array([rect for share in shares for rect in share], np.int64).reshape(-1, 4)
    who = np.repeat(np.arange(len(shares)), [len(share) for share in shares])
    return np.bincount(who, cells(*rects.T), len(shares))


def foreign(blocks: Blocks, chunks_per_shard: int, side: int) -> np.ndarray:
    """Shards that each rank reads and does not own: of side 0, Q, or 1, KV."""
    read = np.zeros((len(blocks), len(blocks) * chunks_per_shard), bool)
    for rank, share in enumerate(blocks):
        for rect in share:
            read[rank, rect[2 * side] : rect[2 * side + 1]] = True
        read[rank, rank * chunks_per_shard : (rank + 1) * chunks_per_shard] = False
    return read.sum(1) / chunks_per_shard
