"""Tensors as Triton kernels take them: with their strides, in steps that loads are aligned to."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor


class TensorView(NamedTuple):
    """A tensor [rows, batch, heads] or [.., head_dim] as a kernel's argument; head_dim is dense.

    Strides are in numbers; of a tensor with head_dim in units of the launch's STEP.
    """

    base: Tensor
    row: int
    batch: int
    head: int


def view_of(x: Tensor) -> TensorView:
    return TensorView(x, *x.stride()[:3])


def in_steps(views: Sequence[TensorView | Tensor]) -> tuple[list[TensorView | Tensor], int]:
    """Return the views with strides of rows counted in steps, and the numbers of a step.

    A step is the most numbers, at most 16 bytes of the first view, that divide all strides.

    Triton itself sees only whether a stride is a multiple of 16 numbers. Rows on the wire are
    padded to 16 bytes, 8 numbers of 2: without a step they would be loaded number by number.
    """
    step, strides = 16 // views[0][0].itemsize, {}
    for i, view in enumerate(views):
        if isinstance(view, TensorView) and view.base.ndim == 4:
            sizes = view.base.shape[:3]
            strides[i] = [x if n > 1 else 0 for n, x in zip(sizes, view[1:], strict=True)]
            step = math.gcd(step, *strides[i])
    stepped = [
        TensorView(view[0], *(x // step for x in strides[i])) if i in strides else view
        for i, view in enumerate(views)
    ]
    return stepped, step
