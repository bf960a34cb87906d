"""Tensors as e4m3 numbers times powers of two, and back; see wires.float8 and docs/float8.md.

All scaling is by powers of two, hence exact: the only error is that of rounding to e4m3. What is
not finite arrives as NaN, with the rest of its block.
"""

import torch
from torch import Tensor
from torch.nn import functional as F

from tilewise.kernels.dropout import philox
from tilewise.wires.float8 import Float8

_BIAS = 127
_LEAST, _MOST = -126, 120
"""Exponents of the powers of two; a block's largest number is below 2^8 times its power."""
_NOT_FINITE = 128
"""The exponent of a block with a number that is not finite."""
_NORMAL = 2.0**-6
"""The least normal number of e4m3; its subnormals are 2^-9 apart."""


def encode(wire: Float8, x: Tensor, stream: tuple[int, int] = (0, 0)) -> Tensor:
    """[rows, batch, heads, width] as uint8 [rows, batch, heads * width + heads].

    Args:
        stream: below 2^32 and 2^17; stochastic rounding is independent in every stream.
    """
    exponents, finite = _exponents(x, wire.block)
    wide = x if x.dtype == torch.float64 else x.float()
    factor = torch.where(finite, _power(-exponents), torch.nan)
    scaled = (wide * factor[..., None].to(wide.dtype)).float()
    if wire.stochastic:
        scaled = _round_stochastically(scaled, wire.seed, stream)
    codes = scaled.to(torch.float8_e4m3fn).view(torch.uint8).flatten(2)
    exponents = torch.where(finite, exponents, _NOT_FINITE)
    return torch.cat([codes, (exponents + _BIAS).to(torch.uint8)], -1)


def decode(packed: Tensor, into: Tensor) -> Tensor:
    """The inverse of encode into [rows, batch, heads, width], exact unless it overflows."""
    *_, heads, width = into.shape
    codes, exponents = packed.split([heads * width, heads], -1)
    # The bits of e4m3 within those of bfloat16 are the same number times 2^-120: a shift takes a
    # tenth of the time that torch's conversion takes on a CPU.
    bits = codes.view(torch.int8).to(torch.int16).bitwise_left_shift_(4).bitwise_and_(-0x7810)
    numbers = bits.view(torch.bfloat16).unflatten(-1, (heads, width))
    exponents = exponents.int()[..., None] - _BIAS
    first = (exponents + 120) >> 1  # no power of two is that large at once
    second = torch.where(exponents == _NOT_FINITE, torch.nan, _power(exponents + 120 - first))
    wide = into if into.dtype != torch.float16 else into.float()
    wide.copy_(numbers).mul_(_power(first).to(wide.dtype)).mul_(second.to(wide.dtype))
    return wide if wide is into else into.copy_(wide)


def _exponents(x: Tensor, block: int) -> tuple[Tensor, Tensor]:
    """Return the exponents by which rows are scaled, and whether each block is finite.

    Args:
        x: [rows, batch, heads, width].
        block: rows that share an exponent.
    Returns:
        int32 and bool, [rows, batch, heads] each.
    """
    largest = x.abs().amax(-1).to(torch.promote_types(x.dtype, torch.float32))
    rows = len(largest)
    blocks = F.pad(largest, (0, 0, 0, 0, 0, -rows % block)).unflatten(0, (-1, block)).amax(1)
    exponents = torch.frexp(blocks).exponent - 8
    finite = blocks < 2.0**128
    return (
        exponents.clamp(_LEAST, _MOST).repeat_interleave(block, 0)[:rows],
        finite.repeat_interleave(block, 0)[:rows],
    )


def _power(exponents: Tensor) -> Tensor:
    """2^exponents in fp32, by its bits."""
    return ((exponents + _BIAS).int() << 23).view(torch.float32)


def _round_stochastically(x: Tensor, seed: int, stream: tuple[int, int]) -> Tensor:
    """To 3 mantissa bits, up with the probability of the 20 bits behind; subnormals as well.

    A subnormal number is lifted to where 3 bits are as far apart as it needs.
    """
    rows, batch, heads, width = x.shape
    row, one, number = (
        torch.arange(n, device=x.device).view(shape)
        for n, shape in ((rows, (-1, 1, 1)), (batch, (-1, 1)), (heads * width, (-1,)))
    )
    word = philox((row, number, one + (stream[1] << 15), stream[0]), seed).view(x.shape)
    magnitude = x.abs()
    lift = (magnitude < _NORMAL).float() * _NORMAL
    bits = (magnitude + lift).view(torch.int32) + (word >> 12).int()
    return ((bits >> 20 << 20).view(torch.float32) - lift).copysign(x)
