"""One rank's attention call, checked: everything that can be wrong is found before a byte moves."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from contextlib import suppress
from copy import copy
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Self
from weakref import ref

import numpy as np
import torch
from torch import Tensor

from tilewise.arguments import Save, Validate, dtype_name
from tilewise.compiler.resolved import CallShape, ResolvedPass, resolve_passes
from tilewise.execution.allocator import Allocator
from tilewise.execution.expansion import PROBED_ROWS, Expansion
from tilewise.execution.sinks import SinkKind, check_sink
from tilewise.execution.validation import (
    check_kinds,
    check_mask_heads,
    check_numbers,
    check_ranks,
    check_rows,
    check_tensors,
    checked_scores,
    named_operands,
    query_positions,
)
from tilewise.kernels.protocol import Kernel
from tilewise.kernels.registry import kernel_for, serving_kernel, use_of
from tilewise.kernels.scores import Scores
from tilewise.layouts.layout import Layout
from tilewise.masks.base import Mask
from tilewise.opaque import OpaqueValue
from tilewise.plan.ir import Plan
from tilewise.plan.kept import RecentValues, kept_with_plan
from tilewise.plan.rank_plan import RankPlan
from tilewise.transport.agreement import PASS
from tilewise.transport.resolve import Group
from tilewise.wires.latent import Latent
from tilewise.wires.wire import AnyWire, Plain, Wires, latent_of, plain_wires, wires_of


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
    wire: AnyWire | None = None
    save: Save | None = None
    prune: bool = True
    q_positions: Sequence[int] | Tensor | None = None
    group: Group = None
    validate: Validate = "always"
    kernel: Kernel | str | None = None
    needs_grad: bool = False
    sink: SinkKind | None = None
    softcap: float | None = None
    dropout_p: float = 0.0
    dropout_seed: int | None = None
    max_logit: bool = False
    return_lse: bool = False
    error_bound: bool = False
    problem: Problem | None = None

    def resolved(self, problem: Problem, group: Group) -> Self:
        """The same call, checked; group: its transport."""
        made = copy(self)
        vars(made).update(problem=problem, group=group)
        return made


NO_PASSES: Any = ()
ASKED_ANEW = frozenset(
    ("plan", "backward_plan", "group", "validate", "problem", "q_positions", "dropout_seed")
)
"""What of a call its checks do not depend on, or is looked at in every call."""


class KeptForCalls(NamedTuple):
    """What is made once for all calls of a problem."""

    runs: RecentValues[Hashable, Any]  # of passes
    records: RecentValues[Hashable, Tensor]  # what ranks compare before forward


class Problem(NamedTuple):
    """A checked call.

    Attributes:
        passes: forward and backward.
        number: of the forward pass's agreement, the same on all ranks; None: not known.
        expansion: of latents, if k and v are made of some.
        allocator: makes what hands out a pass its buffers; None: as the device of q asks.
        kept: what is made once for all calls of this problem; None: nothing is kept.
    """

    passes: tuple[ResolvedPass, ResolvedPass]
    scores: Scores
    prune: bool
    kernel: Kernel
    number: int | None = None
    allocator: Callable[[torch.device], Allocator] | None = None
    expansion: Expansion | None = None
    kept: KeptForCalls | None = None

    @property
    def learns(self) -> bool:
        """Whether what makes k and v of latents gets gradients."""
        return self.expansion is not None and bool(self.expansion.leaves)

    @property
    def gathered(self) -> bool:
        """Whether forward keeps the operands that it receives, for backward."""
        return self.passes[1].payload.saved


def known_problem(
    q: Tensor, k: Tensor, v: Tensor | None, call: AttentionCall, rank: int, world_size: int
) -> Problem:
    """As make_problem, which calls that differ in the values of tensors alone ask once.

    The plan keeps the answer, but neither itself nor the backward plan, which may keep an answer
    with this one in it: they would outlive their last user.
    """
    own, other = call.plan, call.backward_plan
    plans = own, own if other is None else other

    def make() -> tuple[Problem, list[tuple[Plan | int, Any]]]:
        problem = make_problem(q, k, v, call, rank, world_size)
        problem = problem._replace(kept=KeptForCalls(RecentValues(4), RecentValues(1)))
        passes: list[tuple[Plan | int, Any]] = []
        for x in problem.passes:
            given = [number for number, plan in enumerate(plans) if plan is x.plan]
            passes.append((given[0] if given else x.plan, x[1:]))
        return problem._replace(passes=NO_PASSES), passes

    given = tuple([x for name, x in vars(call).items() if name not in ASKED_ANEW])
    key: tuple[Any, ...] = ()
    with suppress(AttributeError, TypeError):  # of a wrong kind, which the check says
        operands = [x for x in (q, k, v) if x is not None]
        tensors = tuple([(type(x), x.shape, x.dtype, x.device, x.layout) for x in operands])
        # By type, too: True is no number here, but equals 1.
        backward = "plan" if other is own else ref(other) if isinstance(other, Plan) else other
        asked = world_size, backward, type(other), given, *map(type, given)
        hash((asked, tensors))
        key = asked, tensors
    # Wires look at values.
    anew = call.q_positions is not None or call.wire is not None
    if not isinstance(own, Plan) or not key or anew:
        return make_problem(q, k, v, call, rank, world_size)
    asked, tensors = key
    problem, passes = _problems(own, asked).get((rank, tensors), make)
    known = [(plans[x] if isinstance(x, int) else x, rest) for x, rest in passes]
    forward, backward = (ResolvedPass(plan, *rest) for plan, rest in known)
    problem = problem._replace(passes=(forward, backward))
    if call.dropout_p:
        return problem._replace(scores=checked_scores(call, int(q.shape[-1]), world_size))
    return problem


@kept_with_plan()
def _problems(plan: Plan, asked: tuple[Any, ...]) -> RecentValues[Hashable, Any]:
    """Problems of calls that are equal but for rank and tensors."""
    return RecentValues(4 * plan.world_size)


def make_problem(
    q: Tensor, k: Tensor, v: Tensor | None, call: AttentionCall, rank: int, world_size: int
) -> Problem:
    """Check one rank's call.

    Args:
        k, v: or latents [(batch,) tokens, 1, width] and None.
    Raises:
        ValueError: with both numbers and the fix.
    """
    latent = latent_of(call.wire)
    if latent is not None and call.error_bound:
        raise ValueError(
            "return_error_bound (True) is of keys and values; leave it out with a Latent, whose "
            "expand may make any error larger"
        )
    check_tensors(q, k, v, latent)
    check_kinds(call)
    check_ranks(call, rank, world_size)
    # int: a compiler's symbolic sizes become plain numbers.
    num_queries, num_heads, head_dim = map(int, q.shape[-3:])
    kv_layout, dtype = call.kv_layout or call.layout, dtype_name(q.dtype)
    num_kv_heads, v_head_dim = int(k.shape[-2]), int(k.shape[-1] if v is None else v.shape[-1])
    wires = resolved_wires(call, dtype)
    if latent is not None:
        num_kv_heads, v_head_dim = latent.num_kv_heads, latent.v_head_dim
        wires = wires.of_width(int(k.shape[-1]))
    shape = CallShape(
        call.mask,
        call.layout,
        num_heads,
        num_kv_heads,
        head_dim,
        dtype,
        wires,
        call.save,
        kv_layout,
        query_positions(call, num_queries, kv_layout.num_tokens),
        v_head_dim,
        call.max_logit,
    )
    passes = resolve_passes(shape, call.plan, call.backward_plan)
    layouts = passes[0].layouts
    check_rows(q, k, layouts, passes[0].plan, rank)
    call.mask.check_tokens(layouts[0].num_tokens, layouts[1].num_tokens)
    check_mask_heads(call.mask, shape.num_kv_heads)
    check_sink(call.sink, num_heads, dtype, q.device.type)
    scores = checked_scores(call, head_dim, world_size)
    if world_size > 1 and shape.wires.forward != Plain(dtype_name(dtype)):
        check_numbers(shape.wires.forward, **named_operands(q, k, v))
    expansion = None if latent is None else probed(latent, k, call, kv_layout.rows(rank))
    if expansion is not None and expansion.leaves:
        call = replace(call, needs_grad=True)
    square = layouts[0] == layouts[1]
    kernel = _kernel(call, q, max(head_dim, v_head_dim), scores.needs, square)
    return Problem(passes, scores, call.prune, kernel, expansion=expansion)


def probed(latent: Latent, x: Tensor, call: AttentionCall, places: np.ndarray) -> Expansion:
    """The expansion of this rank's latents [(batch,) tokens, 1, width], tried on a few of them.

    That expand is deterministic is tried where it costs no wait for a device.
    """
    learns = torch.is_grad_enabled()
    expansion = Expansion(latent, x, learns=learns)
    rows = (x if x.ndim == 3 else x[:1].flatten(0, 1))[:PROBED_ROWS, 0]
    rows = rows[: len(rows) - 1 + len(rows) % 2]  # an odd number
    positions = torch.from_numpy(places[: len(rows)]).to(x.device)
    if not len(rows):
        rows, positions = x.new_zeros(1, x.shape[-1]), torch.zeros(1, dtype=torch.int64)
    twice = call.validate != "never" and x.device.type == "cpu"
    expansion.probe(rows, positions.to(x.device), twice=twice)
    return expansion


def resolved_wires(call: AttentionCall, dtype: str) -> Wires:
    """What wire and wire_dtype of a call mean for tensors of a dtype."""
    if call.wire is None:
        return plain_wires(call.wire_dtype and dtype_name(call.wire_dtype), dtype)
    return wires_of(call.wire, call.wire_dtype).resolved(dtype)


def _kernel(
    call: AttentionCall, q: Tensor, head_dim: int, needs: tuple[str, ...], square: bool
) -> Kernel:
    """The one that the call names, or else the first choice of the device."""
    asked = q.device.type, q.dtype, head_dim
    if call.kernel is not None:
        return serving_kernel(call.kernel, *asked, backward=call.needs_grad, needs=needs)
    use = use_of(q.device, call.mask, int(q.shape[-3]), square=square)
    return kernel_for(*asked, use, needs)


def agreement_fields(problem: Problem, q: Tensor, call: AttentionCall) -> dict[str, str]:
    """What all ranks must have in common, most telling first: "auto" plans for the shapes.

    The kernel is not among it: what ranks exchange does not depend on who computed it.
    """
    (plan, mask, (q_layout, kv_layout), groups, payload), backward = problem.passes
    scores = problem.scores
    fields: dict[str, Any] = {
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
        "plan": plan.fingerprint,
        "backward_plan": backward.plan.fingerprint,
        "exchanges": plan.traits.exchanges + backward.plan.traits.exchanges,
        "mask": mask,
        "layout": q_layout.fingerprint,
        "kv_layout": kv_layout.fingerprint,
        "softmax_scale": scores.scale,
        "softcap": scores.softcap,
        "dropout_p": scores.dropout_p,
        "dropout_seed": scores.dropout_seed,
        "return_max_logit": scores.max_logit,
        "return_error_bound": call.error_bound,
        "wire_dtype": payload.wires.partials,
        "wire": payload.wires,
        "save": "gathered" if problem.gathered else "replay",
        "prune": problem.prune,
        "requires_grad": call.needs_grad or problem.learns,
        "sink": "none" if call.sink is None else call.sink.dtype,
        "device": q.device.type,
    }
    return {name: str(value) for name, value in fields.items()}
