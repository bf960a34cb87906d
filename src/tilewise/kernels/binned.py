"""Binned sums: sums of floating-point numbers that have the same bits in any order and grouping.

A number is cut into digits of W bits at absolute places, the powers of 2^W. Each digit is added as
an integer, which is associative. A sum keeps the K digits from the highest that any of its numbers
has; numbers that stand side by side (of one row and head) share that window. When a larger number
comes, the window moves up and the lowest digits are dropped. A digit's sum never carries into the
next, so what is dropped then is what every number has there, whenever it came: the result depends
on the set of numbers alone. Digits have the sign of their number, so they are a function of the
number, and not of the window.

    number                 0.7 = 5734 * 2^-13 + ...      digits at ..., 2^-24, 2^-12, 1, 2^12, ...
    sum, K = 3             [ digit | digit | digit ] and the place of the lowest

Source: Demmel and Nguyen 2015, Parallel Reproducible Summation. Departs from it by digits that are
integers, several of them in one int64 where they are short.
"""

import torch
from torch import Tensor

from tilewise.plan.sums import BinFormat

MOST_EXPONENT = 900
"""Numbers of 2^900 and more make a sum NaN, as infinite ones do: their digits have no scale."""

LEAST_EXPONENT = -800
"""Digits of a sum of smaller numbers begin here, for the same reason."""

_BLOCK = 1 << 16  # numbers whose digits fit in a cache

_BIAS = 1 << 40  # windows are stored above 0, so that zeros are the blank sum
_NOT_FINITE = 1 << 60


def blank_sums(shape: tuple[int, ...], width: int, form: BinFormat, device: torch.device) -> Tensor:
    """Sums of nothing, int64 [*shape, form.columns(width)]: zeros."""
    return torch.zeros(*shape, form.columns(width), dtype=torch.int64, device=device)


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

    Args:
        sums: int64 [..., form.columns(width)], of any strides.
        numbers: [..., width]; where they are all 0 nothing is added. One that is not finite, or
            from 2^900 on, makes all that share its window NaN.
        factors: fp64 [...], finite; default 1.
        exponents: int64 [...]; default 0.
    """
    largest = numbers.abs().amax(-1).double()
    if factors is not None:
        largest = largest * factors.abs()
    field = largest.view(torch.int64) >> 52 & 0x7FF  # of the bits of an fp64 number
    top = (field - 1022).clamp_(min=LEAST_EXPONENT)  # numbers are below 2^top
    finite = field - 1022 <= MOST_EXPONENT
    own = top if exponents is None else top + exponents
    lowest = (own + form.digit_bits - 1).div(form.digit_bits, rounding_mode="floor") - form.digits
    window = torch.where(finite, lowest + _BIAS, _NOT_FINITE).masked_fill_(largest == 0, 0)
    window = _moved_to(sums, window, form)
    unit = -form.digit_bits * (window - _BIAS)
    scale = _power_of_two(unit if exponents is None else unit + exponents)
    if factors is not None:
        scale *= factors
    scale = scale.masked_fill_(~finite, 0.0).unsqueeze(-1)
    block = max(1, _BLOCK // max(1, numbers[:1].numel()))
    for part in zip(sums.split(block), numbers.split(block), scale.split(block), strict=True):
        _add_digits(part[0], part[1] * part[2], form)


def merge_sums(sums: Tensor, others: Tensor, form: BinFormat) -> None:
    """Add other sums to sums in place: the result is that of all terms of both.

    Args:
        sums, others: int64 [..., form.columns(width)], of any strides.
    """
    window = _moved_to(sums, others[..., -1], form)
    words, move = others[..., :-1], window - others[..., -1]
    sums[..., :-1] += _without_lowest(words, move, form)


def exact_numbers(sums: Tensor, form: BinFormat) -> tuple[Tensor, Tensor]:
    """Return sums as fp64 [..., width] and int64 exponents [...]: numbers * 2^exponents.

    The numbers are exact in FLOAT32, and of a fixed rounding in other formats. NaN where a term was
    not finite.
    """
    words, window = sums[..., :-1], sums[..., -1]
    if form.words == 1:
        half = 1 << (form.lane_bits - 1)
        total = words.clone()
        for lane in range(1, form.lanes):
            words = (words + half) >> form.lane_bits
            shift = form.digit_bits * (lane - 1)
            total -= words * ((1 << (form.lane_bits + shift)) - (1 << (form.digit_bits + shift)))
        numbers = total.double()
    else:
        *lower, top = words.unflatten(-1, (form.words, -1)).unbind(-2)
        numbers = top.double()
        for word in reversed(lower):
            numbers = numbers * 2.0**form.digit_bits + word.double()
    numbers = numbers.masked_fill((window >= _NOT_FINITE).unsqueeze(-1), torch.nan)
    known = (window > 0) & (window < _NOT_FINITE)
    return numbers, torch.where(known, form.digit_bits * (window - _BIAS), 0)


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
    return numbers * _power_of_two(half) * _power_of_two(exponents - half)


def _power_of_two(exponents: Tensor) -> Tensor:
    """2^exponents by the bits of fp64 numbers; 0 below 2^-1022, and at most 2^1023."""
    bits = (exponents.clamp(-1023, 1023) + 1023) << 52
    return bits.view(torch.float64)


def _moved_to(sums: Tensor, window: Tensor, form: BinFormat) -> Tensor:
    """Move the windows of sums up to others where they are higher; returns where they stand."""
    before = sums[..., -1]
    window = torch.maximum(before, window)
    words, move = sums[..., :-1], window - before
    if sums.is_cuda:  # no wait for a device
        words.copy_(_without_lowest(words, move, form))
    else:  # windows move seldom after their first number, and then those of few rows
        moved = torch.nonzero((move > 0) & (before > 0), as_tuple=True)
        if len(moved[0]):
            words[moved] = _without_lowest(words[moved], move[moved], form)
    before.copy_(window)
    return window


def _without_lowest(words: Tensor, moves: Tensor, form: BinFormat) -> Tensor:
    """Words whose windows have moved up by so many digits [...]."""
    if not words.is_cuda and not bool(moves.any()):
        return words
    moves = moves.clamp(max=form.digits).unsqueeze(-1)
    if form.words == 1:
        halves = torch.zeros(form.lanes + 1, dtype=torch.int64, device=words.device)
        for lane in range(form.lanes):
            halves[lane + 1 :] += 1 << (form.lane_bits * (lane + 1) - 1)
        return (words + halves[moves]) >> (form.lane_bits * moves)
    found = words.unflatten(-1, (form.words, -1)).unbind(-2)
    for step in range(form.words):
        up = (*found[1:], torch.zeros_like(found[0]))
        found = [torch.where(moves > step, x, y) for x, y in zip(up, found, strict=True)]
    return torch.cat(tuple(found), -1)


def _add_digits(sums: Tensor, digits: Tensor, form: BinFormat) -> None:
    """Add numbers in units of the lowest digit, fp64; changes them."""
    words = sums[..., :-1]
    if form.words == 1:
        # word = sum of digit_j << (lane_bits j);  digit_j = x_j - x_(j + 1) << digit_bits, where
        # x_j is the number in units of digit j, cut off towards 0
        words += digits.long()
        for lane in range(1, form.lanes):
            digits *= 2.0**-form.digit_bits
            shift = form.lane_bits * (lane - 1)
            factor = (1 << (form.lane_bits + shift)) - (1 << (form.digit_bits + shift))
            words.add_(digits.long(), alpha=factor)
        return
    parts = words.unflatten(-1, (form.words, -1))
    for word in reversed(range(form.words)):
        unit = 2.0 ** (form.digit_bits * word)
        top = (digits * (1 / unit)).trunc_()
        parts[..., word, :] += top.long()
        digits -= top * unit
