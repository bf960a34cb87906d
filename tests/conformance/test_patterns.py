"""Every pattern under every strategy: exact, and no byte more than its own plan says."""

from __future__ import annotations

import random
from itertools import product

import pytest
from support.thinned import thinned

import tilewise as tw
from conformance.oracle import assert_close, dense, draw, split
from conformance.table import MASK_AWARE, STRATEGIES

LAYOUTS = (tw.contiguous, tw.zigzag, tw.striped)
WORLD_SIZES = (1, 2, 3, 4, 5, 6, 8, 12, 16)
LENGTHS = (1, 5, 16, 37, 64, 101)


def case(seed: int, pattern: str) -> tuple[random.Random, tw.Mask, tw.Layout]:
    """A random world, length and layout, and the pattern with random parameters."""
    choose = random.Random(f"{pattern} {seed}")
    n, num_tokens = choose.choice(WORLD_SIZES), choose.choice(LENGTHS)
    layout = choose.choice(LAYOUTS)(num_tokens, n)
    ends = sorted(choose.randint(0, num_tokens) for _ in range(choose.randint(0, 5)))
    cu_seqlens = [0, *ends, num_tokens]
    if num_tokens > 2 and seed % 2:  # a document of one token, and an empty one
        cu_seqlens = [0, 1, 1, num_tokens]
    mask = tw.masks.random(
        pattern,
        num_tokens,
        seed=seed,
        cu_seqlens=cu_seqlens if "document" in pattern or "share" in pattern else None,
    )
    return choose, mask, layout


@pytest.mark.parametrize(
    ("strategy", "pattern"),
    thinned(product(STRATEGIES, tw.masks.NAMES), 3),
    ids=lambda of: getattr(of, "name", of),
)
def test_a_pattern_is_exact_under_a_strategy(strategy, pattern):
    seed = len(strategy.name) + len(pattern)
    choose, mask, layout = case(seed, pattern)
    plan = choose.choice(list(strategy.plans(layout.world_size)))
    kv_heads = plan.num_head_groups if plan.num_head_groups > 1 else choose.choice((1, 2))
    heads = kv_heads * choose.choice((1, 2))
    num_tokens = layout.num_tokens
    queries = min(2, num_tokens) if plan.replicated_queries else num_tokens
    positions = None
    if plan.replicated_queries:
        positions = tw.contiguous(num_tokens, 1).positions(0)[num_tokens - queries :]
    x = draw((queries, heads, 4), (num_tokens, kv_heads, 4), seed)
    want = dense(x, mask, positions)
    assert_close(split(x, plan, layout, mask), want)


@pytest.mark.parametrize("pattern", tw.masks.NAMES)
@pytest.mark.parametrize("name, build", MASK_AWARE)
@pytest.mark.parametrize("seed", [0, *(pytest.param(s, marks=pytest.mark.slow) for s in (1, 2))])
def test_a_mask_aware_plan_is_right_and_lean(seed, name, build, pattern):
    _, mask, layout = case(seed, pattern)
    plan = build(mask, layout)
    tw.check(plan, mask, layout)
    assert not tw.droppable(plan, mask, layout)
    assert tw.parse(tw.show(plan)) == plan
    x = draw((layout.num_tokens, 4, 4), (layout.num_tokens, 2, 4), seed)
    assert_close(split(x, plan, layout, mask), dense(x, mask))


@pytest.mark.parametrize("pattern", tw.masks.NAMES)
def test_needed_moves_no_more_than_any_plan_that_moves_no_queries(pattern):
    _, mask, layout = case(7, pattern)
    work = tw.Workload(
        num_tokens=layout.num_tokens,
        num_heads=2,
        num_kv_heads=2,
        head_dim=4,
        mask=mask,
        layout=layout,
    )
    n = layout.world_size
    fewest = tw.volume(tw.needed(mask, layout), work)
    for plan in (tw.ring(n), tw.all_gather(n), tw.double_ring(1, n)):
        moved = tw.volume(plan, work)
        assert sum(fewest.forward) <= sum(moved.forward)
        assert sum(fewest.backward) <= sum(moved.backward)


def test_a_mask_aware_plan_refuses_another_mask():
    layout = tw.zigzag(37, 4)
    plan = tw.needed(tw.Causal(), layout)
    x = draw((37, 2, 4), (37, 2, 4), 0)
    message = r"needed is a plan for Causal\(\) on zigzag\(37, 4\), not for Full\(\)"
    with pytest.raises(ValueError, match=message):
        split(x, plan, layout, tw.Full())
    with pytest.raises(ValueError, match=r"not for Causal\(\) on striped\(37, 4\)"):
        split(x, plan, tw.striped(37, 4), tw.Causal())
