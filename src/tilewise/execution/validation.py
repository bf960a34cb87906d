"""What can be wrong with one rank's attention call: every message has the numbers and the fix."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from torch import Tensor

from tilewise.arguments import dtype_name, require_type
from tilewise.layouts.layout import Layout
from tilewise.masks.base import Mask
from tilewise.plan.ir import Plan, Side
from tilewise.plan.payload import check_dtype

if TYPE_CHECKING:
    from tilewise.execution.problem import AttentionCall


def check_tensors(q: Tensor, k: Tensor, v: Tensor) -> None:
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


def check_kinds(call: AttentionCall) -> None:
    plan = "tw.ring(world_size)"
    require_type(Plan, "plan", call.plan, plan)
    require_type(Layout, "layout", call.layout)
    require_type(Mask, "mask", call.mask)
    if call.backward_plan is not None:
        require_type(Plan, "backward_plan", call.backward_plan, plan)
    if call.kv_layout is not None:
        require_type(Layout, "kv_layout", call.kv_layout)


def check_ranks(call: AttentionCall, world_size: int) -> None:
    """Plans are for the group's ranks, and layouts give every token to one of them."""
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


def query_positions(call: AttentionCall, num_queries: int, num_keys: int) -> list[int] | None:
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


def check_rows(q: Tensor, k: Tensor, layouts: tuple[Layout, Layout], plan: Plan, rank: int) -> None:
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
