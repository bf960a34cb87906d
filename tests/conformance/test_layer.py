"""What models add to attention is exact in every strategy: fp64, to 1e-12, each gradient apart."""

from __future__ import annotations

from itertools import product
from random import Random
from typing import Any, NamedTuple

import pytest
import torch
from support.thinned import thinned

import tilewise as tw
from conformance.oracle import Changes, assert_close, dense, draw, split
from conformance.table import STRATEGIES
from tilewise.kernels.dropout import kept
from tilewise.kernels.protocol import Places, Scores
from tilewise.plan.ir import Plan

LAYOUTS = (tw.contiguous, tw.zigzag, tw.striped)


class Layer(NamedTuple):
    """What a model asks of its attention.

    Attributes:
        widths: head_dim of q and k, and of v.
    """

    sink: bool = False
    widths: tuple[int, int] = (4, 4)
    softcap: float | None = None
    dropout_p: float = 0.0


LAYERS = {
    "sink": Layer(sink=True),
    "softcap": Layer(softcap=1.5),
    "narrow values": Layer(widths=(24, 16)),
    "wide values": Layer(widths=(16, 40)),
    "MLA": Layer(widths=(192, 128)),
    "dropout": Layer(dropout_p=0.3),
    "all": Layer(True, (6, 3), 2.0, 0.5),
}
SEED = 0x1234_5678_9ABC_DEF0


def masks(num_tokens: int) -> dict[str, tw.Mask]:
    cu = [0, 3, 3, 8, num_tokens]
    return {
        "full": tw.Full(),
        "chunked_causal": tw.masks.chunked_causal(num_tokens, 4, cu),
        "causal_with_blocks": tw.masks.causal_with_blocks(num_tokens, [(1, 4), (6, 9)], 3),
        "rows without keys": tw.Window(2, 0) & tw.Slices([((5, num_tokens), (0, 9), "full")]),
    }


def run(plan: Plan, layout: tw.Layout, mask: tw.Mask, layer: Layer, seed: int, **more: Any) -> None:
    """Compare one call with dense attention; a tree's queries are the last two tokens."""
    num_tokens, heads = layout.num_tokens, (4, 4 if "ulysses" in plan.name else 2)
    num_queries = 2 if plan.replicated_queries else num_tokens
    positions = torch.arange(num_tokens - num_queries, num_tokens)
    batch, (width, v_width) = more.pop("batch", ()), layer.widths
    shapes = (*batch, num_queries, heads[0], width), (*batch, num_tokens, heads[1], width)
    x = draw(*shapes, seed, v_width)
    sink = torch.linspace(-2, 2, heads[0], dtype=torch.float64) if layer.sink else None
    changes = Changes(sink, layer.softcap)
    if layer.softcap is not None:
        more["softcap"] = layer.softcap
    if layer.dropout_p:
        more |= {"dropout_p": layer.dropout_p, "dropout_seed": SEED}
        places = Places(positions, torch.arange(num_tokens), 0)
        scores = Scores(1.0, None, layer.dropout_p, SEED, places=places)
        keeps = kept(scores, *(batch or (1,)), heads[0]).double() / (1 - layer.dropout_p)
        changes = changes._replace(kept=keeps if batch else keeps[0])
    want = dense(x, mask, positions, changes=changes)
    assert_close(split(x, plan, layout, mask, sink=sink, **more), want)


@pytest.mark.parametrize(
    ("strategy", "layer"),
    thinned(product(STRATEGIES, LAYERS), 3),
    ids=lambda of: getattr(of, "name", of),
)
def test_every_strategy(strategy, layer: str):
    """One shape, layout and mask after the other, 13 tokens on 4 ranks."""
    random = Random(f"{strategy.name} {layer}")
    for name, mask in masks(13).items():
        plan = random.choice(list(strategy.plans(4)))
        batch = random.choice([(), (), (2,)])
        save = random.choice([None, "replay", "gathered"])
        layout = random.choice(LAYOUTS)(13, 4)
        run(plan, layout, mask, LAYERS[layer], seed=len(name), batch=batch, save=save)


def test_a_sink_has_a_gradient_of_zero_where_a_rank_has_no_rows():
    layout, sink = tw.contiguous(2, 3), torch.zeros(2, requires_grad=True)

    def on_rank(rank: int, group: Any) -> torch.Tensor:
        own = sink.detach().clone().requires_grad_()
        q, k, v = (layout.shard(x, rank, dim=0) for x in torch.ones(3, 2, 2, 4))
        call = {"plan": tw.ring(3), "layout": layout, "mask": tw.Full(), "group": group}
        out = tw.attention(q.requires_grad_(), k, v, **call, sink=own)
        (grad,) = torch.autograd.grad(out.sum(), own)
        return grad

    first, second, third = tw.loopback(3, on_rank)
    assert torch.equal(third, torch.zeros(2)) and bool((first < 0).all()) and bool(second.any())


@pytest.mark.parametrize("value", [-torch.inf, 0.0])
def test_rows_no_key_reaches_stay_zero_and_finite(value: float):
    mask = tw.Slices([((1, 3), (0, 3), "full")])
    q, k, v = (torch.randn(3, 1, 2, requires_grad=True) for _ in range(3))
    sink = torch.full((1,), value, requires_grad=True)
    call = {"plan": tw.ring(1), "layout": tw.contiguous(3, 1), "mask": mask, "return_lse": True}
    out, lse = tw.attention(q, k, v, **call, sink=sink)
    assert not out[0].any() and lse[0].item() == value
    (out.sum() + lse[1:].sum()).backward()
    grads = [x.grad for x in (q, k, v, sink)]
    assert all(x is not None and x.isfinite().all() for x in grads)
    if value == -torch.inf:
        assert torch.equal(out, tw.attention(q, k, v, **call)[0])


@pytest.mark.parametrize("strategy", STRATEGIES, ids=lambda strategy: strategy.name)
def test_no_byte_more_than_the_volume(strategy):
    """Of values of another width, with and without the largest scores."""
    layout, heads = tw.zigzag(13, 4), (4, 4)
    for i, plan in enumerate(strategy.plans(4)):
        if plan.replicated_queries:
            continue
        layer = {"v_head_dim": (3, 8)[i % 2], "max_logit": i % 3 == 0}
        shape = {"num_tokens": 13, "num_heads": 4, "num_kv_heads": 4, "head_dim": 5}
        work = tw.Workload(**shape, **layer, dtype="float32", mask=tw.Causal(), layout=layout)
        x = draw((13, heads[0], 5), (13, heads[1], 5), 0, layer["v_head_dim"])

        def on_rank(rank: int, group: Any, plan=plan, x=x, layer=layer) -> tuple[int, int]:
            q, k, v = (layout.shard(t, rank, dim=0).float().requires_grad_() for t in x[:3])
            call = {"plan": plan, "layout": layout, "mask": tw.Causal(), "group": group}
            found = tw.attention(q, k, v, **call, return_max_logit=layer["max_logit"])
            forward, out = group.bytes_sent, found[0] if layer["max_logit"] else found
            out.sum().backward()
            return forward, group.bytes_sent - forward

        assert tuple(zip(*tw.loopback(4, on_rank), strict=True)) == tuple(tw.volume(plan, work))


@pytest.mark.parametrize("strategy", STRATEGIES, ids=lambda strategy: strategy.name)
def test_the_largest_score_of_a_ranks_rows(strategy):
    """By head, over rows and batch, capped and without the sink; -inf without rows or keys."""
    layout, mask = tw.contiguous(7, 4), tw.Window(3, 0) & tw.Slices([((2, 7), (0, 5), "full")])
    x = draw((2, 7, 4, 4), (2, 7, 4, 4), seed=1)
    table = 2 * torch.tanh(torch.einsum("bqhd,bkhd->bqhk", x.q, x.k) / 4)
    allowed = torch.as_tensor(mask.dense(range(7), range(7)))
    largest = table.masked_fill(~allowed[:, None], -torch.inf).amax(-1)
    for plan in strategy.plans(4):
        if plan.replicated_queries:
            continue

        def on_rank(rank: int, group: Any, plan=plan) -> torch.Tensor:
            q, k, v = (layout.shard(t, rank, dim=1).requires_grad_() for t in x[:3])
            call = {"plan": plan, "layout": layout, "mask": mask, "group": group}
            more = {"return_lse": True, "return_max_logit": True, "softcap": 2.0}
            out, lse, found = tw.attention(q, k, v, **call, **more, sink=torch.ones(4))
            (out.sum() + lse.sum()).backward()
            assert not found.requires_grad and found.dtype == torch.float32
            return found

        for rank, found in enumerate(tw.loopback(4, on_rank)):
            rows = layout.shard(largest, rank, dim=1).flatten(0, 1)
            want = torch.cat([rows, rows.new_full((1, 4), -torch.inf)]).amax(0)
            assert torch.equal(found == -torch.inf, want == -torch.inf)
            assert torch.allclose(found.double(), want, atol=1e-6)


def dropped(plan: Plan, layout: tw.Layout, heads: int, p: float, seed: int) -> torch.Tensor:
    """bool [heads, queries, keys]: which pairs attention drops, read from the weights of values
    that are one-hot; queries and keys are all 0, so no pair is hidden."""
    num_tokens = layout.num_tokens
    q, v = torch.zeros(num_tokens, heads, 2), torch.eye(num_tokens)[:, None]

    def on_rank(rank: int, group: Any) -> torch.Tensor:
        own_q, own_k = (layout.shard(x, rank, dim=0) for x in (q, q[:, :1]))
        call = {"plan": plan, "layout": layout, "mask": tw.Full(), "group": group}
        own_v = layout.shard(v, rank, dim=0)
        return tw.attention(own_q, own_k, own_v, **call, dropout_p=p, dropout_seed=seed)

    out = layout.unshard(tw.loopback(plan.world_size, on_rank), dim=0)
    return (out == 0).transpose(0, 1)


def test_the_same_pairs_are_dropped_at_every_world_size_in_every_strategy():
    want = dropped(tw.ring(1), tw.contiguous(37, 1), 4, 0.3, SEED)
    random = Random(0)
    for n in (2, 3, 8):
        for strategy in STRATEGIES:
            plan = random.choice(list(strategy.plans(n)))
            if not plan.replicated_queries and 4 % plan.num_head_groups == 0:
                layout = random.choice(LAYOUTS)(37, n)
                assert torch.equal(dropped(plan, layout, 4, 0.3, SEED), want), (plan, layout)


@pytest.mark.parametrize("p", [0.01, 0.3, 0.5, 0.9])
def test_dropped_pairs_are_independent_draws_of_their_rate(p: float):
    """Rates of the whole and of every head, row and key; and a chi-squared test of pairs of
    neighbours, of heads, rows, keys and seeds, on 2 x 2 tables."""
    size, one = 96, tw.ring(1)
    table = dropped(one, tw.contiguous(size, 1), 4, p, 5).double()
    other = dropped(one, tw.contiguous(size, 1), 4, p, 6).double()
    for along in ((0, 1, 2), (1, 2), (0, 2), (0, 1)):
        rates, count = table.mean(along), table.numel() / max(1, table.mean(along).numel())
        sigma = (p * (1 - p) / count) ** 0.5
        assert float((rates - p).abs().max()) < (4 if rates.ndim == 0 else 5.5) * sigma
    shifted = {"head": table.roll(1, 0), "row": table.roll(1, 1), "key": table.roll(1, 2)}
    for name, x in {**shifted, "seed": other, "transposed": table.transpose(1, 2)}.items():
        both, n = (table * x).mean(), table.numel()
        chi_squared = n * (both - table.mean() * x.mean()) ** 2 / (p * (1 - p)) ** 2
        assert float(chi_squared) < 16, name  # of one degree of freedom: 4 sigma
