"""Kernel calls bound to blocks: which rows of which block each call gathers, and where it adds.

Done once per tile, layout and mask; in the loop there are only slices and index tensors.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import accumulate
from typing import NamedTuple, TypeAlias

import numpy as np
import torch
from torch import Tensor

from tilewise.execution.allocator import Source
from tilewise.execution.packing import Arena, PackedRows, join
from tilewise.kernels.scores import Places
from tilewise.layouts.layout import Layout
from tilewise.plan.builder import operand
from tilewise.plan.ir import Item, Role, Side, Tile
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
Group: TypeAlias = tuple[Item, ...]
Spans: TypeAlias = dict[int, slice | None]
"""By the id of a bound call's parts where they lie in their arena, the same at every call."""


class BoundTile(NamedTuple):
    """The items that a tile reads, by side, and its calls by the rows that are held of them."""

    tile: Tile
    q: list[Item]
    kv: list[Item]
    calls: dict[Held, tuple[BoundCall, ...]]


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
    name: str,
    heads: slice | None,
    allocator: Source,
    spans: Spans,
) -> Tensor:
    """The rows of a call, of one field: a view where they lie side by side, else a copy."""
    if len(parts) == 1:
        (part,) = parts
        x = blocks[part.shard].fields[name]
        if part.block is not None:
            x = pick(x, part.block, allocator)
    else:
        x = _joined(blocks, parts, name, allocator, spans)
    return x if heads is None else x[:, :, heads]


def _joined(
    blocks: Sequence[PackedRows],
    parts: Sequence[TensorPart],
    name: str,
    allocator: Source,
    spans: Spans,
) -> Tensor:
    if id(parts) not in spans:
        spans[id(parts)] = _side_by_side(blocks, parts)
    place, rows = blocks[parts[0].shard].arena, spans[id(parts)]
    if place is not None and rows is not None:
        return place[0].fields[name][rows]
    sources = [blocks[part.shard].fields[name] for part in parts]
    if all(is_range(part.call) and not isinstance(part.block, Tensor) for part in parts):
        return join(
            [pick(x, p.block, allocator) for x, p in zip(sources, parts, strict=True)], allocator
        )
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


def _side_by_side(blocks: Sequence[PackedRows], parts: Sequence[TensorPart]) -> slice | None:
    """The rows of their arena that parts are; None if they do not lie in one, in order."""
    first = blocks[parts[0].shard].arena
    if first is None:
        return None
    arena = first[0]
    places = (block.arena for block in blocks)
    starts = [None if place is None or place[0] is not arena else place[1] for place in places]
    rows = span(parts, [count_rows(block.rows) for block in blocks], starts)
    return None if rows is None else slice(*rows)


class PartialGroups:
    """The partials of every arena's operands, each with its whole shard's rows.

    They lie side by side as well, so that one kernel call can add to those of several shards in
    place. A partial has its place once: from when it is first added to until it leaves.

    Args:
        sizes: rows of the shards, by side.
    """

    def __init__(self, sizes: Sequence[Sequence[int]], arenas: Sequence[Arena]):
        self._sizes = sizes
        self._starts: dict[Item, int] = {}  # first row among those of its group
        self._group: dict[Item, Group] = {}
        self._unused: set[Item] = set()
        self._whole: dict[Group, Tensors] = {}
        for arena in arenas:
            group = tuple(item._replace(role=Role.PARTIAL) for item in arena.starts)
            starts = accumulate(map(self._size, group), initial=0)
            self._starts.update(zip(group, starts, strict=False))
            self._group.update(dict.fromkeys(group, group))
            self._unused.update(group)

    def __contains__(self, item: Item) -> bool:
        """Whether a partial that is not there yet is to lie in its place among others."""
        return bool(self._unused) and item in self._unused

    def take(self, item: Item, blank: Callable[[Side, Sequence[int]], Tensors]) -> Tensors:
        """A partial that nothing was added to.

        Args:
            blank: side, rows of each partial -> partials, one after the other, nothing added yet.
                Kept here, it would hold the pass's tensors until the garbage collector came.
        """
        self._unused.remove(item)
        group = self._group[item]
        if group not in self._whole:
            self._whole[group] = blank(item.side, [self._size(one) for one in group])
        start = self._starts[item]
        return self._rows(group, start, start + self._size(item))

    def whole(self, arena: Arena, blank: Callable[[Side, Sequence[int]], Tensors]) -> Tensors:
        """The partials of all of an arena's operands."""
        group = self._group[next(iter(arena.starts))._replace(role=Role.PARTIAL)]
        if group not in self._whole:
            self._whole[group] = blank(group[0].side, [self._size(one) for one in group])
        return self._whole[group]

    def untouched(self, place: tuple[Group, int, int]) -> bool:
        """Whether these are all rows of a group that nothing was added to."""
        group, start, stop = place
        return group not in self._whole and stop - start == sum(map(self._size, group))

    def adopt(self, place: tuple[Group, int, int], values: Tensors) -> None:
        """Let the values, which nobody else uses, be the partials of an untouched group."""
        self._whole[place[0]] = values

    def leave(self, item: Item) -> None:
        """A partial is no longer in its place."""
        if self._starts:
            self._starts.pop(item, None)

    def beside(self, parts: Sequence[TensorPart]) -> tuple[Group, int, int] | None:
        """Where the results of a call's parts belong, if that is side by side and in order."""
        group = self._group.get(parts[0].item)
        if group is None or any(self._group.get(part.item) is not group for part in parts):
            return None
        rows = total_rows(parts, self._sizes[parts[0].item.side], self._starts)
        return None if rows is None else (group, *rows)

    def between(self, place: tuple[Group, int, int]) -> Tensors:
        """The partials' rows there, all of which have been taken."""
        return self._rows(*place)

    def _rows(self, group: Group, start: int, stop: int) -> Tensors:
        return tuple([x[start:stop] for x in self._whole[group]])

    def _size(self, item: Item) -> int:
        return self._sizes[item.side][item.shard]


def total_rows(
    parts: Sequence[TensorPart], sizes: Sequence[int], starts: Mapping[Item, int]
) -> tuple[int, int] | None:
    """As span, of the whole shards' rows that results of a call's parts are to be added to."""
    placed = [starts.get(part.item) for part in parts]
    whole = [part._replace(shard=number, block=part.local) for number, part in enumerate(parts)]
    return span(whole, [sizes[part.item.shard] for part in parts], placed)
