"""exp and log that are made of single rounded operations, hence the same for any shape of tensor.

ATen's own differ in the last bit between the vectors of a tensor and what is left after them.
"""

from math import factorial

import torch
from torch import Tensor

_LN2_HIGH = float.fromhex("0x1.62e42fee00000p-1")  # 32 bits, so that products with whole
_LN2_LOW = float.fromhex("0x1.a39ef35793c76p-33")  # numbers are exact
_LEAST, _MOST = -(2.0**32), 2.0**38  # windows of sums are integers of 32 bits
_EXP_TERMS = 14
_LOG_TERMS = 12
_FIRST_BITS = 0x3FF0000000000000  # of 1.0


def exp_parts(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return exp(x) as fp64 mantissas in 0.7..1.42 and int64 exponents of 2; exp(-inf) as 0, 0.

    x counts as -2^32 below that, and as 2^38 above it.

    Source: Cody and Waite 1980, the reduction of the argument.
    """
    x = x.double()
    finite, lost = x.isfinite(), x.isnan() | (x == torch.inf)
    x = x.masked_fill(~finite, 0.0).clamp_(_LEAST, _MOST)
    n = (x * (1 / (_LN2_HIGH + _LN2_LOW))).round_()
    r = x - n * _LN2_HIGH
    r -= n * _LN2_LOW
    mantissa = torch.full_like(r, 1 / factorial(_EXP_TERMS))
    for term in range(_EXP_TERMS - 1, -1, -1):
        mantissa *= r
        mantissa += 1 / factorial(term)
    mantissa = torch.where(finite, mantissa, torch.where(lost, torch.nan, 0.0))
    return mantissa, n.long()


def log_of(numbers: Tensor, exponents: Tensor) -> Tensor:
    """Return the natural logarithm of numbers * 2^exponents, fp64; -inf of 0.

    log m = 2 artanh((m - 1) / (m + 1)), m between sqrt(1/2) and sqrt(2).

    Args:
        numbers: fp64, from 0 on, not subnormal.
    """
    bits = numbers.view(torch.int64)
    exponents = exponents + (bits >> 52) - 1023
    m = (bits & ((1 << 52) - 1) | _FIRST_BITS).view(torch.float64)
    large = m > 2**0.5
    m = torch.where(large, m * 0.5, m)
    n = (exponents + large).double()
    s = (m - 1.0) / (m + 1.0)
    square, series = s * s, torch.full_like(s, 1 / (2 * _LOG_TERMS + 1))
    for term in range(_LOG_TERMS - 1, -1, -1):
        series *= square
        series += 1 / (2 * term + 1)
    found = series * s
    found *= 2.0
    found += n * _LN2_LOW
    found += n * _LN2_HIGH
    found = found.masked_fill(numbers == 0, -torch.inf)
    return found.masked_fill(numbers.isnan(), torch.nan)


def power_of_two(exponents: Tensor) -> Tensor:
    """2^exponents, fp64, by their bits: 0 from 2^-1023 down, and at most 2^1023."""
    field = exponents.add(1023).clamp_(0, 2046)
    return (field << 52).view(torch.float64)
