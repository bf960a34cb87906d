"""Ulysses written out by hand: what its exchanges, copies and kernel calls take with nothing else.

The floor for a Ulysses of torch's public functions over gloo. It is causal, of one sequence, heads
that the ranks divide and equally many rows each; nothing is checked, exchanges carry no mark, and
lse stays where it is computed.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

_forward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


def bare_ulysses(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """out of this rank's rows [num_tokens, num_heads, head_dim], over the default group."""
    return _BareUlysses.apply(q, k, v)  # pyright: ignore[reportReturnType]


def _exchanged(x: Tensor) -> Tensor:
    """The parts for each rank for those from each: [ranks, ...]."""
    arrived = torch.empty_like(x)
    dist.all_to_all_single(arrived, x)
    return arrived


def _to_heads(*rows: Tensor) -> Tensor:
    """This rank's rows of all heads for all rows of its heads, [tensors, heads, tokens, width]."""
    ranks, (count, num_heads, width) = dist.get_world_size(), rows[0].shape
    leaving = torch.empty(ranks, len(rows), count, num_heads // ranks, width)
    for place, x in enumerate(rows):
        leaving[:, place].copy_(x.view(count, ranks, -1, width).transpose(0, 1))
    return _exchanged(leaving).permute(1, 3, 0, 2, 4).flatten(2, 3)


def _to_rows(*heads: Tensor) -> Tensor:
    """The inverse of _to_heads: [tensors, rows, heads, width]."""
    ranks, (num_heads, num_tokens, width) = dist.get_world_size(), heads[0].shape
    leaving = torch.empty(ranks, len(heads), num_tokens // ranks, num_heads, width)
    for place, x in enumerate(heads):
        leaving[:, place].copy_(x.view(num_heads, ranks, -1, width).permute(1, 2, 0, 3))
    return _exchanged(leaving).permute(1, 2, 0, 3, 4).flatten(2, 3)


class _BareUlysses(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *qkv: Tensor) -> Tensor:
        operands = _to_heads(*qkv).unsqueeze(1)
        out, lse = _forward(*operands, 0.0, True)
        ctx.save_for_backward(operands, out, lse)
        return _to_rows(out[0])[0]

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        operands, out, lse = ctx.saved_tensors
        grads = _backward(_to_heads(dout), *operands, out, lse, 0.0, True)
        return tuple(_to_rows(*(x[0] for x in grads)))
