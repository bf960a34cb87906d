"""An out made from delta, for kernels that derive delta from out themselves."""

from collections.abc import Mapping
from types import MappingProxyType

import torch
from torch import Tensor

from tilewise.kernels.protocol import accumulator_dtype

LEAST_DIVISORS: Mapping[torch.dtype, tuple[float, float]] = MappingProxyType(
    {
        dtype: (2.0**-shift, torch.finfo(dtype).tiny)
        for dtype, shift in (
            (torch.float64, 200),
            (torch.float32, 80),
            (torch.bfloat16, 80),
            (torch.float16, 15),
        )
    }
)
"""By dtype: `out_for_delta` changes a dout that is below this share of |delta|, or this number."""


def out_for_delta(dout: Tensor, delta: Tensor) -> tuple[Tensor, Tensor]:
    """(dout', out) with rowsum(out * dout') = delta, for kernels that want out to derive delta.

    out is zero but in its first column: out_0 = delta / dout_0. In half precision what rounding
    leaves of delta goes to two more columns, so that about 24 bits arrive. Where |dout_c| is below
    2**-s |delta| (a loss of lse alone has dout = 0) dout' takes that value: far under the rounding
    of any gradient it enters, in fp16 (s = 15, for its range) a sixteenth of it. Cheaper than a
    padded column, and head_dim stays what it is.

    Both lie in memory as [batch, m, num_heads, head_dim], whatever dout's strides: flash attention
    would copy them so, the memory-efficient kernel reads out so without asking, and cuDNN keeps
    what it compiled by the shapes and strides of q, k and v alone.

    Args:
        dout: [m, batch, num_heads, head_dim]; not changed.
        delta: [m, batch, num_heads], fp32 or wider.
    """
    batch_first = dout.transpose(0, 1)
    changed, out = (
        torch.empty_like(batch_first, memory_format=torch.contiguous_format).transpose(0, 1)
        for _ in range(2)
    )
    num_columns = min(3 if dout.dtype.itemsize == 2 else 1, dout.shape[-1])
    if dout.is_cuda:
        from tilewise.kernels.triton.delta import put_out_for_delta

        least = LEAST_DIVISORS[dout.dtype]
        put_out_for_delta(dout, delta, changed, out, num_columns, least)
    else:
        _put_out_for_delta(dout, delta, changed, out, num_columns)
    return changed, out


def _put_out_for_delta(
    dout: Tensor, delta: Tensor, changed: Tensor, out: Tensor, columns: int
) -> None:
    """Write a dout' and an out with sum(dout' * out) = delta, in plain torch.

    triton/delta.py does the same in one kernel.

    Args:
        changed, out: written; changed is dout' and has dout's numbers where they are large enough.
        columns: number of columns of out that are written; the others are 0.
    """
    changed.copy_(dout)
    out.zero_()
    share, tiny = LEAST_DIVISORS[dout.dtype]
    rest = divisor = delta.to(accumulator_dtype(dout.dtype))
    for c in range(columns):
        if c:
            rest = rest - out[..., c - 1].to(rest.dtype) * divisor
        least = rest.abs().mul_(share).clamp_min_(tiny)
        divisor = dout[..., c].to(rest.dtype)
        divisor = torch.where(divisor.abs() < least, least, divisor)
        changed[..., c].copy_(torch.where(rest == 0, dout[..., c], divisor))
        divisor = divisor.to(dout.dtype).to(rest.dtype)
        out[..., c].copy_(rest / divisor)
