"""Launches of Triton kernels: what follows from dtypes, sizes and strides is found once."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from itertools import islice
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tilewise.kernels.triton.views import TensorView
from tilewise.plan.kept import RecentValues


class KernelLaunch(NamedTuple):
    """A launch but for its tensors.

    Attributes:
        numbers: what follows tensors and extra arguments.
        constants: the kernel's constants, and Triton's options, by name.
        strides: of rows, batch and heads, of tensors that the kernel takes as TensorViews; (): as
            they are.
        tuples: how many of the tensors are in each of the kernel's tuples of tensors; (): none.
    """

    kernel: Any
    grid: tuple[int, int, int]
    numbers: tuple[Any, ...]
    constants: dict[str, Any]
    strides: Sequence[Any] = ()
    tuples: Sequence[int] = ()


class _Known:
    """The compiled kernel of one kind of launch (None before the first one), and its launch."""

    __slots__ = ("found",)

    def __init__(self, launch: KernelLaunch):
        self.found: tuple[Any, KernelLaunch] = None, launch


KNOWN = RecentValues[Hashable, _Known](1024)
"""Launches by kind."""


def launch(
    prepare: Callable[..., KernelLaunch],
    tensors: Sequence[Tensor],
    *facts: Hashable,
    extra: Any = (),
) -> None:
    """Launch what `prepare(tensors, *facts)` gives.

    Triton finds a compiled kernel by looking at every argument; of a kind that was launched before
    it is at hand. A kind is all that `prepare` and Triton look at.

    Args:
        facts: the kernel among them.
        extra: arguments behind the tensors: floats, aligned tensors, and numbers that follow from
            what is above.
    """
    places = [(x.dtype, x.shape, x.stride(), x.get_device(), x.data_ptr() % 16) for x in tensors]
    kind = prepare, facts, *places
    known = KNOWN.get(kind, lambda: _Known(prepare(tensors, *facts)))
    compiled, it = known.found
    arguments: Sequence[Any] = tensors
    if it.strides:
        arguments = [*map(_viewed, tensors, it.strides)]
    elif it.tuples:
        rest = iter(tensors)
        arguments = [tuple(islice(rest, size)) for size in it.tuples]
    with torch.cuda.device_of(tensors[0]):
        if compiled is not None:
            compiled[it.grid](*arguments, *extra, *it.numbers)
            return
        options = {"enable_fp_fusion": True, **it.constants}
        compiled = it.kernel[it.grid](*arguments, *extra, *it.numbers, **options)
    if compiled is not None:  # as Triton's interpreter returns
        constants = [it.constants[x] for x in it.kernel.arg_names if x in it.constants]
        known.found = compiled, it._replace(numbers=(*it.numbers, *constants))


def _viewed(x: Tensor, strides: tuple[int, int, int]) -> TensorView:
    return TensorView(x, *strides)
