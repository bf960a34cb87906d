"""What both passes of one attention call share: layouts, kernel, packing, and who lends buffers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from tilewise.execution.allocator import Lender
from tilewise.execution.gather import Binder
from tilewise.execution.packing import Packing
from tilewise.kernels.protocol import Kernel
from tilewise.layouts.layout import Layout
from tilewise.plan.ir import Role, Side
from tilewise.plan.payload import Payload


@dataclass(frozen=True)
class Frame:
    """One pass of one attention call, beside its tensors.

    Attributes:
        layouts: of the query and the KV shards.
        batch: sequences side by side, all of the same layout and mask.
        keep: received operands stay for the next pass.
        packing: how each side's and role's tensors lie in a row of bytes.
        lender: of the pass's buffers.
    """

    layouts: tuple[Layout, Layout]
    binder: Binder
    kernel: Kernel
    scale: float
    batch: int
    dtype: torch.dtype
    device: torch.device
    keep: bool
    packing: Mapping[tuple[Side, Role], Packing]
    lender: Lender


def packings(payload: Payload) -> dict[tuple[Side, Role], Packing]:
    """How every kind of item is packed in a pass."""
    return {
        (side, role): Packing(payload.fields(side, role), payload.heads(side))
        for side in Side
        for role in Role
    }
