"""Binned sums: sums of floating-point numbers that have the same bits in any order and grouping.

A number is cut into digits of 40 bits at absolute places, the powers of 2^40. Each digit is added
as an integer, which is associative. A sum keeps the three digits from the highest that any of its
numbers has, 80 bits and more; numbers that stand side by side share that window. When a larger
number comes, the window moves up and the lowest digits are dropped. A digit's sum never carries
into the next, so what is dropped then is what every number has there, whenever it came: the result
depends on the set of numbers alone. Digits are rounded to the nearest, from the highest to the
lowest, so they are a function of the number, and not of the window.

    sum    [ digit | digit | digit ] and the place of the lowest          24 bytes

Source: Demmel and Nguyen 2015, Parallel Reproducible Summation. Departs from it by digits that are
integers.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from tilewise.exact.elementary import power_of_two

DIGIT_BITS = 40
DIGITS = 3
MOST_TERMS = (1 << 24) - 1
"""Numbers that may be added to one sum: no digit's sum overflows."""

MOST_EXPONENT = 800
"""Numbers of 2^800 and more make a sum NaN, as infinite ones do. The window of a sum of numbers
below 2^-800 is that of 2^-800: other digits would have no scale."""

_BLOCK = 1 << 18  # numbers whose digits fit in a cache
_BIAS = 1 << 30  # windows are stored above 0, so that zeros are the blank sum
_NOT_FINITE = (1 << 31) - 1
_FAR = 1 << 45  # an exponent that no number has


def blank_sums(shape: tuple[int, ...], width: int, device: torch.device) -> Tensor:
    """Sums of nothing, int64 [*shape, columns]: zeros."""
    return torch.zeros(*shape, DIGITS * width + 1, dtype=torch.int64, device=device)


def add_terms(
    sums: Tensor,
    numbers: Tensor,
    factors: Tensor | None = None,
    exponents: Tensor | None = None,
) -> None:
    """Add numbers * factors * 2^exponents to sums in place, a term each.

        sums = blank_sums((rows, heads), head_dim, device)
        add_terms(sums, x)              # in any order, any of them elsewhere and merged
        result = rounded(sums, torch.float32)

    Args:
        sums: int64 [..., columns], of any strides.
        numbers: [..., width]; where they are all 0, or not normal, nothing is added. One that is
            not finite, or too large (2^800), makes all that share its window NaN.
        factors: [...], of sizes below 2; default 1.
        exponents: int64 [...] from -2^33 on; default 0. From 2^36 on they make sums NaN.
    """
    sums, numbers = torch.atleast_2d(sums), torch.atleast_2d(numbers)
    ones = torch.ones(numbers.shape[:-1], dtype=torch.float64, device=numbers.device)
    factors = ones if factors is None else factors.double().expand_as(ones)
    exponents = torch.zeros_like(ones, dtype=torch.int64) if exponents is None else exponents
    for part in _in_blocks(sums, numbers, factors, exponents.expand_as(ones)):
        _add(*part)


def merge_sums(sums: Tensor, others: Tensor) -> None:
    """Add other sums to sums in place: the result is that of all terms of both."""
    sums, others = torch.atleast_2d(sums), torch.atleast_2d(others)
    _raise_windows(sums, others[..., -1])
    sums[..., :-1] += _without_lowest(others[..., :-1], sums[..., -1] - others[..., -1])


def folded(sums: Tensor) -> Tensor:
    """Return the sum over the first dimension, of at least one row."""
    sums = sums.clone()
    while len(sums) > 1:
        half = len(sums) // 2
        merge_sums(sums[:half], sums[-half:])
        sums = sums[:-half]
    return sums[0]


def rounded(sums: Tensor, dtype: torch.dtype) -> Tensor:
    """The sums as numbers of a dtype, [..., width]; NaN where a term was not finite."""
    window = sums[..., -1]
    *lower, top = sums[..., :-1].unflatten(-1, (DIGITS, -1)).unbind(-2)
    numbers = top.double()
    for digit in reversed(lower):
        numbers.mul_(2.0**DIGIT_BITS).add_(digit)
    not_finite = window == _NOT_FINITE
    numbers.masked_fill_(not_finite.unsqueeze(-1), torch.nan)
    exponents = DIGIT_BITS * (window - _BIAS)
    exponents.masked_fill_((window == 0) | not_finite, 0)
    return numbers.mul_(power_of_two(exponents).unsqueeze(-1)).to(dtype)


def _in_blocks(*tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Blocks of rows of several tensors, of at most so many numbers, or one row."""
    rows = max(1, _BLOCK // max(1, tensors[0][:1].numel()))
    return zip(*(x.split(rows) for x in tensors), strict=True)


def _add(sums: Tensor, numbers: Tensor, factors: Tensor, exponents: Tensor) -> None:
    numbers = numbers.double()
    top = _tops(numbers.abs().amax(-1) * factors.abs())  # numbers are below 2^top
    nothing = top == -_FAR
    # rounded to the place above its highest digit, a number is 0: it is at most half of it
    places = (top + exponents + DIGIT_BITS).div_(DIGIT_BITS, rounding_mode="floor")
    _raise_windows(sums, (places + (_BIAS - DIGITS)).clamp_(0, _NOT_FINITE))
    unit = (sums[..., -1] - (_BIAS + 1 - DIGITS)) * -DIGIT_BITS + exponents
    scale = (power_of_two(unit) * factors).masked_fill_(nothing, 0.0)
    rest = numbers * scale.unsqueeze(-1)
    for digit in reversed(sums[..., :-1].unflatten(-1, (DIGITS, -1)).unbind(-2)):
        whole = rest.round()
        digit += whole.long()
        rest.sub_(whole).mul_(2.0**DIGIT_BITS)


def _tops(x: Tensor) -> Tensor:
    """The least exponents of powers of two above numbers from 0 on, int64.

    Those of numbers that are not finite or too large are far above all others, those of 0 and of
    numbers that are not normal far below.
    """
    field = x.view(torch.int64) >> 52 & 2047
    found = field - 1022
    found.masked_fill_(found > MOST_EXPONENT, _FAR).clamp_(min=-MOST_EXPONENT)
    return found.masked_fill_(field == 0, -_FAR)


def _raise_windows(sums: Tensor, windows: Tensor) -> None:
    """Move the windows of sums up, in place, to at least these windows; the lowest digits are
    dropped.
    """
    before = sums[..., -1]
    higher = windows > before
    if not sums.is_cuda and not bool(higher.any()):  # no wait for a device
        return
    windows = torch.maximum(windows, before)
    sums[..., :-1] = _without_lowest(sums[..., :-1], windows - before)
    sums[..., -1] = windows


def _without_lowest(digits: Tensor, moves: Tensor) -> Tensor:
    """Digits whose windows have moved up by so many places [...]."""
    moves, parts = moves.unsqueeze(-1), digits.unflatten(-1, (DIGITS, -1)).unbind(-2)
    for step in range(DIGITS):
        up = (*parts[1:], torch.zeros_like(parts[0]))
        parts = [torch.where(moves > step, x, y) for x, y in zip(up, parts, strict=True)]
    return torch.cat(tuple(parts), -1)
