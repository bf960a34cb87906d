"""The fourteen patterns against their definitions, written out pair by pair."""

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.drawn_masks import boundaries

from tilewise import masks
from tilewise.masks.base import Causal, Full, Mask, Window
from tilewise.masks.tables import PerHead

NUM_TOKENS = 19
edges = boundaries(NUM_TOKENS)


def agree(mask: Mask, allowed) -> None:
    """dense is the definition, and area counts it, over the whole and over parts."""
    rows = range(NUM_TOKENS)
    expected = np.array([[bool(allowed(q, k)) for k in rows] for q in rows])
    mask.check_tokens(NUM_TOKENS)
    assert (mask.dense(rows, rows) == expected).all()
    for q0, k0 in itertools.product((0, 5), (0, 8)):
        area = mask.area((q0, NUM_TOKENS), (k0, NUM_TOKENS))
        assert area == expected[q0:, k0:].sum()


def document(cu: list[int], token: int) -> int:
    return next(i for i, stop in enumerate(cu[1:]) if token < stop)


@given(edges)
def test_documents(cu):
    agree(masks.full_document(cu), lambda q, k: document(cu, q) == document(cu, k))
    agree(masks.causal_document(cu), lambda q, k: document(cu, q) == document(cu, k) and k <= q)


@given(st.integers(0, NUM_TOKENS + 3))
def test_windows(w):
    agree(masks.sliding_window(NUM_TOKENS, w), lambda q, k: abs(q - k) <= w)
    agree(masks.sliding_window_causal(NUM_TOKENS, w), lambda q, k: 0 <= q - k <= w)
    agree(
        masks.global_sliding_window(NUM_TOKENS, w),
        lambda q, k: q < w or k < w or abs(q - k) <= w,
    )


@given(edges)
def test_share_question(cu):
    def allowed(q, k):
        a, b = document(cu, q), document(cu, k)
        return (a == b and k <= q) or (b == 0 and a > 0)

    agree(masks.share_question(cu), allowed)


@given(edges)
def test_causal_blockwise(cu):
    def allowed(q, k):
        same = document(cu, q) == document(cu, k)
        return k <= q and (same or document(cu, q) == len(cu) - 2)

    agree(masks.causal_blockwise(cu), allowed)


@given(st.integers(0, NUM_TOKENS))
def test_prefix_lm_causal(prefix):
    agree(masks.prefix_lm_causal(NUM_TOKENS, prefix), lambda q, k: k < prefix or k <= q)


@given(edges, st.randoms(use_true_random=False))
def test_prefix_lm_document(cu, rng):
    prefixes = [rng.randint(0, b - a) for a, b in itertools.pairwise(cu)]

    def allowed(q, k):
        d = document(cu, q)
        return d == document(cu, k) and (k < cu[d] + prefixes[d] or k <= q)

    agree(masks.prefix_lm_document(cu, prefixes), allowed)


@given(edges, st.integers(1, NUM_TOKENS))
def test_block_causal_document(cu, block):
    def allowed(q, k):
        d = document(cu, q)
        return d == document(cu, k) and (k - cu[d]) // block <= (q - cu[d]) // block

    agree(masks.block_causal_document(cu, block), allowed)


@given(st.integers(1, NUM_TOKENS + 5), st.integers(0, 9))
def test_block_sparse(block, seed):
    count = -(-NUM_TOKENS // block)
    table = np.random.default_rng(seed).random((count, count)) < 0.5
    agree(masks.block_sparse(table, block), lambda q, k: table[q // block, k // block])
    agree(
        masks.block_sparse(torch.tensor(table), block), lambda q, k: table[q // block, k // block]
    )
    assert masks.block_sparse(table, block) == masks.block_sparse(table.tolist(), block)


@given(edges, edges, st.integers(0, 9))
def test_block_sparse_variable(q_edges, k_edges, seed):
    shape = len(q_edges) - 1, len(k_edges) - 1
    table = np.random.default_rng(seed).random(shape) < 0.5
    mask = masks.block_sparse_variable(table, q_edges, k_edges)
    agree(mask, lambda q, k: table[document(q_edges, q), document(k_edges, k)])


@given(edges, st.integers(1, NUM_TOKENS + 3))
def test_chunked_causal(cu, chunk):
    def allowed(q, k):
        d = document(cu, q)
        same = d == document(cu, k) and (k - cu[d]) // chunk == (q - cu[d]) // chunk
        return k <= q and same

    agree(masks.chunked_causal(NUM_TOKENS, chunk, cu), allowed)
    whole = masks.chunked_causal(NUM_TOKENS, chunk)
    agree(whole, lambda q, k: k <= q and k // chunk == q // chunk)
    agree(
        whole & masks.full_document(cu),
        lambda q, k: k <= q and k // chunk == q // chunk and document(cu, q) == document(cu, k),
    )


@given(edges, edges, st.one_of(st.none(), st.integers(0, NUM_TOKENS)))
def test_causal_with_blocks(cu, ends, window):
    blocks = [*itertools.pairwise(sorted({*ends}))][::2]

    def allowed(q, k):
        together = any(a <= q < b and a <= k < b for a, b in blocks)
        return together or 0 <= q - k <= (NUM_TOKENS if window is None else window)

    mask = masks.causal_with_blocks(NUM_TOKENS, blocks, window)
    agree(mask, allowed)
    agree(
        mask & masks.full_document(cu),
        lambda q, k: allowed(q, k) and document(cu, q) == document(cu, k),
    )


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: masks.chunked_causal(9, 0), r"chunk \(0\) must be at least 1"),
        (lambda: masks.chunked_causal(9, 4, [0, 3, 8]), "cu_seqlens ends at 8, but there are 9"),
        (lambda: masks.causal_with_blocks(9, [(2, 10)]), r"block \(2, 10\) .* num_tokens \(9\)"),
        (lambda: masks.causal_with_blocks(9, [(4, 2)]), r"block \(4, 2\) must be"),
        (lambda: masks.causal_with_blocks(9, [(0, 3), (2, 4)]), r"both allow query 2, key 2"),
        (lambda: masks.causal_with_blocks(9, [(0, 3)], -1), r"left \(-1\) must be at least 0"),
    ],
)
def test_masks_of_models_refuse_what_does_not_fit(build, message):
    with pytest.raises(ValueError, match=message):
        build()


def test_full_and_causal():
    assert masks.full(NUM_TOKENS) == Full() and masks.causal(NUM_TOKENS) == Causal()
    assert masks.sliding_window(NUM_TOKENS, 4) == Window(4, 4)


def test_block_tables_by_head_make_masks_by_head():
    table = np.random.default_rng(0).random((3, 4, 4)) < 0.5
    mask = masks.block_sparse(table, 5)
    assert isinstance(mask, PerHead) and len(mask.heads) == 3
    dense = mask.dense(range(NUM_TOKENS), range(NUM_TOKENS))
    assert (dense == table.repeat(5, 1).repeat(5, 2)[:, :NUM_TOKENS, :NUM_TOKENS]).all()


def test_no_documents_at_all_allow_nothing():
    for make in (masks.share_question, masks.causal_blockwise, masks.causal_document):
        assert make([0]).area((0, 9), (0, 9)) == 0
    assert masks.prefix_lm_document([0, 0, 3], [0, 3]).area((0, 3), (0, 3)) == 9


@pytest.mark.parametrize("name", masks.ALL_NAMES)
def test_random_masks_count_what_they_allow(name: str):
    for seed, num_tokens in enumerate((1, 2, 3, 127, 300, 2500)):
        mask = masks.random(name, num_tokens, seed=seed)
        mask.check_tokens(num_tokens)
        span = (0, num_tokens)
        dense = mask.dense(range(num_tokens), range(num_tokens))
        assert mask.area(span, span) == dense.sum()
        assert dense.any()
        assert mask == masks.random(name, num_tokens, seed=seed)


def test_there_are_fourteen_patterns():
    assert len(masks.NAMES) == len(set(masks.NAMES)) == 14


def test_random_takes_documents_heads_and_densities():
    cu = (0, 5, 30)
    mask = masks.random("causal_document", 30, seed=0, cu_seqlens=torch.tensor(cu))
    assert mask == masks.causal_document(cu)
    by_head = masks.random("block_sparse_uniform", 2000, seed=0, num_kv_heads=3, density=0.5)
    assert isinstance(by_head, PerHead) and len(set(by_head.heads)) == 3
    share = by_head.area((0, 2000), (0, 2000)) / 2000**2
    assert share == pytest.approx(0.5, abs=0.05)


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: masks.full(0), r"num_tokens \(0\) must be at least 1"),
        (lambda: masks.sliding_window(9, -1), r"Window left \(-1\)"),
        (lambda: masks.global_sliding_window(9, -1), r"window \(-1\) must be at least 0"),
        (lambda: masks.prefix_lm_causal(9, 10), r"prefix \(10\) must be from 0 to 9"),
        (
            lambda: masks.prefix_lm_document([0, 3, 9], [1, 7]),
            r"prefix 1 \(7\) must be from 0 to 6",
        ),
        (lambda: masks.prefix_lm_document([0, 3, 9], [1]), "1 prefixes for 2 documents"),
        (lambda: masks.block_causal_document([0, 9], 0), r"block \(0\) must be at least 1"),
        (lambda: masks.block_sparse([True], 4), "block_mask has 1 dimensions"),
        (lambda: masks.block_sparse_variable([[True]], [0, 4, 9], [0, 9]), r"is \(1, 1\)"),
        (lambda: masks.random("ring", 9, seed=0), "'ring' is not known; take one of full, causal"),
        (lambda: masks.random("full_document", 9, seed=0, cu_seqlens=[0, 8]), "ends at 8, but"),
        (lambda: masks.random("block_sparse_uniform", 9, seed=0, density=0), r"density \(0\)"),
        (lambda: masks.block_sparse([[True] * 3] * 3, 4).check_tokens(8), "blocks end at 12"),
    ],
)
def test_bad_parameters_are_refused_with_the_numbers(build, message):
    with pytest.raises(ValueError, match=message):
        build()


@pytest.mark.parametrize("entry", ["1", 0.5, float("nan"), 2])
@pytest.mark.parametrize("by_head", [False, True])
def test_blocks_of_anything_but_true_and_false_are_refused(entry, by_head):
    table = [[1, 0], [entry, 1]] if entry != "1" else [["1", "0"], ["1", "1"]]
    with pytest.raises(ValueError, match="must hold True and False"):
        masks.block_sparse([table, table] if by_head else table, 4)
