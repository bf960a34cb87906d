"""Mask-aware two dimensions: each block is computed where that moves least, under equal load.

Queries, keys and values, and partial results travel, whichever costs least, passed on by those who
read them so that no owner sends to everybody.
"""

from collections.abc import Callable
from math import inf
from typing import TypeAlias

from tilewise.arguments import MOST_RANKS, checks_arguments, positive_number, whole_number
from tilewise.layouts.layout import Layout
from tilewise.masks.base import Causal, Mask
from tilewise.plan.ir import MHA, HeadTuning, Plan
from tilewise.strategies.tiling.causal.planner import suits, triangle_layout, triangle_plan
from tilewise.strategies.tiling.placement import LEVEL, Balance
from tilewise.strategies.tiling.planner import PlacedPlans, placed_layout

MakePlan: TypeAlias = Callable[[Mask, Layout, float], Plan]
"""Makes a plan for a mask and a layout of (mask, layout, kv_bytes)."""

BETWEEN = 1.0  # owners chosen for this serve MHA and eight query heads per KV head alike


@checks_arguments
def tiled(
    mask: Mask,
    layout: Layout,
    *,
    kv_bytes: float | None = None,
    slack: float | None = None,
    linear: float | None = None,
) -> Plan:
    """Decide which rank computes which block of the table, and move what costs least.

    Args:
        mask, layout: the plan is for these only; ranks own rows as layout says. tiled_layout makes
            a layout that suits the mask.
        kv_bytes: bytes of a KV shard per byte of a query shard, 2 num_kv_heads / num_heads: of
            values of any width, if q and out count by their mean. None: volume and attention make
            the plan anew for the heads that they find.
        slack: max / mean work - 1 that a rank may have; what is not needed to stay within it is
            spent on fewer bytes. The most level plan found if none is so level.
        linear: the work of a token in the rest of the layer, in allowed pairs of one layer, as
            Machine.linear_pairs says it. A rank's work is its pairs, and this for each row it owns.
            None, of both: as in the tiled_layout, elsewhere 0.03 and 0.
    Raises:
        ValueError: if kv_bytes, slack or linear is out of range.
    """
    layout = layout.owned
    mask.check_tokens(layout.num_tokens)
    layout_balance = getattr(layout, "balance", LEVEL)
    balance = _balance(
        *(
            default if x is None else x
            for x, default in zip((slack, linear), layout_balance, strict=True)
        )
    )
    make = PlacedPlans(balance)
    if suits(mask, layout) and balance == LEVEL:
        make = triangle_plan
    if kv_bytes is not None:
        return make(mask, layout, _positive(kv_bytes))
    plan = make(mask, layout, MHA)
    tuning = HeadTuning(_for_heads, (make, mask, layout), MHA)
    return plan.changed(traits=plan.traits._replace(tuning=tuning))


def _for_heads(
    make: MakePlan,
    mask: Mask,
    layout: Layout,
    num_heads: int,
    num_kv_heads: int,
) -> Plan:
    return make(mask, layout, 2 * num_kv_heads / num_heads)


@checks_arguments
def tiled_layout(
    mask: Mask,
    num_tokens: int,
    n: int,
    *,
    kv_bytes: float = BETWEEN,
    slack: float = LEVEL.slack,
    linear: float = LEVEL.linear,
) -> Layout:
    """The rows that each rank best owns under tiled: equally many, whatever the mask.

    Args:
        kv_bytes: as for tiled. The default suits MHA and eight query heads per KV head alike; the
            heads' own ratio saves some more bytes.
        slack, linear: as for tiled, which takes them from the layout.
    """
    mask.check_tokens(num_tokens)
    whole_number("n", n, most=MOST_RANKS)
    balance = _balance(slack, linear)
    if mask == Causal() and balance == LEVEL:
        return triangle_layout(num_tokens, n, _positive(kv_bytes))
    return placed_layout(mask, num_tokens, n, _positive(kv_bytes), balance)


def _balance(slack: float, linear: float) -> Balance:
    if not 0 <= slack < inf:
        raise ValueError(f"slack ({slack}) must be at least 0 and finite: max / mean work - 1")
    if not 0 <= linear < inf:
        raise ValueError(
            f"linear ({linear}) must be at least 0 and finite: pairs as costly as a token elsewhere"
        )
    return Balance(slack, linear)


def _positive(kv_bytes: float) -> float:
    return positive_number("kv_bytes", kv_bytes, ": 2 num_kv_heads / num_heads, 2 for MHA")
