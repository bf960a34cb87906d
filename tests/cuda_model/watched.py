"""Shows a played device all that operators and kernels do to tensors."""

from __future__ import annotations

from typing import Any

import torch
from cuda_model.played_cuda import PlayedDevice
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tilewise.execution import operator
from tilewise.tiles.calls import KernelCall, Kind

OURS = {
    "tilewise::attention": operator._forward,
    "tilewise::attention_backward": operator._backward,
}
EMPTY = ("empty", "new_empty")


class Watch(TorchDispatchMode):
    """Operators of one thread, each an operation on the current stream."""

    def __init__(self, device: PlayedDevice) -> None:
        super().__init__()
        self.device = device

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = func._schema.name
        if name in OURS:
            with self:
                return OURS[name](*args, **kwargs)
        result = func(*args, **kwargs)
        reads, writes, views = _arguments(func, args, kwargs)
        new = self.device.take(_tensors(result))
        if not name.removeprefix("aten::").startswith(EMPTY):
            writes += new
        if writes or (reads and not views):
            self.device.launch(name, reads, writes)
        return result


def _arguments(func: Any, args: Any, kwargs: Any) -> tuple[list[Tensor], list[Tensor], bool]:
    """The tensors that an operator reads and writes; whether its result is a view."""
    reads: list[Tensor] = []
    writes: list[Tensor] = []
    views = False
    for i, argument in enumerate(func._schema.arguments):
        given = args[i] if i < len(args) else kwargs.get(argument.name)
        alias = argument.alias_info
        if alias is None or alias.is_write:
            (reads if alias is None else writes).extend(_tensors(given))
        else:
            views = True
    return reads, writes, views


def _tensors(tree: Any) -> list[Tensor]:
    return [x for x in tree_leaves(tree) if isinstance(x, Tensor)]


def _touched(
    name: str, call: KernelCall, args: Any, results: list[Tensor]
) -> tuple[list[Tensor], list[Tensor]]:
    """The rows of a call of lists: those that it reads, and those whose results it writes."""
    sides = (0, 1, 1) if name == "forward" else (0, 1, 1, 0, 0, 0)
    ends = (0,) * len(results) if name == "forward" else (0, 1, 1)

    def rows(tensors: Any, sides: Any) -> list[Tensor]:
        pairs = zip(tensors, sides, strict=False)
        return [x[slice(*span)] for x, side in pairs for span in call.sides[side]]

    return rows(args, sides), rows(results, ends)


class WatchedKernel:
    """A kernel whose calls are one operation each.

    Attributes:
        ways: in which it was called: name, results given, dtypes and strides.
    """

    def __init__(self, kernel: Any, device: PlayedDevice, *, whole_tile: bool = False) -> None:
        self._kernel, self._device = kernel, device
        self.name, self.supports = kernel.name, kernel.supports
        self.lists = getattr(kernel, "lists", False)
        self.square_causal = kernel.square_causal and not whole_tile
        self.whole_tile = whole_tile
        self.ways: set[Any] = set()

    def forward(self, *args: Any) -> Any:
        return self._run("forward", self._kernel.forward, args)

    def backward(self, *args: Any) -> Any:
        return self._run("backward", self._kernel.backward, args)

    def _run(self, name: str, function: Any, args: Any) -> Any:
        with torch._C._DisableTorchDispatch():
            result = function(*args)
        reads, results = _tensors(args), _tensors(result)
        for call in args:
            if isinstance(call, KernelCall) and call.kind is Kind.LISTS:
                reads, results = _touched(name, call, args, results)
        self.ways.add((name, len(reads), *((x.dtype, x.stride()) for x in reads)))
        self._device.take(results)
        self._device.launch(name, reads, results)
        return result
