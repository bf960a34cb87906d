"""Whether an object is a kernel: run on small calls of every kind, beside the oracle."""

import inspect
import traceback
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tilewise.kernels.protocol import Kernel, accumulator_dtype
from tilewise.kernels.reference import Reference
from tilewise.kernels.registry import given_kernel
from tilewise.masks.base import Causal, Document, Full, Mask, Window
from tilewise.tiles.calls import KernelCall
from tilewise.tiles.cover import tile_calls

TOLERANCES = {"float64": 1e-9, "float32": 1e-4, "bfloat16": 6e-2, "float16": 1e-2}.__getitem__
"""Errors over the largest true value up to which a kernel passes."""
BATCH, HEADS, KV_HEADS = 2, 4, 2
MASKS: tuple[tuple[Mask, range, range], ...] = (
    (Full(), range(5), range(7)),
    (Causal(), range(6), range(6)),
    (Causal(), range(3, 8), range(8)),
    (Document([0, 3, 4, 9]) & Window(2, 1), range(9), range(9)),
    (Document([0, 4, 9]) & Causal(), range(9), range(2, 9)),
)
"""A mask with its queries and keys: full, causal and sliced calls, also with rows without a key."""


def check_kernel(
    kernel: Kernel, device: str, dtype: torch.dtype, head_dim: int, *, backward: bool = True
) -> None:
    """Run a kernel on calls of every kind, and compare what it gives with the reference.

    Args:
        device, dtype, head_dim, backward: what it is asked for; where it says that it cannot serve
            that, nothing is run.
    Raises:
        ValueError: naming the method, its file and line, and what is wrong: one that is missing or
            raises, a wrong shape or dtype, a wrong lse or gradient, accumulators left alone.
    """
    found = given_kernel(kernel)
    asked = device, dtype, head_dim, backward
    if _run(found.supports, "supports", *asked) is not None:
        return
    make = torch.Generator().manual_seed(0)
    for call in _calls(found):
        check = _CallCheck(found, call, make, dtype, head_dim)
        check.to(device)
        check.forward()
        if backward:
            check.backward()


def _calls(kernel: Kernel) -> Iterator[KernelCall]:
    cut = {"square_causal": kernel.square_causal, "whole_tile": kernel.whole_tile}
    for mask, queries, keys in MASKS:
        yield from tile_calls(np.array(queries), np.array(keys), mask, **cut)


class _CallCheck:
    """One call with its operands, and the oracle's results in fp64."""

    def __init__(
        self,
        kernel: Kernel,
        call: KernelCall,
        make: torch.Generator,
        dtype: torch.dtype,
        head_dim: int,
    ):
        self.kernel, self.call, self.dtype = kernel, call, dtype
        self.scale = head_dim**-0.5

        def normal(rows: int, heads: int) -> Tensor:  # every second row: strides are any
            x = torch.randn(2 * rows, BATCH, heads, head_dim, generator=make)
            return x.to(dtype)[::2]

        self.q, self.dout = normal(call.num_q, HEADS), normal(call.num_q, HEADS)
        self.k, self.v = normal(call.num_k, KV_HEADS), normal(call.num_k, KV_HEADS)
        wide = (self.q.double(), self.k.double(), self.v.double())
        self.out, self.lse = Reference().forward(*wide, call, self.scale)
        # of the whole attention, of which this call is a part
        self.whole_lse = torch.where(self.lse == -torch.inf, 0.0, self.lse) + 0.7
        self.delta = torch.randn(self.lse.shape, generator=make, dtype=torch.float64)
        statistics = self.whole_lse, self.delta
        self.grads = Reference().backward(*wide, self.dout.double(), *statistics, call, self.scale)

    def to(self, device: str) -> None:
        for name in ("q", "k", "v", "dout"):
            setattr(self, name, getattr(self, name).to(device))

    def forward(self) -> None:
        operands = self.q, self.k, self.v, self.call, self.scale
        found = self._two(self._run("forward", *operands))
        self._compare("forward", "out", found[0], self.out)
        self._compare("forward", "lse", found[1], self.lse, accumulator_dtype(self.dtype))
        wide = accumulator_dtype(self.dtype)
        into = tuple(x.to(self.q.device, wide).clone() for x in (self.out, self.lse))
        merged = self._two(self._run("forward", *operands, into=into))
        self._into("forward", merged, into)
        # the same keys a second time: out stays, every weight counts twice
        self._compare("forward(into=...)", "out", merged[0], self.out)
        self._compare("forward(into=...)", "lse", merged[1], self.lse + np.log(2))

    def backward(self) -> None:
        wide = accumulator_dtype(self.dtype)
        statistics = (x.to(self.q.device, wide) for x in (self.whole_lse, self.delta))
        operands = self.q, self.k, self.v, self.dout, *statistics, self.call, self.scale
        grads, names = self._run("backward", *operands), ("dq", "dk", "dv")
        if not isinstance(grads, tuple | list) or len(grads) != 3:
            self._refuse("backward", f"returned {_said(grads)}, not (dq, dk, dv)")
        for name, found, wanted in zip(names, grads, self.grads, strict=True):
            self._compare("backward", name, found, wanted)
        into = tuple(torch.ones_like(x, dtype=wide, device=self.q.device) for x in self.grads)
        added = self._run("backward", *operands, into=into)
        self._into("backward", added, into)
        for name, found, wanted in zip(names, into, self.grads, strict=True):
            self._compare("backward(into=...)", name, found, wanted + 1)

    def _run(self, method: str, *args: Any, **words: Any) -> Any:
        return _run(getattr(self.kernel, method), method, *args, about=self._about, **words)

    def _two(self, found: Any) -> tuple[Tensor, Tensor]:
        if not isinstance(found, tuple | list) or len(found) != 2:
            self._refuse("forward", f"returned {_said(found)}, not (out, lse)")
        return found[0], found[1]

    def _into(self, method: str, found: Any, into: tuple[Tensor, ...]) -> None:
        if len(found) != len(into) or any(a is not b for a, b in zip(found, into, strict=True)):
            self._refuse(method, "must return `into` itself, changed in place, where it is given")

    def _compare(
        self, method: str, name: str, found: Any, wanted: Tensor, dtype: torch.dtype | None = None
    ) -> None:
        if not isinstance(found, Tensor):
            self._refuse(method, f"{name} is a {type(found).__name__}, not a tensor")
        if found.shape != wanted.shape:
            shapes = f"{list(found.shape)}, not {list(wanted.shape)}"
            self._refuse(method, f"{name} has shape {shapes}")
        if not found.is_floating_point() or dtype not in (None, found.dtype):
            self._refuse(method, f"{name} has dtype {found.dtype}, not {dtype or 'a float'}")
        found = found.detach().cpu().double()
        hidden = wanted == -torch.inf
        if ((found == -torch.inf) != hidden).any():
            self._refuse(method, f"{name} must be -inf on rows that no key reaches, and only there")
        error = (found - wanted).masked_fill(hidden, 0.0).abs()
        error = float(error.max()) / max(1.0, float(wanted.masked_fill(hidden, 0.0).abs().max()))
        tolerance = TOLERANCES(str(self.dtype).removeprefix("torch."))
        if not error <= tolerance:
            hint = "; lse is the natural logarithm" if name == "lse" else ""
            self._refuse(
                method,
                f"{name} is off by {error:.2g} ({tolerance:g} is allowed){hint}",
            )

    @property
    def _about(self) -> str:
        call = self.call
        return f"a {call.kind.value} call of {call.num_q} queries and {call.num_k} keys: "

    def _refuse(self, method: str, text: str) -> None:
        name = method.partition("(")[0]
        at = place(getattr(self.kernel, name))
        raise ValueError(f"kernel {self.kernel.name!r}, {method}{at}: {self._about}{text}")


def _run(method: Callable[..., Any], name: str, *args: Any, about: str = "", **words: Any) -> Any:
    try:
        return method(*args, **words)
    except Exception as error:
        own = inspect.getsourcefile(method)
        lines = [x.lineno for x in traceback.extract_tb(error.__traceback__) if x.filename == own]
        at = f" ({own}:{lines[-1]})" if lines else place(method)
        said = f"{type(error).__name__}: {error}"
        raise ValueError(f"kernel method {name}{at}: {about}{said}") from None


def place(of: Any) -> str:
    """Where a method or class is defined, as " (file:line)"; empty where there is no source."""
    try:
        return f" ({inspect.getsourcefile(of)}:{inspect.getsourcelines(of)[1]})"
    except (OSError, TypeError):
        return ""


def _said(found: Any) -> str:
    return f"{len(found)} values" if isinstance(found, tuple | list) else type(found).__name__
