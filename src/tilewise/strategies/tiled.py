"""Mask-aware two dimensions: each block is computed where that moves least, under equal load.

Queries, keys and values, and partial results travel, whichever costs least, passed on by those who
read them so that no owner sends to everybody.
"""

from tilewise.arguments import require_type
from tilewise.layouts.layout import Layout
from tilewise.masks.base import Causal, Mask
from tilewise.plan.ir import HeadTuning, Plan
from tilewise.strategies.tiling.causal.planner import suits, triangle_layout, triangle_plan
from tilewise.strategies.tiling.planner import placed_layout, placed_plan

MHA = 2.0  # bytes of a KV shard per byte of a query shard, as many KV heads as query heads
BETWEEN = 1.0  # owners chosen for this serve MHA and eight query heads per KV head alike


def tiled(mask: Mask, layout: Layout, *, kv_bytes: float | None = None) -> Plan:
    """Decide which rank computes which block of the table, and move what costs least.

    Args:
        mask, layout: the plan is for these only; ranks own rows as layout says. tiled_layout makes
            a layout that suits the mask.
        kv_bytes: bytes of a KV shard per byte of a query shard, 2 num_kv_heads / num_heads. None:
            volume and attention make the plan anew for the heads that they find.
    """
    require_type(Layout, "layout", layout)
    require_type(Mask, "mask", mask).check_tokens(layout.num_tokens)
    make = triangle_plan if suits(mask, layout) else placed_plan
    if kv_bytes is not None:
        return make(mask, layout, _positive(kv_bytes))
    plan = make(mask, layout, MHA)
    return plan.changed(traits=plan.traits._replace(tuning=HeadTuning(make, MHA)))


def tiled_layout(mask: Mask, num_tokens: int, n: int, *, kv_bytes: float = BETWEEN) -> Layout:
    """The rows that each rank best owns under tiled: equally many, whatever the mask.

    Args:
        kv_bytes: as for tiled. The default suits MHA and eight query heads per KV head alike; the
            heads' own ratio saves some more bytes.
    """
    require_type(Mask, "mask", mask).check_tokens(num_tokens)
    if mask == Causal():
        return triangle_layout(num_tokens, n, _positive(kv_bytes))
    return placed_layout(mask, num_tokens, n, _positive(kv_bytes))


def _positive(kv_bytes: float) -> float:
    if not kv_bytes > 0:
        raise ValueError(
            f"kv_bytes ({kv_bytes}) must be positive: 2 num_kv_heads / num_heads, 2.0 for MHA"
        )
    return kv_bytes
