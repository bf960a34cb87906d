"""Binned sums as data: how many digits they keep, and where they lie in a row of integers.

`kernels/binned.py` says what they are and computes with them.
"""

from typing import NamedTuple


class BinFormat(NamedTuple):
    """The digits of a sum, and the integers that hold them.

    Attributes:
        digit_bits: W.
        digits: K.
        sum_bits: that the sum of one digit has, its sign among them. So many travel.
        item_bits: of the integers in memory, one for each digit: 32 or 64.
    """

    digit_bits: int
    digits: int
    sum_bits: int
    item_bits: int

    @property
    def dtype(self) -> str:
        """The dtype of the integers."""
        return f"int{self.item_bits}"

    @property
    def most_terms(self) -> int:
        """Numbers that may be added to one sum: no digit's sum overflows."""
        return ((1 << (self.sum_bits - 1)) - 1) >> (self.digit_bits - 1)

    def columns(self, width: int) -> int:
        """Integers that so many sums with one window take: their digits, and the window."""
        return self.digits * width + 1


FLOAT32 = BinFormat(24, 2, 32, 32)
"""For numbers of fp32, 24 bits and more of the largest, at most 255 terms: 8 bytes a sum."""

FLOAT16 = BinFormat(14, 2, 22, 32)
"""For results of fp16, 14 bits and more of the largest, at most 255 terms: 5.5 bytes on the way."""

BFLOAT16 = BinFormat(12, 2, 20, 32)
"""For results of bf16, 12 bits and more of the largest, at most 255 terms: 5 bytes on the way."""

FLOAT64 = BinFormat(54, 2, 64, 64)
"""For numbers of fp64, 54 bits and more of the largest, at most 1023 terms: 16 bytes a sum."""

MANY_TERMS = BinFormat(40, 3, 64, 64)
"""For up to 16,777,215 terms of any, 80 bits and more of the largest: 24 bytes a sum."""

SHORT_BITS = 16
"""Bits of a digit's sum that travel as an integer of their own, where less than all do."""

SHORT_GROUP = 4
"""Sums whose further bits, an even number of up to 8, travel together in whole bytes."""


class SumGroup(NamedTuple):
    """Sums that share a window.

    Attributes:
        start: the first of their integers in a row.
    """

    form: BinFormat
    width: int
    start: int

    @property
    def columns(self) -> slice:
        return slice(self.start, self.start + self.form.columns(self.width))

    @property
    def is_short(self) -> bool:
        """True if its sums travel in fewer bits than they have in memory."""
        return self.form.sum_bits < self.form.item_bits


class SumColumns(NamedTuple):
    """The integers of one row and head of a partial result, and the wire by which they travel.

    Attributes:
        forms: of sums that share a window, group by group; integers of all have one dtype.
        widths: numbers of sums of each group.
        largest: two more integers stand for the largest score.
    """

    forms: tuple[BinFormat, ...]
    widths: tuple[int, ...]
    largest: bool = False

    @property
    def dtype(self) -> str:
        """The dtype of all integers."""
        return self.forms[0].dtype

    @property
    def most_terms(self) -> int:
        """Numbers that may be added to any of the sums."""
        return min(form.most_terms for form in self.forms)

    @property
    def num_columns(self) -> int:
        return self.groups[-1].columns.stop + 2 * self.largest

    @property
    def groups(self) -> tuple[SumGroup, ...]:
        found: list[SumGroup] = []
        for form, width in zip(self.forms, self.widths, strict=True):
            start = found[-1].columns.stop if found else 0
            found.append(SumGroup(form, width, start))
        return tuple(found)

    @property
    def is_short(self) -> bool:
        """True if some sums travel in fewer bits than they have in memory."""
        return any(group.is_short for group in self.groups)

    def row_bytes(self, width: int, dtype: str) -> int:
        """Bytes of one row of one head on its way, a multiple of 4: see `kernels/short_sums.py`.

        Args:
            width, dtype: of the integers in memory, as of any wire.
        """
        whole, short = width, 0
        for form, sums, _ in (group for group in self.groups if group.is_short):
            integers = form.digits * sums
            whole -= integers
            short += SHORT_BITS // 8 * integers
            short += (form.sum_bits - SHORT_BITS) * SHORT_GROUP // 8 * -(-integers // SHORT_GROUP)
        return int(dtype.removeprefix("int")) // 8 * whole + -(-short // 4) * 4
