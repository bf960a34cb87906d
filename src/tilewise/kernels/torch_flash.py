"""The CUDA kernel without extra dependencies: PyTorch's own flash attention, bf16 and fp16.

Flash attention knows full, causal (bottom-right aligned) and windowed rectangles. So every slice of
a call is one such rectangle with its window, and a call of several slices is merged from them.
"""

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import attention
from torch.nn import functional as F

from tilewise.kernels.delta import out_for_delta
from tilewise.kernels.merge import merge_into
from tilewise.kernels.protocol import (
    Accumulators,
    Asked,
    Gradients,
    Operands,
    ProvidedKernel,
    Scores,
    Tensors,
    deliver,
    no_gradients,
    no_keys,
    widened,
)
from tilewise.tiles.calls import KernelCall, Slice

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
    return tuple(map(_part, call.as_slices))


def _part(s: Slice) -> FlashRect:
    k0, k1 = s.lo + s.lo_slope * s.q0, s.hi + s.hi_slope * (s.q1 - 1)
    # no row of a slice is empty: a sloped side therefore has n >= m
    left = (k1 - k0) - (s.q1 - s.q0) if s.lo_slope else -1
    return FlashRect(s.q0, s.q1, k0, k1, left, 0 if s.hi_slope else -1)


class CudaFlash(ProvidedKernel):
    """Flash attention of the installed PyTorch (reroutable by activate_flash_attention_impl).

    Yields the input dtype, fp32 where several slices are merged.

    Attributes:
        equal_widths: values, and dout, come as wide as queries and keys.
    """

    name = "cuda"
    equal_widths = True
    square_causal = False
    whole_tile = False

    def unable(self, asked: Asked) -> str | None:
        if attention.current_flash_attention_impl() == "FA4":
            return (
                "torch's adapter does not fit the package flash-attn-4: call "
                "torch.nn.attention.restore_flash_attention_impl() and take kernel='flash_attn_4'"
            )
        return None

    def attend_into(
        self, qkv: Tensors, call: KernelCall, scores: Scores, into: Accumulators | None
    ) -> Accumulators:
        (q, _, v), parts = qkv, flash_parts(call)
        if len(parts) == 1 and parts[0].q1 - parts[0].q0 == len(q):
            return deliver(self._attend(qkv, parts[0], scores), into)
        out, lse = result = into or no_keys(q, v)
        for part in parts:
            rows = slice(part.q0, part.q1)
            merge_into(out[rows], lse[rows], *self._attend(qkv, part, scores))
        return result

    def differentiate_into(
        self, operands: Operands, call: KernelCall, scores: Scores, into: Gradients | None
    ) -> Gradients:
        q, k, v, dout, lse, delta = operands
        widths = q.shape[-1], k.shape[-1], v.shape[-1]
        if self.equal_widths and q.shape[-1] != v.shape[-1]:
            q, k, v, dout = widened(max(widths), q, k, v, dout)
        dout, beside = self.beside_dout(dout, delta)

        def gradients(part: FlashRect) -> Gradients:
            rows, keys = part[:2], part[2:4]
            tensors = tuple(map(_rows, (dout, q, k, v, beside), (rows, rows, keys, keys, rows)))
            statistics = _rows(lse, rows).permute(1, 2, 0).contiguous()
            made = self.run_backward(tensors, statistics, part, scores)
            dq, dk, dv = (columns(*x).transpose(0, 1) for x in zip(made, widths, strict=True))
            return dq, dk, dv

        parts = flash_parts(call)
        if into is None and len(parts) == 1 and parts[0][:4] == (0, len(q), 0, len(k)):
            return gradients(parts[0])
        totals = into or no_gradients(*operands[:3])
        for part in parts:
            rows, keys = part[:2], part[2:4]
            for total, ends, grad in zip(totals, (rows, keys, keys), gradients(part), strict=True):
                _rows(total, ends).add_(grad)
        return totals

    def _attend(self, qkv: Tensors, part: FlashRect, scores: Scores) -> tuple[Tensor, Tensor]:
        width, v_width = qkv[0].shape[-1], qkv[2].shape[-1]
        widens = self.equal_widths and width != v_width
        whole = widened(max(width, v_width), *qkv) if widens else qkv
        operands = tuple(map(_rows, whole, (part[:2], part[2:4], part[2:4])))
        out, lse = self.run_forward(operands, part, scores)
        return columns(out, v_width).transpose(0, 1), lse.permute(2, 0, 1)

    def beside_dout(self, dout: Tensor, delta: Tensor) -> tuple[Tensor, Tensor]:
        """Return dout and an out for `run_backward`, from which flash attention derives delta."""
        return out_for_delta(dout, delta)

    def run_forward(
        self, operands: tuple[Tensor, ...], part: FlashRect, scores: Scores
    ) -> tuple[Tensor, Tensor]:
        """out [batch, rows, ...] and lse [batch, heads, rows] of a part's own q, k, v."""
        sizes = part.q1 - part.q0, part.k1 - part.k0
        q, k, v = map(batch_first, operands)
        sides = {} if is_causal(part) else window(part)
        out, lse, *_ = _forward(
            q, k, v, None, None, *sizes, 0.0, is_causal(part), False, scale=scores.scale, **sides
        )
        return out, lse

    def run_backward(
        self, operands: tuple[Tensor, ...], lse: Tensor, part: FlashRect, scores: Scores
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
            scale=scores.scale,
            **({} if is_causal(part) else window(part)),
        )


def _rows(x: Tensor, ends: tuple[int, int]) -> Tensor:
    return x if ends == (0, x.shape[0]) else x[slice(*ends)]


def columns(x: Tensor, width: int) -> Tensor:
    """The first columns of x, which may have been widened."""
    return x if x.shape[-1] == width else x[..., :width]


def batch_first(x: Tensor) -> Tensor:
    """[rows, batch, ...] as [batch, rows, ...], head_dim filled with 0 to a multiple of 8."""
    spare = -x.shape[-1] % 8
    return (F.pad(x, (0, spare)) if spare else x).transpose(0, 1)


def is_causal(part: FlashRect) -> bool:
    return part.right == 0 and part.left < 0


def window(part: FlashRect) -> dict[str, int | None]:
    """The sides of a part's window; None: without a bound, whose -1 not all versions know."""
    sides = {"window_size_left": part.left, "window_size_right": part.right}
    return {name: None if side < 0 else side for name, side in sides.items()}
