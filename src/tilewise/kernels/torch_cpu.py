"""The CPU kernel: PyTorch's own flash attention for CPU, with its traps handled at the boundary.

Traps: an empty q or k ends the process; a row without keys gets lse 0; causal is top-left aligned,
so only square calls may use it; masks must be floats; backward asks for out where delta is at hand.
"""

from collections.abc import Iterable
from operator import methodcaller

import torch
from torch import Tensor

from tilewise.kernels.call_masks import additive_mask
from tilewise.kernels.delta import LEAST_DIVISORS, out_for_delta
from tilewise.kernels.protocol import Accumulators, AsideKernel, Operands, Scores
from tilewise.tiles.calls import KernelCall, Kind

_forward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward

# Between [rows, batch, heads, width] and aten's [batch, heads, rows, width].
_heads_first, _rows_first = methodcaller("permute", 1, 2, 0, 3), methodcaller("permute", 2, 0, 1, 3)


class CpuFlash(AsideKernel):
    """fp64, fp32, bf16 and fp16; yields out and gradients in fp32 or wider."""

    name = "cpu"
    square_causal = True
    whole_tile = False
    device = "cpu"
    dtypes = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
    most_width = None

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, call: KernelCall, scores: Scores
    ) -> Accumulators:
        q, k, v = _widened(q, k, v)
        mask, unseen = _mask_of(call, q.dtype)
        out, lse = _forward(
            *map(_heads_first, (q, k, v)),
            0.0,
            call.is_square_causal,
            attn_mask=mask,
            scale=scores.scale,
        )
        out, lse = _rows_first(out), lse.permute(2, 0, 1)
        if unseen is not None:
            out[unseen], lse[unseen] = 0.0, -torch.inf
        return out, lse

    def differentiate(
        self, operands: Operands, call: KernelCall, scores: Scores
    ) -> Iterable[Tensor]:
        q, k, v, dout, lse, delta = operands
        q, k, v, dout = _widened(q, k, v, dout)
        mask, unseen = _mask_of(call, q.dtype)
        if unseen is not None:
            # exp(-inf - -inf) is nan; with any finite lse the weights of such a row are 0
            nowhere = lse == -torch.inf
            lse, delta = lse.masked_fill(nowhere, 0.0), delta.masked_fill(nowhere, 0.0)
        dout, out = _out_for_delta(dout, delta)
        grads = _backward(
            *map(_heads_first, (dout, q, k, v, out)),
            lse.permute(1, 2, 0),
            0.0,
            call.is_square_causal,
            attn_mask=mask,
            scale=scores.scale,
        )
        return map(_rows_first, grads)


def _mask_of(call: KernelCall, dtype: torch.dtype) -> tuple[Tensor | None, Tensor | None]:
    """Return the additive mask of a call and its rows that see nothing; calls other than of slices
    need none.
    """
    return additive_mask(call, dtype) if call.kind is Kind.SLICES else (None, None)


def _widened(*tensors: Tensor) -> Iterable[Tensor]:
    """Half precision as fp32: aten would round every call's results to the input dtype."""
    return [x.float() for x in tensors] if tensors[0].dtype.itemsize == 2 else tensors


def _out_for_delta(dout: Tensor, delta: Tensor) -> tuple[Tensor, Tensor]:
    """Return what out_for_delta does, in a fourth of the operations where it changes no dout."""
    if dout.dtype == delta.dtype:
        out = torch.zeros_like(dout)
        column = torch.div(delta, dout[..., 0], out=out[..., 0])
        share, _ = LEAST_DIVISORS[dout.dtype]
        # not if any is nan
        if not column.numel() or torch.linalg.vector_norm(column, torch.inf).item() <= 1 / share:
            return dout, out
    return out_for_delta(dout, delta)
