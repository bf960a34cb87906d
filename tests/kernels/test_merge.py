"""Merging partials: exact over any split of the keys, and safe where rows have no keys."""

import math
from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tilewise.kernels.merge import Partial, merge, merge_into

ROWS, HEADS, DIM, KEYS = 7, 3, 5, 24


def attend(scores: torch.Tensor, v: torch.Tensor) -> Partial:
    """Dense attention from scores [rows, heads, keys]; out 0 and lse -inf on rows without keys."""
    if not scores.shape[-1]:
        return Partial(
            scores.new_zeros(ROWS, HEADS, DIM), scores.new_full((ROWS, HEADS), -math.inf)
        )
    lse = torch.logsumexp(scores, -1)
    p = torch.exp(scores - lse.masked_fill(lse == -math.inf, 0.0)[..., None])
    return Partial(torch.einsum("rhk,khd->rhd", p, v), lse)


def draw(seed: int, dtype: torch.dtype = torch.float64) -> tuple[torch.Tensor, torch.Tensor]:
    """Scores with many cells, whole rows among them, masked; values."""
    g = torch.Generator().manual_seed(seed)
    scores = 8 * torch.randn(ROWS, HEADS, KEYS, generator=g, dtype=dtype)
    scores[torch.rand(scores.shape, generator=g) < 0.4] = -math.inf
    scores[torch.rand(ROWS, generator=g) < 0.3] = -math.inf
    return scores, torch.randn(KEYS, HEADS, DIM, generator=g, dtype=dtype)


def assert_same(got: Partial, want: Partial, tolerance: float = 1e-14) -> None:
    torch.testing.assert_close(got.out, want.out, rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(got.lse, want.lse, rtol=tolerance, atol=tolerance)


@given(st.integers(0, 10**6), st.lists(st.integers(0, KEYS), max_size=4))
def test_any_split_of_the_keys_merges_to_the_whole(seed, cuts):
    scores, v = draw(seed)
    edges = [0, *sorted(cuts), KEYS]
    parts = [attend(scores[..., a:b], v[a:b]) for a, b in pairwise(edges)]
    whole, merged = attend(scores, v), parts[0]
    acc = Partial(parts[0].out.clone(), parts[0].lse.clone())
    for part in parts[1:]:
        merged = merge(merged, part)
        merge_into(*acc, *part)
    assert_same(merged, whole)
    assert_same(acc, whole)


def test_rows_that_neither_side_reaches_stay_empty():
    scores, v = draw(0)
    nothing = attend(scores[..., :0], v[:0])
    for a, b in ((nothing, nothing), (nothing, attend(scores, v)), (attend(scores, v), nothing)):
        merged = merge(a, b)
        empty = merged.lse == -math.inf
        assert not merged.lse.isnan().any() and (merged.out[empty] == 0).all()
        assert_same(merged, b if a is nothing else a, 0.0)


def test_merge_changes_neither_operand():
    scores, v = draw(1)
    a, b = attend(scores[..., :9], v[:9]), attend(scores[..., 9:], v[9:])
    copies = [x.clone() for x in (*a, *b)]
    merge(a, b)
    assert all(torch.equal(x, y) for x, y in zip((*a, *b), copies, strict=True))


def test_half_precision_partials_merge_into_fp32():
    scores, v = draw(2, torch.float32)
    parts = [attend(scores[..., i : i + 6], v[i : i + 6]) for i in range(0, KEYS, 6)]
    acc = Partial(torch.zeros(ROWS, HEADS, DIM), torch.full((ROWS, HEADS), -math.inf))
    for out, lse in parts:
        merge_into(*acc, out.bfloat16(), lse)
    assert acc.out.dtype == torch.float32
    assert_same(acc, attend(scores, v), 2.0**-7)


def test_merging_into_a_view_changes_those_rows_alone():
    scores, v = draw(3)
    out, lse = attend(scores, v)
    all_out = torch.zeros(20, HEADS, DIM, dtype=torch.float64)
    all_lse = torch.full((20, HEADS), -math.inf, dtype=torch.float64)
    merge_into(all_out[4 : 4 + ROWS], all_lse[4 : 4 + ROWS], out, lse)
    assert torch.equal(all_out[4 : 4 + ROWS], out) and torch.equal(all_lse[4 : 4 + ROWS], lse)
    assert not all_out[:4].any() and not all_out[4 + ROWS :].any()


def test_huge_lse_does_not_overflow():
    one = torch.ones(1, 1, 1)
    merged = merge(Partial(one, 1e4 * one[0]), Partial(3 * one, 1e4 * one[0]))
    assert merged.out.item() == 2.0 and merged.lse.item() == pytest.approx(1e4 + math.log(2))


def test_different_shapes_are_refused_with_both():
    a = Partial(torch.zeros(3, 2, 4), torch.zeros(3, 2))
    b = Partial(torch.zeros(5, 2, 4), torch.zeros(5, 2))
    with pytest.raises(ValueError, match=r"\(3, 2, 4\) and \(5, 2, 4\)"):
        merge(a, b)
    with pytest.raises(ValueError, match="differ in shape"):
        merge_into(*a, *b)
