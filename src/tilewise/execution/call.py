"""One call of attention: as it was asked for, and resolved."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from copy import copy
from dataclasses import dataclass
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor

from tilewise.arguments import Save, Validate
from tilewise.compiler.resolved import ResolvedPass
from tilewise.execution.expansion import Expansion
from tilewise.execution.sinks import SinkKind
from tilewise.kernels.protocol import Kernel
from tilewise.kernels.scores import Scores
from tilewise.layouts.layout import Layout
from tilewise.masks.base import Mask
from tilewise.opaque import OpaqueValue
from tilewise.plan.ir import Plan
from tilewise.plan.kept import RecentValues
from tilewise.transport.resolve import Group
from tilewise.wires.wire import AnyWire


@dataclass(frozen=True)
class Call(OpaqueValue):
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
    problem: ResolvedCall | None = None

    def resolved(self, problem: ResolvedCall, group: Group) -> Self:
        """The same call, checked; group: its transport."""
        made = copy(self)
        vars(made).update(problem=problem, group=group)
        return made


class KeptForCalls(NamedTuple):
    """What is made once for all calls that are resolved alike."""

    codes: RecentValues[Hashable, Any]  # of passes, bound
    records: RecentValues[Hashable, Tensor]  # what ranks compare before forward


class ResolvedCall(NamedTuple):
    """A checked call.

    Attributes:
        passes: forward and backward.
        number: of the forward pass's agreement, the same on all ranks; None: not known.
        expansion: of latents, if k and v are made of some.
        kept: what is made once for all calls of this problem; None: nothing is kept.
    """

    passes: tuple[ResolvedPass, ResolvedPass]
    scores: Scores
    prune: bool
    kernel: Kernel
    number: int | None = None
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
