"""Leaves: the pieces of documents by which a canonical reduction computes.

A document is cut at fixed places of its own, so the cuts depend neither on ranks and layout nor on
what else lies in the sequence. `leaf_layout` gives each rank whole leaves.
"""

from __future__ import annotations

from functools import lru_cache
from itertools import pairwise

from tilewise.layouts.layout import Layout
from tilewise.layouts.whole_blocks import split_blocks, whole_blocks
from tilewise.masks.base import Mask
from tilewise.masks.components import components

LEAST_LEAF = 64
"""Rows of the leaves of short documents."""

USUAL_LEAVES = 8
"""Leaves that a document of medium length has."""

USUAL_LEAF = 1024
"""Rows at which a leaf's kernel call is worth its sums; larger leaves would leave ranks idle."""

MOST_TERMS = 240
"""Calls that add to one sum at most, one for each leaf and query head of a KV head. A sum has room
for a few more, such as a sink."""


def leaf_size(length: int, heads_per_kv_head: int) -> int:
    """Rows of all leaves but the last of a document of so many tokens, a power of two."""
    usual = min(-(-length // USUAL_LEAVES), USUAL_LEAF)
    needed = -(-length * heads_per_kv_head // MOST_TERMS)
    return 1 << (max(LEAST_LEAF, usual, needed) - 1).bit_length()


@lru_cache(maxsize=64)
def leaf_edges(mask: Mask, num_tokens: int, heads_per_kv_head: int) -> tuple[int, ...]:
    """Positions at which leaves begin, and num_tokens.

    Documents are the components of the mask: ranges that no allowed pair connects.
    """
    edges: list[int] = []
    for start, stop in pairwise(components(mask, num_tokens).tolist()):
        edges += range(start, stop, leaf_size(stop - start, heads_per_kv_head))
    return *edges, num_tokens


def edges_of_sides(
    mask: Mask, num_tokens: tuple[int, int], heads_per_kv_head: int
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The edges of the queries' leaves and of the keys'.

    Where they are not of the same tokens, each side is one document.

    Args:
        num_tokens: of the queries' sequence and of the keys'.
    """
    if num_tokens[0] == num_tokens[1]:
        edges = leaf_edges(mask, num_tokens[0], heads_per_kv_head)
        return edges, edges
    q, k = ((*range(0, n, leaf_size(n, heads_per_kv_head)), n) for n in num_tokens)
    return q, k


def leaf_layouts(
    mask: Mask, layout: Layout, kv_layout: Layout, heads_per_kv_head: int
) -> tuple[Layout, Layout]:
    """The layouts of whole leaves of the queries and of the keys of a call."""
    layouts = layout, kv_layout
    tokens = layout.num_tokens, kv_layout.num_tokens
    q, kv = map(leaf_layout, layouts, edges_of_sides(mask, tokens, heads_per_kv_head))
    return q, kv


@lru_cache(maxsize=64)
def leaf_layout(layout: Layout, edges: tuple[int, ...]) -> Layout:
    """The layout in which each leaf is whole: on the rank that has most of its rows under layout.

    Where several ranks have as many, on the one with the fewest rows so far. A layout whose leaves
    are whole, their rows in order, is returned as it is.

    Args:
        layout: each token belongs to one rank.
    """
    return whole_blocks(layout, edges) if split_blocks(layout, edges) else layout
