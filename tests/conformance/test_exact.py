"""Every strategy is exact: out, lse and each gradient against dense attention in fp64, to 1e-12."""

from __future__ import annotations

from random import Random
from typing import Any

import pytest
import torch
from support.thinned import thinned

import tilewise as tw
from conformance.oracle import assert_close, dense, draw, split
from conformance.table import STRATEGIES, plans
from tilewise.plan.ir import Plan

LAYOUTS = (tw.contiguous, tw.zigzag, tw.striped)


def grid_masks(num_tokens: int) -> dict[str, tw.Mask]:
    return {
        "full": tw.Full(),
        "causal": tw.Causal(),
        "window": tw.Causal() & tw.Window(3, 0),
        "documents": tw.Document([0, 3, 3, 8, num_tokens]) & tw.Causal() | tw.Window(1, 1),
    }


@pytest.mark.parametrize("mask", grid_masks(13))
@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda make: make.__name__)
@pytest.mark.parametrize("strategy", STRATEGIES, ids=lambda strategy: strategy.name)
def test_every_strategy_on_every_layout_and_mask(strategy, layout, mask: str):
    """Uneven shards of 13 tokens on 4 ranks; one shape of the strategy after the other."""
    chosen = list(strategy.plans(4))
    number = LAYOUTS.index(layout) + list(grid_masks(13)).index(mask) * len(LAYOUTS)
    plan = chosen[number % len(chosen)]
    run(plan, layout(13, 4), grid_masks(13)[mask], heads=(4, 4 if "ulysses" in plan.name else 2))


@pytest.mark.parametrize("plan", thinned(p for n in (2, 6) for p in plans(n)), ids=repr)
def test_every_shape_of_every_strategy(plan: Plan):
    run(plan, tw.zigzag(17, plan.world_size), tw.Causal(), heads=(12, 12))


def run(
    plan: Plan,
    layout: tw.Layout,
    mask: tw.Mask,
    heads: tuple[int, int],
    batch: tuple[int, ...] = (),
    head_dim: int = 4,
    uses: tuple[bool, bool] = (True, True),
    seed: int = 0,
    **options: Any,
) -> None:
    """Compare one call with dense attention; queries of a replicated plan stand at q_positions."""
    num_keys = options.get("kv_layout", layout).num_tokens
    positions = None
    num_queries = layout.num_tokens
    if plan.replicated_queries:
        given = options.get("q_positions")
        num_queries = min(2, num_keys) if given is None else len(given)
        last = range(num_keys - num_queries, num_keys)
        positions = torch.tensor(list(last) if given is None else given)
    x = draw(
        (*batch, num_queries, heads[0], head_dim), (*batch, num_keys, heads[1], head_dim), seed
    )
    x = x._replace(dout=x.dout * uses[0], dlse=x.dlse * uses[1])
    want = dense(x, mask, positions, options.get("softmax_scale"))
    assert_close(split(x, plan, layout, mask, uses=uses, **options), want)


@pytest.mark.slow
@pytest.mark.parametrize("plan", [tw.mesh(64, q_tile=8), tw.double_ring(8, 8)], ids=repr)
def test_64_ranks(plan: Plan):
    run(plan, tw.zigzag(200, plan.world_size), tw.Causal(), heads=(2, 1))


@pytest.mark.slow
@pytest.mark.parametrize(
    "plan",
    [tw.ring(256), tw.mesh(256, q_tile=16), tw.ulysses(8, inner=tw.mesh(32, q_tile=4))],
    ids=repr,
)
def test_256_ranks(plan: Plan):
    run(plan, tw.zigzag(600, plan.world_size), tw.Causal(), heads=(8, 8))


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("save", ["gathered", "replay"])
def test_messages_of_shards_without_rows_do_not_count_as_sent(save: str, seed: int):
    """No transport sees them, so what was sent before them may not have left yet."""
    n, draw_rows = 15, Random(seed)
    owners = [draw_rows.randrange(0, n, 2 + seed % 2) for _ in range(9)]
    parts = [[token for token, owner in enumerate(owners) if owner == rank] for rank in range(n)]
    layout = tw.Layout.from_positions(parts, 9)
    for plan in (tw.ring(n), tw.ring(n, moves="q"), tw.mesh(n, q_tile=3)):
        for mask in (tw.Full(), tw.Causal()):
            run(plan, layout, mask, heads=(2, 1), save=save, prune=False)
