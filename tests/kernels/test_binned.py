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
from tilewise.plan.sums import FLOAT32, FLOAT64, MANY_TERMS, BinFormat

CPU = torch.device("cpu")
FORMATS = pytest.mark.parametrize(
    ("form", "dtype"),
    [
        (FLOAT32, torch.float32),
        (FLOAT32, torch.bfloat16),
        (FLOAT64, torch.float64),
        (MANY_TERMS, torch.float64),
    ],
    ids=["fp32", "bf16", "fp64", "many"],
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
    bits = form.digit_bits * (form.digits - 1) + (form.words == 1)
    for row in range(2):
        largest = max(float(x[row].abs().max()) for x in terms)
        for column in range(3):
            exact = sum(Fraction(x[row, column].item()) for x in terms)
            found = Fraction(numbers[row, column].item()) * Fraction(2) ** int(exponents[row])
            rounding = abs(exact) * Fraction(form.words - 1, 2**52)
            assert abs(found - exact) <= len(terms) * Fraction(largest) / 2**bits + rounding


@FORMATS
def test_factors_and_exponents_multiply_terms(form: BinFormat, dtype: torch.dtype) -> None:
    x = torch.randn(5, 4, dtype=dtype)
    factors, exponents = torch.rand(5, dtype=torch.float64) + 0.7, torch.tensor([0, 9, -9, 99, -99])
    scaled, plain = blank_sums((5,), 4, form, CPU), blank_sums((5,), 4, form, CPU)
    add_terms(scaled, x, form, factors, exponents)
    add_terms(plain, x * factors[:, None] * 2.0 ** exponents[:, None], form)
    assert torch.equal(scaled, plain)


def test_exponents_beyond_those_of_numbers_are_kept() -> None:
    sums, one = blank_sums((1,), 1, FLOAT32, CPU), torch.ones(1, 1)
    for exponent in (5000, 5001, -70000):
        add_terms(sums, one, FLOAT32, exponents=torch.tensor([exponent]))
    numbers, exponents = exact_numbers(sums, FLOAT32)
    assert Fraction(numbers.item()) * Fraction(2) ** int(exponents) == 3 * 2**5000


@pytest.mark.parametrize("form", [FLOAT32, FLOAT64, MANY_TERMS])
@pytest.mark.parametrize("sign", [1, -1])
def test_as_many_terms_as_a_format_allows_do_not_overflow(form: BinFormat, sign: int) -> None:
    number = sign * (1 - 2.0 ** -(24 if form is FLOAT32 else 53))  # all bits of digits are 1
    sums = blank_sums((1,), 1, form, CPU)
    add_terms(sums, torch.tensor([[number]], dtype=torch.float64), form)
    terms = 1
    while terms * 2 <= form.most_terms:
        merge_sums(sums, sums.clone(), form)
        terms *= 2
    assert rounded(sums, form, torch.float64).item() == pytest.approx(terms * number, rel=1e-15)
    for moved in range(1, form.digits + 1):  # the lowest digits leave without a carry
        up = 2.0 ** (form.digit_bits * (moved - 1))
        total = sums.clone()
        add_terms(total, torch.tensor([[up]], dtype=torch.float64), form)
        found = rounded(total, form, torch.float64).item() - up
        unit = 2.0 ** (form.digit_bits * (moved - form.digits))
        assert abs(found - terms * number) <= terms * unit + math.ulp(up + terms)


@pytest.mark.parametrize("wrong", [math.nan, math.inf, -math.inf, 2.0**901])
def test_a_number_that_is_not_finite_makes_its_sum_nan_in_any_order(wrong: float) -> None:
    terms = [torch.tensor([[1.0, 2.0]], dtype=torch.float64) for _ in range(3)]
    terms[1][0, 1] = wrong
    for order in (terms, terms[::-1], [terms[1], terms[0], terms[2]]):
        sums = blank_sums((1,), 2, FLOAT64, CPU)
        for x in order:
            add_terms(sums, x, FLOAT64)
        assert rounded(sums, FLOAT64, torch.float64).isnan().all()


def test_zeros_change_nothing() -> None:
    sums = blank_sums((1,), 2, FLOAT32, CPU)
    add_terms(sums, torch.tensor([[0.0, -0.0]]), FLOAT32, exponents=torch.tensor([10**6]))
    assert not sums.any()
    assert rounded(sums, FLOAT32, torch.float32).tolist() == [[0.0, 0.0]]


def test_formats_say_how_many_terms_they_hold() -> None:
    assert (FLOAT32.most_terms, FLOAT64.most_terms) == (256, 1024)
