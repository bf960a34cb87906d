"""Latents in place of k and v, in every strategy: exact to 1e-12, and no byte but those counted."""

from random import Random
from typing import Any

import pytest
import torch
from support.latents import Sizes, draw_layer

import tilewise as tw
from conformance.oracle import assert_close
from conformance.table import MASK_AWARE, STRATEGIES, plans

LAYOUTS = (tw.contiguous, tw.zigzag, tw.striped)
MASKS = (
    tw.Full(),
    tw.Causal(),
    tw.Causal() & tw.Window(3, 0),
    tw.Document([0, 3, 3, 8, 13]) & tw.Causal() | tw.Window(1, 1),
)


def run(plan: tw.Plan, layout: tw.Layout, mask: tw.Mask, sizes: Sizes, **options: Any) -> None:
    layer = draw_layer(layout.num_tokens, sizes, batch=options.pop("batch", ()))
    found, moved = layer.split(plan, layout, mask, **options)
    assert_close(found, layer.dense(mask))
    if layer.q.ndim == 3:
        work = layer.workload(mask=mask, layout=layout, save=options.get("save"))
        assert moved == tw.volume(plan, work, options.get("backward_plan"))


def sizes_for(plan: tw.Plan, least: int = 2) -> Sizes:
    heads = max(plan.num_head_groups, least)
    return Sizes(2 * heads, heads)


@pytest.mark.parametrize("strategy", STRATEGIES, ids=lambda strategy: strategy.name)
def test_every_strategy(strategy):
    """Uneven shards; one shape of the strategy, layout and mask after the other."""
    for number, plan in enumerate(strategy.plans(4)):
        if not plan.replicated_queries:
            layout, mask = LAYOUTS[number % 3](13, 4), MASKS[(number + 1) % 4]
            run(plan, layout, mask, sizes_for(plan), keep=bool(number % 2))


@pytest.mark.parametrize("make", [make for _, make in MASK_AWARE], ids=[x for x, _ in MASK_AWARE])
def test_plans_made_for_a_mask(make):
    for build, mask in zip(LAYOUTS, MASKS[1:], strict=True):
        layout = build(13, 3)
        run(make(mask, layout), layout, mask, Sizes())


@pytest.mark.parametrize("keep", [False, True])
@pytest.mark.parametrize("save", ["replay", "gathered"])
def test_options_of_a_call(save: Any, keep: bool):
    layout = tw.zigzag(13, 3)
    run(tw.ring(3), layout, tw.Causal(), Sizes(), save=save, keep=keep, batch=(2,))
    per_head = tw.PerHead([tw.Causal(), tw.Full(), tw.Causal() & tw.Window(3, 0), tw.Full()])
    run(tw.all_gather(3), layout, per_head, Sizes(), save=save, keep=keep)


def test_another_plan_backward():
    layout, backward = tw.zigzag(13, 4), tw.mesh(4, q_tile=2)
    run(tw.ring(4), layout, tw.Causal(), Sizes(), backward_plan=backward, keep=True)


def test_ulysses_shares_a_kv_head_between_groups():
    run(tw.ulysses(4), tw.zigzag(13, 4), tw.Causal(), Sizes(8, 2))
    run(tw.ulysses(4, inner=tw.ring(2)), tw.striped(13, 8), tw.Causal(), Sizes(8, 1))


@pytest.mark.parametrize("kind", ["forward", "backward", "partials"])
def test_latents_and_their_gradients_may_be_encoded(kind: str):
    layout, mask = tw.zigzag(24, 4), tw.Causal()
    layer = draw_layer(24)
    exact = layer.dense(mask)
    for plan in (tw.ring(4), tw.mesh(4, q_tile=2), tw.ulysses(4)):
        for wire, near in ((tw.wire.Float8(4), 0.3), (tw.wire.Plain("float32"), 1e-5)):
            found, moved = layer.split(plan, layout, mask, wires={kind: wire})
            work = layer.workload(mask=mask, layout=layout, wires={kind: wire})
            assert moved == tw.volume(plan, work)
            for name, x, y in zip(exact._fields, found, exact, strict=True):
                kept = kind == "backward" and name in ("out", "lse")
                off = float((x - y).abs().max() / y.abs().max())
                assert off < (1e-12 if kept else near), (plan, wire, name)
                assert kept or kind == "partials" or off > 1e-12, (plan, wire, name)
            assert kind != "partials" or float((found.dlatent - exact.dlatent).abs().max()) > 1e-12


@pytest.mark.slow
@pytest.mark.parametrize("n", range(1, 17))
def test_every_world_size(n: int):
    random = Random(n)
    for plan in plans(n, "tree"):
        mask, layout = random.choice(MASKS), random.choice(LAYOUTS)(13, n)
        save = random.choice([None, "replay", "gathered"])
        run(plan, layout, mask, sizes_for(plan, 1), keep=random.random() < 0.3, save=save)
    for _, make in MASK_AWARE:
        mask, layout = random.choice(MASKS), random.choice(LAYOUTS)(13, n)
        run(make(mask, layout), layout, mask, Sizes())


def test_replicated_queries_of_decoding():
    """tree: every rank expands its own rows; dq is complete on every rank, dlatent its own."""
    layer, layout, plan = draw_layer(13), tw.contiguous(13, 4), tw.tree(4)
    last = layer._replace(q=layer.q[-2:], dout=layer.dout[-2:], dlse=layer.dlse[-2:] * 0)

    def on_rank(rank: int, group: Any) -> list[torch.Tensor]:
        rows = layout.shard(layer.latent, rank, dim=0)
        given = [x.clone().requires_grad_() for x in (last.q, rows, layer.w_k, layer.w_v)]
        call = {"plan": plan, "layout": layout, "mask": tw.Causal(), "group": group}
        out = tw.attention(*given[:2], None, **call, wire=layer.wire(given[2:]))
        out.backward(last.dout)
        return [out.detach(), *(x.grad for x in given if x.grad is not None)]

    zeros = layer._replace(dout=layer.dout * 0, dlse=layer.dlse * 0)
    zeros.dout[-2:] = last.dout
    want = zeros.dense(tw.Causal())
    parts = list(zip(*tw.loopback(4, on_rank), strict=True))
    for out, dq in zip(*parts[:2], strict=True):
        assert torch.allclose(out, want.out[-2:], atol=1e-12, rtol=0)
        assert torch.allclose(dq, want.dq[-2:], atol=1e-12, rtol=0)
    grads = layout.unshard(parts[2], dim=0), *(torch.stack(x).sum(0) for x in parts[3:])
    for grad, wanted in zip(grads, want[3:], strict=True):
        assert torch.allclose(grad, wanted, atol=1e-11, rtol=0)
