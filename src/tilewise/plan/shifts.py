"""Digits of a rank's number that may be shifted, and what ranks are then alike.

A ring's ranks are shifted by one, a mesh's along either coordinate; in attention2d a row and the
columns that are its remainders go together. A strategy declares its shifts as it makes its plan;
`plan.ir.find_symmetry` fits them to a machine. A plan of 4096 ranks is then as good as that
of one rank.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from itertools import pairwise
from math import gcd, lcm
from typing import Any, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.int64]
Number = TypeVar("Number", int, Array)


class Shift(NamedTuple):
    """The digit rank // place % radix may be shifted cyclically, and those at others with it.

    Attributes:
        others: lower places of digits of the same radix.
        free: the digit's values may be permuted in any way, those at others alike: so digits of
            the digit may be shifted too, each by itself.
    """

    place: int
    radix: int
    others: tuple[int, ...] = ()
    free: bool = False

    @property
    def span(self) -> int:
        return self.place * self.radix

    @property
    def places(self) -> tuple[int, ...]:
        return self.place, *self.others

    def times(self, factor: int) -> Shift:
        """Return the shift of ranks that moves rank // factor as this shift moves a rank."""
        others = tuple(place * factor for place in self.others)
        return self._replace(place=self.place * factor, others=others)

    def cut(self, blocks: Iterable[int]) -> Iterator[Shift]:
        """Split a free digit into smaller digits that end at the borders of blocks.

        Each of them may be shifted by itself, so more shifts map blocks to blocks.

        Args:
            blocks: sizes of blocks of neighbouring ranks.
        """
        ends = [self.radix]
        if self.free:
            whole = {gcd(b, p * self.radix) // p for b in blocks for p in self.places if b % p == 0}
            for end in sorted(whole, reverse=True):
                ends.append(gcd(end, ends[-1]))
        for high, low in pairwise([*ends, 1]):
            others = tuple(place * low for place in self.others)
            if high > low:
                yield Shift(self.place * low, high // low, others)

    def respecting(self, blocks: Iterable[int]) -> Iterator[Shift]:
        """Yield this shift, or a multiple of it, if it maps blocks of neighbouring ranks to blocks.

        Args:
            blocks: sizes of the blocks.
        """
        if self.others:
            ends = [(place, place * self.radix) for place in self.places]
            if all(b % end == 0 or place % b == 0 for place, end in ends for b in blocks):
                yield self
            return
        place = lcm(self.place, *(block for block in blocks if block % self.span))
        if self.span % place == 0 and place < self.span:
            yield Shift(place, self.span // place)


class Symmetry(NamedTuple):
    """Ranks that shifts map to each other are alike, and so are all they do.

    Attributes:
        plan_shifts: those that map the plan to itself.
        shifts: those of them that map the machine to itself too.
    """

    world_size: int
    plan_shifts: tuple[Shift, ...] = ()
    shifts: tuple[Shift, ...] = ()

    @property
    def num_classes(self) -> int:
        return self.world_size // self.members

    @property
    def members(self) -> int:
        """Ranks per class."""
        return span(self.shifts)

    def representative(self, rank: int) -> int:
        """The lowest rank of a rank's class, which stands for it."""
        return relative(rank, rank, self.shifts)

    def representatives(self) -> list[int]:
        """One rank of every class."""
        every = np.arange(self.world_size)
        return np.flatnonzero(relative(every, every, self.shifts) == every).tolist()

    def template(self, rank: int) -> int:
        """The rank whose steps, relabelled, are this rank's."""
        return relative(rank, rank, self.plan_shifts)

    def together(self, block: int) -> int:
        """Return how many ranks of one class lie in each block of neighbouring ranks."""
        return span(shift for shift in self.shifts if shift.span <= block)


def span(shifts: Iterable[Shift]) -> int:
    product = 1
    for shift in shifts:
        product *= shift.radix
    return product


def relative(rank: Number, to: Number, shifts: tuple[Shift, ...]) -> Number:
    """Return `rank` after the shift that brings rank `to` to the first rank of its class."""
    for place, radix, others, _ in shifts:
        shift = to // place % radix
        for p in (place, *others):
            digit = rank // p % radix
            rank = rank + ((digit - shift) % radix - digit) * p
    return rank


def absolutes(rank: int, seen_by: Array, shifts: tuple[Shift, ...]) -> Array:
    """Return, for each of several ranks, the number that it means by one relative number."""
    return absolute(np.full(seen_by.shape, rank), seen_by, shifts)


def absolute(rank: Number, seen_by: Any, shifts: tuple[Shift, ...]) -> Number:
    """The inverse of relative.

    Args:
        seen_by: a rank; or several, if rank is several.
    """
    for place, radix, others, _ in shifts:
        shift = seen_by // place % radix
        for p in (place, *others):
            digit = rank // p % radix
            rank = rank + ((digit + shift) % radix - digit) * p
    return rank


def relabelled(model: int, rank: int, shifts: tuple[Shift, ...]) -> Callable[[int], int]:
    """Return the function from what one rank calls a rank or a shard to what another of its class
    calls it.
    """
    if model == rank:
        return int
    known: dict[int, int] = {}

    def name(number: int) -> int:
        found = known.get(number)
        if found is None:
            found = known[number] = absolute(relative(number, model, shifts), rank, shifts)
        return found

    return name
