"""One rank's attention call, checked: everything that can be wrong is found before a byte moves."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tilewise.arguments import Save, Validate, dtype_name, require_type
from tilewise.compiler.checker import check_shards
from tilewise.compiler.shards import Resolved, resolve
from tilewise.execution.allocator import Allocator
from tilewise.kernels.protocol import Kernel
from tilewise.kernels.registry import kernel_for, serving_kernel, use_of
from tilewise.layouts.layout import Layout
from tilewise.masks.base import Mask
from tilewise.opaque import OpaqueValue
from tilewise.plan.ir import Plan, Side
from tilewise.plan.payload import HeadGroups, check_dtype, check_gathered, head_groups, saving
from tilewise.transport.resolve import Group


@dataclass(frozen=True)
class AttentionCall(OpaqueValue):
    """The keyword arguments of attention, as given, and what is known of the call besides.

    Attributes:
        needs_grad: a backward pass may follow.
        problem: the checked call, if it is checked and agreed on already.
    """

    plan: Plan
    layout: Layout
    mask: Mask
    backward_plan: Plan | None = None
    kv_layout: Layout | None = None
    softmax_scale: float | None = None
    wire_dtype: torch.dtype | str | None = None
    save: Save | None = None
    prune: bool = True
    q_positions: Sequence[int] | Tensor | None = None
    group: Group = None
    validate: Validate = "always"
    kernel: Kernel | str | None = None
    needs_grad: bool = False
    problem: Problem | None = None


class Problem(NamedTuple):
    """A checked call.

    Attributes:
        resolved, groups: forward's and backward's plan and head groups.
        allocator: makes what lends a pass its buffers; None: as the device of q asks.
    """

    resolved: tuple[Resolved, Resolved]
    groups: tuple[HeadGroups, HeadGroups]
    head_dim: int
    scale: float
    dtype: str
    wire_dtype: str
    gathered: bool
    prune: bool
    kernel: Kernel
    allocator: Callable[[torch.device], Allocator] | None = None

    @property
    def plans(self) -> tuple[Plan, Plan]:
        forward, backward = self.resolved
        return forward.plan, backward.plan

    @property
    def layouts(self) -> tuple[Layout, Layout]:
        """Of the query and the KV shards."""
        return self.resolved[0].layouts

    @property
    def mask(self) -> Mask:
        return self.resolved[0].mask


def make_problem(
    q: Tensor, k: Tensor, v: Tensor, call: AttentionCall, rank: int, world_size: int
) -> Problem:
    """Check one rank's call.

    Raises:
        ValueError: with both numbers and the fix.
    """
    _check_tensors(q, k, v)
    _check_kinds(call)
    # int: a compiler's symbolic sizes become plain numbers.
    mask, heads, head_dim = call.mask, (int(q.shape[-2]), int(k.shape[-2])), int(q.shape[-1])
    resolved = _resolved(call, heads, q.shape[-3], world_size)
    (plan, _, layouts), (backward, _, _) = resolved
    _check_rows(q, k, layouts, plan, rank)
    mask.check_tokens(layouts[0].num_tokens, layouts[1].num_tokens)
    check_mask_heads(mask, heads[1])
    dtype = dtype_name(q.dtype)
    wire = dtype_name(call.wire_dtype or dtype)
    check_dtype("wire_dtype", wire)
    gathered = saving(plan, call.save) == "gathered"
    if gathered and call.backward_plan is not None:
        check_gathered(plan, backward)
    for one in (plan, backward):
        if not one.scripted:
            one.memo("checked", (mask, layouts), lambda p=one: check_shards(p, mask, *layouts))
    return Problem(
        resolved,
        (head_groups(*heads, plan.num_head_groups), head_groups(*heads, backward.num_head_groups)),
        head_dim,
        checked_scale(call.softmax_scale, head_dim),
        dtype,
        wire,
        gathered,
        call.prune,
        _kernel(call, q, head_dim),
    )


def _kernel(call: AttentionCall, q: Tensor, head_dim: int) -> Kernel:
    """The one that the call names, or else the first choice of the device."""
    asked = q.device.type, q.dtype, head_dim
    if call.kernel is not None:
        return serving_kernel(call.kernel, *asked, backward=call.needs_grad)
    return kernel_for(*asked, use_of(q.device, call.mask, int(q.shape[-3])))


def agreement_fields(problem: Problem, q: Tensor, k: Tensor, needs_grad: bool) -> dict[str, str]:
    """What all ranks must have in common, most telling first: "auto" plans for the shapes.

    The kernel is not among it: what ranks exchange does not depend on who computed it.
    """
    q_layout, kv_layout = problem.layouts
    fields: dict[str, Any] = {
        "num_tokens": kv_layout.num_tokens,
        "dtype": problem.dtype,
        "num_dimensions": q.ndim,
        "batch": q.shape[0] if q.ndim == 4 else 1,
        "num_heads": q.shape[-2],
        "num_kv_heads": k.shape[-2],
        "head_dim": problem.head_dim,
        "plan": problem.plans[0].fingerprint,
        "backward_plan": problem.plans[1].fingerprint,
        "mask": problem.mask,
        "layout": q_layout.fingerprint,
        "kv_layout": kv_layout.fingerprint,
        "softmax_scale": problem.scale,
        "wire_dtype": problem.wire_dtype,
        "save": "gathered" if problem.gathered else "replay",
        "prune": problem.prune,
        "requires_grad": needs_grad,
        "device": q.device.type,
    }
    return {name: str(value) for name, value in fields.items()}


def _check_kinds(call: AttentionCall) -> None:
    plan = "tw.ring(world_size)"
    require_type(Plan, "plan", call.plan, plan)
    require_type(Layout, "layout", call.layout)
    require_type(Mask, "mask", call.mask)
    if call.backward_plan is not None:
        require_type(Plan, "backward_plan", call.backward_plan, plan)
    if call.kv_layout is not None:
        require_type(Layout, "kv_layout", call.kv_layout)


def _resolved(
    call: AttentionCall, heads: tuple[int, int], num_queries: int, world_size: int
) -> tuple[Resolved, Resolved]:
    """Both passes' plans, made for the heads."""
    kv_layout = call.kv_layout or call.layout
    for plan in (call.plan, call.backward_plan or call.plan):
        if plan.world_size != world_size:
            raise ValueError(
                f"{plan.name} is for {plan.world_size} ranks, but the group has {world_size}; "
                f"make the plan for {world_size}"
            )
    for name, layout in (("layout", call.layout), ("kv_layout", kv_layout)):
        if not layout.is_partition:
            raise ValueError(
                f"{name} has {sum(layout.sizes)} rows for {layout.num_tokens} tokens; "
                "every token must belong to exactly one rank"
            )
    positions = _query_positions(call, num_queries, kv_layout.num_tokens)
    where = call.mask, call.layout, heads, kv_layout, positions
    forward = backward = resolve(call.plan, *where)
    if call.backward_plan is not None:
        backward = resolve(call.backward_plan, *where)
    for plan in (forward.plan, backward.plan):
        if plan.made_for and kv_layout != call.layout:
            raise ValueError(f"{plan.name} is for one layout of q, k and v; leave out kv_layout")
    if (backward.plan.owners, backward.plan.cuts) != (forward.plan.owners, forward.plan.cuts):
        raise ValueError(
            f"{backward.plan.name} and {forward.plan.name} own shards differently; a backward plan "
            "needs the forward plan's owners"
        )
    return forward, backward


def _check_tensors(q: Tensor, k: Tensor, v: Tensor) -> None:
    for name, x in (("q", q), ("k", k), ("v", v)):
        require_type(Tensor, name, x, "torch.randn(tokens, heads, head_dim)")
        if hasattr(x, "placements"):  # a DTensor: importing the class takes half a second
            raise ValueError(
                f"{name} is a DTensor; call attention through local_map of "
                "torch.distributed.tensor.experimental, which passes each rank its own rows"
            )
    shapes = f"q {tuple(q.shape)}, k {tuple(k.shape)}, v {tuple(v.shape)}"
    if q.ndim not in (3, 4) or not q.ndim == k.ndim == v.ndim:
        raise ValueError(
            f"{shapes} must all be [tokens, heads, head_dim] or [batch, tokens, heads, head_dim]"
        )
    if v.shape != k.shape:
        raise ValueError(
            f"k {tuple(k.shape)} and v {tuple(v.shape)} must have one shape; "
            "a value head_dim other than the key's is not supported"
        )
    if q.shape[-1] != k.shape[-1] or q.shape[-1] < 1:
        raise ValueError(
            f"head_dim of q ({q.shape[-1]}) and k ({k.shape[-1]}) must be equal, and at least 1"
        )
    if q.shape[:-3] != k.shape[:-3]:
        raise ValueError(f"batch of q ({q.shape[0]}) and k ({k.shape[0]}) must be equal")
    for what, of in (("dtype", lambda x: x.dtype), ("device", lambda x: x.device)):
        if not of(q) == of(k) == of(v):
            raise ValueError(f"q, k, v have {what} {of(q)}, {of(k)}, {of(v)}; they must be equal")
    check_dtype("dtype", dtype_name(q.dtype))


def _query_positions(call: AttentionCall, num_queries: int, num_keys: int) -> list[int] | None:
    """Where replicated queries stand; None for queries that have a layout."""
    given = call.q_positions
    if not call.plan.replicated_queries:
        if given is not None:
            raise ValueError(
                "q_positions are for plans with replicated queries (tree), not "
                f"{call.plan.name}; use layout instead"
            )
        return None
    given = range(num_keys - num_queries, num_keys) if given is None else given
    positions = [int(x) for x in given]
    if len(positions) != num_queries:
        raise ValueError(
            f"q has {num_queries} tokens but q_positions {len(positions)}; pass one for each"
        )
    if positions and not 0 <= min(positions) <= max(positions) < num_keys:
        raise ValueError(
            f"q_positions {min(positions)}..{max(positions)} must lie in 0..{num_keys - 1}"
        )
    return positions


def _check_rows(
    q: Tensor, k: Tensor, layouts: tuple[Layout, Layout], plan: Plan, rank: int
) -> None:
    for name, x, side in (("q", q, Side.Q), ("k", k, Side.KV)):
        held = [shard for shard, ranks in enumerate(plan.owners[side]) if rank in ranks]
        wanted = sum(layouts[side].size(shard) for shard in held)
        if x.shape[-3] != wanted:
            raise ValueError(
                f"{name} has {x.shape[-3]} tokens on rank {rank}, but the layout gives it {wanted} "
                f"of {layouts[side].num_tokens}; pass layout.shard(x, rank)"
            )


def check_mask_heads(mask: Mask, num_kv_heads: int) -> None:
    heads = getattr(mask, "heads", None)
    if heads is not None and len(heads) != num_kv_heads:
        raise ValueError(
            f"the mask is for {len(heads)} KV heads, but k has {num_kv_heads}; make them equal"
        )


def checked_scale(scale: float | None, head_dim: int) -> float:
    scale = 1 / math.sqrt(head_dim) if scale is None else float(scale)
    if not 0 < scale < math.inf:
        raise ValueError(
            f"softmax_scale ({scale}) must be finite and above 0; scale or negate q instead"
        )
    return scale
