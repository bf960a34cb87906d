"""Binned sums: sums of floating-point numbers that have the same bits in any order and grouping.

A number is cut into digits of W bits at absolute places, the powers of 2^W. Each digit is added as
an integer, which is associative. A sum keeps the K digits from the highest that any of its numbers
has; numbers that stand side by side (of one row and head) share that window. When a larger number
comes, the window moves up and the lowest digits are dropped. A digit's sum never carries into the
next, so what is dropped then is what every number has there, whenever it came: the result depends
on the set of numbers alone. Digits are rounded to the nearest, from the highest to the lowest, so
they are a function of the number, and not of the window.

    number                 0.7 = 2867 * 2^-12 + 205 * 2^-24 + ...     digits at ..., 2^-24, 2^-12, 1
    sum, K = 2             [ digit | digit ] and the place of the lowest

Source: Demmel and Nguyen 2015, Parallel Reproducible Summation. Departs from it by digits that are
integers.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from tilewise.plan.sums import BinFormat

MOST_FURTHER_EXPONENT = 1 << 33
"""Numbers times 2^x with a larger x make a sum NaN, and those with an x below its negative count as
times that: windows are integers of 32 bits."""

_BLOCK = 1 << 18  # numbers whose digits fit in a cache

_BIAS = 1 << 30  # windows are stored above 0, so that zeros are the blank sum
_NOT_FINITE = (1 << 31) - 1


class _Real(NamedTuple):
    """Floating-point numbers of which digits are cut.

    Attributes:
        bits: an integer dtype of the same size.
        most_exponent: numbers of 2^x and more make a sum NaN, as infinite ones do, and the window
            of a sum of numbers below 2^-x is that of 2^-x: other digits would have no scale.
    """

    dtype: torch.dtype
    bits: torch.dtype
    mantissa_bits: int
    bias: int
    most_exponent: int

    @classmethod
    def of(cls, form: BinFormat) -> "_Real":
        return _FLOAT32 if form.item_bits == 32 else _FLOAT64

    def exponents(self, x: Tensor) -> Tensor:
        """The least exponents of powers of two above numbers from 0 on; more than all of NaN."""
        return ((x.view(self.bits) >> self.mantissa_bits) & (2 * self.bias + 1)) - (self.bias - 1)

    def power_of_two(self, exponents: Tensor) -> Tensor:
        """2^exponents by their bits; 0 where it has none, and at most 2^bias."""
        field = (exponents.clamp(-self.bias, self.bias) + self.bias).to(self.bits)
        return (field << self.mantissa_bits).view(self.dtype)


_FLOAT32 = _Real(torch.float32, torch.int32, 23, 127, 100)
_FLOAT64 = _Real(torch.float64, torch.int64, 52, 1023, 800)


def blank_sums(shape: tuple[int, ...], width: int, form: BinFormat, device: torch.device) -> Tensor:
    """Sums of nothing, integers [*shape, form.columns(width)]: zeros."""
    dtype = getattr(torch, form.dtype)
    return torch.zeros(*shape, form.columns(width), dtype=dtype, device=device)


def add_terms(
    sums: Tensor,
    numbers: Tensor,
    form: BinFormat,
    factors: Tensor | None = None,
    exponents: Tensor | None = None,
) -> None:
    """Add numbers * factors * 2^exponents to sums in place, a term each.

        sums = blank_sums((rows, heads), head_dim, FLOAT32, device)
        add_terms(sums, x, FLOAT32)              # in any order, any of them elsewhere and merged
        result = rounded(sums, FLOAT32, torch.float32)

    Numbers, factors and their products are rounded to fp32 first, in formats of 64 bits to fp64.

    Args:
        sums: integers [..., form.columns(width)], of any strides.
        numbers: [..., width]; where they are all 0 nothing is added. One that is not finite, or too
            large, makes all that share its window NaN: see MOST_EXPONENT.
        factors: [...], finite; default 1.
        exponents: int64 [...]; default 0.
    """
    real, sums = _Real.of(form), torch.atleast_2d(sums)
    numbers = torch.atleast_2d(numbers).to(real.dtype)
    largest = numbers.abs().amax(-1)
    if factors is not None:
        factors = factors.to(real.dtype)
        largest = largest * factors.abs()
    top = real.exponents(largest)  # numbers are below 2^top
    nothing, finite = largest == 0, top <= real.most_exponent
    top = top.clamp_(min=-real.most_exponent).long()
    further = 0
    if exponents is not None:
        finite &= exponents <= MOST_FURTHER_EXPONENT
        further = exponents.clamp(-MOST_FURTHER_EXPONENT, MOST_FURTHER_EXPONENT)
        top += further
    # rounded to the place above its highest digit, a number is 0: it is at most half of it
    lowest = -(-(top + 1)).div(form.digit_bits, rounding_mode="floor") - form.digits
    window = torch.where(finite, lowest + _BIAS, _NOT_FINITE).masked_fill_(nothing, 0)
    window = _moved_to(sums, window.to(sums.dtype), form)
    highest = window.long() + (form.digits - 1 - _BIAS)
    scale = real.power_of_two(further - form.digit_bits * highest)
    if factors is not None:
        scale *= factors
    scale = scale.masked_fill_(nothing | ~finite, 0.0).unsqueeze(-1)
    block = max(1, _BLOCK // max(1, numbers[:1].numel()))
    for part in zip(sums.split(block), numbers.split(block), scale.split(block), strict=True):
        _add_digits(part[0], part[1] * part[2], form)


def merge_sums(sums: Tensor, others: Tensor, form: BinFormat) -> None:
    """Add other sums to sums in place: the result is that of all terms of both.

    Args:
        sums, others: integers [..., form.columns(width)], of any strides.
    """
    sums, others = torch.atleast_2d(sums), torch.atleast_2d(others)
    window = _moved_to(sums, others[..., -1], form)
    sums[..., :-1] += _with_window(others, window, form)


def exact_numbers(sums: Tensor, form: BinFormat) -> tuple[Tensor, Tensor]:
    """Return sums as fp64 [..., width] and int64 exponents [...]: numbers * 2^exponents.

    The numbers are of a fixed rounding. NaN where a term was not finite.
    """
    window = sums[..., -1]
    *lower, top = _digits(sums, form)
    numbers = top.double()
    for digit in reversed(lower):
        numbers = numbers.mul_(2.0**form.digit_bits).add_(digit)
    numbers = numbers.masked_fill_((window == _NOT_FINITE).unsqueeze(-1), torch.nan)
    exponents = form.digit_bits * (window.long() - _BIAS)
    return numbers, torch.where((window > 0) & (window < _NOT_FINITE), exponents, 0)


def folded(sums: Tensor, form: BinFormat) -> Tensor:
    """Return the sum over the first dimension, of at least one row."""
    sums = sums.clone()
    while len(sums) > 1:
        half = len(sums) // 2
        merge_sums(sums[:half], sums[-half:], form)
        sums = sums[:-half]
    return sums[0]


def rounded(sums: Tensor, form: BinFormat, dtype: torch.dtype) -> Tensor:
    """The sums as numbers of a dtype, [..., width]."""
    numbers, exponents = exact_numbers(sums, form)
    return scaled(numbers, exponents.unsqueeze(-1)).to(dtype)


def scaled(numbers: Tensor, exponents: Tensor) -> Tensor:
    """numbers * 2^exponents, fp64, by two steps, since the first alone may have no scale."""
    half = exponents >> 1
    steps = _FLOAT64.power_of_two(half), _FLOAT64.power_of_two(exponents - half)
    return (numbers * steps[0]).mul_(steps[1])


def _digits(sums: Tensor, form: BinFormat) -> tuple[Tensor, ...]:
    """The sums of digits, the lowest first, each [..., width]."""
    return sums[..., :-1].unflatten(-1, (form.digits, -1)).unbind(-2)


def _moved_to(sums: Tensor, window: Tensor, form: BinFormat) -> Tensor:
    """Move the windows of sums up to others where they are higher; returns where they stand."""
    before = sums[..., -1]
    window = torch.maximum(before, window)
    if sums.is_cuda:  # no wait for a device
        sums[..., :-1] = _without_lowest(sums[..., :-1], window - before, form)
    else:  # windows move seldom after their first number, and then those of few rows
        moved = torch.nonzero((window > before) & (before > 0), as_tuple=True)
        if len(moved[0]):
            moves = window[moved] - before[moved]
            sums[(*moved, slice(0, -1))] = _without_lowest(sums[moved][..., :-1], moves, form)
    before.copy_(window)
    return window


def _with_window(sums: Tensor, window: Tensor, form: BinFormat) -> Tensor:
    """Digits [..., digits * width] of sums whose windows move up to others."""
    digits, moves = sums[..., :-1], window - sums[..., -1]
    if sums.is_cuda:
        return _without_lowest(digits, moves, form)
    moved = torch.nonzero(moves > 0, as_tuple=True)
    if len(moved[0]):
        digits = digits.clone()
        digits[moved] = _without_lowest(digits[moved], moves[moved], form)
    return digits


def _without_lowest(digits: Tensor, moves: Tensor, form: BinFormat) -> Tensor:
    """Digits whose windows have moved up by so many places [...]."""
    moves, parts = moves.unsqueeze(-1), digits.unflatten(-1, (form.digits, -1)).unbind(-2)
    for step in range(form.digits):
        up = (*parts[1:], torch.zeros_like(parts[0]))
        parts = [torch.where(moves > step, x, y) for x, y in zip(up, parts, strict=True)]
    return torch.cat(tuple(parts), -1)


def _add_digits(sums: Tensor, numbers: Tensor, form: BinFormat) -> None:
    """Add numbers in units of the highest digit; changes them."""
    *lower, top = _digits(sums, form)
    for digit in (top, *reversed(lower[1:])):
        whole = numbers.round()
        digit += whole.to(digit.dtype)
        numbers.sub_(whole).mul_(2.0**form.digit_bits)
    lower[0] += numbers.round_().to(top.dtype)
