"""Trees of any sequences: rows, masks, values and gradients are those of the sequences apart."""

from __future__ import annotations

from typing import Any

import numpy as np
from batches.test_tree import KV_HEADS, VOCABULARY, compare
from hypothesis import assume, given
from hypothesis import strategies as st
from support.drawn_calls import groups_fit, plans_of
from support.drawn_masks import layouts
from support.fuzzing import examples

import tilewise as tw

MOST_TOKENS = 10
HEADS = 2 * KV_HEADS


@st.composite
def sequences(draw: st.DrawFn) -> list[list[int]]:
    """They often share a beginning: each grows from a piece of an earlier one."""
    found: list[list[int]] = []
    for _ in range(draw(st.integers(1, 8))):
        earlier = draw(st.sampled_from(found)) if found else []
        kept = earlier[: draw(st.integers(0, len(earlier)))]
        tokens = st.integers(0, VOCABULARY - 1)
        rest = draw(st.lists(tokens, min_size=not kept, max_size=MOST_TOKENS - len(kept)))
        found.append([*kept, *rest])
    return found


@examples(3)
@given(sequences(), st.data())
def test_a_tree_holds_each_beginning_once(token_lists: list[list[int]], data: st.DataObject):
    kinds = (list, tuple, np.array, lambda x: np.array(x, np.uint8))
    tree = tw.Tree.from_sequences([data.draw(st.sampled_from(kinds))(x) for x in token_lists])
    wanted = np.zeros((tree.num_tokens, tree.num_tokens), bool)
    for i, sequence in enumerate(token_lists):
        rows = tree.rows(i)
        assert tree.tokens[rows].tolist() == sequence
        assert tree.position_ids[rows].tolist() == [*range(len(sequence))]
        wanted[np.ix_(rows, rows)] |= np.tri(len(rows), dtype=bool)
    every = np.arange(tree.num_tokens)
    np.testing.assert_array_equal(tree.mask.dense(every, every), wanted)
    assert tree.mask.area((0, tree.num_tokens), (0, tree.num_tokens)) == wanted.sum()
    beginnings = {tuple(s[: j + 1]) for s in token_lists for j in range(len(s))}
    assert tree.num_tokens == len(beginnings)
    assert (tree.num_sequences, tree.num_tokens_apart) == (
        len(token_lists),
        sum(map(len, token_lists)),
    )


@examples(0.75)
@given(sequences(), st.data())
def test_a_model_over_a_tree_is_the_model_over_each_sequence(
    token_lists: list[list[int]], data: st.DataObject
):
    tree = tw.Tree.from_sequences(token_lists)
    n = data.draw(st.integers(1, 6), "ranks")
    layout = data.draw(layouts(tree.num_tokens, n), "layout")
    every = [p for one in plans_of(n, False) for p in one if groups_fit(p, HEADS, KV_HEADS)]
    makers: tuple[Any, ...] = (
        lambda: data.draw(st.sampled_from(every), "plan"),
        lambda: tw.needed(tree.mask, layout, node_size=data.draw(st.integers(1, 3))),
        lambda: tw.tiled(tree.mask, layout),
        lambda: "auto",
    )
    assume(tree.num_tokens >= 1)
    compare(token_lists, layout, data.draw(st.sampled_from(makers))())


REFUSED = st.one_of(
    st.none(),
    st.integers(),
    st.floats(),
    st.text(max_size=3),
    st.lists(st.none() | st.floats() | st.text(max_size=2) | st.integers(-3, -1), max_size=3),
    st.just([[1, 2]]),
    st.dictionaries(st.integers(0, 3), st.integers(0, 3), max_size=2),
)


@examples(2)
@given(sequences(), REFUSED, st.integers(0, 8))
def test_what_is_no_sequence_is_refused(token_lists: list[Any], wrong: Any, place: int):
    token_lists.insert(place, wrong)
    try:
        tree = tw.Tree.from_sequences(token_lists)
    except ValueError as error:
        assert "sequence" in str(error)
    else:
        assert tree.num_sequences == len(token_lists)
