"""Memory whose units hold numbers that stand for their content, for the canonical check.

A unit is a few bytes of which all tensors of all codes consist. The value of a row and head is
written to each of its units, times a factor of the unit's place in the row: so sums of such rows
are rows of sums, and a row that was put together of others is none.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from math import gcd, prod
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from tilewise.arguments import item_bytes
from tilewise.compiler.canonical_terms import Numbers, factors
from tilewise.compiler.code import Code, Home, Ref, TensorSpec, extent
from tilewise.plan.sums import SumColumns

Causes = NDArray[np.int32]

UNWRITTEN = 1
"""The cause of what nobody wrote."""


class Content(NamedTuple):
    """The content of memory, unit by unit.

    Attributes:
        numbers: a value of a row and head, times the factor of a unit's place in it.
        causes: 0, or the number of the cause for which the content depends on the split.
    """

    numbers: Numbers
    causes: Causes

    @classmethod
    def blank(cls, count: int) -> Content:
        return cls(np.zeros(count, np.uint64), np.full(count, UNWRITTEN, np.int32))

    def each(self, view: Callable[[np.ndarray], np.ndarray]) -> Content:
        """The same view of both."""
        return Content(view(self.numbers), view(self.causes))

    def write(self, other: Content) -> None:
        self.numbers[...] = other.numbers.reshape(self.numbers.shape)
        self.causes[...] = other.causes.reshape(self.causes.shape)


class Values(NamedTuple):
    """Values of rows and heads [rows, batch, heads], and their causes.

    Attributes:
        whole: whether all units of a row and head are of the value.
    """

    values: Numbers
    causes: Causes
    whole: NDArray[np.bool_]

    def rows(self, numbers: NDArray[np.int64]) -> Values:
        """Those of some rows."""
        return Values(self.values[numbers], self.causes[numbers], self.whole[numbers])


def unit_of(code: Code) -> int:
    """Bytes of which every tensor, row and head of a code takes whole numbers."""
    parts = [code.num_bytes, *code.offsets, *(buffer.num_bytes for buffer in code.buffers)]
    for spec in code.tensors:
        parts.append(spec.start)
        if spec.dtype != "uint8":
            parts.append(item_bytes(spec.dtype))
        elif _is_flat(spec):
            parts.append(prod(spec.shape))
        else:
            parts += [spec.shape[-1], *spec.strides[:-1]]
    return gcd(*parts)


def _is_flat(spec: TensorSpec) -> bool:
    """Return whether a tensor's first dimension is its bytes, and not its rows."""
    return spec.dtype == "uint8" and prod(spec.shape[1:]) == 1


class Memory:
    """The memory of one rank in one pass."""

    def __init__(self, code: Code, unit: int, given: Mapping[str, Content]):
        self._code, self._unit = code, unit
        workspace = Content.blank(-(-code.num_bytes // unit))
        self._buffers: list[Content] = []
        for buffer, offset in zip(code.buffers, code.offsets, strict=True):
            if buffer.home is Home.WORKSPACE:
                content = workspace.each(lambda x, at=offset // unit: x[at:])
            elif buffer.name in given:
                content = given[buffer.name]
            else:
                content = Content.blank(buffer.num_bytes // unit)
            self._buffers.append(content)

    def view(self, ref: Ref) -> Content:
        """The units that a reference means, to read and to write, [*shape, units of a number]."""
        spec = self._code.tensors[ref.tensor]
        span = extent(spec, ref)
        shape, strides = (*span.shape, span.item_bytes), (*span.strides, 1)
        if spec.dtype == "uint8":  # whole units of bytes
            place = 0 if _is_flat(spec) else len(span.shape) - 1
            shape = (*shape[:place], shape[place] // self._unit, *shape[place + 1 :])
            strides = (*strides[:place], self._unit, *strides[place + 1 :])
        else:
            shape = (*shape[:-1], span.item_bytes // self._unit)
            strides = (*strides[:-1], self._unit)
        if 0 in shape:
            return Content(np.zeros(shape, np.uint64), np.zeros(shape, np.int32))
        first, buffer = span.first // self._unit, self._buffers[spec.buffer]
        if not 0 <= span.first < span.stop <= len(buffer.numbers) * self._unit:
            raise ValueError(f"{self._code.named(ref)} is not within its memory")
        return buffer.each(lambda x: _strided(x[first:], shape, strides, self._unit))

    def kept(self) -> list[Content]:
        """The buffers that the pass keeps, in order."""
        return [self._buffers[one.buffer] for one in self._code.kept]


def _strided(x: np.ndarray, shape: Sequence[int], strides: Sequence[int], unit: int) -> np.ndarray:
    steps = tuple(stride // unit * x.itemsize for stride in strides)
    return np.lib.stride_tricks.as_strided(x, tuple(shape), steps)


def read_values(content: Content, name: str | SumColumns) -> Values:
    """The values of rows and heads, of units [rows, batch, heads, ...]."""
    numbers, causes = content.each(lambda x: x.reshape(*x.shape[:3], prod(x.shape[3:])))
    if not numbers.shape[-1]:
        blank = numbers.shape[:3]
        return Values(np.zeros(blank, np.uint64), np.zeros(blank, np.int32), np.ones(blank, bool))
    found = numbers[..., 0]
    whole = (numbers == found[..., None] * factors(name, numbers.shape[-1])).all(-1)
    return Values(found, causes.max(-1), whole)


def write_values(
    content: Content, name: str | SumColumns, found: Numbers, causes: Causes | int = 0
) -> None:
    width = prod(content.numbers.shape[3:])
    numbers = found[..., None] * factors(name, width)
    content.numbers[...] = numbers.reshape(content.numbers.shape)
    write_causes(content, np.broadcast_to(np.asarray(causes, np.int32), found.shape))


def write_causes(content: Content, causes: Causes) -> None:
    """Write causes of rows and heads, or of numbers, to all units of each."""
    content.causes[...] = causes[(...,) + (None,) * (content.causes.ndim - causes.ndim)]


def first_cause(*causes: Causes) -> Causes:
    """The first cause that there is, place by place."""
    found = causes[0]
    for other in causes[1:]:
        found = np.where(found > 0, found, other)
    return found
