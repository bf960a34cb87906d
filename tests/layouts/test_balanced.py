"""Balanced layouts: equal tokens, equal areas, for one mask or the sum of several."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.drawn_masks import NUM_TOKENS, masks

import tilewise as tw
from tilewise.layouts.balanced import balanced
from tilewise.masks.components import components, row_areas


def areas(mask: tw.Mask, layout: tw.Layout) -> np.ndarray:
    """Allowed pairs of every rank's queries."""
    rows = row_areas(mask, layout.num_tokens)
    return np.array([rows[layout.rows(r)].sum() for r in range(layout.world_size)])


def imbalance(values: np.ndarray) -> float:
    return float(values.max() / values.mean())


def documents(num_tokens: int, seed: int = 0) -> tw.Mask:
    cu = tw.lengths.sample("prolong512k", num_tokens, seed=seed, cap=num_tokens // 4)
    return tw.masks.causal_document(cu)


@pytest.mark.parametrize("name", tw.masks.NAMES)
@pytest.mark.parametrize(("n", "tokens"), [(8, 8192), (32, 2048)])
def test_every_pattern_has_equal_tokens_and_areas(name, n, tokens):
    mask = tw.masks.random(name, n * tokens, seed=1)
    layout = balanced(mask, n * tokens, n)
    assert set(layout.sizes) == {tokens}
    assert imbalance(areas(mask, layout)) <= 1.03


@given(mask=masks(), n=st.integers(1, NUM_TOKENS + 3), chunk=st.integers(1, NUM_TOKENS))
def test_any_mask_is_dealt_in_whole_to_ranks_whose_tokens_ascend(mask, n, chunk):
    layout = balanced(mask, NUM_TOKENS, n, chunk)
    assert layout.is_partition and layout.world_size == n
    assert max(layout.sizes) - min(layout.sizes) <= 1
    assert all((np.diff(layout.rows(rank)) > 0).all() for rank in range(n))


@given(mask=masks())
def test_row_areas_are_the_dense_sums(mask):
    every = np.arange(NUM_TOKENS)
    assert np.array_equal(row_areas(mask, NUM_TOKENS), mask.dense(every, every).sum(1))


@given(mask=masks())
def test_no_allowed_pair_crosses_the_edge_of_a_component(mask):
    every = np.arange(NUM_TOKENS)
    dense = mask.dense(every, every)
    for edge in components(mask, NUM_TOKENS).tolist():
        assert not dense[:edge, edge:].any() and not dense[edge:, :edge].any()


def test_documents_are_components():
    cu = [0, 1, 2, 9, 20, NUM_TOKENS]
    assert components(tw.masks.causal_document(cu), NUM_TOKENS).tolist() == cu


def test_layers_of_several_masks_share_one_level_layout():
    num_tokens, n = 1 << 16, 16
    layers = [tw.Causal(), tw.Window(4096, 0), documents(num_tokens)]
    layout = balanced(layers, num_tokens, n)
    assert imbalance(sum(areas(mask, layout) for mask in layers)) <= 1.03
    assert set(layout.sizes) == {num_tokens // n}


def test_a_mask_by_head_is_balanced_in_the_mean_of_its_heads():
    mask = tw.PerHead([tw.Causal(), tw.Window(100, 0)])
    assert imbalance(areas(mask, balanced(mask, 8192, 8))) <= 1.03


def test_uneven_lengths_differ_by_one_token():
    layout = balanced(documents(10_007), 10_007, 12)
    assert set(layout.sizes) == {833, 834}


def test_slack_bounds_the_tokens_of_a_rank():
    num_tokens, n = 1 << 16, 16
    mask = documents(num_tokens)
    tight, loose = (balanced(mask, num_tokens, n, slack=slack) for slack in (0.0, 0.1))
    assert max(loose.sizes) <= 1.1 * num_tokens / n
    assert imbalance(areas(mask, loose)) <= 1.03
    assert sum(map(len, loose.runs)) <= sum(map(len, tight.runs))


def test_documents_stay_on_few_ranks():
    num_tokens, n = 1 << 16, 16
    mask = documents(num_tokens)

    def sent(layout: tw.Layout) -> int:
        work = tw.Workload(num_tokens, 1, 1, 128, mask=mask, layout=layout)
        return sum(tw.volume(tw.needed(mask, layout), work).forward)

    assert sent(balanced(mask, num_tokens, n)) < 0.5 * sent(tw.striped(num_tokens, n))


@pytest.mark.parametrize(
    ("options", "numbers"),
    [
        ({"chunk": 101}, r"chunk \(101\) must be from 1 to 100"),
        ({"chunk": 0}, r"chunk \(0\) must be from 1 to 100"),
        ({"slack": -0.1}, r"slack \(-0.1\) must be at least 0"),
        ({"n": 0}, r"n \(0\) must be at least 1"),
        ({"mask": ()}, "balanced has 0 masks"),
        ({"mask": tw.Document([0, 99])}, "99"),
    ],
)
def test_wrong_input_is_named_with_its_numbers(options, numbers):
    given = {"mask": tw.Causal(), "num_tokens": 100, "n": 4, "chunk": 10, **options}
    with pytest.raises(ValueError, match=numbers):
        balanced(**given)
