"""One call of attention: as it was asked for, in which autocast region, and resolved."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any, NamedTuple, Self, TypeVar

import torch
from torch import Tensor

from tilewise.arguments import DtypeName, Reduction, Save, Validate, require_type
from tilewise.compiler.rank_plan import RankPlan
from tilewise.compiler.resolved import ResolvedPass
from tilewise.execution.expansion import Expansion
from tilewise.execution.sinks import TensorKind
from tilewise.kernels.bias import Alibi
from tilewise.kernels.protocol import Kernel, Scores
from tilewise.layouts.layout import Layout
from tilewise.masks.base import Mask
from tilewise.opaque import OpaqueValue
from tilewise.plan.ir import Plan
from tilewise.plan.kept import RecentValues
from tilewise.transport.agreement import CallKind
from tilewise.transport.protocol import Transport
from tilewise.transport.resolve import Group
from tilewise.wires.wire import AnyWire

NO_CONTEXT = nullcontext()
Operand = TypeVar("Operand", Tensor, Tensor | None)

MUST_AGREE = MappingProxyType({"agreed": True})
"""Metadata of an option that must be the same on every rank: the ranks' agreement compares it."""


@dataclass(frozen=True, kw_only=True)
class Call(OpaqueValue):
    """The keyword arguments of attention, each under its name; what they mean is said there.

    It is a constant to torch's compiler. Ranks that disagree on several options hear of the first.

    Attributes:
        sink: its kind; the tensor takes part in no constant.
        bias: its kind if it is a tensor.
        autocast: dtype of the torch.autocast region in which attention was called, if in one.
        needs_grad: a backward pass may follow.
        resolved: the call, if it is resolved already; group is then its transport.
    """

    plan: Plan = field(metadata=MUST_AGREE)
    backward_plan: Plan | None = field(default=None, metadata=MUST_AGREE)
    mask: Mask = field(metadata=MUST_AGREE)
    layout: Layout = field(metadata=MUST_AGREE)
    kv_layout: Layout | None = field(default=None, metadata=MUST_AGREE)
    q_positions: Sequence[int] | Tensor | None = None  # agreed on as the queries' layout
    softmax_scale: float | None = field(default=None, metadata=MUST_AGREE)
    softcap: float | None = field(default=None, metadata=MUST_AGREE)
    dropout_p: float = field(default=0.0, metadata=MUST_AGREE)
    dropout_seed: int | None = field(default=None, metadata=MUST_AGREE)
    sink: TensorKind | None = field(default=None, metadata=MUST_AGREE)
    bias: TensorKind | Alibi | None = field(default=None, metadata=MUST_AGREE)
    wire_dtype: torch.dtype | DtypeName | None = field(default=None, metadata=MUST_AGREE)
    wire: AnyWire | None = field(default=None, metadata=MUST_AGREE)
    save: Save | None = field(default=None, metadata=MUST_AGREE)
    prune: bool = field(default=True, metadata=MUST_AGREE)
    reduction: Reduction = field(default="fast", metadata=MUST_AGREE)
    return_lse: bool = False
    return_max_logit: bool = field(default=False, metadata=MUST_AGREE)
    group: Group = None
    validate: Validate = "first"
    kernel: Kernel | str | None = None  # what ranks exchange does not depend on who computed it
    autocast: torch.dtype | None = None
    needs_grad: bool = False
    resolved: ResolvedCall | None = field(default=None, compare=False, repr=False)

    def with_resolved(self, resolved: ResolvedCall, transport: Transport) -> Self:
        """The same call, resolved."""
        return replace(self, resolved=resolved, group=transport)

    def check_kinds(self) -> None:
        """Raise ValueError for an option that is of another kind than it must be."""
        for name, kind in _KINDS:
            value = getattr(self, name)
            if value is not None or name not in _MAY_BE_NONE:
                require_type(kind, name, value, _EXAMPLES.get(kind))


_KINDS = (
    ("plan", Plan),
    ("prune", bool),
    ("return_lse", bool),
    ("return_max_logit", bool),
    ("layout", Layout),
    ("mask", Mask),
    ("backward_plan", Plan),
    ("kv_layout", Layout),
)
_MAY_BE_NONE = frozenset(("backward_plan", "kv_layout"))
_EXAMPLES: Mapping[type, str] = MappingProxyType({Plan: "tw.ring(world_size)", bool: "True"})


def known_of(
    plan: object, layout: Layout | None, mask: Mask | None
) -> tuple[Layout | None, Mask | None]:
    """The layout and mask of a call: those given, else those that a prepared plan knows."""
    if not isinstance(plan, RankPlan) or plan.made_for is None:
        return layout, mask
    known_mask, known_layout = plan.made_for
    return known_layout if layout is None else layout, known_mask if mask is None else mask


def autocast_dtype(x: object) -> torch.dtype | None:
    """Return the dtype of the autocast region for x's device, or None outside of a region."""
    if not isinstance(x, Tensor):
        return None
    kind = x.device.type
    if not torch._C._is_autocast_available(kind) or not torch.is_autocast_enabled(kind):
        return None
    return torch.get_autocast_dtype(kind)


def operand_dtype(x: Tensor, autocast: torch.dtype | None) -> torch.dtype:
    """Return the dtype in which an operand takes part, as SDPA's under autocast.

    Args:
        autocast: as `autocast_dtype` gives it; tensors of fp64 and of whole numbers keep theirs.
    """
    if autocast is None or not x.is_floating_point() or x.dtype == torch.float64:
        return x.dtype
    return autocast


def lowered(x: Operand, autocast: torch.dtype) -> Operand:
    """Return x in its `operand_dtype`; what is no tensor is returned as it is."""
    return x.to(operand_dtype(x, autocast)) if isinstance(x, Tensor) else x


def without_autocast(x: Tensor, autocast: torch.dtype | None) -> AbstractContextManager[Any]:
    """Return a context in which the products of a kernel keep the dtypes that they are given.

    Args:
        autocast: dtype of the region that the context stands in; None: there is none to leave.
    """
    return NO_CONTEXT if autocast is None else torch.autocast(x.device.type, enabled=False)


_LEFT_OUT: Any = None


class KeptForCalls(NamedTuple):
    """Values that are made once for all calls that are resolved alike."""

    codes: RecentValues[Hashable, Any]  # of passes, bound
    kinds: dict[bool, CallKind]  # what ranks compare before each pass, by whether backward


class ResolvedCall(NamedTuple):
    """A call that one rank has checked, with all that is derived from its options and shapes.

    Attributes:
        bare_passes: forward and backward; `passes` has their plans.
        plans: those of the call, of passes whose plan is left out.
        plan_numbers: which of plans is that of each pass; None: it is there.
        number: of the forward pass among the group's calls, the same on all ranks; None: not known.
        expansion: of latents, if k and v are made of some.
        kept: what is made once for all calls that resolve to this; None: nothing is kept.
    """

    bare_passes: tuple[ResolvedPass, ResolvedPass]
    scores: Scores
    prune: bool
    kernel: Kernel
    number: int | None = None
    expansion: Expansion | None = None
    kept: KeptForCalls | None = None
    plans: tuple[Plan, ...] = ()
    plan_numbers: tuple[int | None, int | None] = (None, None)

    @property
    def passes(self) -> tuple[ResolvedPass, ResolvedPass]:
        """Forward and backward, with their plans."""
        forward, backward = (
            bare if number is None else bare._replace(plan=self.plans[number])
            for bare, number in zip(self.bare_passes, self.plan_numbers, strict=True)
        )
        return forward, backward

    def without_plans(self, plans: tuple[Plan, Plan]) -> ResolvedCall:
        """Return this call with numbers in place of these plans.

        The result is kept with one of them; a reference to the plan would keep it alive for ever.
        """
        numbers, bare = [], []
        for x in self.bare_passes:
            number = next((i for i, plan in enumerate(plans) if plan is x.plan), None)
            numbers.append(number)
            bare.append(x if number is None else x._replace(plan=_LEFT_OUT))
        return self._replace(bare_passes=tuple(bare), plan_numbers=tuple(numbers))

    @property
    def whole_rows(self) -> bool:
        """True if each row of a result is computed by one rank, in one call."""
        return self.bare_passes[0].payload.whole_rows

    @property
    def learns(self) -> bool:
        """True if what makes k and v of latents gets gradients."""
        return self.expansion is not None and bool(self.expansion.leaves)

    @property
    def gathered(self) -> bool:
        """True if forward keeps the operands that it receives, for backward."""
        return self.bare_passes[1].payload.saved
