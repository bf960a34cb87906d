"""Mixed precision: attention under torch.autocast, in the dtype in which SDPA would compute it."""

from contextlib import AbstractContextManager, nullcontext
from typing import Any, TypeVar

import torch
from torch import Tensor

Operand = TypeVar("Operand", Tensor, Tensor | None)


def autocast_dtype(x: object) -> torch.dtype | None:
    """Return the dtype of the autocast region for x's device, or None outside of a region."""
    if not isinstance(x, Tensor):
        return None
    kind = x.device.type
    if not torch.amp.is_autocast_available(kind) or not torch.is_autocast_enabled(kind):
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
    return nullcontext() if autocast is None else torch.autocast(x.device.type, enabled=False)
