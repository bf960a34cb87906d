"""A mask on a few cells, each with the rank that computes it: what pictures and text are made of.

Stands alone so that a picture, a terminal and a test look at the same cells.
"""

from __future__ import annotations

from itertools import pairwise
from typing import NamedTuple

import numpy as np

from tilewise.compiler.shards import shard_layouts
from tilewise.layouts.layout import Layout
from tilewise.masks.base import Mask
from tilewise.plan.ir import Plan

__all__ = ["View", "view"]

Array = np.ndarray
MOST_CELLS = 512
SAMPLES = (0.5, 0.2, 0.8)  # places within a cell where a plan is asked who computes it


class View(NamedTuple):
    """Cells between edges, queries by keys.

    Attributes:
        edges: of the cells on both sides, from 0 to num_tokens.
        shares: float [cells, cells], allowed part of a cell's pairs.
        ranks: int [cells, cells], who computes the cell, -1 where nothing is allowed.
        owners: int [cells], whose the cell's tokens are; of several ranks each gets its share of
            neighbouring cells.
    """

    edges: Array
    shares: Array
    ranks: Array
    owners: Array


def view(mask: Mask, layout: Layout, cells: int, plan: Plan | None = None) -> View:
    """A mask seen through at most this many cells a side.

    Args:
        plan: who computes what; None: each rank its own queries.
    """
    if not 1 <= cells <= MOST_CELLS:
        raise ValueError(f"cells ({cells}) must be from 1 to {MOST_CELLS}")
    num_tokens = layout.num_tokens
    edges = np.linspace(0, num_tokens, min(cells, num_tokens) + 1).astype(np.int64)
    sizes = np.diff(edges)
    shares = np.asarray(mask.areas(edges, edges), float) / np.outer(sizes, sizes)
    owners = _dealt(owner_of_tokens(layout), edges, layout.world_size)
    if plan is None:
        ranks = np.broadcast_to(owners[:, None], shares.shape)
    else:
        ranks = _computed(plan, layout, edges, owners)
    return View(edges, shares, np.where(shares > 0, ranks, -1), owners)


def owner_of_tokens(layout: Layout) -> Array:
    """The shard of every token, int64 [num_tokens]."""
    owner = np.zeros(layout.num_tokens, np.int64)
    for shard in range(layout.world_size):
        owner[layout.rows(shard)] = shard
    return owner


def _dealt(owner: Array, edges: Array, n: int) -> Array:
    """One owner a cell, so that over neighbouring cells each has about its share of the tokens."""
    chosen = np.zeros(len(edges) - 1, np.int64)
    due = np.zeros(n)
    for i, (start, stop) in enumerate(pairwise(edges.tolist())):
        share = np.bincount(owner[start:stop], minlength=n) / (stop - start)
        due += share
        chosen[i] = np.where(share > 0, due, -np.inf).argmax()
        due[chosen[i]] -= 1
    return chosen


def _computed(plan: Plan, layout: Layout, edges: Array, owners: Array) -> Array:
    """Who computes each cell: asked at a few of its tokens, else the owner of its queries."""
    sides = shard_layouts(plan, layout)
    table = _by_shard(plan)
    q_shard, k_shard = (owner_of_tokens(side) for side in sides)
    at = [edges[:-1] + (part * np.diff(edges)).astype(np.int64) for part in SAMPLES]
    ranks = np.full((len(owners), len(owners)), -1)
    for q, k in ((q, k) for q in at for k in at):
        found = table[np.ix_(q_shard[q], k_shard[k])]
        ranks = np.where(ranks < 0, found, ranks)
    return np.where(ranks < 0, owners[:, None], ranks)


def _by_shard(plan: Plan) -> Array:
    """The rank that computes each query shard x KV shard, -1: none."""
    table = np.full([len(side) for side in plan.owners], -1)
    for rank in range(plan.world_size):
        for step in plan.rank_steps(rank):
            for tile in step.tiles:
                table[np.ix_(tile.q, tile.kv)] = rank
    return table
