"""A check that an object is a kernel: it runs small calls of every kind, beside the oracle."""

import inspect
import traceback
from collections.abc import Sequence
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
    kernel: Kernel,
    device: str,
    dtype: torch.dtype,
    head_dim: int,
    *,
    v_head_dim: int | None = None,
    backward: bool = True,
    masks: Sequence[tuple[Mask, range, range]] = MASKS,
) -> None:
    """Run a kernel on calls of every kind, and compare what it gives with the reference.

    Args:
        device, dtype, head_dim, backward: what it is asked for; where it says that it cannot serve
            that, nothing is run.
        v_head_dim: of values, if it is another.
        masks: of the calls, each with its queries and keys.
    Raises:
        ValueError: naming the method, its file and line, and what is wrong: one that is missing or
            raises, a wrong shape or dtype, a wrong lse or gradient, accumulators left alone.
    """
    found, widths = given_kernel(kernel), (head_dim, v_head_dim or head_dim)
    if _run(found, "supports", "", device, dtype, max(widths), backward) is not None:
        return
    make = torch.Generator().manual_seed(0)
    cut = {"square_causal": found.square_causal, "whole_tile": found.whole_tile}
    for mask, queries, keys in masks:
        for call in tile_calls(np.array(queries), np.array(keys), mask, **cut):
            like = torch.empty(0, dtype=dtype, device=device)
            check = _CallCheck(found, call, make, like, widths)
            check.forward()
            if backward:
                check.backward()


class _CallCheck:
    """One call with its operands, and the oracle's results in fp64."""

    def __init__(
        self,
        kernel: Kernel,
        call: KernelCall,
        make: torch.Generator,
        like: Tensor,
        widths: tuple[int, int],
    ):
        self.kernel, self.call = kernel, call
        self.tolerance = TOLERANCES(str(like.dtype).removeprefix("torch."))
        self.wide, self.scale = accumulator_dtype(like.dtype), widths[0] ** -0.5

        def normal(rows: int, heads: int, width: int) -> Tensor:  # every second row: any strides
            return torch.randn(2 * rows, BATCH, heads, width, generator=make).to(like)[::2]

        self.q, self.dout = (normal(call.num_q, HEADS, x) for x in widths)
        self.k, self.v = (normal(call.num_k, KV_HEADS, x) for x in widths)
        wide = self.q.double(), self.k.double(), self.v.double()
        self.out, self.lse = Reference().forward(*wide, call, self.scale)
        # of the whole attention, of which this call is a part
        self.whole_lse = torch.where(self.lse == -torch.inf, 0.0, self.lse) + 0.7
        self.delta = torch.ones_like(self.lse)
        statistics = self.dout.double(), self.whole_lse, self.delta
        self.grads = Reference().backward(*wide, *statistics, call, self.scale)

    def forward(self) -> None:
        operands, names = (self.q, self.k, self.v, self.call, self.scale), ("out", "lse")
        found = _run(self.kernel, "forward", self._about, *operands)
        self._compare("forward", names, found, (self.out, self.lse))
        into = tuple(x.to(self.wide, copy=True) for x in (self.out, self.lse))
        merged = _run(self.kernel, "forward", self._about, *operands, into=into)
        self._refuse_other("forward", merged, into)
        # the same keys a second time: out stays, every weight counts twice
        self._compare("forward", names, into, (self.out, self.lse + np.log(2)))

    def backward(self) -> None:
        statistics = (x.to(self.wide) for x in (self.whole_lse, self.delta))
        operands = self.q, self.k, self.v, self.dout, *statistics, self.call, self.scale
        grads, names = _run(self.kernel, "backward", self._about, *operands), ("dq", "dk", "dv")
        self._compare("backward", names, grads, self.grads)
        into = tuple(torch.ones_like(x, dtype=self.wide) for x in self.grads)
        added = _run(self.kernel, "backward", self._about, *operands, into=into)
        self._refuse_other("backward", added, into)
        self._compare("backward", names, into, [x + 1 for x in self.grads])

    def _compare(
        self, method: str, names: Sequence[str], got: Any, wanted: Sequence[Tensor]
    ) -> None:
        if not isinstance(got, tuple | list) or len(got) != len(names):
            what = f"{len(got)} values" if isinstance(got, tuple | list) else type(got).__name__
            self._refuse(method, f"returned {what}, not ({', '.join(names)})")
        for name, found, true in zip(names, got, wanted, strict=True):
            if not isinstance(found, Tensor) or found.shape != true.shape:
                shape = list(found.shape) if isinstance(found, Tensor) else type(found).__name__
                self._refuse(method, f"{name} has shape {shape}, not {list(true.shape)}")
            if name == "lse" and found.dtype != self.wide:
                self._refuse(method, f"lse has dtype {found.dtype}, not {self.wide}")
            hidden = true == -torch.inf
            if ((found == -torch.inf) != hidden).any():
                self._refuse(method, f"{name} must be -inf on rows without a key, and only there")
            true, found = (x.double().masked_fill(hidden, 0.0) for x in (true, found))
            error = float((found - true).abs().max()) / max(1.0, float(true.abs().max()))
            if not error <= self.tolerance:
                hint = "; lse is the natural logarithm" if name == "lse" else ""
                self._refuse(
                    method, f"{name} is off by {error:.2g} ({self.tolerance:g} is allowed){hint}"
                )

    def _refuse_other(self, method: str, found: Any, into: tuple[Tensor, ...]) -> None:
        if len(found) != len(into) or any(a is not b for a, b in zip(found, into, strict=True)):
            self._refuse(method, "must return `into` itself, changed in place, where it is given")

    @property
    def _about(self) -> str:
        call = self.call
        return f"a {call.kind.value} call of {call.num_q} queries and {call.num_k} keys: "

    def _refuse(self, method: str, text: str) -> None:
        at = place(getattr(self.kernel, method))
        raise ValueError(f"kernel {self.kernel.name!r}, {method}{at}: {self._about}{text}")


def _run(kernel: Kernel, name: str, about: str, *args: Any, **words: Any) -> Any:
    method = getattr(kernel, name)
    try:
        return method(*args, **words)
    except Exception as error:
        own = inspect.getsourcefile(method)
        lines = [x.lineno for x in traceback.extract_tb(error.__traceback__) if x.filename == own]
        at = f" ({own}:{lines[-1]})" if lines else place(method)
        said = f"{type(error).__name__}: {error}"
        raise ValueError(f"kernel {kernel.name!r}, {name}{at}: {about}{said}") from None


def place(of: Any) -> str:
    """Return where a method or class is defined, as " (file:line)"; empty where there is
    no source.
    """
    try:
        return f" ({inspect.getsourcefile(of)}:{inspect.getsourcelines(of)[1]})"
    except (OSError, TypeError):
        return ""
