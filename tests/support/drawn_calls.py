"""Random plans, and masks, layouts and heads that fit them, for hypothesis."""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

from conformance.table import MASK_AWARE, STRATEGIES
from hypothesis import strategies as st
from support.drawn_masks import layouts, masks

import tilewise as tw
from tilewise.strategies.catalog import degrees

WORLD_SIZES = (1, 2, 3, 4, 5, 6, 8)
MOST_TOKENS = 40


class DrawnCall(NamedTuple):
    """A plan and what it is called with; tensors are [num_tokens, num_heads, head_dim]."""

    plan: tw.Plan
    layout: tw.Layout
    mask: tw.Mask
    num_heads: int
    num_kv_heads: int
    head_dim: int
    v_head_dim: int

    @property
    def sizes(self) -> tuple[int, int, int, int]:
        """As a Workload begins."""
        return self.layout.num_tokens, self.num_heads, self.num_kv_heads, self.head_dim


@cache
def plans_of(world_size: int, replicated_queries: bool) -> tuple[tuple[tw.Plan, ...], ...]:
    """The plans of every strategy, a tuple for each, so that one with many is not drawn more."""
    every = (tuple(strategy.plans(world_size)) for strategy in STRATEGIES)
    return tuple(x for x in every if x and x[0].replicated_queries == replicated_queries)


@st.composite
def heads(draw: st.DrawFn, groups: int, num_kv_heads: int | None = None) -> tuple[int, int]:
    """Query and KV heads, MHA, GQA or MQA, that so many head groups can share.

    Args:
        num_kv_heads: None: any.
    """
    every = range(1, 13) if num_kv_heads is None else [num_kv_heads]
    legal = [
        (kv * ratio, kv)
        for kv in every
        for ratio in range(1, 13)
        if kv * ratio <= max(12, groups) and groups in degrees(groups, kv * ratio, kv)
    ]
    return draw(st.sampled_from(legal))


@st.composite
def calls(
    draw: st.DrawFn,
    *,
    world_sizes: tuple[int, ...] = WORLD_SIZES,
    replicated_queries: bool | None = None,
    by_head: bool = True,
    most_tokens: int = MOST_TOKENS,
) -> DrawnCall:
    """Any plan on any layout under any mask.

    Args:
        replicated_queries: None: one plan in eight has them.
        by_head: also masks that differ between KV heads.
    """
    n, num_tokens = draw(st.sampled_from(world_sizes)), draw(st.integers(1, most_tokens))
    mask: tw.Mask = draw(masks(num_tokens))
    layout = draw(layouts(num_tokens, n))
    per_head = by_head and draw(st.integers(0, 5)) == 0
    if per_head:
        others = draw(st.lists(masks(num_tokens), min_size=1, max_size=3))
        mask = tw.PerHead([mask, *others])
    if replicated_queries is None:
        replicated_queries = draw(st.integers(0, 7)) == 0
    if not replicated_queries and draw(st.integers(0, 3)) == 0:
        plan = draw(st.sampled_from(MASK_AWARE))[1](mask, layout)
    else:
        plan = draw(st.sampled_from(draw(st.sampled_from(plans_of(n, replicated_queries)))))
    num_kv_heads = None
    if isinstance(mask, tw.PerHead):
        num_kv_heads = len(mask.heads)
        if not any(groups_fit(plan, num_kv_heads * ratio, num_kv_heads) for ratio in range(1, 13)):
            plan = tw.ring(n)
    pair = draw(heads(plan.num_head_groups, num_kv_heads))
    widths = draw(st.integers(1, 9)), draw(st.integers(1, 9))
    return DrawnCall(plan, layout, mask, *pair, *widths)


@st.composite
def exact_calls(draw: st.DrawFn, *, most_tokens: int = MOST_TOKENS) -> DrawnCall:
    """Any plan that serves a canonical reduction."""
    call = draw(calls(replicated_queries=False, most_tokens=most_tokens))
    n, layout, mask = call.layout.world_size, call.layout, call.mask
    plans = [tw.all_gather(n), tw.needed(mask, layout)]
    if n % 2 == 0:
        plans.append(tw.needed(mask, layout, node_size=2))
    shared = [d for d in range(1, n + 1) if n % d == 0 == call.num_kv_heads % d]
    plans += [tw.ulysses(d, inner=tw.all_gather(n // d) if d < n else None) for d in shared]
    return call._replace(plan=draw(st.sampled_from(plans)))


def groups_fit(plan: tw.Plan, num_heads: int, num_kv_heads: int) -> bool:
    """Whether a plan's head groups can share these heads."""
    return plan.num_head_groups in degrees(plan.num_head_groups, num_heads, num_kv_heads)
