"""Binned sums have the same bits in any order and grouping, and are close to the exact sum."""

import math
from fractions import Fraction

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tilewise.exact.elementary import exp_parts
from tilewise.exact.sums import (
    DIGIT_BITS,
    DIGITS,
    MOST_TERMS,
    add_terms,
    blank_sums,
    folded,
    merge_sums,
    rounded,
)

CPU = torch.device("cpu")
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])


def _terms(draw: st.DrawFn, dtype: torch.dtype, width: int) -> list[torch.Tensor]:
    """Terms [2, width] of very different sizes: windows move."""
    sizes = draw(st.lists(st.integers(-60, 60), min_size=1, max_size=9))
    seed = draw(st.integers(0, 2**31))
    made = torch.Generator().manual_seed(seed)
    terms = [
        torch.randn(2, width, generator=made, dtype=torch.float64) * 2.0**size for size in sizes
    ]
    zero = draw(st.integers(0, len(terms)))
    return [(x * (number != zero)).to(dtype) for number, x in enumerate(terms)]


def _sum_of(terms: list[torch.Tensor]) -> torch.Tensor:
    sums = blank_sums((2,), terms[0].shape[-1], CPU)
    for x in terms:
        add_terms(sums, x)
    return sums


@DTYPES
@given(data=st.data())
def test_any_order_and_grouping_gives_the_same_bits(
    dtype: torch.dtype, data: st.DataObject
) -> None:
    terms = data.draw(st.composite(lambda draw: _terms(draw, dtype, 3))())
    expected = _sum_of(terms)
    groups: list[list[torch.Tensor]] = [[], [], []]
    for x in data.draw(st.permutations(terms)):
        groups[data.draw(st.integers(0, 2))].append(x)
    total = blank_sums((2,), 3, CPU)
    for group in groups:
        part = _sum_of(group) if group else blank_sums((2,), 3, CPU)
        merge_sums(total, part)
    assert torch.equal(total, expected)
    parts = [_sum_of(group) for group in groups if group]
    assert torch.equal(folded(torch.stack(parts)), expected)


@DTYPES
@given(data=st.data())
def test_a_sum_is_as_close_as_its_window_is_wide(dtype: torch.dtype, data: st.DataObject) -> None:
    terms = data.draw(st.composite(lambda draw: _terms(draw, dtype, 3))())
    total = rounded(_sum_of(terms), torch.float64)
    for row in range(2):
        largest = max(float(x[row].abs().max()) for x in terms)
        for column in range(3):
            exact = sum(Fraction(x[row, column].item()) for x in terms)
            rounding = abs(exact) * Fraction(DIGITS, 2**52)
            limit = len(terms) * Fraction(largest) / 2 ** (DIGIT_BITS * (DIGITS - 1)) + rounding
            assert abs(Fraction(total[row, column].item()) - exact) <= limit


@DTYPES
def test_factors_and_exponents_multiply_terms(dtype: torch.dtype) -> None:
    x = torch.randn(5, 4, dtype=dtype)
    factors, exponents = torch.rand(5, dtype=torch.float64) + 0.7, torch.tensor([0, 9, -9, 80, -80])
    scaled, plain = blank_sums((5,), 4, CPU), blank_sums((5,), 4, CPU)
    add_terms(scaled, x, factors, exponents)
    add_terms(plain, x.double() * factors[:, None] * 2.0 ** exponents[:, None])
    assert torch.equal(scaled, plain)


@pytest.mark.parametrize("sign", [1, -1])
def test_as_many_terms_as_are_allowed_do_not_overflow(sign: int) -> None:
    """Digits of these numbers are as large as they can be: half of their place."""
    half = 2.0 ** (DIGIT_BITS - 1)
    for high in (half / 2, half / 2 - 0.5):
        number = sign * high
        sums = blank_sums((1,), 1, CPU)
        terms = 0
        while terms < MOST_TERMS:  # 1, 3, 7, ...
            merge_sums(sums, sums.clone())
            add_terms(sums, torch.tensor([[number]], dtype=torch.float64))
            terms = 2 * terms + 1
        expected = terms * number
        assert rounded(sums, torch.float64).item() == pytest.approx(expected, rel=1e-15)
        for moved in range(1, DIGITS + 1):  # the lowest digits leave without a carry
            up = 2.0 ** (DIGIT_BITS * moved) * half
            total = sums.clone()
            add_terms(total, torch.tensor([[up]], dtype=torch.float64))
            assert rounded(total, torch.float64).item() == pytest.approx(up + expected, rel=1e-12)


@pytest.mark.parametrize("wrong", [math.nan, math.inf, -math.inf, 2.0**801])
def test_a_number_that_is_not_finite_makes_its_sum_nan_in_any_order(wrong: float) -> None:
    terms = [torch.tensor([[1.0, 2.0]], dtype=torch.float64) for _ in range(3)]
    terms[1][0, 1] = wrong
    for order in (terms, terms[::-1], [terms[1], terms[0], terms[2]]):
        sums = blank_sums((1,), 2, CPU)
        for x in order:
            add_terms(sums, x)
        assert rounded(sums, torch.float64).isnan().all()


def test_zeros_and_subnormal_numbers_change_nothing() -> None:
    sums = blank_sums((1,), 2, CPU)
    for x in (0.0, 2.0**-1030, 2.0**-1074):
        term = torch.tensor([[x, -0.0]], dtype=torch.float64)
        add_terms(sums, term)
        add_terms(sums, term, exponents=torch.tensor([10**6]))
    assert not sums.any()
    assert rounded(sums, torch.float32).tolist() == [[0.0, 0.0]]


def test_single_sums_merge_when_windows_differ() -> None:
    small, large = (blank_sums((), 1, CPU) for _ in range(2))
    for size in range(0, -120, -20):
        add_terms(small, torch.tensor([2.0**size], dtype=torch.float64))
    add_terms(large, torch.tensor([2.0**25], dtype=torch.float64))
    merged, other = small.clone(), large.clone()
    merge_sums(merged, large)
    merge_sums(other, small)
    assert torch.equal(merged, other)
    error = abs(rounded(merged, torch.float64).item() - 2**25 - 1 / (1 - 2**-20))
    assert error <= math.ulp(2**25)


def test_exponents_beyond_those_of_numbers_are_kept_or_nan() -> None:
    for exponent, expected in ((1 << 34, math.inf), (1 << 36, math.nan), (-(1 << 34), 1.0)):
        sums = blank_sums((1,), 1, CPU)
        add_terms(sums, torch.ones(1, 1), exponents=torch.tensor([exponent]))
        add_terms(sums, torch.ones(1, 1), exponents=torch.tensor([0]))
        found = rounded(sums, torch.float32).item()
        assert found == expected or (math.isnan(found) and math.isnan(expected))


def test_exp_of_any_number_is_a_number() -> None:
    x = torch.tensor([-3.4e38, -1e30, -100.0, 0.0, 1e30, -math.inf, math.nan])
    mantissas, exponents = exp_parts(x)
    assert mantissas[:5].isfinite().all() and mantissas[5] == 0 and mantissas[6].isnan()
    assert exponents.abs().max() <= 2**39
    assert exponents[0] == exponents[1] < -(2**32)
