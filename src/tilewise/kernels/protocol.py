"""What an attention kernel is, and the conventions at its boundary.

Every kernel yields natural-log lse, -inf on rows no key reaches, where out is 0: made so once, here
at the boundary, so that merging, gradients and transports need not know kernels apart.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterable
from typing import NamedTuple, Protocol, TypeAlias

import torch
from torch import Tensor

from tilewise.kernels.merge import merge_into
from tilewise.tiles.calls import KernelCall

Accumulators: TypeAlias = tuple[Tensor, Tensor]
Gradients: TypeAlias = tuple[Tensor, Tensor, Tensor]


class Kernel(Protocol):
    """Attention of one call's rows, gathered in call order; `kernel=` takes any object that has it.

    One object serves all ranks of a loopback world and both passes, one call at a time.

    q is [m, batch, num_heads, head_dim], k and v are [n, batch, num_kv_heads, head_dim], of any
    strides with unit last stride; query head h reads KV head h // (num_heads // num_kv_heads).

    Attributes:
        name: for messages.
        square_causal: causal calls must have as many queries as keys (`tile_calls` obliges).
        whole_tile: a tile is best one call, however many slices it has (`tile_calls` obliges).
    """

    name: str
    square_causal: bool
    whole_tile: bool

    def supports(
        self, device_type: str, dtype: torch.dtype, head_dim: int, backward: bool = True
    ) -> str | None:
        """None if the kernel can (with backward: both passes), else the reason why not."""
        ...

    def forward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        call: KernelCall,
        scale: float,
        into: Accumulators | None = None,
    ) -> tuple[Tensor, Tensor]:
        """out = softmax(scale q k^T + mask) v and its lse, over the call's keys alone.

        Args:
            into: (out, lse) of the call's rows so far, fp32 or wider, changed in place by merging.
        Returns:
            out [m, batch, num_heads, head_dim] in the kernel's own dtype, lse [m, batch, num_heads]
            in `accumulator_dtype`; `into` itself where it is given.
        """
        ...

    def backward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        dout: Tensor,
        lse: Tensor,
        delta: Tensor,
        call: KernelCall,
        scale: float,
        into: Gradients | None = None,
    ) -> Gradients:
        """The call's share of dq, dk, dv.

        p = exp(scale q k^T - lse);  ds = p (dout v^T - delta);
        dq = scale ds k;  dk = scale ds^T q;  dv = p^T dout.

        Args:
            lse, delta: [m, batch, num_heads], of the whole attention, not of this call;
                delta = rowsum(out * dout) - dlse.
            into: (dq, dk, dv) so far, fp32 or wider, which the call's share is added to in place.
        Returns:
            `into` itself where it is given.
        """
        ...


def accumulator_dtype(dtype: torch.dtype) -> torch.dtype:
    """fp64 for fp64, else fp32: of lse, delta and partials in memory."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def no_keys(q: Tensor, dtype: torch.dtype | None = None) -> tuple[Tensor, Tensor]:
    """(out, lse) of queries that see nothing: 0 and -inf; dtype of out, default q's."""
    out = torch.zeros_like(q, dtype=dtype or q.dtype)
    lse = q.new_full(q.shape[:-1], -torch.inf, dtype=accumulator_dtype(q.dtype))
    return out, lse


def deliver(out: Tensor, lse: Tensor, into: Accumulators | None) -> tuple[Tensor, Tensor]:
    """Merge a call's result into the accumulators, if there are any; what `forward` returns."""
    if into is None:
        return out, lse
    merge_into(*into, out, lse)
    return into


def heads_first(x: Tensor) -> Tensor:
    """[rows, batch, heads, head_dim] seen as [batch, heads, rows, head_dim]."""
    return x.permute(1, 2, 0, 3)


def no_gradients(q: Tensor, k: Tensor, v: Tensor) -> Gradients:
    """Zeros, of a call without rows or without keys."""
    dq, dk, dv = (torch.zeros_like(x, dtype=accumulator_dtype(x.dtype)) for x in (q, k, v))
    return dq, dk, dv


class Operands(NamedTuple):
    """What `backward` takes of a call."""

    q: Tensor
    k: Tensor
    v: Tensor
    dout: Tensor
    lse: Tensor
    delta: Tensor


class AsideKernel(ABC):
    """A kernel that computes its results aside, and then merges or adds them to accumulators."""

    @abstractmethod
    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, call: KernelCall, scale: float
    ) -> tuple[Tensor, Tensor]:
        """out and lse as `forward` returns them, of at least one row and one key."""

    @abstractmethod
    def differentiate(self, operands: Operands, call: KernelCall, scale: float) -> Iterable[Tensor]:
        """dq, dk, dv as `backward` returns them, of at least one row and one key."""

    def forward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        call: KernelCall,
        scale: float,
        into: Accumulators | None = None,
    ) -> tuple[Tensor, Tensor]:
        found = self.attend(q, k, v, call, scale) if len(q) and len(k) else no_keys(q)
        return deliver(*found, into)

    def backward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        dout: Tensor,
        lse: Tensor,
        delta: Tensor,
        call: KernelCall,
        scale: float,
        into: Gradients | None = None,
    ) -> Gradients:
        if not (len(q) and len(k)):
            return into or no_gradients(q, k, v)
        dq, dk, dv = self.differentiate(Operands(q, k, v, dout, lse, delta), call, scale)
        if into is None:
            return dq, dk, dv
        for total, grad in zip(into, (dq, dk, dv), strict=True):
            total += grad
        return into
