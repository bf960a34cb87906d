"""Attention to chosen keys, against dense attention with the same pairs: each gradient, in fp64."""

from __future__ import annotations

from random import Random
from typing import Any

import numpy as np
import pytest
import torch
from support.chosen_problems import (
    Problem,
    beside,
    choices,
    chosen_by,
    compare,
    dense,
    indexer,
    problem,
)
from support.drawn_layouts import drawn, drawn_mask, normal
from torch import Tensor

import tilewise as tw
from tilewise.indexed import lists
from tilewise.kernels.reference import Reference


@pytest.mark.parametrize("seed", range(100))
def test_attention_is_that_of_dense_formulas(seed: int):
    """Over layouts, documents, masks, lengths of lists, batches, heads, widths and sinks."""
    split, draw = drawn(seed), Random(seed)
    n, mask = split.layout.num_tokens, drawn_mask(draw, split.layout.num_tokens)
    mask = mask & tw.Document(split.cu_seqlens) if draw.random() < 0.4 else mask
    allowed = mask.dense(np.arange(n), np.arange(n))
    compare(problem(draw, allowed, seed), split.layout, mask)


@pytest.mark.parametrize("seed", range(20))
def test_a_window_beside_a_choice(seed: int):
    """Against dense formulas whose choice has the window's keys as well."""
    split, draw = drawn(seed), Random(seed)
    n, window = split.layout.num_tokens, draw.randint(1, 9)
    mask = drawn_mask(draw, n)
    mask = mask & tw.Document(split.cu_seqlens) if draw.random() < 0.6 else mask
    allowed = mask.dense(np.arange(n), np.arange(n))
    given = problem(draw, allowed, seed)
    compare(given, split.layout, mask, window, beside(given, allowed, window))


@pytest.mark.parametrize(
    "seed", [*range(40), *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(40, 300))]
)
def test_a_choice_and_the_attention_to_it_are_those_of_dense_formulas(seed: int):
    """Over layouts of 1 to 8 ranks, documents, masks, k, ties, sinks, windows and batches."""
    split, draw = drawn(seed), Random(seed)
    n, mask = split.layout.num_tokens, drawn_mask(draw, split.layout.num_tokens)
    mask = mask & tw.Document(split.cu_seqlens) if draw.random() < 0.5 else mask
    allowed = mask.dense(np.arange(n), np.arange(n))
    given, k = problem(draw, allowed, seed), draw.randint(1, n)
    ties = draw.random() < 0.6
    whole = indexer(n, len(given.q), draw.choice([1, 3]), seed, ties=ties)
    lists = [chosen_by(scores, allowed, k) for scores in whole.scores()]
    filled = [[row + [-1] * (k - len(row)) for row in entry] for entry in lists]
    wanted = given._replace(positions=torch.tensor(filled))
    window = draw.choice([None, draw.randint(1, 9)])
    if window is not None:
        wanted = beside(wanted, allowed, window)
    compare(given, split.layout, mask, window, wanted, choosing=(whole, k))


def test_a_block_of_one_query(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(lists, "MOST_NUMBERS", 1)
    draw = Random(5)
    compare(problem(draw, np.ones((24, 24), bool), 5), tw.zigzag(24, 3), tw.Full())


def test_an_indexed_layer():
    """The choice and the attention to it, and the same with every key chosen as plain attention."""
    n, layout = 32, tw.zigzag(32, 4)
    q, k, v = (normal(n, heads, 4, seed=i) for i, heads in enumerate((4, 2, 2)))
    indexer = normal(n, 3, 5, seed=4), normal(n, 5, seed=5), normal(n, 3, seed=6)

    def run(rank: int, group: Any) -> tuple[Tensor, Tensor]:
        cp = tw.ContextParallel(group, num_tokens=n, layout=layout, mask=tw.Causal())
        own = [cp.shard(x) for x in (q, k, v)]
        chosen = cp.index(*(cp.shard(x, 0) for x in indexer), k=n)
        return cp.attention(*own, mask=tw.Chosen(chosen)), cp.attention(*own, plan=tw.ring(4))

    for out, plain in tw.loopback(4, run):
        assert (out - plain).abs().max() < 1e-12


def test_scores_of_chosen_keys_train_an_indexer():
    """As docs/indexed.md writes them: against the table of scores, each gradient."""
    n, layout = 24, tw.zigzag(24, 3)
    operands = normal(n, 3, 5, seed=4), normal(n, 5, seed=5), normal(n, 3, seed=6)
    positions = choices(Random(2), np.ones((n, n), bool), 1, 4)[0]
    weight = normal(n, 4, seed=7)

    def scores(q: Tensor, keys: Tensor, weights: Tensor) -> Tensor:
        return torch.einsum("thk,th->tk", torch.einsum("thd,tkd->thk", q, keys).relu(), weights)

    def run(rank: int, group: Any) -> list[Tensor | None]:
        cp = tw.ContextParallel(group, num_tokens=n, layout=layout)
        q, k, w = (cp.shard(x, 0).clone().requires_grad_() for x in operands)
        keys = cp.gather_rows(k, cp.shard(positions, 0))
        (scores(q, keys, w) * cp.shard(weight, 0)).sum().backward()
        return [q.grad, k.grad, w.grad]

    leaves = [x.clone().requires_grad_() for x in operands]
    keys = leaves[1][positions.clamp(min=0)] * (positions >= 0)[..., None]
    (scores(leaves[0], keys, leaves[2]) * weight).sum().backward()
    for parts, leaf in zip(zip(*tw.loopback(3, run), strict=True), leaves, strict=True):
        assert (layout.unshard(parts, 0) - leaf.grad).abs().max() < 1e-12


def test_an_attention_layout_is_left_alone():
    layout, n = tw.contiguous(16, 2), 16
    q, k, v = (normal(n, 2, 4, seed=i) for i in range(3))
    positions = torch.arange(n)[:, None]

    def run(rank: int, group: Any) -> Tensor:
        cp = tw.ContextParallel(
            group, num_tokens=n, layout=layout, attention_layout=tw.zigzag(n, 2)
        )
        chosen = tw.Chosen(cp.shard(positions, 0))
        return cp.attention(cp.shard(q), cp.shard(k), cp.shard(v), mask=chosen)

    assert (layout.unshard(tw.loopback(2, run), -3) - v).abs().max() < 1e-12


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_low_precision_is_no_worse_than_the_dense_kernels(dtype: torch.dtype):
    n, layout = 64, tw.contiguous(64, 2)
    q, k, v = (normal(n, 2, 16, seed=i) for i in range(3))
    positions = torch.arange(n).expand(n, n).clone()
    low = [x.to(dtype) for x in (q, k, v)]

    def run(rank: int, group: Any) -> tuple[Tensor, Tensor]:
        cp = tw.ContextParallel(group, num_tokens=n, layout=layout, kernel=Reference())
        own = [cp.shard(x) for x in low]
        out = cp.attention(*own, mask=tw.Chosen(cp.shard(positions, 0)), kernel="reference")
        return out, cp.attention(*own, plan=tw.ring(2))

    outs, plain = zip(*tw.loopback(2, run), strict=True)
    want = torch.einsum("hqk,khd->qhd", (torch.einsum("qhd,khd->hqk", q, k) / 4).softmax(-1), v)
    errors = [(layout.unshard(x, -3).double() - want).abs().max() for x in (outs, plain)]
    assert outs[0].dtype == dtype
    assert errors[0] <= 2 * errors[1]


def test_latents_travel_in_place_of_keys_and_values():
    """Multi-head latent attention: expanded on the rank whose queries chose them."""
    n, layout, width = 40, tw.zigzag(40, 4), 6
    q, x, w = normal(n, 3, 4), normal(n, width, seed=1), normal(width, 3 * (4 + 2), seed=2)
    draw = Random(1)
    given = choices(draw, tw.Causal().dense(np.arange(n), np.arange(n)), 1, 5)
    rope = torch.arange(n, dtype=torch.float64) / 7

    def expand(rows: Tensor, positions: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        made = (rows @ weight).unflatten(-1, (3, 6))
        return made[..., :4] * rope[positions][:, None, None].cos(), made[..., 4:]

    leaves = [one.clone().requires_grad_() for one in (q, x, w)]
    k, v = expand(leaves[1], torch.arange(n), leaves[2])
    whole = Problem(q[None], k, v, given, None, (normal(1, n, 3, 2, seed=8), normal(1, n, 3)), 0.5)
    out, _ = dense(whole, leaves[0][None], k[None], v[None], None)
    (out * whole.weights[0]).sum().backward()

    def run(rank: int, group: Any) -> tuple[Any, ...]:
        cp = tw.ContextParallel(group, num_tokens=n, layout=layout, mask=tw.Causal())
        mine = [cp.shard(q), cp.shard(x, 0), w]
        mine = [one.clone().requires_grad_() for one in mine]
        latent = tw.wire.Latent(expand, [mine[2]], num_kv_heads=3, head_dim=4, v_head_dim=2)
        chosen = tw.Chosen(cp.shard(given[0], 0))
        before = group.bytes_sent
        found = cp.attention(mine[0], mine[1], None, mask=chosen, wire=latent, softmax_scale=0.5)
        sent = group.bytes_sent - before
        (found * cp.shard(whole.weights[0][0])).sum().backward()
        return found.detach(), *(one.grad for one in mine), sent

    outs, dq, dx, dw, sent = zip(*tw.loopback(4, run), strict=True)
    assert (layout.unshard(outs, -3) - out[0]).abs().max() < 1e-12
    for found, leaf in zip(
        (layout.unshard(dq, -3), layout.unshard(dx, 0), sum(dw)), leaves, strict=True
    ):
        assert leaf.grad is not None
        assert (found - leaf.grad).abs().max() < 1e-12
    assert max(sent) <= 10 * 3 * (width * 8 + 4) + 8 * 4 * 3


WRONG = (
    ({"positions": torch.tensor([[0, 8]] * 4)}, "4 chooses key 8, which must be from 0 to 7"),
    ({"positions": torch.tensor([[0, -2]] * 4)}, r"chooses key -2, which must be from 0 to 7"),
    ({"positions": torch.tensor([[3], [5], [7], [0]])}, r"6 chooses key 7, which Causal\(\) hides"),
    ({"positions": torch.tensor([[3, 3]] * 4)}, "position 4 chooses key 3, which it names twice"),
    ({"positions": torch.zeros(3, 2).long()}, r"chosen positions are \[3, 2\], but q is"),
    ({"positions": torch.arange(9).expand(4, 9)}, "each query chooses 9 keys of 8 tokens"),
    ({"bias": torch.zeros(2, 8, 8)}, "bias .* is not taken with mask=tw.Chosen"),
    ({"softcap": 3.0}, "softcap .* is not taken"),
    ({"dropout_p": 0.1, "dropout_seed": 1}, "dropout_p .* is not taken"),
    ({"reduction": "canonical"}, "reduction .* is not taken"),
    ({"wire": tw.wire.Plain("float32")}, "wire .* is not taken"),
    ({"kernel": "cpu"}, r"kernel \(cpu\) takes no list of keys"),
    ({"kernel": "triton"}, "'triton' cannot serve .*(interpreter|installed); 'reference' can"),
    ({"sink": torch.zeros(3)}, "sink is float32"),
    ({"softmax_scale": -1.0}, "softmax_scale"),
    ({"k": torch.zeros(3, 2, 4)}, "k has 3 tokens on rank 1|k .* and v .* must have the same"),
    ({"v": None}, "v"),
)  # fmt: skip


@pytest.mark.parametrize(("change", "message"), WRONG)
def test_a_wrong_rank_is_named_on_all(change: dict[str, Any], message: str):
    def run(rank: int, group: Any) -> None:
        cp = tw.ContextParallel(group, num_tokens=8, layout=tw.contiguous(8, 2), mask=tw.Causal())
        given: dict[str, Any] = {name: torch.zeros(4, 2, 4) for name in "qkv"}
        given |= {"positions": torch.tensor([[0, -1]] * 4)} | (change if rank else {})
        with pytest.raises(ValueError, match=f"rank 1: .*({message})"):
            cp.attention(mask=tw.Chosen(given.pop("positions")), **given)
        assert group.bytes_sent == 0

    tw.loopback(2, run)


def test_ranks_compare_how_many_keys_they_choose():
    def run(rank: int, group: Any) -> None:
        cp = tw.ContextParallel(group, num_tokens=8, layout=tw.contiguous(8, 2))
        positions = torch.full((4, 2 + rank), -1)
        with pytest.raises(ValueError, match="ranks disagree on keys of a query"):
            cp.attention(*[torch.zeros(4, 2, 4)] * 3, mask=tw.Chosen(positions))
        assert group.bytes_sent == 0

    tw.loopback(2, run)


def test_ranks_compare_windows():
    def run(rank: int, group: Any) -> None:
        cp = tw.ContextParallel(group, num_tokens=8, layout=tw.contiguous(8, 2))
        mask = tw.Chosen(torch.full((4, 2), -1), window=2 + rank)
        with pytest.raises(ValueError, match="ranks disagree on window"):
            cp.attention(*[torch.zeros(4, 2, 4)] * 3, mask=mask)
        assert group.bytes_sent == 0

    tw.loopback(2, run)
    with pytest.raises(ValueError, match=r"window \(0\) must be at least 1"):
        tw.Chosen(torch.full((4, 2), -1), window=0)


def test_ranks_compare_a_choice_with_a_mask():
    def run(rank: int, group: Any) -> None:
        cp = tw.ContextParallel(group, num_tokens=8, layout=tw.contiguous(8, 2))
        mask = tw.Chosen(torch.full((4, 2), -1)) if rank else tw.Full()
        with pytest.raises(ValueError, match="ranks disagree on"):
            cp.attention(*[torch.zeros(4, 2, 4)] * 3, mask=mask, plan=tw.ring(2))

    tw.loopback(2, run)


@pytest.mark.parametrize("combine", [lambda a, b: a & b, lambda a, b: b | a, lambda a, b: a + b])
def test_a_choice_is_not_combined_with_masks(combine: Any):
    with pytest.raises(TypeError, match="chosen keys are not combined with masks"):
        combine(tw.Chosen(torch.zeros(4, 2, dtype=torch.int64)), tw.Causal())


@pytest.mark.parametrize("wrong", [torch.zeros(4, 2), torch.zeros(4, dtype=torch.int64), [[1]]])
def test_a_choice_is_whole_numbers_of_each_query(wrong: Any):
    with pytest.raises(ValueError, match="positions"):
        tw.Chosen(wrong)
