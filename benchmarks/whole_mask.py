"""A kernel on a whole mask, without the executor: its calls one by one, results merged."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from tilewise.kernels.merge import merge_into
from tilewise.kernels.protocol import Kernel, no_keys
from tilewise.plan.row_ranges import Ranges, row_index
from tilewise.tiles.calls import KernelCall

Index = slice | Tensor


class PlacedCall(NamedTuple):
    """A call and what selects its rows and keys."""

    call: KernelCall
    rows: Index
    keys: Index


def placed(calls: Iterable[KernelCall], device: str) -> tuple[PlacedCall, ...]:
    """Calls with their indices, on the device."""
    return tuple(PlacedCall(c, _index(c.q, device), _index(c.k, device)) for c in calls)


def whole_mask(
    q: Tensor, k: Tensor, v: Tensor, kernel: Kernel, calls: tuple[PlacedCall, ...]
) -> Tensor:
    """out of [num_tokens, heads, head_dim] under the mask that the calls cover; differentiable."""
    out: Any = _WholeMask.apply(q, k, v, kernel, calls)
    return out


class _WholeMask(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *given: Any) -> Tensor:
        q, k, v, kernel, calls = given
        scale = 1 / math.sqrt(q.shape[-1])
        out, lse = no_keys(q[:, None], v)
        for call, rows, keys in calls:
            found = kernel.forward(q[rows, None], k[keys, None], v[keys, None], call, scale)
            if len(calls) == 1 and len(found[0]) == len(out):
                out, lse = found
            elif isinstance(rows, slice):
                merge_into(out[rows], lse[rows], *found)
            else:
                some = out[rows], lse[rows]
                merge_into(*some, *found)
                out[rows], lse[rows] = some
        out = out[:, 0].to(q.dtype).contiguous()
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.kernel, ctx.calls, ctx.scale = kernel, calls, scale
        return out

    @staticmethod
    @once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, dout: Tensor
    ) -> tuple[Tensor | None, ...]:
        q, k, v, out, lse = ctx.saved_tensors
        delta = (out.to(lse.dtype) * dout.to(lse.dtype)).sum(-1)[:, None]
        totals = [torch.zeros_like(x, dtype=lse.dtype) for x in (q, k, v)]
        for call, rows, keys in ctx.calls:
            operands = q[rows, None], k[keys, None], v[keys, None], dout[rows, None]
            found = ctx.kernel.backward(*operands, lse[rows], delta[rows], call, ctx.scale)
            for total, index, part in zip(totals, (rows, keys, keys), found, strict=True):
                if isinstance(index, slice):
                    total[index] += part[:, 0]
                else:
                    total.index_add_(0, index, part[:, 0].to(total.dtype))
        return *(x.to(q.dtype) for x in totals), None, None


def _index(ranges: Ranges, device: str) -> Index:
    if len(ranges) == 1:
        return slice(*ranges[0])
    return torch.from_numpy(row_index(ranges)).to(device)
