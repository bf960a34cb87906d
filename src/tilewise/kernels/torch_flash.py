"""The CUDA kernel without extra dependencies: PyTorch's own flash attention, bf16 and fp16.

Flash attention knows full, causal (bottom-right aligned) and windowed rectangles. So every slice of
a call is one such rectangle with its window, and a call of several slices is merged from them.
"""

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from tilewise.kernels.delta import out_for_delta
from tilewise.kernels.merge import merge_into
from tilewise.kernels.protocol import (
    Accumulators,
    Gradients,
    deliver,
    no_gradients,
    no_keys,
)
from tilewise.tiles.calls import KernelCall, Kind, Slice

_forward = torch.ops.aten._flash_attention_forward.default
_backward = torch.ops.aten._flash_attention_backward.default


class FlashRect(NamedTuple):
    """Rows [q0, q1) x keys [k0, k1) of a call: row a sees j with -left <= j - a - (n - m) <= right.

    left, right: -1 is unbounded, as flash attention has it; m, n: the part's own sizes.
    """

    q0: int
    q1: int
    k0: int
    k1: int
    left: int = -1
    right: int = -1


def flash_parts(call: KernelCall) -> tuple[FlashRect, ...]:
    """A call as rectangles that flash attention can compute; together they cover it exactly."""
    match call.kind:
        case Kind.FULL:
            return (FlashRect(0, call.num_q, 0, call.num_k),)
        case Kind.CAUSAL:
            return (FlashRect(0, call.num_q, 0, call.num_k, right=0),)
        case Kind.SLICES:
            return tuple(map(_part, call.slices))


def _part(s: Slice) -> FlashRect:
    k0, k1 = s.lo + s.lo_slope * s.q0, s.hi + s.hi_slope * (s.q1 - 1)
    # no row of a slice is empty: a sloped side therefore has n >= m
    left = (k1 - k0) - (s.q1 - s.q0) if s.lo_slope else -1
    return FlashRect(s.q0, s.q1, k0, k1, left, 0 if s.hi_slope else -1)


class CudaFlash:
    """Flash attention of the installed PyTorch (reroutable by activate_flash_attention_impl).

    Yields the input dtype, fp32 where several slices are merged.
    """

    name = "cuda"
    square_causal = False
    whole_tile = False

    def supports(
        self, device_type: str, dtype: torch.dtype, head_dim: int, backward: bool = True
    ) -> str | None:
        return cuda_half_only(device_type, dtype, head_dim)

    def forward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        call: KernelCall,
        scale: float,
        into: Accumulators | None = None,
    ) -> tuple[Tensor, Tensor]:
        parts = flash_parts(call) if len(q) and len(k) else ()
        if len(parts) == 1 and parts[0].q1 - parts[0].q0 == len(q):
            return deliver(*self._attend(q, k, v, parts[0], scale), into)
        out, lse = result = into or no_keys(q, torch.float32)
        for part in parts:
            rows = slice(part.q0, part.q1)
            merge_into(out[rows], lse[rows], *self._attend(q, k, v, part, scale))
        return result

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
        totals = into or no_gradients(q, k, v)
        parts = flash_parts(call) if len(q) and len(k) else ()
        dout, out = out_for_delta(dout, delta)
        for part in parts:
            rows, keys = slice(part.q0, part.q1), slice(part.k0, part.k1)
            operands = (dout[rows], q[rows], k[keys], v[keys], out[rows])
            grads = self._differentiate(operands, lse[rows], part, scale)
            for total, rows_of, grad in zip(totals, (rows, keys, keys), grads, strict=True):
                total[rows_of] += grad
        return totals

    def _attend(
        self, q: Tensor, k: Tensor, v: Tensor, part: FlashRect, scale: float
    ) -> tuple[Tensor, Tensor]:
        rows, keys = slice(part.q0, part.q1), slice(part.k0, part.k1)
        out, lse = self.run_forward((q[rows], k[keys], v[keys]), part, scale)
        return out[..., : q.shape[-1]].transpose(0, 1), lse.permute(2, 0, 1)

    def _differentiate(
        self, operands: tuple[Tensor, ...], lse: Tensor, part: FlashRect, scale: float
    ) -> list[Tensor]:
        """dq, dk, dv of one part; operands are dout, q, k, v, out of its rows and keys."""
        grads = self.run_backward(operands, lse.permute(1, 2, 0).contiguous(), part, scale)
        return [g[..., : operands[0].shape[-1]].transpose(0, 1) for g in grads]

    def run_forward(
        self, operands: tuple[Tensor, ...], part: FlashRect, scale: float
    ) -> tuple[Tensor, Tensor]:
        """out [batch, rows, ...] and lse [batch, heads, rows] of a part's own q, k, v."""
        sizes = part.q1 - part.q0, part.k1 - part.k0
        q, k, v = map(batch_first, operands)
        window, causal = _window(part), is_causal(part)
        out, lse, *_ = _forward(
            q, k, v, None, None, *sizes, 0.0, causal, False, scale=scale, **window
        )
        return out, lse

    def run_backward(
        self, operands: tuple[Tensor, ...], lse: Tensor, part: FlashRect, scale: float
    ) -> tuple[Tensor, ...]:
        """dq, dk, dv [batch, rows, ...] of a part's own dout, q, k, v, out; lse as forward's."""
        sizes = part.q1 - part.q0, part.k1 - part.k0
        unused = torch.empty(2, dtype=torch.int64, device=lse.device)  # the state of dropout
        return _backward(
            *map(batch_first, operands),
            lse,
            None,
            None,
            *sizes,
            0.0,
            is_causal(part),
            unused,
            unused,
            scale=scale,
            **_window(part),
        )


def cuda_half_only(device_type: str, dtype: torch.dtype, head_dim: int) -> str | None:
    """Why a kernel for bf16 and fp16 on CUDA, of head_dim up to 256, cannot; None if it can."""
    if device_type != "cuda":
        return f"it runs on cuda, not on {device_type}"
    if dtype not in (torch.bfloat16, torch.float16):
        return f"dtype {dtype} is neither bfloat16 nor float16"
    if head_dim > 256:
        return f"head_dim ({head_dim}) is over 256"
    return None


def batch_first(x: Tensor) -> Tensor:
    """[rows, batch, ...] as [batch, rows, ...], head_dim filled with 0 to a multiple of 8."""
    spare = -x.shape[-1] % 8
    return (F.pad(x, (0, spare)) if spare else x).transpose(0, 1)


def is_causal(part: FlashRect) -> bool:
    return part.right == 0 and part.left < 0


def _window(part: FlashRect) -> dict[str, int | None]:
    if part.left < 0:
        return {"window_size_left": None, "window_size_right": None}
    return {"window_size_left": part.left, "window_size_right": part.right}
