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

from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from tilewise.plan.sums import BinFormat

_BLOCK = 1 << 18  # numbers whose digits fit in a cache

_BIAS = 1 << 30  # windows are stored above 0, so that zeros are the blank sum
_NOT_FINITE = (1 << 31) - 1
_FAR = 1 << 45  # an exponent that no number has


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

    def tops(self, x: Tensor) -> Tensor:
        """The least exponents of powers of two above numbers from 0 on, int64.

        Those of numbers that are not finite or too large are far above all others, those of 0 far
        below.
        """
        field = (x.view(self.bits) >> self.mantissa_bits) & (2 * self.bias + 1)
        return _tops(self, x.device).index_select(0, field.view(-1)).view(field.shape)

    def power_of_two(self, exponents: Tensor) -> Tensor:
        """2^exponents, int64, by their bits; 0 from 2^-bias down, and at most 2^(bias - 1)."""
        field = exponents.add(self.bias).clamp_(0, 2 * self.bias - 1).to(self.bits)
        return (field << self.mantissa_bits).view(self.dtype)


_FLOAT32 = _Real(torch.float32, torch.int32, 23, 127, 100)
_FLOAT64 = _Real(torch.float64, torch.int64, 52, 1023, 800)


@lru_cache
def _tops(real: _Real, device: torch.device) -> Tensor:
    """The exponents of `_Real.tops` by the field of a number's bits."""
    found = torch.arange(2 * real.bias + 2) - (real.bias - 1)
    found[found > real.most_exponent] = _FAR
    found.clamp_(min=-real.most_exponent)
    found[0] = -_FAR  # numbers that are not normal count as 0
    return found.to(device)


def blank_sums(shape: tuple[int, ...], width: int, form: BinFormat, device: torch.device) -> Tensor:
    """Sums of nothing, integers [*shape, form.columns(width)]: zeros."""
    dtype = getattr(torch, form.dtype)
    return torch.zeros(*shape, form.columns(width), dtype=dtype, device=device)


class Scratch:
    """Memory that additions use one after the other: new memory would cost more than they do."""

    def __init__(self) -> None:
        self._tensors: dict[tuple[object, ...], Tensor] = {}

    def like(self, x: Tensor, name: str, dtype: torch.dtype) -> Tensor:
        """A tensor of any content, which is that of the last call of this name and shape."""
        key = name, x.shape, x.stride(), x.device, dtype
        found = self._tensors.get(key)
        if found is None:
            found = self._tensors[key] = torch.empty_like(x, dtype=dtype)
        return found


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
        numbers: [..., width]; where they are all 0, or not normal, nothing is added. One that is
            not finite, or too large (2^100, in formats of 64 bits 2^800), makes all that share its
            window NaN.
        factors: [...], of sizes below 2; default 1.
        exponents: int64 [...] from -2^33 on; default 0. From 2^36 on they make sums NaN.
    """
    sums, numbers = torch.atleast_2d(sums), torch.atleast_2d(numbers)
    add_groups([sums], [numbers], form, factors, exponents, Scratch())


def add_groups(
    sums: Sequence[Tensor],
    numbers: Sequence[Tensor],
    form: BinFormat,
    factors: Tensor | None,
    exponents: Tensor | None,
    scratch: Scratch,
) -> None:
    """Do what add_terms does with several sums of the same rows, each with windows of its own.

    Args:
        scratch: of several calls.
    """
    real = _Real.of(form)
    numbers = [x.to(real.dtype) for x in numbers]
    shape, device = (len(sums), *numbers[0].shape[:-1]), numbers[0].device
    largest = torch.empty(shape, dtype=real.dtype, device=device)
    for x, found in zip(numbers, largest, strict=True):
        for part, into in in_blocks(_BLOCK, x, found):
            torch.amax(torch.abs(part, out=scratch.like(part, "number", real.dtype)), -1, out=into)
    if factors is not None:
        factors = factors.to(real.dtype)
        largest *= factors.abs()
    top = real.tops(largest)  # numbers are below 2^top
    nothing = top == -_FAR
    if exponents is not None:
        top += exponents
    # rounded to the place above its highest digit, a number is 0: it is at most half of it
    places = top.add_(form.digit_bits).div_(form.digit_bits, rounding_mode="floor")
    window = places.add_(_BIAS - form.digits).clamp_(0, _NOT_FINITE).to(sums[0].dtype)
    window = _moved_to(sums, window, form)
    unit = (window.long() - (_BIAS + 1 - form.digits)).mul_(-form.digit_bits)
    scale = real.power_of_two(unit if exponents is None else unit.add_(exponents))
    if factors is not None:
        scale *= factors
    scale = scale.masked_fill_(nothing, 0.0).unsqueeze(-1)
    for group in zip(numbers, sums, scale, strict=True):
        for x, into, scales in in_blocks(_BLOCK, *group):
            _add_digits(x, into, scales, form, scratch)


def merge_sums(sums: Tensor, others: Tensor, form: BinFormat) -> None:
    """Add other sums to sums in place: the result is that of all terms of both.

    Args:
        sums, others: integers [..., form.columns(width)], of any strides.
    """
    sums, others = torch.atleast_2d(sums), torch.atleast_2d(others)
    (window,) = _moved_to([sums], others[None, ..., -1], form)
    sums[..., :-1] += _with_window(others, window, form)


def exact_numbers(sums: Tensor, form: BinFormat) -> tuple[Tensor, Tensor]:
    """Return sums as fp64 [..., width] and int64 exponents [...]: numbers * 2^exponents.

    The numbers are of a fixed rounding. NaN where a term was not finite.
    """
    window = sums[..., -1]
    *lower, top = _digits(sums, form)
    numbers = top.double()
    for digit in reversed(lower):
        numbers.mul_(2.0**form.digit_bits).add_(digit)
    not_finite = window == _NOT_FINITE
    if sums.is_cuda or bool(not_finite.any()):  # no wait for a device
        numbers.masked_fill_(not_finite.unsqueeze(-1), torch.nan)
    exponents = form.digit_bits * (window.long() - _BIAS)
    return numbers, exponents.masked_fill_((window == 0) | not_finite, 0)


def in_blocks(size: int, *tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Blocks of rows of several tensors, of at most so many numbers of the first, or one row."""
    rows = max(1, size // max(1, tensors[0][:1].numel()))
    return zip(*(x.split(rows) for x in tensors), strict=True)


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
    return numbers.mul_(power_of_two(exponents).unsqueeze(-1)).to(dtype)


def power_of_two(exponents: Tensor) -> Tensor:
    """2^exponents, fp64: 0 from 2^-1023 down, and at most 2^1023."""
    return _FLOAT64.power_of_two(exponents)


def _digits(sums: Tensor, form: BinFormat) -> tuple[Tensor, ...]:
    """The sums of digits, the lowest first, each [..., width]."""
    return sums[..., :-1].unflatten(-1, (form.digits, -1)).unbind(-2)


def _moved_to(sums: Sequence[Tensor], windows: Tensor, form: BinFormat) -> Tensor:
    """Move the windows of sums up to others where they are higher; returns where they stand.

    Args:
        windows: of each of the sums.
    """
    before = torch.stack([x[..., -1] for x in sums])
    higher = windows > before
    waits = not windows.is_cuda  # not for a device
    if waits and not bool(higher.any()):
        return before
    windows = torch.maximum(before, windows)
    for x, old, new in zip(sums, before, windows, strict=True):
        if waits:  # windows move seldom after their first number, and then those of few rows
            moved = torch.nonzero((new > old) & (old > 0), as_tuple=True)
            if len(moved[0]):
                moves = new[moved] - old[moved]
                x[(*moved, slice(0, -1))] = _without_lowest(x[moved][..., :-1], moves, form)
        else:
            x[..., :-1] = _without_lowest(x[..., :-1], new - old, form)
        x[..., -1] = new
    return windows


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


def _add_digits(
    numbers: Tensor, sums: Tensor, scale: Tensor, form: BinFormat, scratch: Scratch
) -> None:
    """Add numbers * scale, which is in units of the highest digit, to sums."""
    rest = torch.mul(numbers, scale, out=scratch.like(numbers, "number", numbers.dtype))
    whole = scratch.like(numbers, "digit", numbers.dtype)
    integers = scratch.like(sums[..., :-1], "integers", sums.dtype)
    *lower, top = integers.unflatten(-1, (form.digits, -1)).unbind(-2)
    for digit in (top, *reversed(lower)):
        digit.copy_(torch.round(rest, out=whole))
        if digit is not lower[0]:
            rest.sub_(whole).mul_(2.0**form.digit_bits)
    sums[..., :-1] += integers
