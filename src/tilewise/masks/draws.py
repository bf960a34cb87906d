"""Random parameters of the benchmark's patterns, drawn as it draws them (arXiv 2510.17896).

They stand apart from masks/patterns.py because they know of no mask: tables, edges and prefixes only.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy as np

__all__ = ["block_edges", "prefixes_for", "top_blocks"]


def top_blocks(
    shape: tuple[int, int], num_kv_heads: int | None, share: float, rng: np.random.Generator
) -> np.ndarray:
    """The highest of random scores: the same number of key blocks for every query block."""
    whole = shape if num_kv_heads is None else (num_kv_heads, *shape)
    count = max(1, int(share * shape[1]))
    best = np.argpartition(rng.random(whole), shape[1] - count, axis=-1)[..., shape[1] - count :]
    table = np.zeros(whole, bool)
    np.put_along_axis(table, best, True, axis=-1)
    return table


def block_edges(num_tokens: int, rng: np.random.Generator) -> list[int]:
    """Blocks of 128 to 1024 tokens, the last one cut."""
    sizes = rng.integers(128, 1025, -(-num_tokens // 128))
    ends = np.cumsum(sizes)
    return [0, *ends[ends < num_tokens].tolist(), num_tokens]


def prefixes_for(cu: Sequence[int], rng: np.random.Generator) -> list[int]:
    """One length up to the first document's, cut to each document's own."""
    first = cu[1] if len(cu) > 1 else 0
    prefix = int(rng.integers(min(1, first), first + 1))
    return [min(prefix, stop - start) for start, stop in pairwise(cu)]
