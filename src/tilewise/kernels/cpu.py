"""The CPU kernel: PyTorch's own flash attention for CPU, with its traps handled at the boundary.

Traps: an empty q or k ends the process; a row without keys gets lse 0; causal is top-left aligned,
so only square calls may use it; masks must be floats; backward asks for out where delta is at hand.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tilewise.calls import Call, Kind
from tilewise.kernels.protocol import Accumulators, deliver, no_keys, out_for_delta
from tilewise.kernels.slices import call_mask

_forward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


class CpuFlash:
    """fp64, fp32, bf16 and fp16; yields out and gradients in fp32 or wider."""

    name = "cpu"
    square_causal = True

    def supports(self, device_type: str, dtype: torch.dtype, head_dim: int) -> str | None:
        if device_type != "cpu":
            return f"it runs on cpu, not on {device_type}"
        if dtype not in (torch.float64, torch.float32, torch.bfloat16, torch.float16):
            return f"dtype {dtype} is none of float64, float32, bfloat16, float16"
        return None

    def forward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        call: Call,
        scale: float,
        into: Accumulators | None = None,
    ) -> tuple[Tensor, Tensor]:
        if not (len(q) and len(k)):
            return deliver(*no_keys(q), into)
        q, k, v = map(_widened, (q, k, v))
        mask, unseen = _masks(call, q.dtype)
        out, lse = _forward(
            *map(_bhsd, (q, k, v)), 0.0, _is_causal(call), attn_mask=mask, scale=scale
        )
        out, lse = out.permute(2, 0, 1, 3), lse.permute(2, 0, 1)
        if unseen is not None:
            out[unseen], lse[unseen] = 0.0, -torch.inf
        return deliver(out, lse, into)

    def backward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        dout: Tensor,
        lse: Tensor,
        delta: Tensor,
        call: Call,
        scale: float,
    ) -> tuple[Tensor, Tensor, Tensor]:
        if not (len(q) and len(k)):
            return torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)
        q, k, v, dout = map(_widened, (q, k, v, dout))
        mask, unseen = _masks(call, q.dtype)
        if unseen is not None:
            # exp(-inf - -inf) is nan; with any finite lse the weights of such a row are 0
            nowhere = lse == -torch.inf
            lse, delta = lse.masked_fill(nowhere, 0.0), delta.masked_fill(nowhere, 0.0)
        dout, out = out_for_delta(dout, delta)
        grads = _backward(
            *map(_bhsd, (dout, q, k, v, out)),
            lse.permute(1, 2, 0),
            0.0,
            _is_causal(call),
            attn_mask=mask,
            scale=scale,
        )
        dq, dk, dv = (g.permute(2, 0, 1, 3) for g in grads)
        return dq, dk, dv


def _widened(x: Tensor) -> Tensor:
    """Half precision as fp32: aten would round every call's results to the input dtype."""
    return x.float() if x.dtype.itemsize == 2 else x


def _bhsd(x: Tensor) -> Tensor:
    """[rows, batch, heads, head_dim] seen as [batch, heads, rows, head_dim]."""
    return x.permute(1, 2, 0, 3)


def _is_causal(call: Call) -> bool:
    if call.kind is Kind.CAUSAL and call.num_q != call.num_k:
        raise ValueError(
            f"a causal call of {call.num_q} queries and {call.num_k} keys is not square; "
            "make calls for this kernel with tile_calls(..., square_causal=True)"
        )
    return call.kind is Kind.CAUSAL


def _masks(call: Call, dtype: torch.dtype) -> tuple[Tensor | None, Tensor | None]:
    """The additive mask [m, n] of a SLICES call, and which rows see no key (None: all see)."""
    if call.kind is not Kind.SLICES:
        return None, None
    allowed = call_mask(call)
    seen = allowed.any(1)
    mask = torch.where(allowed, *torch.tensor([0.0, -torch.inf], dtype=dtype))
    return mask, None if bool(seen.all()) else ~seen
