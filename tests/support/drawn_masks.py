"""Random masks, slices and layouts for hypothesis, all over the same short sequence."""

import numpy as np
from hypothesis import strategies as st

from tilewise.layouts.layout import Layout, Run, contiguous, striped, zigzag
from tilewise.masks.base import Causal, Document, Full, Mask, Window
from tilewise.masks.tables import KINDS, Blocks, Slices

NUM_TOKENS = 23


@st.composite
def boundaries(draw: st.DrawFn, num_tokens: int = NUM_TOKENS) -> list[int]:
    """Ascending edges from 0 to num_tokens; zero-length parts are likely."""
    inner = st.lists(st.integers(0, num_tokens), max_size=6)
    return [0, *sorted(draw(inner)), num_tokens]


@st.composite
def slices(draw: st.DrawFn, num_tokens: int = NUM_TOKENS) -> Slices:
    """One slice of any kind and shape in each of a few cells of a grid: never overlapping."""
    q_edges, k_edges = draw(boundaries(num_tokens)), draw(boundaries(num_tokens))
    entries = []
    for i, q0 in enumerate(q_edges[:-1]):
        for j, k0 in enumerate(k_edges[:-1]):
            if draw(st.integers(0, 3)) == 0:
                kind = draw(st.sampled_from(KINDS))
                entries.append(((q0, q_edges[i + 1]), (k0, k_edges[j + 1]), kind))
    return Slices(entries)


@st.composite
def blocks(draw: st.DrawFn, num_tokens: int = NUM_TOKENS) -> Blocks:
    q_edges, k_edges = draw(boundaries(num_tokens)), draw(boundaries(num_tokens))
    size = (len(q_edges) - 1) * (len(k_edges) - 1)
    cells = draw(st.lists(st.booleans(), min_size=size, max_size=size))
    table = np.array(cells).reshape(len(q_edges) - 1, len(k_edges) - 1)
    return Blocks(table, q_edges, k_edges)


def masks(num_tokens: int = NUM_TOKENS) -> st.SearchStrategy[Mask]:
    """Every kind of mask, and what & and | make of them."""
    side = st.none() | st.integers(0, num_tokens + 2)
    plain = st.one_of(
        st.just(Full()),
        st.just(Causal()),
        st.builds(Window, side, side),
        boundaries(num_tokens).map(Document),
        slices(num_tokens),
        blocks(num_tokens),
    )
    pair = lambda inner: st.tuples(inner, inner, st.booleans())  # noqa: E731
    return st.recursive(
        plain,
        lambda inner: pair(inner).map(lambda p: p[0] & p[1] if p[2] else p[0] | p[1]),
        max_leaves=5,
    )


@st.composite
def layouts(draw: st.DrawFn, num_tokens: int = NUM_TOKENS, world_size: int | None = None) -> Layout:
    """Contiguous, zigzag, striped, scattered chunks, or rows in any order; some shards empty.

    Args:
        world_size: None: 1 to 6.
    """
    n = draw(st.integers(1, 6)) if world_size is None else world_size
    kind = draw(st.sampled_from(("contiguous", "zigzag", "striped", "chunks", "rows")))
    if kind == "rows":
        order = draw(st.permutations(range(num_tokens)))
        return Layout.from_positions([order[r::n] for r in range(n)])
    if kind == "chunks":
        chunk = draw(st.integers(1, 4))
        starts = range(0, num_tokens, chunk)
        owners = draw(st.lists(st.integers(0, n - 1), min_size=len(starts), max_size=len(starts)))
        runs = [
            [
                Run(a, min(chunk, num_tokens - a))
                for a, r in zip(starts, owners, strict=True)
                if r == s
            ]
            for s in range(n)
        ]
        return Layout(num_tokens, runs)
    return {"contiguous": contiguous, "zigzag": zigzag, "striped": striped}[kind](num_tokens, n)
