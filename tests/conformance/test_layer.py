"""What models add to attention is exact in every strategy: fp64, to 1e-12, each gradient apart."""

from __future__ import annotations

from random import Random
from typing import Any, NamedTuple

import pytest
import torch

import tilewise as tw
from conformance.oracle import Changes, assert_close, dense, draw, split
from conformance.table import STRATEGIES
from tilewise.plan.ir import Plan

LAYOUTS = (tw.contiguous, tw.zigzag, tw.striped)


class Layer(NamedTuple):
    """What a model asks of its attention.

    Attributes:
        widths: head_dim of q and k, and of v.
    """

    sink: bool = False
    widths: tuple[int, int] = (4, 4)


LAYERS = {
    "sink": Layer(sink=True),
}


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
    want = dense(x, mask, positions, changes=Changes(sink))
    assert_close(split(x, plan, layout, mask, sink=sink, **more), want)


@pytest.mark.parametrize("layer", LAYERS)
@pytest.mark.parametrize("strategy", STRATEGIES, ids=lambda strategy: strategy.name)
def test_every_strategy(strategy, layer: str):
    """One shape, layout and mask after the other, 13 tokens on 4 ranks."""
    random = Random(f"{strategy.name} {layer}")
    for name, mask in masks(13).items():
        plan = random.choice(list(strategy.plans(4)))
        batch = random.choice([(), (2,)])
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
