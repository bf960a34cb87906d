"""Binned sums as data: how many digits they keep, and where they lie in a row of integers.

`kernels/binned.py` says what they are and computes with them.
"""

from typing import NamedTuple


class BinFormat(NamedTuple):
    """The digits of a sum, and how they lie in integers of 64 bits.

    Attributes:
        digit_bits: W.
        lane_bits: bits that the sum of one digit has, its sign among them.
        lanes: digits in one integer.
        words: integers that a sum has. lanes or words is 1.
    """

    digit_bits: int
    lane_bits: int
    lanes: int
    words: int

    @property
    def digits(self) -> int:
        """K."""
        return self.lanes * self.words

    @property
    def most_terms(self) -> int:
        """Numbers that may be added to one sum: no lane overflows."""
        return ((1 << (self.lane_bits - 1)) - 1) // ((1 << self.digit_bits) - 1)

    def columns(self, width: int) -> int:
        """Integers that so many sums with one window take: their words, and the window."""
        return self.words * width + 1


FLOAT32 = BinFormat(12, 21, 3, 1)
"""For numbers of fp32, 25 bits and more of the largest, at most 256 terms: 8 bytes a sum."""

FLOAT64 = BinFormat(53, 64, 1, 2)
"""For numbers of fp64, 54 bits and more of the largest, at most 1024 terms: 16 bytes a sum."""

MANY_TERMS = BinFormat(40, 64, 1, 3)
"""For up to 8,388,608 terms of either, 81 bits and more of the largest: 24 bytes a sum."""


class SumColumns(NamedTuple):
    """The integers of one row and head of a partial result.

    Attributes:
        widths: numbers of sums that share a window, group by group.
        largest: one more integer stands for the largest score.
    """

    form: BinFormat
    widths: tuple[int, ...]
    largest: bool = False

    @property
    def num_columns(self) -> int:
        return sum(map(self.form.columns, self.widths)) + self.largest

    @property
    def groups(self) -> tuple[slice, ...]:
        """The columns of each group."""
        found: list[slice] = []
        for width in self.widths:
            start = found[-1].stop if found else 0
            found.append(slice(start, start + self.form.columns(width)))
        return tuple(found)
