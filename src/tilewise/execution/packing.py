"""An item's rows in memory and on the wire.

On the wire a row is its fields one after the other, heads within; in memory the fields are views
of such a buffer where alignment allows, so that a received block is used, cut and passed on
without a copy. Blocks that one tile reads together may lie in one buffer (an arena).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from tilewise.execution.allocator import Allocator, Source
from tilewise.kernels import float8
from tilewise.plan.ir import Item, Role, Rows, Side
from tilewise.plan.payload import ALIGNMENT_BYTES, Field, Payload, RowFormat
from tilewise.wires.float8 import Float8
from tilewise.wires.wire import Plain

STATISTICS = ("lse", "delta", "largest")
_NUMBERS = ("q", "k", "v", "dout", "out", "dq", "dk", "dv", "latent", "dlatent")
"""Fields that may be encoded, by their number in counters."""


class PackedRows(NamedTuple):
    """Rows of an item: fields [num_rows, batch, heads, width], statistics without width.

    Attributes:
        rows: which local rows of the shard these are, ascending half-open ranges.
        fields: tensors by name.
        wire: the same rows packed, if they are.
        arena: (the arena, this block's first row in it), if it lies in one.
    """

    rows: Rows
    fields: Mapping[str, Tensor]
    wire: Tensor | None = None
    arena: tuple[Arena, int] | None = None


class Packing:
    """How the fields of one kind of item lie in a packed row of bytes.

    Attributes:
        row_bytes: bytes of one token of one sequence.
        row_shape: shape of those bytes in a buffer.
        encoded: the names of the fields that have a wire.
        in_place: whether packed fields can be used without a copy: all are aligned, none encoded.
        unit: bytes that a row's place must be a multiple of for that.
    """

    def __init__(self, row: RowFormat, heads: int):
        fields, starts, self.row_bytes, self.in_place = row
        self.names = [field.name for field in fields]
        self._fields, self._heads = fields, heads
        self.encoded = tuple(field.name for field in fields if field.wire is not None)
        self._dtypes = [getattr(torch, field.dtype) for field in fields]
        self.unit = max((dtype.itemsize for dtype in self._dtypes), default=1)
        sizes = [heads * field.row_bytes for field in fields]
        self._columns = [slice(at, at + size) for at, size in zip(starts, sizes, strict=True)]
        self._shapes = [
            (heads,) if field.name in STATISTICS else (heads, field.width) for field in fields
        ]
        # Fields of one shape are the slices of one tensor: fewer views than one by one.
        alike = len(set(zip(self._dtypes, self._shapes, strict=True))) == 1 and not self.encoded
        alike = alike and sum(sizes) == self.row_bytes
        self._alike = self._dtypes[0] if alike else None
        inner = (len(fields), *self._shapes[0][:-1]) if alike else ()
        self.row_shape = (*inner, self.row_bytes // math.prod(inner))

    def pack(
        self, tensors: Sequence[Tensor], allocator: Allocator, item: Item, rank: int = 0
    ) -> Tensor:
        """Tensors [rows, batch, heads(, width)] as uint8 [rows, batch, *row_shape].

        Each is converted to its field's dtype; a lone one that is packed already is not copied.

        Args:
            item, rank: whose rows these are, and of a partial who packs them.
        """
        first = tensors[0]
        shape = *first.shape[:2], *self.row_shape
        alone = len(tensors) == 1 and first.dtype == self._dtypes[0] and not self.encoded
        if alone and first.is_contiguous() and first.numel():
            # strides of empty tensors forbid the views below
            return first.flatten(2).view(torch.uint8).view(shape)
        wire = allocator.take(shape, torch.uint8)
        if not wire.numel():
            return wire
        if self.in_place:
            for place, x in zip(self.unpack(wire).values(), tensors, strict=True):
                place.copy_(x)
            return wire
        for field, columns, x, dtype in zip(
            self._fields, self._columns, tensors, self._dtypes, strict=True
        ):
            if field.wire is not None:
                wire[..., columns].copy_(_encode(field, x, item, rank))
                continue
            converted = allocator.take(x.shape, dtype)
            wire[..., columns].copy_(converted.copy_(x).flatten(2).view(torch.uint8))
            allocator.give(converted)
        return wire

    def unpack(self, wire: Tensor, source: Source | None = None) -> dict[str, Tensor]:
        """The inverse of pack: views of the buffer where alignment allows, else copies.

        Args:
            source: of the memory that fields are decoded into; None: new memory.
        """
        if self._alike is not None:
            return dict(zip(self.names, wire.view(self._alike).unbind(2), strict=False))
        tensors = []
        for field, columns, dtype, shape in zip(
            self._fields, self._columns, self._dtypes, self._shapes, strict=True
        ):
            packed = wire[..., columns]
            if field.wire is not None:
                take = wire.new_empty if source is None else source.take
                into = take((*wire.shape[:2], *shape), dtype=dtype)
                tensors.append(_decode(field, packed, into))
                continue
            # contiguous() keeps a single row where it is, unaligned
            if not self.in_place:
                packed = packed.clone(memory_format=torch.contiguous_format)
            tensors.append(packed.view(dtype).unflatten(-1, shape))
        return dict(zip(self.names, tensors, strict=True))


def _encode(field: Field, x: Tensor, item: Item, rank: int) -> Tensor:
    """A tensor [rows, batch, heads, width] of a field that has a wire, as uint8 [rows, batch, n].

    n is heads * field.row_bytes, and every row can be decoded by itself.

    Args:
        item, rank: whose rows these are, and who encodes them: for numbers of a counter.
    """
    wire = field.wire
    if isinstance(wire, Plain):
        return x.to(getattr(torch, wire.dtype or field.dtype)).flatten(2).view(torch.uint8)
    if isinstance(wire, Float8):
        number = _NUMBERS.index(field.name)
        return float8.encode(wire, x, (item.shard << 15 | item.heads << 4 | number, rank))
    raise TypeError(f"{field.name} has a wire that nobody encodes: {wire!r}")


def _decode(field: Field, columns: Tensor, into: Tensor) -> Tensor:
    """The inverse of _encode, but for rounding.

    Args:
        columns: uint8 [rows, batch, n].
        into: [rows, batch, heads, width] of the field's dtype, which is returned.
    """
    wire = field.wire
    if isinstance(wire, Plain):  # views of wider numbers begin at multiples of their size
        numbers = columns.clone(memory_format=torch.contiguous_format)
        numbers = numbers.view(getattr(torch, wire.dtype or field.dtype))
        return into.copy_(numbers.unflatten(-1, into.shape[2:]))
    if isinstance(wire, Float8):
        return float8.decode(columns, into)
    raise TypeError(f"{field.name} has a wire that nobody decodes: {wire!r}")


@lru_cache(maxsize=64)
def packings(payload: Payload) -> Mapping[tuple[Side, Role], Packing]:
    """How every kind of item is packed in a pass."""
    return {
        (side, role): Packing(payload.row_format(side, role), payload.heads(side))
        for side in Side
        for role in Role
    }


def loadable(x: Tensor) -> Tensor:
    """x as kernels load it: of unit last stride (of a single column, too), and aligned if rows can
    be. Else a copy."""
    unit = ALIGNMENT_BYTES if x.shape[-1] * x.itemsize % ALIGNMENT_BYTES == 0 else x.itemsize
    begins = x.stride(-1) == 1 and x.data_ptr() % unit == 0
    if begins and (x.is_contiguous() or not any(at * x.itemsize % unit for at in x.stride()[:-1])):
        return x
    return x.clone(memory_format=torch.contiguous_format)


def take(x: Tensor, held: Rows, wanted: Rows | None, allocator: Source) -> Tensor:
    """The wanted local rows of a tensor whose rows are the held ones: a view if side by side."""
    if wanted is None or wanted == held:
        return x
    pieces, offset = [], 0
    for start, stop in held:
        for first, last in wanted:
            first, last = max(first, start), min(last, stop)
            if first < last:
                pieces.append(x[offset + first - start : offset + last - start])
        offset += stop - start
    return pieces[0] if len(pieces) == 1 else join(pieces, allocator)


def join(pieces: Sequence[Tensor], allocator: Source) -> Tensor:
    """Rows one after the other, copied."""
    shape = sum(map(len, pieces)), *pieces[0].shape[1:]
    joined = allocator.take(shape, pieces[0].dtype)
    if joined.is_meta:  # shapes without values
        return joined
    return torch.cat(pieces, out=joined)  # pyright: ignore[reportCallIssue, reportArgumentType]


class Arena(NamedTuple):
    """One buffer for the blocks of several items, side by side.

    Attributes:
        starts: first row of each item.
        wire: uint8 [num_rows, batch, row_bytes]; None if the items have no bytes in this pass.
        fields: the whole buffer's tensors; those of an earlier pass stay readable beside.
    """

    starts: Mapping[Item, int]
    wire: Tensor | None
    fields: Mapping[str, Tensor]
