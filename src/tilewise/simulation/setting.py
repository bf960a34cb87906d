"""What the passes of all ranks of a plan have in common, as their memory is counted.

It stands alone because it is made once, and every rank's program is then followed by it.
"""

from __future__ import annotations

from typing import NamedTuple

from tilewise.compiler.shards import everything_needed
from tilewise.layouts.layout import Layout
from tilewise.plan.ir import Plan
from tilewise.plan.payload import Payload, head_groups, saving
from tilewise.tiles.call_rows import CallStyle, TileCalls
from tilewise.workload import Workload


class Setting(NamedTuple):
    """What the passes of a plan's ranks have in common.

    Attributes:
        forward: the payload of the forward pass, if backward finds operands that it kept.
        keeps: whether a forward pass keeps operands.
        everything: the mask allows all pairs.
    """

    plan: Plan
    table: TileCalls
    payload: Payload
    forward: Payload | None
    keeps: bool
    everything: bool


def setting_of(
    plan: Plan, work: Workload, layouts: tuple[Layout, Layout], backward: bool
) -> Setting:
    """What the ranks of a pass have in common; the plan is as it is lowered."""
    groups = head_groups(work.num_heads, work.num_kv_heads, plan.num_head_groups)
    gathered = saving(plan, work.save) == "gathered"
    return Setting(
        plan,
        TileCalls(layouts, work.mask, groups, CallStyle()),
        work.payload(plan, backward),
        work.payload(plan, False) if backward and gathered else None,
        gathered and not backward,
        everything_needed(work.mask, *layouts),
    )
