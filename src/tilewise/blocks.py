"""An item's rows in memory and on the wire.

On the wire a row is its fields one after the other, heads within; in memory the fields are views
of such a buffer where alignment allows, so that a received block is used, cut and passed on
without a copy. Blocks that one tile reads together may lie in one buffer (an arena).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from tilewise.payload import ITEM_BYTES, Field
from tilewise.plan import Item, Rows


class Block(NamedTuple):
    """Rows of an item: fields [num_rows, batch, heads, width] (statistics: [num_rows, batch, heads]).

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


def pack(tensors: Sequence[Tensor], fields: Sequence[Field]) -> Tensor:
    """Tensors [rows, batch, heads(, width)] as rows of bytes, uint8 [rows, batch, row_bytes].

    Each is first converted to its field's dtype.
    """
    if len(tensors[0]) == 0:  # strides of empty tensors forbid the views below
        sizes = (
            x.shape[2:].numel() * ITEM_BYTES(f.dtype) for x, f in zip(tensors, fields, strict=True)
        )
        return tensors[0].new_empty((*tensors[0].shape[:2], sum(sizes)), dtype=torch.uint8)
    parts = [
        x.to(getattr(torch, field.dtype)).flatten(2).contiguous().view(torch.uint8)
        for x, field in zip(tensors, fields, strict=True)
    ]
    return parts[0] if len(parts) == 1 else torch.cat(parts, -1)


def unpack(wire: Tensor, fields: Sequence[Field], heads: int) -> dict[str, Tensor]:
    """The inverse of pack: views of the buffer where alignment allows, else copies."""
    tensors, start = {}, 0
    for field in fields:
        size = ITEM_BYTES(field.dtype)
        stop = start + heads * field.width * size
        columns = wire[..., start:stop]
        if start % size or wire.shape[-1] % size or wire.storage_offset() % size:
            columns = columns.contiguous()
        shape = (heads,) if field.name in ("lse", "delta") else (heads, field.width)
        tensors[field.name] = columns.view(getattr(torch, field.dtype)).unflatten(-1, shape)
        start = stop
    return tensors


def take(x: Tensor, held: Rows, wanted: Rows | None) -> Tensor:
    """The wanted local rows of a tensor whose rows are the held ones."""
    if wanted is None or wanted == held:
        return x
    pieces, offset = [], 0
    for start, stop in held:
        for first, last in wanted:
            first, last = max(first, start), min(last, stop)
            if first < last:
                pieces.append(x[offset + first - start : offset + last - start])
        offset += stop - start
    return pieces[0] if len(pieces) == 1 else torch.cat(pieces)


class Arena:
    """One buffer for the blocks of several items, side by side.

    Attributes:
        starts: first row of each item.
        wire: uint8 [num_rows, batch, row_bytes]; None if the items have no bytes in this pass.
        fields: the whole buffer's tensors; those of an earlier pass stay readable beside.
    """

    def __init__(self, starts: Mapping[Item, int], wire: Tensor | None, fields: dict[str, Tensor]):
        self.starts, self.wire, self.fields = starts, wire, fields


def aligned(fields: Sequence[Field], heads: int) -> bool:
    """Whether the fields of a packed row can be used in place."""
    sizes = [heads * field.width * ITEM_BYTES(field.dtype) for field in fields]
    widest = max((ITEM_BYTES(field.dtype) for field in fields), default=1)
    return all(size % widest == 0 for size in sizes)
