"""A pass while it is compiled: operations on buffers that have rows and fields, but no place yet.

    buffer  rows x (batch x heads x width) of some fields: k and v of shard 3, say
    view    some rows, heads and fields of a buffer

A buffer may lie in another one: a shard that was received lies in its message, a message in an
arena beside others. Passes decide that by `place_in`, and drop the copies that are needless then.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from math import prod
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from tilewise.arguments import item_bytes
from tilewise.compiler.code import Home
from tilewise.compiler.head_exchange import HeadExchange
from tilewise.compiler.ops import Message, Op, Post, Wait
from tilewise.plan.ir import Item, Rows, Side, Tile
from tilewise.plan.payload import STATISTICS, Field, RowFormat, row_shape
from tilewise.tiles.calls import KernelCall

Index: TypeAlias = "tuple[int, int] | slice | None"


class View(NamedTuple):
    """Some rows, heads and fields of a buffer; None: all of them.

    Attributes:
        rows: (start, stop, step).
        heads: (start, stop).
    """

    buffer: int
    rows: tuple[int, int, int] | None = None
    heads: tuple[int, int] | None = None
    fields: tuple[str, ...] | None = None


class HeadBuffer(NamedTuple):
    """The fields of a side in a buffer of an exchange of heads: of all rows, or apart by rank."""

    exchange: HeadExchange
    side: Side
    whole: bool


class RowBuffer(NamedTuple):
    """A buffer of rows.

    Attributes:
        form: None: each field is a tensor by itself. A RowFormat: the fields of a row lie one after
            the other, as they travel. A HeadBuffer: as that says. An int: bytes, so many of them.
        item: the item whose rows these are.
        part_rows: rows of parts that may be needed for different lengths of time.
        within: another buffer, and the byte of it at which this one begins.
    """

    name: str
    num_rows: int
    fields: tuple[Field, ...]
    heads: int
    home: Home
    form: RowFormat | HeadBuffer | int | None = None
    item: Item | None = None
    part_rows: tuple[int, ...] = ()
    within: tuple[int, int] | None = None

    @property
    def usable(self) -> bool:
        """True if the fields can be used where they lie."""
        return not isinstance(self.form, RowFormat) or self.form.in_place


class Held(NamedTuple):
    """An operand that is here: which rows of its shard, in one or two buffers.

    Two where backward finds in one what forward kept, and receives the rest in another.
    """

    rows: Rows
    views: tuple[View, ...]


class AttendTile(NamedTuple):
    """A tile, before it is cut into kernel calls.

    Attributes:
        operands: of the queries' shards, and of the keys' and values'.
        partials: those that results are added to, by side; () for a side without results.
    """

    label: str
    tile: Tile
    operands: tuple[tuple[Held, ...], tuple[Held, ...]]
    partials: tuple[tuple[View, ...], tuple[View, ...]]


class Kept(NamedTuple):
    """A buffer that forward keeps for backward: which operands lie in it, from which row on, and
    which rows of their shards they are.
    """

    buffer: int
    items: tuple[tuple[Item, int, Rows], ...]


DraftOp: TypeAlias = Op[View] | AttendTile


@dataclass
class Draft:
    """One rank's pass while passes work on it.

    Attributes:
        batch: sequences that lie side by side in every row.
        inside: of each buffer the view of another in which it lies, or None.
        kept: what a forward pass keeps for backward.
        by_head: whether heads are exchanged as whole buffers, so that tiles read one shard.
    """

    batch: int
    ops: list[DraftOp] = field(default_factory=list[DraftOp])
    buffers: list[RowBuffer] = field(default_factory=list[RowBuffer])
    inside: list[View | None] = field(default_factory=list[View | None])
    kept: list[Kept] = field(default_factory=list[Kept])
    by_head: bool = False

    def new(self, buffer: RowBuffer) -> View:
        """Add a buffer; return all of it."""
        self.buffers.append(buffer)
        self.inside.append(None)
        return View(len(self.buffers) - 1)

    def append(self, other: Draft, first_step: int) -> None:
        """Let another draft's operations follow, with its buffers beside those of this one.

        Args:
            first_step: the step of the first messages of the other, which every rank counts from.
        """
        posts = [op for op in self.ops if isinstance(op, Post)]
        handle = max((op.handle for op in posts), default=-1) + 1
        arrival = max((number for op in posts for number in op.arrivals), default=-1) + 1
        moved = _Renumbered(len(self.buffers), handle, arrival, first_step)
        self.ops += map(moved.of, other.ops)
        self.buffers += (
            x if x.within is None else x._replace(within=(x.within[0] + moved.buffer, x.within[1]))
            for x in other.buffers
        )
        self.inside += map(moved.of, other.inside)
        self.kept += (x._replace(buffer=x.buffer + moved.buffer) for x in other.kept)

    def num_rows(self, view: View) -> int:
        rows = view.rows
        if rows is None:
            return self.buffers[view.buffer].num_rows
        return rows[1] - rows[0] if rows[2] == 1 else len(range(*rows))

    def rows(self, view: View, index: Index) -> View:
        """Rows of a view, counted in it."""
        if index is None:
            return view
        if isinstance(index, slice):
            start, stop, step = index.start, index.stop, index.step or 1
        else:
            (start, stop), step = index, 1
        if view.rows is not None:
            first, _, by = view.rows
            start, stop, step = first + start * by, first + stop * by, step * by
        if step == 1 and start == 0 and stop == self.buffers[view.buffer].num_rows:
            return View(view.buffer, None, view.heads, view.fields)
        return View(view.buffer, (start, stop, step), view.heads, view.fields)

    def heads(self, view: View, heads: slice | None) -> View:
        """Heads of a view, counted in it."""
        if heads is None:
            return view
        first = 0 if view.heads is None else view.heads[0]
        return view._replace(heads=(first + heads.start, first + heads.stop))

    def fields_of(self, view: View) -> tuple[Field, ...]:
        fields = self.buffers[view.buffer].fields
        if view.fields is None:
            return fields
        return tuple(x for x in fields if x.name in view.fields)

    def num_heads(self, view: View) -> int:
        if view.heads is not None:
            return view.heads[1] - view.heads[0]
        return self.buffers[view.buffer].heads

    def place_in(self, buffer: int, view: View) -> None:
        """Let a buffer lie in a view of another, which has the same rows."""
        self.inside[buffer] = self.found(view)

    def found(self, view: View) -> View:
        """Return a view in terms of the outermost buffer: a buffer may lie in another one."""
        outer = self.inside[view.buffer]
        while outer is not None:
            inner, view = view, outer
            if inner.rows is not None:
                view = self.rows(view, slice(*inner.rows))
            if inner.heads is not None:
                view = self.heads(view, slice(*inner.heads))
            if inner.fields is not None:
                view = view._replace(fields=inner.fields)
            outer = self.inside[view.buffer]
        return view

    def named(self, view: View) -> str:
        """A buffer's name with the rows, heads and fields that are meant: "kv1[0:32].k"."""
        view = self.found(view)
        rows = "" if view.rows is None else f"[{':'.join(map(str, view.rows[:2]))}]"
        if view.rows is not None and view.rows[2] != 1:
            rows = f"[{':'.join(map(str, view.rows))}]"
        heads = "" if view.heads is None else f"{{{view.heads[0]}:{view.heads[1]}}}"
        fields = "" if view.fields is None else f".{' '.join(view.fields)}"
        return f"{self.buffers[view.buffer].name}{rows}{heads}{fields}"

    def num_bytes(self, view: View) -> int:
        """Bytes of what a view means: of its numbers, or as they travel if they are packed."""
        buffer, rows = self.buffers[view.buffer], self.num_rows(view)
        if isinstance(buffer.form, int):
            return buffer.form
        if isinstance(buffer.form, RowFormat) and view.fields is None and view.heads is None:
            return rows * self.batch * buffer.form.num_bytes
        return rows * self.batch * self.num_heads(view) * _row_bytes(self.fields_of(view))

    def made_bytes(self, view: View, dtype: str) -> int:
        """Bytes of results as a kernel makes them: statistics as they are, the rest in a dtype."""
        numbers = sum(
            x.item_bytes if x.name in STATISTICS else x.width * item_bytes(dtype)
            for x in self.fields_of(view)
        )
        return self.batch * self.num_rows(view) * self.num_heads(view) * numbers

    def side_by_side(self, views: Sequence[View]) -> View | None:
        """Return one view of the rows of all views, or None if they do not lie side by side in one
        buffer.
        """
        found = [self.found(view) for view in views]
        first = found[0]
        if len(found) == 1:
            return first
        size = self.buffers[first.buffer].num_rows
        start, stop, step = first.rows or (0, size, 1)
        for view in found[1:]:
            if view[0] != first[0] or view[2:] != first[2:] or view.rows is None:
                return None
            if view.rows[0] != stop or view.rows[2] != 1 or step != 1:
                return None
            stop = view.rows[1]
        return self.rows(View(first.buffer, None, first.heads, first.fields), (start, stop))

    def apart(
        self,
        name: str,
        num_rows: int,
        fields: Iterable[Field],
        heads: int,
        home: Home = Home.WORKSPACE,
        item: Item | None = None,
    ) -> View:
        """A new buffer whose fields are tensors by themselves."""
        return self.new(RowBuffer(name, num_rows, tuple(fields), heads, home, None, item))


class _Renumbered(NamedTuple):
    """The first numbers of buffers, handles, arrivals and steps of a draft that is appended to
    another.
    """

    buffer: int
    handle: int
    arrival: int
    step: int

    def of(self, x: Any) -> Any:
        """Return an operation, view or message whose numbers count from those of this value."""
        if isinstance(x, View):
            return x._replace(buffer=x.buffer + self.buffer)
        if isinstance(x, Post | Wait):
            arrivals = tuple(number + self.arrival for number in x.arrivals)
            return self._all(x)._replace(handle=x.handle + self.handle, arrivals=arrivals)
        if isinstance(x, Message):
            return x._replace(step=x.step + self.step)
        if isinstance(x, tuple) and not isinstance(x, KernelCall | Item):
            return self._all(x)
        return x

    def _all(self, x: Any) -> Any:
        parts = map(self.of, x)
        return type(x)(*parts) if hasattr(x, "_fields") else tuple(parts)


@lru_cache(maxsize=64)
def _row_bytes(fields: tuple[Field, ...]) -> int:
    """Bytes of one row of one head. A pass asks for it at every operation, and has few kinds."""
    return sum(x.width * x.item_bytes for x in fields)


def field_shape(buffer: RowBuffer, one: Field, batch: int) -> tuple[int, ...]:
    """The shape of a field of a buffer: [rows, batch, heads(, width)]."""
    return buffer.num_rows, batch, *row_shape(one.name, buffer.heads, one.width)


def blank_value(name: str) -> float:
    """Return the value of a partial to which nothing was added: 0 for out and gradients, -inf for
    statistics.
    """
    return -np.inf if name in STATISTICS else 0.0


def narrow_fields(fields: Iterable[Field], dtype: str) -> tuple[Field, ...]:
    """Return fields of results in a dtype, but for statistics: as kernels make them, and calls give
    them.
    """
    return tuple(x if x.name in STATISTICS else x._replace(dtype=dtype) for x in fields)


def strides_of(shape: Sequence[int]) -> tuple[int, ...]:
    """Strides of a contiguous tensor, in numbers."""
    return tuple(prod(shape[i + 1 :]) for i in range(len(shape)))
