"""Kernel calls bound to blocks: which rows of which block each call gathers, and where it adds.

Done once per tile, layout and mask; in the loop there are only slices and index tensors.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple, TypeGuard

import numpy as np
import torch
from torch import Tensor

from tilewise.blocks import Block, join
from tilewise.buffers import Source
from tilewise.calls import Call, Ranges, row_index
from tilewise.layout import Layout
from tilewise.mask import Mask
from tilewise.payload import HeadGroups
from tilewise.plan import Item, Rows, Side, Tile
from tilewise.script import operand, partial
from tilewise.tile import tile_calls

Index = slice | Tensor | None
Held = tuple[tuple[Rows, ...], tuple[Rows, ...]]
MAX_PIECES = 8  # a part in more pieces is gathered by index


class Part(NamedTuple):
    """Rows of one shard in one side of a call: in the call, in its block, in the whole shard.

    None stands for all rows, in order. shard counts the tile's shards of this side; item is the
    partial that the rows' results add to.
    """

    shard: int
    item: Item
    call: Index
    block: Index
    local: Index


class BoundCall(NamedTuple):
    """A call with its rows' places, and which of the group's heads it is for (None: all)."""

    call: Call
    q: tuple[Part, ...]
    k: tuple[Part, ...]
    q_heads: slice | None
    kv_heads: slice | None


class BoundTile(NamedTuple):
    """The items that a tile reads, by side, and its calls by the rows that are held of them."""

    tile: Tile
    q: list[Item]
    kv: list[Item]
    calls: dict[Held, tuple[BoundCall, ...]]


class Binder:
    """Turns tiles into bound calls for one pair of layouts and one mask, and remembers them.

    Args:
        layouts: of the query and the KV shards.
        mask: a mask that differs by KV head is bound head by head.
        square_causal, whole_tile: how the kernel wants tiles cut; see `tile_calls`.
        groups: how heads are cut.
    """

    def __init__(
        self,
        layouts: tuple[Layout, Layout],
        mask: Mask,
        square_causal: bool,
        groups: HeadGroups,
        device: torch.device,
        whole_tile: bool = False,
    ):
        self.layouts, self.mask = layouts, mask
        self._cut = {"square_causal": square_causal, "whole_tile": whole_tile}
        self.groups, self.device = groups, device
        self._tiles: dict[Tile, BoundTile] = {}

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
            known = bound.calls[held] = tuple(self._bind(bound.tile, held))
        return known

    def _bind(self, tile: Tile, held: Held) -> Iterator[BoundCall]:
        local = [[row_index(rows) for rows in side] for side in held]
        q_positions, k_positions = (
            np.concatenate([layout.rows(s)[x] for s, x in zip(shards, rows, strict=True)])
            for layout, shards, rows in zip(self.layouts, tile[:2], local, strict=True)
        )
        for mask, q_heads, kv_heads in self._masks(tile.heads):
            calls = tile_calls(q_positions, k_positions, mask, **self._cut)
            for call in calls:
                q = self._parts(Side.Q, tile, call.q, local[0])
                k = self._parts(Side.KV, tile, call.k, local[1])
                yield BoundCall(call, q, k, q_heads, kv_heads)

    def _masks(self, group: int) -> Iterator[tuple[Mask, slice | None, slice | None]]:
        """The masks of a head group, and which of its heads each is for."""
        by_head: Sequence[Mask] | None = getattr(self.mask, "heads", None)
        if by_head is None:
            yield self.mask, None, None
            return
        first = self.groups.slice(Side.KV, group)
        shared = self.groups.size[0] // (first.stop - first.start)
        for i, mask in enumerate(by_head[first]):
            yield mask, slice(i * shared, (i + 1) * shared), slice(i, i + 1)

    def _parts(
        self, side: Side, tile: Tile, ranges: Ranges, local: Sequence[np.ndarray]
    ) -> tuple[Part, ...]:
        rows = row_index(ranges)
        starts = np.cumsum([0, *map(len, local)])
        which = np.searchsorted(starts, rows, side="right") - 1
        parts: list[tuple[int, Part]] = []
        for i in np.unique(which).tolist():
            shard = (tile.q, tile.kv)[side][i]
            in_call = np.flatnonzero(which == i)
            in_block = rows[in_call] - starts[i]
            limits = len(rows), len(local[i]), self.layouts[side].size(shard)
            for places in _pieces((in_call, in_block, local[i][in_block])):
                index = (self._index(x, n) for x, n in zip(places, limits, strict=True))
                part = Part(i, partial(side, shard, tile.heads), *index)
                parts.append((int(places[0][0]), part))
        return tuple(part for _, part in sorted(parts, key=lambda placed: placed[0]))

    def _index(self, rows: np.ndarray, limit: int) -> Index:
        """Rows as what selects them fastest, of a tensor of so many rows."""
        step = int(rows[1] - rows[0]) if len(rows) > 1 else 1
        if step < 1 or (len(rows) > 2 and (np.diff(rows) != step).any()):
            return torch.from_numpy(rows).to(self.device)
        whole = step == 1 and len(rows) == limit
        return None if whole else slice(int(rows[0]), int(rows[-1]) + 1, step)


def pick(x: Tensor, index: Index, lender: Source) -> Tensor:
    """The rows of a tensor that an index selects; a view unless it is a tensor."""
    if index is None:
        return x
    if isinstance(index, slice):
        return x[index]
    return torch.index_select(x, 0, index, out=lender.take((len(index), *x.shape[1:]), x.dtype))


def gather(
    blocks: Sequence[Block],
    parts: Sequence[Part],
    name: str,
    heads: slice | None,
    lender: Source,
) -> Tensor:
    """The rows of a call, of one field: a view where they lie side by side, else a copy."""
    if len(parts) == 1:
        (part,) = parts
        x = blocks[part.shard].fields[name]
        if part.block is not None:
            x = pick(x, part.block, lender)
    else:
        x = _joined(blocks, parts, name, lender)
    return x if heads is None else x[:, :, heads]


def _joined(blocks: Sequence[Block], parts: Sequence[Part], name: str, lender: Source) -> Tensor:
    in_order = all(_is_range(part.call) for part in parts)
    beside = _side_by_side(blocks, parts, name) if in_order else None
    if beside is not None:
        return beside
    pieces = [pick(blocks[part.shard].fields[name], part.block, lender) for part in parts]
    if in_order:
        return join(pieces, lender)
    gathered = lender.take((sum(map(len, pieces)), *pieces[0].shape[1:]), pieces[0].dtype)
    for part, piece in zip(parts, pieces, strict=True):
        if isinstance(part.call, Tensor):
            gathered.index_copy_(0, part.call, piece)
        else:
            pick(gathered, part.call, lender).copy_(piece)
    return gathered


def _side_by_side(blocks: Sequence[Block], parts: Sequence[Part], name: str) -> Tensor | None:
    arena = blocks[parts[0].shard].arena
    if arena is None:
        return None
    begin = end = None
    for part in parts:
        block = blocks[part.shard]
        if block.arena is None or block.arena[0] is not arena[0] or not _is_range(part.block):
            return None
        stop = len(block.fields[name]) if part.block is None else part.block.stop
        start = block.arena[1] + (0 if part.block is None else part.block.start)
        if end not in (None, start):
            return None
        begin = start if begin is None else begin
        end = block.arena[1] + stop
    return arena[0].fields[name][begin:end]


def _pieces(places: tuple[np.ndarray, ...]) -> Iterable[tuple[np.ndarray, ...]]:
    """Rows of one shard in as few pieces as can each be selected by slices, if those are few."""
    steps = [np.diff(x) for x in places]
    if all(len(step) == 0 or (step[0] > 0 and (step == step[0]).all()) for step in steps):
        return [places]
    breaks = np.flatnonzero(np.logical_or.reduce([step != 1 for step in steps])) + 1
    if len(breaks) >= MAX_PIECES:
        return [places]
    return zip(*(np.split(x, breaks) for x in places), strict=True)


def _is_range(index: Index) -> TypeGuard[slice | None]:
    return index is None or (isinstance(index, slice) and index.step in (None, 1))
