"""The other two kernels behind torch's scaled_dot_product_attention: cuDNN and memory-efficient.

Both know full and square causal calls; others get a dense additive mask, so `tile_calls` keeps
those small. Their operators are private: tests call them on meta tensors.
"""

from abc import abstractmethod
from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from tilewise.kernels.call_cache import CALL_CACHE
from tilewise.kernels.call_masks import additive_mask
from tilewise.kernels.delta import out_for_delta
from tilewise.kernels.protocol import (
    Accumulators,
    AsideKernel,
    Asked,
    Operands,
    Scores,
    heads_first,
)
from tilewise.tiles.calls import KernelCall, Kind

_cudnn = torch.ops.aten._scaled_dot_product_cudnn_attention.default
_cudnn_backward = torch.ops.aten._scaled_dot_product_cudnn_attention_backward.default
_efficient = torch.ops.aten._scaled_dot_product_efficient_attention.default
_efficient_backward = torch.ops.aten._scaled_dot_product_efficient_attention_backward.default

ALIGNMENT = 16  # of the mask's rows in numbers, as the memory-efficient kernel loads it
LSE_ALIGNMENT = 32  # of its lse


class Cells(NamedTuple):
    """Cells of a call that count: those of an additive mask, else the causal ones, or all."""

    mask: Tensor | None
    causal: bool


class _Sdpa(AsideKernel):
    """A kernel on [batch, heads, rows, head_dim] that takes global lse, and out for delta."""

    square_causal = True
    whole_tile = False
    min_keys = 1

    @abstractmethod
    def run_forward(
        self, q: Tensor, k: Tensor, v: Tensor, cells: Cells, scale: float
    ) -> tuple[Tensor, Tensor]:
        """out and lse [batch, heads, rows]."""

    @abstractmethod
    def run_backward(
        self, operands: tuple[Tensor, ...], lse: Tensor, cells: Cells, scale: float
    ) -> tuple[Tensor, ...]:
        """dq, dk, dv; operands are dout, q, k, v, out."""

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, call: KernelCall, scores: Scores
    ) -> Accumulators:
        cells, unseen = _cells(call, self.min_keys, q)
        tensors = heads_first(q), self._keys(k), self._keys(v)
        out, lse = self.run_forward(*tensors, cells, scores.scale)
        out, lse = out.permute(2, 0, 1, 3), lse.permute(2, 0, 1)
        if unseen is not None:
            out = out.masked_fill(unseen[:, None, None, None], 0.0)
            lse = lse.masked_fill(unseen[:, None, None], -torch.inf)
        return out, lse

    def differentiate(
        self, operands: Operands, call: KernelCall, scores: Scores
    ) -> Iterable[Tensor]:
        q, k, v, dout, lse, delta = operands
        cells, unseen = _cells(call, self.min_keys, q)
        if unseen is not None:
            # exp(-inf - -inf) is nan; with any finite lse the weights of such a row are 0
            nowhere = lse == -torch.inf
            lse, delta = lse.masked_fill(nowhere, 0.0), delta.masked_fill(nowhere, 0.0)
        dout, out = map(heads_first, out_for_delta(dout, delta))
        tensors = dout, heads_first(q), self._keys(k), self._keys(v), out
        grads = self.run_backward(tensors, lse.permute(1, 2, 0), cells, scores.scale)
        dq, dk, dv = (g.permute(2, 0, 1, 3) for g in grads)
        num_keys = k.shape[0]
        return (dq, dk, dv) if dk.shape[0] == num_keys else (dq, dk[:num_keys], dv[:num_keys])

    def _keys(self, x: Tensor) -> Tensor:
        """Keys or values heads first, filled up with hidden ones to the fewest that are taken."""
        spare = max(0, self.min_keys - x.shape[0])
        return heads_first(F.pad(x, (0, 0, 0, 0, 0, 0, 0, spare)) if spare else x)


class CudnnSdpa(_Sdpa):
    """cuDNN's attention, bf16 and fp16; it refuses a single key, so it gets a hidden one beside."""

    name = "cudnn"
    min_keys = 2

    def unable(self, asked: Asked) -> str | None:
        if not torch.backends.cudnn.is_available():
            return "this torch has no cuDNN"
        if asked.head_dim % 8 or asked.head_dim > 128:
            return f"head_dim ({asked.head_dim}) is no multiple of 8 up to 128"
        if asked.backward and torch.are_deterministic_algorithms_enabled():
            return "its backward is not deterministic, which torch is told to be"
        return None

    def run_forward(
        self, q: Tensor, k: Tensor, v: Tensor, cells: Cells, scale: float
    ) -> tuple[Tensor, Tensor]:
        out, lse, *_ = _cudnn(q, k, v, cells.mask, True, 0.0, cells.causal, False, scale=scale)
        return out, lse[..., 0]

    def run_backward(
        self, operands: tuple[Tensor, ...], lse: Tensor, cells: Cells, scale: float
    ) -> tuple[Tensor, ...]:
        dout, q, k, v, out = operands
        unused = torch.empty((), dtype=torch.int64, device=q.device)  # the state of dropout
        sizes = q.shape[2], k.shape[2]
        return _cudnn_backward(
            *(dout, q, k, v, out, lse[..., None].contiguous(), unused, unused, cells.mask),
            *(None, None, *sizes, 0.0, cells.causal),
            scale=scale,
        )


class EfficientSdpa(_Sdpa):
    """The memory-efficient kernel of CUTLASS: bf16, fp16 and fp32; KV heads are repeated for it."""

    name = "efficient"
    dtypes = (torch.float32, torch.bfloat16, torch.float16)
    most_width = None

    def unable(self, asked: Asked) -> str | None:
        multiple = 16 // asked.dtype.itemsize
        if asked.dtype in self.dtypes and asked.head_dim % multiple:
            return f"head_dim ({asked.head_dim}) is no multiple of {multiple}"
        return None

    def run_forward(
        self, q: Tensor, k: Tensor, v: Tensor, cells: Cells, scale: float
    ) -> tuple[Tensor, Tensor]:
        k, v = (_repeated(x, q) for x in (k, v))
        mask = _expanded(cells.mask, q)
        out, lse, *_ = _efficient(q, k, v, mask, True, 0.0, cells.causal, scale=scale)
        return out, lse[..., : q.shape[2]]

    def run_backward(
        self, operands: tuple[Tensor, ...], lse: Tensor, cells: Cells, scale: float
    ) -> tuple[Tensor, ...]:
        dout, q, k, v, out = operands
        wide_k, wide_v = (_repeated(x, q) for x in (k, v))
        # rows past the end count for nothing: exp(.. - inf) = 0
        lse = F.pad(lse, (0, -lse.shape[2] % LSE_ALIGNMENT), value=torch.inf).contiguous()
        unused = torch.empty((), dtype=torch.int64, device=q.device)  # the state of dropout
        dq, dk, dv, _ = _efficient_backward(
            *(dout, q, wide_k, wide_v, _expanded(cells.mask, q), out, lse, unused, unused, 0.0),
            *([True, True, True, False], cells.causal),
            scale=scale,
        )
        shape = k.shape[1], q.shape[1] // k.shape[1]
        return dq, dk.unflatten(1, shape).sum(2), dv.unflatten(1, shape).sum(2)


def _repeated(x: Tensor, q: Tensor) -> Tensor:
    return x.repeat_interleave(q.shape[1] // x.shape[1], 1)


def _expanded(mask: Tensor | None, q: Tensor) -> Tensor | None:
    return None if mask is None else mask.expand(*q.shape[:2], -1, -1)


def _cells(call: KernelCall, min_keys: int, q: Tensor) -> tuple[Cells, Tensor | None]:
    """Return the cells that a call allows, and which rows see no key (None: all see)."""
    if call.num_k >= min_keys and (call.kind is Kind.FULL or call.is_square_causal):
        return Cells(None, call.is_square_causal), None

    def make() -> tuple[tuple[Tensor | None, Tensor | None], tuple[Tensor | None, ...]]:
        made = _mask(call, min_keys, q)
        return made, made

    mask, unseen = CALL_CACHE.get(call, ("sdpa", min_keys, q.dtype), q.device, make)
    # a mask on a causal call only hides a key beside its single one: all else is allowed
    return Cells(mask, call.is_square_causal and mask is None), unseen


def _mask(call: KernelCall, min_keys: int, q: Tensor) -> tuple[Tensor | None, Tensor | None]:
    """The mask [1, 1, m, n], its rows aligned, and which rows see no key (None: all see)."""
    dtype, device = q.dtype, q.device
    mask, unseen = additive_mask(call, dtype)
    m, n = call.num_q, call.num_k
    num_keys = max(n, min_keys)
    if mask is None and num_keys == n:
        return None, None
    aligned = torch.full((m, num_keys + -num_keys % ALIGNMENT), -torch.inf, dtype=dtype)
    aligned[:, :n] = 0.0 if mask is None else mask
    unseen = None if unseen is None else unseen.to(device)
    return aligned.to(device)[None, None, :, :num_keys], unseen
