"""Blocks of the sequence that are whole on a rank: which are not, and layouts whose blocks are."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy as np

from tilewise.layouts.layout import Layout, Run


def whole_blocks(layout: Layout, edges: Sequence[int]) -> Layout:
    """Give each block of tokens to the rank that has most of it; returns layout if it does.

    Of several ranks with equally many of its tokens the one with fewest tokens so far gets it. A
    rank's tokens ascend.

    Args:
        layout: gives each token to one rank.
        edges: where blocks begin, and the number of tokens: 0, ..., num_tokens.
    """
    owners = np.empty(layout.num_tokens, np.int64)
    for rank in range(layout.world_size):
        owners[layout.rows(rank)] = rank
    runs: list[list[Run]] = [[] for _ in range(layout.world_size)]
    num_tokens = [0] * layout.world_size
    for start, stop in pairwise(edges):
        shares = np.bincount(owners[start:stop], minlength=layout.world_size)
        most = np.flatnonzero(shares == shares.max()).tolist()
        rank = min(most, key=lambda rank: num_tokens[rank])
        runs[rank].append(Run(start, stop - start))
        num_tokens[rank] += stop - start
    whole = Layout(layout.num_tokens, runs, f"{layout.name}, whole blocks")
    return layout if whole == layout else whole


def split_blocks(layout: Layout, edges: Sequence[int]) -> list[int]:
    """Return the blocks, by number, that are not whole on one shard of a layout, rows in order.

    Args:
        edges: where blocks begin, and the number of tokens: 0, ..., num_tokens.
    """
    starts, found = np.asarray(edges), set[int]()
    for shard in range(layout.world_size):
        rows = layout.rows(shard)
        block = np.searchsorted(starts, rows, "right") - 1
        first = np.flatnonzero(np.diff(block, prepend=-1) != 0)
        last = np.append(first, len(rows))[1:] - 1
        jumps = np.cumsum(np.diff(rows, prepend=rows[:1]) != 1)
        split = (last + 1 - first != np.diff(starts)[block[first]]) | (jumps[first] != jumps[last])
        found.update(block[first[split]].tolist())
    return sorted(found)
