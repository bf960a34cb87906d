"""Masks: frozen values that say which (query, key) pairs of global positions may attend.

Everything derived from a mask (kernel calls, what must travel, FLOPs, plots) comes from its normal
form, `strips`; `dense` is written from each mask's own definition, so that each checks the other.
Masks compose with & and |. Explicit slices, block tables and masks by head are in masks/tables.py.
"""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass, fields
from functools import cached_property
from itertools import pairwise
from typing import Any, ClassVar, NoReturn

import numpy as np
from numpy.typing import ArrayLike, NDArray

from tilewise.arguments import check_count, checks_arguments, whole_number, whole_numbers
from tilewise.masks import strips
from tilewise.masks.strips import LIMIT, Strips
from tilewise.opaque import OpaqueValue

Array = NDArray[np.int64]


@dataclass(frozen=True, eq=False, repr=False)
class Mask(OpaqueValue, ABC):
    """Allowed pairs of queries and keys, by global position. Equal masks have equal reprs."""

    @abstractmethod
    def dense(self, q_positions: Any, k_positions: Any) -> NDArray[np.bool_]:
        """bool [num_queries, num_keys]: may this query see this key? The oracle of all else."""

    @abstractmethod
    def _strips(self) -> Strips: ...

    @checks_arguments
    def check_tokens(self, num_tokens: int, num_keys: int | None = None) -> None:
        """Raise ValueError unless the mask fits sequences of this many queries and keys.

        Args:
            num_keys: None: as many as queries.
        """
        whole_number("num_tokens", num_tokens)

    @cached_property
    def _normal(self) -> Strips:
        return self._strips()

    def strips(self) -> Strips:
        """The mask as disjoint strips; see masks/strips.py."""
        return self._normal

    def area(self, q_range: tuple[int, int], k_range: tuple[int, int]) -> int:
        """Exact number of allowed pairs with q in q_range and k in k_range (half-open)."""
        return strips.area(self.strips(), q_range, k_range)

    def areas(self, q_edges: ArrayLike, k_edges: ArrayLike) -> Array:
        """`area` of every cell between the edges, int64 [len(q_edges) - 1, len(k_edges) - 1]."""
        return strips.areas(self.strips(), q_edges, k_edges)

    def coverage(self, q_edges: ArrayLike, k_edges: ArrayLike) -> NDArray[np.int8]:
        """int8 table over the cells between the edges: 0 empty, 1 partial, 2 full; exact."""
        return strips.coverage(self.strips(), q_edges, k_edges)

    def __bool__(self) -> NoReturn:
        raise TypeError(
            "a mask is neither true nor false; write a & b and a | b in place of a and b, a or b, "
            "and mask is None to ask whether there is one"
        )

    def __add__(self, other: object) -> NoReturn:
        raise TypeError(
            "masks are not added; write a & b for the pairs that both allow, such as tw.Causal() & "
            "tw.Window(8, 0), or a | b for those that one allows"
        )

    __radd__ = __add__

    def __and__(self, other: Mask) -> Mask:
        return self._with(other, And)

    def __or__(self, other: Mask) -> Mask:
        return self._with(other, Or)

    def _with(self, other: object, operation: type[And] | type[Or]) -> Mask:
        if not isinstance(other, Mask):
            return NotImplemented
        return other._after(self, operation)

    def _after(self, first: Mask, operation: type[And] | type[Or]) -> Mask:
        """`operation(first, self)`; a mask that differs by head distributes it over its heads."""
        return operation(first, self)

    @cached_property
    def _key(self) -> tuple[Any, ...]:
        return tuple(getattr(self, field.name) for field in fields(self))

    @cached_property
    def _hash(self) -> int:
        return hash((type(self).__name__, self._key))

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        if self is other:
            return True
        if type(self) is not type(other) or not isinstance(other, Mask):
            return False
        return self._hash == other._hash and self._key == other._key

    def __getstate__(self) -> dict[str, Any]:
        """The fields alone: a cached hash means nothing in another process."""
        return {field.name: getattr(self, field.name) for field in fields(self)}


@dataclass(frozen=True, eq=False, repr=False)
class Full(Mask):
    """Every query sees every key."""

    def dense(self, q_positions: Any, k_positions: Any) -> NDArray[np.bool_]:
        return np.ones((len(positions(q_positions)), len(positions(k_positions))), bool)

    def _strips(self) -> Strips:
        return strips.make(0, LIMIT, 0, LIMIT)

    def __repr__(self) -> str:
        return "Full()"


@dataclass(frozen=True, eq=False, repr=False)
class Causal(Mask):
    """A query sees the keys at or before its own position: k <= q."""

    def dense(self, q_positions: Any, k_positions: Any) -> NDArray[np.bool_]:
        return positions(k_positions)[None, :] <= positions(q_positions)[:, None]

    def _strips(self) -> Strips:
        return strips.make(0, LIMIT, 0, 1, hi_slope=1)

    def __repr__(self) -> str:
        return "Causal()"


@dataclass(frozen=True, eq=False, repr=False)
class Window(Mask):
    """A query sees keys near it: q - left <= k <= q + right.

    Args:
        left, right: tokens, inclusive, not negative; None is unbounded.
    """

    left: int | None
    right: int | None

    def __post_init__(self) -> None:
        for side in ("left", "right"):
            tokens = getattr(self, side)
            if tokens is None:
                continue
            if isinstance(tokens, int) and tokens == -1:
                raise ValueError(f"Window {side} (-1) must be at least 0; None is unbounded")
            object.__setattr__(self, side, whole_number(f"Window {side}", tokens, 0))

    def dense(self, q_positions: Any, k_positions: Any) -> NDArray[np.bool_]:
        offset = positions(k_positions)[None, :] - positions(q_positions)[:, None]
        allowed = np.ones(offset.shape, bool)
        if self.left is not None:
            allowed &= offset >= -self.left
        if self.right is not None:
            allowed &= offset <= self.right
        return allowed

    def _strips(self) -> Strips:
        below = LIMIT if self.left is None else min(self.left, LIMIT)
        above = LIMIT if self.right is None else min(self.right, LIMIT)
        return strips.make(0, LIMIT, -below, above + 1, lo_slope=1, hi_slope=1)

    def __repr__(self) -> str:
        return f"Window({self.left}, {self.right})"


@dataclass(frozen=True, eq=False, repr=False)
class Document(Mask):
    """A query sees the keys of its own document; tokens past the last document see nothing.

    Args:
        cu_seqlens: boundaries from 0 on, never descending (list, tuple, array or tensor). Documents
            of no tokens are allowed and do nothing.
    """

    cu_seqlens: tuple[int, ...]

    def __init__(self, cu_seqlens: Any):
        object.__setattr__(self, "cu_seqlens", as_ints(cu_seqlens, "cu_seqlens"))
        if not self.cu_seqlens or self.cu_seqlens[0] != 0:
            start = self.cu_seqlens[0] if self.cu_seqlens else "nothing"
            raise ValueError(f"cu_seqlens starts at {start}, but must start at 0")
        for i, (start, stop) in enumerate(pairwise(self.cu_seqlens)):
            if stop < start:
                raise ValueError(
                    f"cu_seqlens descends from {start} to {stop} at index {i + 1}; "
                    "pass the running total of the document lengths"
                )

    @checks_arguments
    def check_tokens(self, num_tokens: int, num_keys: int | None = None) -> None:
        for name, total in (("queries", num_tokens), ("keys", num_keys)):
            if total is not None and self.cu_seqlens[-1] != total:
                raise ValueError(
                    f"cu_seqlens ends at {self.cu_seqlens[-1]}, but there are {total} {name}; "
                    "let the last document end with the sequence"
                )

    def dense(self, q_positions: Any, k_positions: Any) -> NDArray[np.bool_]:
        boundaries = np.asarray(self.cu_seqlens, np.int64)
        q, k = (
            np.searchsorted(boundaries, positions(x), "right") for x in (q_positions, k_positions)
        )
        return (q[:, None] == k[None, :]) & (q < len(boundaries))[:, None]

    def _strips(self) -> Strips:
        boundaries = np.asarray(self.cu_seqlens, np.int64)
        starts, stops = boundaries[:-1], boundaries[1:]
        return strips.make(starts, stops, starts, stops)

    def __repr__(self) -> str:
        if len(self.cu_seqlens) <= 12:
            return f"Document({self.cu_seqlens})"
        count, end = len(self.cu_seqlens) - 1, self.cu_seqlens[-1]
        return f"Document({count} documents, {end} tokens, {digest(self.cu_seqlens)})"


@dataclass(frozen=True, eq=False, repr=False)
class And(Mask):
    """The pairs that both masks allow; written a & b."""

    a: Mask
    b: Mask

    symbol: ClassVar[str] = "&"

    def check_tokens(self, num_tokens: int, num_keys: int | None = None) -> None:
        self.a.check_tokens(num_tokens, num_keys)
        self.b.check_tokens(num_tokens, num_keys)

    def dense(self, q_positions: Any, k_positions: Any) -> NDArray[np.bool_]:
        return self.a.dense(q_positions, k_positions) & self.b.dense(q_positions, k_positions)

    def _strips(self) -> Strips:
        return strips.intersect(self.a.strips(), self.b.strips())

    def __repr__(self) -> str:
        return f"({self.a!r} {self.symbol} {self.b!r})"


@dataclass(frozen=True, eq=False, repr=False)
class Or(And):
    """The pairs that at least one of two masks allows; written a | b."""

    symbol: ClassVar[str] = "|"

    def dense(self, q_positions: Any, k_positions: Any) -> NDArray[np.bool_]:
        return self.a.dense(q_positions, k_positions) | self.b.dense(q_positions, k_positions)

    def _strips(self) -> Strips:
        return strips.union(self.a.strips(), self.b.strips())


def as_ints(values: Any, name: str = "values") -> tuple[int, ...]:
    """A list, tuple, array or tensor of whole numbers as a tuple of int.

    Raises:
        ValueError: as whole_numbers, or of more than MOST_ENTRIES.
    """
    numbers = whole_numbers(name, values)
    check_count(name, values, len(numbers))
    return tuple(numbers.tolist())


def positions(values: Any) -> Array:
    """Global positions as an int64 array, from anything array-like (a tensor on any device too)."""
    return whole_numbers("positions", values)


def digest(values: Iterable[int], rest: bytes = b"") -> str:
    """16 hex digits that stand for many numbers (and bytes) in a repr."""
    packed = np.fromiter(values, np.int64).tobytes()
    return hashlib.blake2b(packed + rest, digest_size=8).hexdigest()
