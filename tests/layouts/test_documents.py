"""zigzag_documents: every document over all ranks, as TransformerEngine orders them."""

from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import tilewise as tw
from tilewise.layouts.cells import cells


def transformer_engine(cu_seqlens, n: int, rank: int) -> list[int]:
    """Its partition of packed tokens (thd_get_partitioned_indices), which needs 2 n to divide."""
    rows: list[int] = []
    for start, stop in pairwise(cu_seqlens):
        pieces = np.arange(start, stop).reshape(2 * n, -1)
        rows += [*pieces[rank], *pieces[2 * n - 1 - rank]]
    return rows


@given(n=st.integers(1, 9), sizes=st.lists(st.integers(1, 12), min_size=1, max_size=8))
def test_it_is_transformer_engines_order_where_that_has_one(n: int, sizes: list[int]):
    cu = np.cumsum([0, *(2 * n * size for size in sizes)]).tolist()
    layout = tw.zigzag_documents(cu, n)
    for rank in range(n):
        assert layout.rows(rank).tolist() == transformer_engine(cu, n, rank)


@given(n=st.integers(1, 9), lengths=st.lists(st.integers(1, 60), min_size=1, max_size=12))
def test_pieces_differ_by_a_token_and_none_is_padded(n: int, lengths: list[int]):
    cu = np.cumsum([0, *lengths]).tolist()
    layout = tw.zigzag_documents(torch.tensor(cu), n)
    assert layout.is_partition
    for start, stop in pairwise(cu):
        counts = [((start <= x) & (x < stop)).sum() for x in map(layout.rows, range(n))]
        assert max(counts) - min(counts) <= 2
    assert layout == tw.zigzag_documents(cu, n)


@pytest.mark.parametrize("n", [2, 8, 16])
@pytest.mark.parametrize("corpus", tw.lengths.corpora())
def test_published_lengths_are_level(corpus: str, n: int):
    for seed in range(3):
        cu = tw.lengths.sample(corpus, 131072, seed=seed)
        layout = tw.zigzag_documents(cu, n)
        work = np.zeros(n)
        for (rank, _), cell in cells(tw.masks.causal_document(cu), layout, layout).items():
            work[rank] += cell.area
        assert work.max() <= (1.001 if n <= 8 else 1.002) * work.mean()
        assert max(layout.sizes) * n <= 1.005 * 131072


def test_no_rank_is_favoured():
    """Of many documents of an odd length the longer pieces go round."""
    for length in range(1, 17):
        layout = tw.zigzag_documents(range(0, 8 * length + 1, length), 4)
        assert len(set(layout.sizes)) == 1


CU = (0, 1, 8, 29, 32, 48)
LAYOUT = tw.zigzag_documents(CU, 4)
PLANS = (
    tw.ring(4),
    tw.ulysses(4),
    tw.needed(tw.masks.causal_document(CU), LAYOUT),
    tw.mesh(4, q_tile=2),
)


@pytest.mark.parametrize("plan", PLANS)
def test_attention_is_that_of_the_documents(plan: tw.Plan):
    cu, layout = CU, LAYOUT
    make = torch.Generator().manual_seed(0)
    q, k, v, dout = (torch.randn(48, 4, 8, generator=make, dtype=torch.float64) for _ in range(4))

    def on_rank(rank, group):
        mine = [layout.shard(x, rank).clone().requires_grad_() for x in (q, k, v)]
        mask = tw.masks.causal_document(cu)
        out = tw.attention(*mine, plan=plan, layout=layout, mask=mask, group=group)
        (out * layout.shard(dout, rank)).sum().backward()
        return out.detach(), *(x.grad for x in mine)

    got = [layout.unshard(list(x)) for x in zip(*tw.loopback(4, on_rank), strict=True)]
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    parts = []
    for start, stop in pairwise(cu):
        one = (x[start:stop].movedim(0, 1) for x in leaves)
        out = torch.nn.functional.scaled_dot_product_attention(*one, is_causal=True)
        parts.append(out.movedim(1, 0))
    (torch.cat(parts) * dout).sum().backward()
    for x, y in zip(got, [torch.cat(parts).detach(), *(x.grad for x in leaves)], strict=True):
        assert (x - y).abs().max() < 1e-12


@pytest.mark.parametrize(
    ("cu_seqlens", "n", "message"),
    [
        ([1, 4], 2, "cu_seqlens"),
        ([0, 4, 3], 2, "cu_seqlens"),
        (None, 2, "cu_seqlens"),
        ([0, 4], 0, r"world_size \(0\)"),
        ([0, 4], 2.5, r"world_size \(2.5\)"),
    ],
)
def test_wrong_arguments(cu_seqlens, n, message: str):
    with pytest.raises(ValueError, match=message):
        tw.zigzag_documents(cu_seqlens, n)
