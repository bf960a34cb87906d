"""Kernel calls bound to blocks: which rows of which block each call gathers, and where it adds.

Done once per tile, layout and mask; in the loop there are only slices and index tensors.
"""

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple, TypeAlias

import numpy as np
import torch
from torch import Tensor

from tilewise.execution.allocator import Source
from tilewise.execution.packing import PackedRows, join
from tilewise.kernels.scores import Places
from tilewise.layouts.layout import Layout
from tilewise.plan.builder import operand
from tilewise.plan.ir import Item, Side, Tile
from tilewise.plan.row_ranges import count_rows
from tilewise.tiles.call_rows import (
    CallParts,
    Held,
    RowSelection,
    TileCalls,
    is_range,
    num_rows,
    span,
)

Index: TypeAlias = slice | Tensor | None
TensorPart: TypeAlias = RowSelection[Tensor]
BoundCall: TypeAlias = CallParts[Tensor]
Tensors: TypeAlias = tuple[Tensor, ...]


class BoundTile(NamedTuple):
    """The items that a tile reads, by side, and its calls by the rows that are held of them."""

    tile: Tile
    q: list[Item]
    kv: list[Item]
    calls: dict[Held, tuple[BoundCall, ...]]


class PlacedCall(NamedTuple):
    """A bound call of one program, and where the rows that it reads lie in arenas, if they do."""

    call: BoundCall
    q_rows: slice | None
    k_rows: slice | None


class PlacedTile(NamedTuple):
    """As BoundTile, of one program."""

    q: list[Item]
    kv: list[Item]
    calls: list[PlacedCall]


class Binder:
    """Turns tiles into bound calls, and remembers them.

    Args:
        table: a mask that differs by KV head is bound head by head.
        known: calls of tiles by (tile, rows held), for all devices.
    """

    def __init__(
        self,
        table: TileCalls,
        device: torch.device,
        known: dict[tuple[Tile, Held], tuple[CallParts[np.ndarray], ...]],
    ):
        self.table, self.device, self._known = table, device, known
        self._tiles: dict[Tile, BoundTile] = {}
        self._places: dict[int, Places] = {}  # by the id of a bound call, which is kept here

    def tile(self, tile: Tile) -> BoundTile:
        """The items that a tile reads, by side; its calls are bound when their rows are known."""
        known = self._tiles.get(tile)
        if known is None:
            q = [operand(Side.Q, shard, tile.heads) for shard in tile.q]
            kv = [operand(Side.KV, shard, tile.heads) for shard in tile.kv]
            known = self._tiles[tile] = BoundTile(tile, q, kv, {})
        return known

    def calls(self, bound: BoundTile, held: Held) -> Sequence[BoundCall]:
        """The calls of a tile whose blocks hold these rows, query side first."""
        known = bound.calls.get(held)
        if known is None:
            known = bound.calls[held] = tuple(self._bound(bound.tile, held))
        return known

    def places(self, bound: BoundCall) -> Places:
        """Where a bound call's rows, keys and heads lie in the whole attention."""
        known = self._places.get(id(bound))
        if known is None:
            q, k = map(self._positions, self.table.layouts, (bound.q, bound.k))
            first = self.table.groups.slice(Side.Q, bound.q[0].item.heads).start
            first += bound.q_heads.start if bound.q_heads else 0
            known = self._places[id(bound)] = Places(q, k, first)
        return known

    def kv_heads(self, bound: BoundCall) -> slice:
        """A bound call's KV heads, of all."""
        heads = self.table.groups.slice(Side.KV, bound.k[0].item.heads)
        return heads if bound.kv_heads is None else _within(heads, bound.kv_heads)

    def _positions(self, layout: Layout, parts: Sequence[TensorPart]) -> Tensor:
        """Global positions of a call's rows of one side, in the order of the call."""
        own = [torch.from_numpy(layout.rows(part.item.shard)).to(self.device) for part in parts]
        rows = [x if p.local is None else x[p.local] for x, p in zip(own, parts, strict=True)]
        places = torch.cat(rows)
        if len(parts) > 1:
            for x, part in zip(rows, parts, strict=True):
                places[part.call] = x
        return places

    def _bound(self, tile: Tile, held: Held) -> Iterator[BoundCall]:
        if (tile, held) not in self._known:
            self._known[tile, held] = tuple(self.table.calls(tile, held))
        for call, q, k, q_heads, kv_heads in self._known[tile, held]:
            q, k = (tuple(map(self._on_device, side)) for side in (q, k))
            yield BoundCall(call, q, k, q_heads, kv_heads)

    def _on_device(self, part: RowSelection) -> TensorPart:
        index = (
            x if x is None or isinstance(x, slice) else torch.from_numpy(x).to(self.device)
            for x in part[2:]
        )
        return RowSelection(part.shard, part.item, *index)


def _within(outer: slice, inner: slice) -> slice:
    """A slice of a slice, of the whole."""
    return slice(outer.start + inner.start, outer.start + inner.stop)


def pick(x: Tensor, index: Index, allocator: Source) -> Tensor:
    """The rows of a tensor that an index selects; a view unless it is a tensor."""
    if index is None:
        return x
    if isinstance(index, slice):
        return x[index]
    return torch.index_select(x, 0, index, out=allocator.take((len(index), *x.shape[1:]), x.dtype))


def gather(
    blocks: Sequence[PackedRows],
    parts: Sequence[TensorPart],
    names: Iterable[str],
    heads: slice | None,
    allocator: Source,
    rows: slice | None = None,
) -> list[Tensor]:
    """The rows of a call, of several fields: views where they lie side by side, else copies.

    Args:
        rows: those of the parts' arena, where they lie side by side in one.
    """
    first = blocks[parts[0].shard]
    if len(parts) == 1:
        fields, block = first.fields, parts[0].block
        found = [*map(fields.__getitem__, names)]
        if block is not None:
            found = [pick(x, block, allocator) for x in found]
    elif rows is not None and first.arena is not None:
        fields = first.arena[0].fields
        found = [fields[name][rows] for name in names]
    else:
        found = [_joined(blocks, parts, name, allocator) for name in names]
    return found if heads is None else [x[:, :, heads] for x in found]


def _joined(
    blocks: Sequence[PackedRows], parts: Sequence[TensorPart], name: str, allocator: Source
) -> Tensor:
    sources = [blocks[part.shard].fields[name] for part in parts]
    if all(is_range(part.call) and not isinstance(part.block, Tensor) for part in parts):
        pieces = [pick(x, p.block, allocator) for x, p in zip(sources, parts, strict=True)]
        return join(pieces, allocator)
    total = sum(num_rows(part.block, len(x)) for part, x in zip(parts, sources, strict=True))
    gathered = allocator.take((total, *sources[0].shape[1:]), sources[0].dtype)
    for part, x in zip(parts, sources, strict=True):
        if isinstance(part.call, Tensor):
            gathered.index_copy_(0, part.call, pick(x, part.block, allocator))
        elif isinstance(part.block, Tensor) and is_range(part.call):
            torch.index_select(x, 0, part.block, out=gathered[part.call])
        else:
            gathered[part.call].copy_(pick(x, part.block, allocator))
    return gathered


def side_by_side(blocks: Sequence[PackedRows], parts: Sequence[TensorPart]) -> slice | None:
    """The rows of their arena that several parts are; None if not in one, or not in order."""
    first = blocks[parts[0].shard].arena
    if first is None or len(parts) == 1:
        return None
    arena = first[0]
    places = (block.arena for block in blocks)
    starts = [None if place is None or place[0] is not arena else place[1] for place in places]
    rows = span(parts, [count_rows(block.rows) for block in blocks], starts)
    return None if rows is None else slice(*rows)
