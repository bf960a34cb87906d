"""A probe of a layer: rows of its input are changed, and its output is read."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle


class Watched(Protocol):
    """The object that a probe writes to: its reading, and whether the layer is running."""

    reading: Tensor | None
    in_layer: bool


class RowProbe(NamedTuple):
    """Rows of a layer's first input are changed, and its output is read; or, backward, the gradient
    at its output is replaced by one that these rows alone have, and that at its input is read.

    Attributes:
        layer: a module's name. Its first call counts.
        rows: positions in the sequence.
        positions: of this run's rows, -1 for padding.
    """

    layer: str
    rows: tuple[int, ...]
    positions: Tensor
    backward: bool = False

    def attach(self, model: nn.Module, watched: Watched) -> list[RemovableHandle]:
        """Probe the layer from now on, until the handles are removed."""
        module: Any = dict(model.named_modules())[self.layer]
        calls = list[None]()

        def before(_: Any, args: tuple[Any, ...], given: dict[str, Any]) -> Any:
            calls.append(None)
            watched.in_layer = True
            if len(calls) > 1:
                return None
            values = [*args, *given.values()]
            at = next((i for i, x in enumerate(values) if self._dim(x) is not None), None)
            if at is None:
                return None
            values[at] = self._input(values[at], watched)
            return tuple(values[: len(args)]), dict(zip(given, values[len(args) :], strict=True))

        def after(_: Any, __: Any, output: Any) -> None:
            watched.in_layer = False
            outs = output if isinstance(output, tuple | list) else (output,)
            out = next((x for x in outs if self._dim(x) is not None), None)
            if len(calls) > 1 or out is None:
                return
            if not self.backward:
                watched.reading = out.detach()
            elif out.requires_grad:
                on_gradient(out, self._gradient)

        return [
            module.register_forward_pre_hook(before, with_kwargs=True),
            module.register_forward_hook(after),
        ]

    def _dim(self, x: Any) -> int | None:
        """The dimension of a tensor's rows; None if it has none."""
        if not isinstance(x, Tensor) or not x.is_floating_point() or x.ndim < 2:
            return None
        dims = sorted(range(x.ndim), key=lambda d: d != x.ndim - 2)
        return next((d for d in dims if x.shape[d] == len(self.positions)), None)

    def _input(self, x: Tensor, watched: Watched) -> Tensor:
        if not self.backward:
            rows = x.movedim(self._dim(x) or 0, 0)
            sizes = rows.detach().square().flatten(1).mean(1).sqrt()
            sizes = sizes.where(sizes > 0, 1).reshape(-1, *[1] * (rows.ndim - 1))
            return x + (self._drawn(rows) * sizes).movedim(0, self._dim(x) or 0)
        copy = x * 1 if x.requires_grad else x.detach().requires_grad_()

        def read(grad: Tensor) -> None:
            watched.reading = grad.detach()

        copy.register_hook(read)
        return copy

    def _gradient(self, grad: Tensor) -> Tensor:
        return self._drawn(grad.movedim(self._dim(grad) or 0, 0)).movedim(0, self._dim(grad) or 0)

    def _drawn(self, rows: Tensor) -> Tensor:
        """Random numbers in the rows of the probe, the same on any rank; 0 in the others."""
        drawn = torch.zeros_like(rows)
        for place, position in enumerate(self.positions.tolist()):
            if position in self.rows:
                make = torch.Generator().manual_seed(position)
                drawn[place] = torch.randn(rows.shape[1:], generator=make).to(rows)
        return drawn


def on_gradient(x: Tensor, change: Callable[[Tensor], Tensor]) -> None:
    """Call a function with a tensor's gradient, and go on with the one that it returns.

    The hook belongs to the tensor's node of the graph. Tensor.register_hook of torch 2.13 ends the
    process if the tensor is a view that has its gradient from a change in place of another view.
    """
    node, number = x.grad_fn, x.output_nr
    if node is None:
        x.register_hook(change)
        return

    def changed(grads: tuple[Tensor | None, ...]) -> tuple[Tensor | None, ...]:
        grad = grads[number]
        return grads if grad is None else (*grads[:number], change(grad), *grads[number + 1 :])

    node.register_prehook(changed)
