"""A plan meets a call: what attention, volume, the simulator and the reports all start from."""

from __future__ import annotations

from typing import NamedTuple

from tilewise.compiler.checker import check_before_run
from tilewise.compiler.pruning import (
    check_made_for,
    every_row_meets,
    prune_shards,
    shard_layouts,
)
from tilewise.layouts.layout import Layout
from tilewise.masks.base import Mask
from tilewise.plan.ir import Plan, Transfer
from tilewise.plan.payload import HeadGroups, Payload, check_gathered, head_groups, saving
from tilewise.plan.row_ranges import count
from tilewise.wires.wire import Wires


class CallShape(NamedTuple):
    """A call without its plans and tensors.

    Args:
        v_head_dim: of v if it differs from that of q and k.
        max_logit: the largest scores are asked for.
    """

    mask: Mask
    layout: Layout  # of the queries; as `shard_layouts` takes it
    num_heads: int
    num_kv_heads: int
    head_dim: int
    dtype: str  # of q, k, v; a name
    wires: Wires
    save: str | None = None  # "replay", "gathered" or None: as the forward plan prefers
    kv_layout: Layout | None = None  # of k and v; None: layout
    v_head_dim: int | None = None
    max_logit: bool = False

    def payload(self, num_head_groups: int) -> Payload:
        """Return what travels forward where heads are cut into so many groups."""
        sizes = head_groups(self.num_heads, self.num_kv_heads, num_head_groups).size
        widths = self.head_dim, self.v_head_dim or self.head_dim
        dtype, wires = self.dtype, self.wires
        return Payload(False, *sizes, *widths, dtype, wires, max_logit=self.max_logit)


class ResolvedPass(NamedTuple):
    """One pass of a call: its plan for the heads, its shards' tokens, and what travels.

    `resolve_passes` makes it, so that no plan runs without having been tuned and checked.

    Attributes:
        then: the pass that follows in the same direction, and computes what is left.
    """

    plan: Plan  # made for the heads, not pruned
    mask: Mask
    layouts: tuple[Layout, Layout]  # the query and the KV shards' tokens
    groups: HeadGroups
    payload: Payload
    then: ResolvedPass | None = None

    @property
    def parts(self) -> tuple[ResolvedPass, ...]:
        """The pass, and those that follow it in the same direction, in order."""
        return (self,) if self.then is None else (self, *self.then.parts)

    @property
    def pruned(self) -> Plan:
        """The plan without what the mask makes needless; it is kept with the plan.

        Whole rows return to their homes as they are: where heads are exchanged and some row meets
        none, nothing is left out.
        """
        whole = self.payload.whole_rows and self.groups.groups > 1
        if whole and not every_row_meets(self.plan, self.mask, *self.layouts):
            return self.plan
        return prune_shards(self.plan, self.mask, self.layouts)

    def transfer_bytes(self, transfer: Transfer) -> int:
        """Bytes of a transfer."""
        side, _, shard, _ = item = transfer.item
        return count(transfer.rows, self.layouts[side].size(shard)) * self.payload.row_bytes(item)


def resolve_passes(
    call: CallShape, plan: Plan, backward_plan: Plan | None = None
) -> tuple[ResolvedPass, ResolvedPass]:
    """The forward and the backward pass.

    What backward does about operands is for the forward plan and save to say.

    Args:
        backward_plan: None: plan. Either in the order that it has for backward, unless backward
            runs on what forward gathered.
    Raises:
        ValueError: if a plan does not fit the call, or the two do not fit each other.
    """
    forward = _resolved(call, plan)
    gathered = saving(forward.plan, call.save) == "gathered"
    backward = forward
    if backward_plan is not None or not (gathered or forward.plan.traits.backward_order is None):
        backward = _resolved(call, backward_plan or plan, own_order=not gathered)
    owned, owned_in_backward = (
        (one.plan.owners, one.plan.cuts, one.plan.replicated_queries) for one in (forward, backward)
    )
    if owned != owned_in_backward:
        raise ValueError(
            f"{backward.plan.name} and {forward.plan.name} own shards differently; a backward plan "
            "needs the forward plan's owners, and has all queries on every rank only if that has"
        )
    for one in (forward, backward):
        if not one.plan.traits.proven:  # tests prove what strategies make
            check_before_run(one.plan, call.mask, one.layouts)
    if gathered:
        check_gathered(forward.plan, backward.plan)
    payload = backward.payload._replace(backward=True, saved=gathered)
    passes = forward, backward._replace(payload=payload)
    return passes


def _resolved(call: CallShape, plan: Plan, own_order: bool = False) -> ResolvedPass:
    """Resolve one plan for a call, with the tensors that travel in a forward pass.

    Args:
        own_order: take the order that the plan has for backward.
    """
    heads = call.num_heads, call.num_kv_heads
    plan = plan.tuned(*heads)
    if own_order:
        plan = plan.in_backward()
    check_made_for(plan, call.mask, call.layout)
    layouts = shard_layouts(plan, call.layout, call.kv_layout)
    if plan.made_for and call.kv_layout not in (None, call.layout):
        raise ValueError(f"{plan.name} is for one layout of q, k and v; leave out kv_layout")
    groups = head_groups(*heads, plan.num_head_groups)
    return ResolvedPass(plan, call.mask, layouts, groups, call.payload(plan.num_head_groups))
