"""Resolving a call: checks find all that can be wrong before a byte moves, plans meet the call."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import fields, replace
from operator import attrgetter
from typing import Any
from weakref import ref

import numpy as np
import torch
from torch import Tensor

from tilewise.arguments import Reduction, dtype_name, of_kind, whole_numbers
from tilewise.compiler.rank_plan import RankPlan
from tilewise.compiler.resolved import CallShape, resolve_passes
from tilewise.execution.call import Call, KeptForCalls, ResolvedCall
from tilewise.execution.expansion import TRIED_ROWS, Expansion
from tilewise.execution.sinks import check_sink
from tilewise.execution.validation import (
    check_bias,
    check_mask_heads,
    check_numbers,
    check_ranks,
    check_rows,
    check_tensors,
    check_token_dimension,
    checked_scores,
    named_operands,
    query_layout,
)
from tilewise.kernels.protocol import Kernel
from tilewise.kernels.registry import kernel_for, serving_kernel, use_of
from tilewise.layouts.layout import Layout
from tilewise.plan.ir import Plan
from tilewise.plan.kept import RecentValues, kept_with_plan
from tilewise.plan.payload import head_groups
from tilewise.transport.agreement import PASS
from tilewise.wires.latent import Latent
from tilewise.wires.wire import Plain, latent_of, wires_of

UNKEYED = frozenset(("plan", "backward_plan", "dropout_seed", "group", "validate", "resolved"))
"""Fields of a call that are not compared as they are to find it again: its checks do not depend
on them, or look at them in every call. The plan has the cache."""
AGREED = tuple(option.name for option in fields(Call) if option.metadata.get("agreed"))
"""Options that must be the same on all ranks; the first in which they differ is named."""
_CALLS_KEPT = 32
_options = attrgetter(*(option.name for option in fields(Call) if option.name not in UNKEYED))
_facts = attrgetter("shape", "dtype", "device", "layout")


def resolve_once(
    q: Tensor, k: Tensor, v: Tensor | None, call: Call, rank: int, world_size: int
) -> ResolvedCall:
    """Return what resolve gives; calls that differ in the values of tensors alone share it.

    The plan keeps it, but neither itself nor the backward plan, which may keep a call with this
    plan in it: they would outlive their last user.
    """
    own, other = call.plan, call.backward_plan
    plans = own, own if other is None else other

    def make() -> ResolvedCall:
        problem = resolve(q, k, v, call, rank, world_size)
        kept = KeptForCalls(RecentValues(4), {})
        return problem.without_plans(plans)._replace(kept=kept)

    if call.q_positions is not None:  # as any caller may write them; a key takes numbers
        positions = whole_numbers("q_positions", call.q_positions).tolist()
        call = replace(call, q_positions=tuple(positions))
    # Wires look at values, but for one that is what wire_dtype is.
    if not isinstance(own, Plan) or not isinstance(call.wire, Plain | None):
        return resolve(q, k, v, call, rank, world_size)
    options, operands = _options(call), (q, k) if v is None else (q, k, v)
    try:
        tensors = [*map(type, operands), *map(_facts, operands)]
        backward = "plan" if other is None or other is own else ref(other)
        # By type first: True is no number here, but equals 1, and values of wrong types may not
        # compare.
        key = world_size, type(other), *map(type, options), backward, *tensors, *options
        table = _problems(own, rank)
        problem = table.newest(key) or table.get(key, make)
    except (AttributeError, TypeError):  # of a wrong kind, which the check says
        return resolve(q, k, v, call, rank, world_size)
    problem = problem._replace(plans=plans)
    if call.dropout_p:
        return problem._replace(scores=checked_scores(call, int(q.shape[-1]), world_size))
    return problem


@kept_with_plan(1, each_rank=True)
def _problems(plan: Plan, rank: int) -> RecentValues[Hashable, Any]:
    """Resolved calls of a rank, by all that their checks depend on."""
    return RecentValues(_CALLS_KEPT)


def resolve(
    q: Tensor, k: Tensor, v: Tensor | None, call: Call, rank: int, world_size: int
) -> ResolvedCall:
    """Check one rank's call, and resolve its plans for the heads, the mask and the layouts.

    Args:
        k, v: or latents [(batch,) tokens, 1, width] and None.
    Raises:
        ValueError: with both numbers and the fix.
    """
    latent = latent_of(call.wire)
    check_tensors(q, k, v, latent)
    call.check_kinds()
    check_ranks(call, rank, world_size)
    exact = of_kind("reduction", call.reduction, Reduction) == "canonical"
    if latent is None:
        check_token_dimension(q, k, call, rank)
    # int: a compiler's symbolic sizes become plain numbers.
    num_queries, num_heads, head_dim = map(int, q.shape[-3:])
    kv_layout, dtype = call.kv_layout or call.layout, dtype_name(q.dtype)
    num_kv_heads, v_head_dim = int(k.shape[-2]), int(k.shape[-1] if v is None else v.shape[-1])
    wires = wires_of(call.wire, call.wire_dtype).resolved(dtype)
    head_groups(num_heads, num_kv_heads, 1)
    if latent is not None:
        num_kv_heads, v_head_dim = latent.num_kv_heads, latent.v_head_dim
        wires = wires.of_width(int(k.shape[-1]))
    shape = CallShape(
        mask=call.mask,
        layout=query_layout(call, num_queries),
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        dtype=dtype,
        wires=wires,
        save=call.save,
        kv_layout=kv_layout,
        v_head_dim=v_head_dim,
        max_logit=call.return_max_logit,
    )
    if exact:
        from tilewise.exact.call import exact_passes

        passes = exact_passes(shape, call.plan, call.backward_plan)
    else:
        passes = resolve_passes(shape, call.plan, call.backward_plan)
    layouts = passes[0].layouts
    check_rows(q, k, layouts, passes[0].plan, rank)
    call.mask.check_tokens(layouts[0].num_tokens, layouts[1].num_tokens)
    check_mask_heads(call.mask, shape.num_kv_heads)
    if call.sink is not None:
        batch = int(q.shape[0]) if q.ndim == 4 else None
        check_sink(call.sink, num_heads, dtype, q.device.type, batch)
    if call.bias is not None:
        tokens = layouts[0].num_tokens, layouts[1].num_tokens
        check_bias(call.bias, (num_heads, *tokens), dtype, q.device.type)
    scores = checked_scores(call, head_dim, world_size)
    if world_size > 1 and shape.wires.forward != Plain(dtype_name(dtype)):
        check_numbers(shape.wires.forward, **named_operands(q, k, v))
    expansion = None if latent is None else probed(latent, k, call, kv_layout.rows(rank))
    if expansion is not None and expansion.leaves:
        call = replace(call, needs_grad=True)
    square = layouts[0] == layouts[1]
    if exact:
        from tilewise.exact.call import exact_kernel

        kernel = exact_kernel(call, q, (head_dim, v_head_dim), scores.needs)
    else:
        kernel = _kernel(call, q, max(head_dim, v_head_dim), scores.needs, square)
    return ResolvedCall(passes, scores, call.prune, kernel, expansion=expansion)


def probed(latent: Latent, x: Tensor, call: Call, places: np.ndarray) -> Expansion:
    """The expansion of this rank's latents [(batch,) tokens, 1, width], tried on three rows.

    That expand works on each row by itself is tried where it costs no wait for a device.
    """
    expansion = Expansion(latent, x, learns=torch.is_grad_enabled(), autocast=call.autocast)
    # Numbers without a pattern, to which rows of this rank are added if it has any.
    rows = torch.arange(TRIED_ROWS * x.shape[-1], device=x.device).cos().to(x.dtype)
    rows = rows.unflatten(0, (TRIED_ROWS, -1))
    positions = torch.zeros(TRIED_ROWS, dtype=torch.int64)
    latents = (x if x.ndim == 3 else x[:1].flatten(0, 1))[:, 0]
    if len(latents):
        chosen = torch.linspace(0, len(latents) - 1, TRIED_ROWS).long()
        rows = rows + latents.detach()[chosen.to(x.device)]
        positions = torch.from_numpy(places)[chosen]
    alone = call.validate != "never" and x.device.type == "cpu"
    expansion.probe(rows, positions.to(x.device), alone=alone)
    return expansion


def _kernel(call: Call, q: Tensor, head_dim: int, needs: tuple[str, ...], square: bool) -> Kernel:
    """The one that the call names, or else the first choice of the device."""
    asked = q.device.type, q.dtype, head_dim
    if call.kernel is not None:
        return serving_kernel(call.kernel, *asked, backward=call.needs_grad, needs=needs)
    use = use_of(q.device, call.mask, int(q.shape[-3]), square=square)
    return kernel_for(*asked, use, needs)


def agreement_fields(problem: ResolvedCall, q: Tensor, call: Call) -> dict[str, str]:
    """Return the facts that all ranks must have in common, most telling first: "auto" plans for the
    shapes.

    What changes from call to call, such as dropout's seed, is compared beside them.
    """
    (plan, _, (q_layout, kv_layout), groups, payload, _), backward = problem.passes
    scores = problem.scores
    settled = replace(
        call,
        plan=plan,
        backward_plan=backward.plan,
        layout=q_layout,
        kv_layout=kv_layout,
        softmax_scale=scores.scale,
        softcap=scores.softcap,
        dropout_p=scores.dropout_p,
        dropout_seed=None,
        wire_dtype=payload.wires.partials,
        wire=payload.wires,
        save="gathered" if problem.gathered else "replay",
    )
    compared: dict[str, Any] = {
        PASS: "forward",
        **({"training step": plan.batch} if isinstance(plan, RankPlan) else {}),
        "num_tokens": kv_layout.num_tokens,
        "dtype": payload.dtype,
        "num_dimensions": q.ndim,
        "batch": q.shape[0] if q.ndim == 4 else 1,
        "num_heads": q.shape[-2],
        "num_kv_heads": groups.num_kv_heads,
        "head_dim": payload.head_dim,
        "v_head_dim": payload.v_head_dim,
        **{name: getattr(settled, name) for name in AGREED},
        "exchanges": plan.traits.exchanges + backward.plan.traits.exchanges,
        "requires_grad": call.needs_grad or problem.learns,
        "device": q.device.type,
    }
    return {name: _text(value) for name, value in compared.items()}


def _text(value: object) -> str:
    return value.fingerprint if isinstance(value, Plan | Layout) else str(value)
