"""Binned sums have the same bits in any order and grouping, and are close to the exact sum."""

import math
from fractions import Fraction

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tilewise.kernels.binned import (
    add_terms,
    blank_sums,
    exact_numbers,
    folded,
    merge_sums,
    rounded,
)
from tilewise.kernels.elementary import exp_parts
from tilewise.plan.sums import BFLOAT16, FLOAT16, FLOAT32, FLOAT64, MANY_TERMS, BinFormat

CPU = torch.device("cpu")
FORMATS = pytest.mark.parametrize(
    ("form", "dtype"),
    [
        (FLOAT32, torch.float32),
        (FLOAT16, torch.float32),
        (BFLOAT16, torch.bfloat16),
        (FLOAT64, torch.float64),
        (MANY_TERMS, torch.float64),
    ],
    ids=["fp32", "fp16", "bf16", "fp64", "many"],
)


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


def _sum_of(terms: list[torch.Tensor], form: BinFormat) -> torch.Tensor:
    sums = blank_sums((2,), terms[0].shape[-1], form, CPU)
    for x in terms:
        add_terms(sums, x, form)
    return sums


@FORMATS
@given(data=st.data())
def test_any_order_and_grouping_gives_the_same_bits(
    form: BinFormat, dtype: torch.dtype, data: st.DataObject
) -> None:
    terms = data.draw(st.composite(lambda draw: _terms(draw, dtype, 3))())
    expected = _sum_of(terms, form)
    groups: list[list[torch.Tensor]] = [[], [], []]
    for x in data.draw(st.permutations(terms)):
        groups[data.draw(st.integers(0, 2))].append(x)
    total = blank_sums((2,), 3, form, CPU)
    for group in groups:
        part = _sum_of(group, form) if group else blank_sums((2,), 3, form, CPU)
        merge_sums(total, part, form)
    assert torch.equal(total, expected)
    parts = [_sum_of(group, form) for group in groups if group]
    assert torch.equal(folded(torch.stack(parts), form), expected)


@FORMATS
@given(data=st.data())
def test_a_sum_is_as_close_as_its_window_is_wide(
    form: BinFormat, dtype: torch.dtype, data: st.DataObject
) -> None:
    terms = data.draw(st.composite(lambda draw: _terms(draw, dtype, 3))())
    numbers, exponents = exact_numbers(_sum_of(terms, form), form)
    bits = form.digit_bits * (form.digits - 1)
    for row in range(2):
        largest = max(float(x[row].abs().max()) for x in terms)
        for column in range(3):
            exact = sum(Fraction(x[row, column].item()) for x in terms)
            found = Fraction(numbers[row, column].item()) * Fraction(2) ** int(exponents[row])
            rounding = abs(exact) * Fraction(form.digits - 1, 2**52)
            assert abs(found - exact) <= len(terms) * Fraction(largest) / 2**bits + rounding


@FORMATS
def test_factors_and_exponents_multiply_terms(form: BinFormat, dtype: torch.dtype) -> None:
    x = torch.randn(5, 4, dtype=dtype)
    factors, exponents = torch.rand(5, dtype=torch.float64) + 0.7, torch.tensor([0, 9, -9, 80, -80])
    scaled, plain = blank_sums((5,), 4, form, CPU), blank_sums((5,), 4, form, CPU)
    add_terms(scaled, x, form, factors, exponents)
    x = x.to(torch.float32 if form.item_bits == 32 else torch.float64)  # as it is rounded
    add_terms(plain, x * factors[:, None].to(x.dtype) * 2.0 ** exponents[:, None], form)
    assert torch.equal(scaled, plain)


def test_exponents_beyond_those_of_numbers_are_kept() -> None:
    sums, one = blank_sums((1,), 1, FLOAT32, CPU), torch.ones(1, 1)
    for exponent in (5000, 5001, -(10**9)):
        add_terms(sums, one, FLOAT32, exponents=torch.tensor([exponent]))
    numbers, exponents = exact_numbers(sums, FLOAT32)
    assert Fraction(numbers.item()) * Fraction(2) ** int(exponents) == 3 * 2**5000


@pytest.mark.parametrize("form", [FLOAT32, FLOAT16, BFLOAT16, FLOAT64, MANY_TERMS])
@pytest.mark.parametrize("sign", [1, -1])
def test_as_many_terms_as_a_format_allows_do_not_overflow(form: BinFormat, sign: int) -> None:
    """Digits of these numbers are as large as they can be: half of their place."""
    half = 2.0 ** (form.digit_bits - 1)
    ends = {half, half * (1 - 2.0**-23)}
    for high in ends if form.item_bits == 32 else (half / 2, half / 2 - 0.5):
        number = sign * high
        sums = blank_sums((1,), 1, form, CPU)
        terms = 0
        while terms < form.most_terms:  # 1, 3, 7, ...
            merge_sums(sums, sums.clone(), form)
            add_terms(sums, torch.tensor([[number]], dtype=torch.float64), form)
            terms = 2 * terms + 1
        expected = terms * number
        assert rounded(sums, form, torch.float64).item() == pytest.approx(expected, rel=1e-15)
        for moved in range(1, form.digits + 1):  # the lowest digits leave without a carry
            up = 2.0 ** (form.digit_bits * moved) * half
            total = sums.clone()
            add_terms(total, torch.tensor([[up]], dtype=torch.float64), form)
            numbers, exponents = exact_numbers(total, form)
            unit = 2.0 ** exponents.item()
            error = abs(numbers.item() * unit - up - expected)
            assert error <= terms * unit / 2 + math.ulp(up + terms * half)


@pytest.mark.parametrize("wrong", [math.nan, math.inf, -math.inf, 2.0**801])
def test_a_number_that_is_not_finite_makes_its_sum_nan_in_any_order(wrong: float) -> None:
    terms = [torch.tensor([[1.0, 2.0]], dtype=torch.float64) for _ in range(3)]
    terms[1][0, 1] = wrong
    for order in (terms, terms[::-1], [terms[1], terms[0], terms[2]]):
        sums = blank_sums((1,), 2, FLOAT64, CPU)
        for x in order:
            add_terms(sums, x, FLOAT64)
        assert rounded(sums, FLOAT64, torch.float64).isnan().all()


def test_zeros_and_subnormal_numbers_change_nothing() -> None:
    sums = blank_sums((1,), 2, FLOAT32, CPU)
    for x in (0.0, 2.0**-127, 2.0**-149):
        add_terms(sums, torch.tensor([[x, -0.0]]), FLOAT32)
        add_terms(sums, torch.tensor([[x, -0.0]]), FLOAT32, exponents=torch.tensor([10**6]))
    assert not sums.any()
    assert rounded(sums, FLOAT32, torch.float32).tolist() == [[0.0, 0.0]]


def test_formats_say_how_many_terms_they_hold() -> None:
    formats = FLOAT32, FLOAT16, BFLOAT16, FLOAT64, MANY_TERMS
    assert [form.most_terms for form in formats] == [255, 255, 255, 1023, 2**24 - 1]


@FORMATS
def test_single_sums_merge_when_windows_differ(form: BinFormat, dtype: torch.dtype) -> None:
    small, large = (blank_sums((), 1, form, CPU) for _ in range(2))
    for size in range(0, -120, -20):
        add_terms(small, torch.tensor([2.0**size], dtype=torch.float64), form)
    add_terms(large, torch.tensor([2.0**25], dtype=torch.float64), form)
    merged, other = small.clone(), large.clone()
    merge_sums(merged, large, form)
    merge_sums(other, small, form)
    assert torch.equal(merged, other)
    error = abs(rounded(merged, form, torch.float64).item() - 2**25 - 1 / (1 - 2**-20))
    assert error <= 2.0 ** (26 - form.digit_bits * (form.digits - 1)) + math.ulp(2**25)


def test_scores_beyond_all_exponents_are_nan_or_nothing() -> None:
    for exponent, expected in ((1 << 34, math.nan), (-(1 << 34), 1.0)):
        sums = blank_sums((1,), 1, BFLOAT16, CPU)
        add_terms(sums, torch.ones(1, 1), BFLOAT16, exponents=torch.tensor([exponent]))
        add_terms(sums, torch.ones(1, 1), BFLOAT16, exponents=torch.tensor([0]))
        assert rounded(sums, BFLOAT16, torch.float32).item() == pytest.approx(expected, nan_ok=True)


def test_exp_of_any_number_is_a_number() -> None:
    x = torch.tensor([-3.4e38, -1e30, -100.0, 0.0, 1e30, -math.inf, math.nan])
    mantissas, exponents = exp_parts(x)
    assert mantissas[:5].isfinite().all() and mantissas[5] == 0 and mantissas[6].isnan()
    assert exponents.abs().max() <= 2**39
    assert exponents[0] == exponents[1] < -(2**32)
