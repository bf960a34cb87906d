"""Masks written as expressions: read, they allow what their words say, pair by pair."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from support.drawn_masks import boundaries, masks
from support.fuzzing import examples

from tilewise.expressions import read_mask, read_plan, read_wire

NUM_TOKENS = 19
Allows = Callable[[int, int], bool]


class Written(NamedTuple):
    """An expression, and whether query q may see key k by it."""

    text: str
    allows: Allows


def side() -> st.SearchStrategy[int | None]:
    return st.none() | st.integers(0, NUM_TOKENS + 2)


def window(left: int | None, right: int | None, words: bool) -> Written:
    text = f"window(left={left}, right={right})" if words else f"window({left}, {right})"
    return Written(
        text,
        lambda q, k: (left is None or q - left <= k) and (right is None or k <= q + right),
    )


def document(edges: list[int]) -> Written:
    def number(token: int) -> int:
        return sum(edge <= token for edge in edges)

    return Written(f"document({edges})", lambda q, k: number(q) == number(k))


def chunked(chunk: int, edges: list[int] | None) -> Written:
    """Causal within chunks that count from each document's start."""
    text = f"chunked_causal({NUM_TOKENS}, {chunk}" + (f", cu_seqlens={edges})" if edges else ")")

    def chunk_of(token: int) -> tuple[int, int]:
        start = max(edge for edge in edges or [0] if edge <= token)
        return start, (token - start) // chunk

    return Written(text, lambda q, k: k <= q and chunk_of(q) == chunk_of(k))


def with_blocks(edges: list[int], left: int | None) -> Written:
    blocks = [*zip(edges[::2], edges[1::2], strict=False)]

    def allows(q: int, k: int) -> bool:
        inside = any(a <= q < b and a <= k < b for a, b in blocks)
        return inside or (k <= q and (left is None or q - k <= left))

    return Written(f"causal_with_blocks({NUM_TOKENS}, {blocks}, {left})", allows)


PLAIN = st.one_of(
    st.just(Written("full", lambda q, k: True)),
    st.just(Written("causal", lambda q, k: k <= q)),
    st.just(Written("causal()", lambda q, k: k <= q)),
    st.builds(window, side(), side(), st.booleans()),
    boundaries(NUM_TOKENS).map(document),
    st.builds(chunked, st.integers(1, NUM_TOKENS + 2), st.none() | boundaries(NUM_TOKENS)),
    st.builds(with_blocks, boundaries(NUM_TOKENS), st.none() | st.integers(0, NUM_TOKENS)),
)


def both(a: Written, b: Written, spaced: bool) -> Written:
    """& binds more than |, so that it needs parentheses around what holds one."""
    left, right = (f"({x.text})" if "|" in x.text else x.text for x in (a, b))
    text = f"{left} & {right}" if spaced else f"{left}&{right}"
    return Written(text, lambda q, k: a.allows(q, k) and b.allows(q, k))


def either(a: Written, b: Written, closed: bool) -> Written:
    text = f"({a.text}) | {b.text}" if closed else f"{a.text}|{b.text}"
    return Written(text, lambda q, k: a.allows(q, k) or b.allows(q, k))


EXPRESSIONS = st.recursive(
    PLAIN,
    lambda inner: (
        st.builds(both, inner, inner, st.booleans())
        | st.builds(either, inner, inner, st.booleans())
    ),
    max_leaves=6,
)


@examples(2)
@given(EXPRESSIONS)
def test_an_expression_allows_what_it_says(written: Written):
    mask = read_mask(f" {written.text}\n")
    every = range(NUM_TOKENS)
    wanted = np.array([[written.allows(q, k) for k in every] for q in every])
    np.testing.assert_array_equal(mask.dense(every, every), wanted)
    assert mask.area((0, NUM_TOKENS), (0, NUM_TOKENS)) == wanted.sum()
    edges = [0, 3, 4, 11, NUM_TOKENS]
    sums = np.add.reduceat(np.add.reduceat(wanted.astype(int), edges[:-1], 0), edges[:-1], 1)
    np.testing.assert_array_equal(mask.areas(edges, edges), sums)


@examples(1)
@given(EXPRESSIONS)
def test_a_mask_is_read_from_its_own_text(written: Written):
    """A mask of few numbers is shown as an expression, but for the capitals of its classes."""
    mask = read_mask(written.text)
    text = repr(mask)
    if "documents," not in text and "slices" not in text.lower():
        assert read_mask(text.lower().replace("none", "None")) == mask


@examples(1)
@given(masks(NUM_TOKENS), st.integers(0, 2**32))
def test_equal_masks_have_equal_text(mask, seed: int):
    assert read_mask("m", {"m": lambda: mask}) is mask
    assert repr(mask | read_mask("causal")) == f"({mask!r} | Causal())"


WORDS = (
    *(
        "full",
        "causal",
        "window",
        "document",
        "ring",
        "mesh",
        "ulysses",
        "float8",
        "plain",
        "wires",
    ),
    *(
        "tree",
        "hierarchical",
        "(",
        ")",
        "[",
        "]",
        ",",
        "&",
        "|",
        "=",
        "inner=",
        "left",
        "None",
        "True",
    ),
    *("0", "-1", "4", "2", "1.5", "1e9", "9999999999999999999999", "'x'", '"', ":", "**", "lambda"),
    *(
        "~",
        "not ",
        "+",
        ".",
        "__class__",
        "\\",
        "\n",
        "\0",
        "é",
        "{",
        "}",
        "…",
        "[0, 5]",
        "(4)",
        " ",
    ),
)


@examples(4)
@given(st.lists(st.sampled_from(WORDS), max_size=9).map("".join), st.sampled_from((None, 4)))
def test_soup_is_refused_in_a_line_or_read(text: str, world_size: int | None):
    for read in (read_mask, read_wire, lambda text: read_plan(text, world_size)):
        try:
            read(text)
        except ValueError as error:
            assert str(error) and "Error(" not in str(error)
