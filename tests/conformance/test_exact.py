"""Every strategy is exact: out, lse and each gradient against dense attention in fp64, to 1e-12."""

from __future__ import annotations

from collections.abc import Callable
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
NUM_RANDOM, NUM_QUICK = 180, 30
USES = ((True, True), (True, True), (False, True), (True, False))  # of out and of lse by the loss


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


def random_mask(random: Random, num_tokens: int, depth: int = 0) -> tw.Mask:
    def side() -> int | None:
        return random.choice([None, 0, 1, 5, random.randint(0, num_tokens)])

    cuts = sorted(random.randint(0, num_tokens) for _ in range(random.randint(0, 6)))
    makers: list[Callable[[], tw.Mask]] = [
        tw.Full,
        tw.Causal,
        lambda: tw.Window(side(), side()),
        lambda: tw.Document([0, *cuts, num_tokens]),
    ]
    if depth < 2:
        makers += [
            lambda: (
                random_mask(random, num_tokens, depth + 1)
                & random_mask(random, num_tokens, depth + 1)
            ),
            lambda: (
                random_mask(random, num_tokens, depth + 1)
                | random_mask(random, num_tokens, depth + 1)
            ),
        ]
    return random.choice(makers)()


def random_heads(random: Random, groups: int) -> tuple[int, int]:
    """MHA, GQA or MQA, such that the head groups divide them."""
    num_kv_heads = random.choice([1, 2, 4, groups])
    num_heads = num_kv_heads * random.choice([1, 2, 3, 4])
    if num_heads % groups == 0 and (num_kv_heads % groups == 0 or groups % num_kv_heads == 0):
        return num_heads, num_kv_heads
    num_heads = groups * random.choice([1, 2])
    legal = [
        d
        for d in range(1, num_heads + 1)
        if num_heads % d == 0 and (d % groups == 0 or groups % d == 0)
    ]
    return num_heads, random.choice(legal)


def random_options(random: Random, plan: Plan, num_tokens: int) -> dict[str, Any]:
    options: dict[str, Any] = {}
    if random.random() < 0.5:
        options["save"] = random.choice(["gathered", "replay"])
    if random.random() < 0.2:
        options["prune"] = False
    if random.random() < 0.2:
        options["softmax_scale"] = random.choice([0.3, 1.0, 2.0])
    if plan.replicated_queries and random.random() < 0.5:
        options["q_positions"] = [random.randrange(num_tokens) for _ in range(3)]
    replayed = options.get("save", plan.default_save) == "replay"
    if replayed and not plan.replicated_queries and random.random() < 0.25:
        others = plans(plan.world_size, "tree")
        groups = (1, plan.num_head_groups)
        options["backward_plan"] = random.choice([p for p in others if p.num_head_groups in groups])
    return options


def seeds() -> list[Any]:
    """Those after the first are slow."""
    slow = pytest.mark.slow
    return [pytest.param(x, marks=[slow] * (x >= NUM_QUICK)) for x in range(NUM_RANDOM)]


@pytest.mark.parametrize("seed", seeds())
def test_random_calls(seed: int):
    """Any strategy, mask, layout, heads, length and options, on 1 to 16 ranks."""
    random = Random(seed)
    n = random.choice([1, 2, 3, 4, 5, 6, 7, 8, 9, 12, 16])
    plan = random.choice(list(random.choice(STRATEGIES).plans(n)))
    num_tokens = random.choice([1, 2, n, n + 1, 17, 37, 64, random.randint(1, 150)])
    mask = random_mask(random, num_tokens)
    options = random_options(random, plan, num_tokens)
    if not plan.replicated_queries and "Document" not in repr(mask) and random.random() < 0.2:
        options["kv_layout"] = random.choice(LAYOUTS)(random.randint(1, 80), n)
    run(
        plan,
        random.choice(LAYOUTS)(num_tokens, n),
        mask,
        random_heads(random, plan.num_head_groups),
        batch=random.choice([(), (), (2,)]),
        head_dim=random.choice([1, 2, 4, 5, 8]),
        uses=random.choice(USES),
        seed=seed,
        **options,
    )


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
