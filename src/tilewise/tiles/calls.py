"""Kernel calls as values: which rows of a tile meet which keys, and under what shape of mask."""

from enum import Enum
from functools import cached_property
from typing import NamedTuple

from tilewise.plan.row_ranges import Ranges


class Kind(Enum):
    """The shape of the allowed cells of a call of m rows and n keys, (a, j) local.

    FULL: all. CAUSAL: j <= a + n - m, bottom-right aligned, n >= m. SLICES: the call's slices.
    LISTS: the call's slices, on rows and keys that lie anywhere in the operands: see KernelCall.
    """

    FULL = "full"
    CAUSAL = "causal"
    SLICES = "slices"
    LISTS = "lists"


class Slice(NamedTuple):
    """Rows a in [q0, q1) of a call see its keys [lo + lo_slope a, hi + hi_slope a), slopes 0 or 1.

    Slices of one call never share a cell, and none is empty on any of its rows.
    """

    q0: int
    q1: int
    lo: int
    lo_slope: int
    hi: int
    hi_slope: int

    @property
    def area(self) -> int:
        rows = self.q1 - self.q0
        slope = self.hi_slope - self.lo_slope
        return rows * (self.hi - self.lo) + slope * (rows * (self.q0 + self.q1 - 1) // 2)


class Life:
    """The life of a call; copies of the call share it."""


class _Fields(NamedTuple):
    q: Ranges
    k: Ranges
    kind: Kind
    slices: tuple[Slice, ...] = ()
    fresh: tuple[Ranges, Ranges] = ((), ())


class KernelCall(_Fields):
    """One kernel call: ranges of the tile's rows and keys, in call order, and the mask's shape.

    Ranges are half-open, into the tile's operand rows one after the other.

    A call of LISTS is of operands that hold other rows too. Its ranges and slices count rows of the
    operands; every row and key in its ranges is in some slice, and no other is read or written.
    Its results go to rows of the same numbers: they are written for the rows and keys in `fresh`,
    which are some of its ranges, or parts of them, and added for the others.
    """

    @property
    def life(self) -> "Life":
        """Return an object that is freed with the call, for finalizers: tuples take no weak
        references.
        """
        return vars(self).setdefault("_life", Life())

    @property
    def sides(self) -> tuple[Ranges, Ranges]:
        """Ranges of its rows and of its keys."""
        return self.q, self.k

    @cached_property
    def num_q(self) -> int:
        return sum([stop - start for start, stop in self.q])

    @cached_property
    def num_k(self) -> int:
        return sum([stop - start for start, stop in self.k])

    @property
    def as_slices(self) -> tuple[Slice, ...]:
        """The call's slices; a full or a causal call is one, unless it has no rows or no keys."""
        m, n = self.num_q, self.num_k
        if self.kind in (Kind.SLICES, Kind.LISTS) or not (m and n):
            return self.slices
        causal = self.kind is Kind.CAUSAL
        return (Slice(0, m, 0, 0, n - m + 1 if causal else n, int(causal)),)

    @property
    def area(self) -> int:
        """Allowed (query, key) pairs."""
        return sum(s.area for s in self.as_slices)

    @property
    def computed(self) -> int:
        """Pairs that a kernel works on: those of SLICES are its whole rectangle."""
        return self.num_q * self.num_k if self.kind is Kind.SLICES else self.area

    @cached_property
    def is_square_causal(self) -> bool:
        """True if the call is causal, for kernels whose causal mask is aligned at the top left.

        Raises:
            ValueError: if it is, but not square, where the two alignments differ.
        """
        if self.kind is Kind.CAUSAL and self.num_q != self.num_k:
            raise ValueError(
                f"a causal call of {self.num_q} queries and {self.num_k} keys is not square; "
                "make calls for this kernel with tile_calls(..., square_causal=True)"
            )
        return self.kind is Kind.CAUSAL
