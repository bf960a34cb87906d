"""One rank's values during a pass: operands held, partials so far, and how tiles add to them.

Forward and backward differ in what a tile computes and how partials merge; all else is common.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from tilewise.binding import Binder, BoundCall, Part, gather
from tilewise.blocks import Arena, Block, pack, take, unpack
from tilewise.kernels.merge import merge_into
from tilewise.kernels.protocol import Kernel
from tilewise.layout import Layout
from tilewise.payload import Payload
from tilewise.plan import Item, Role, Rows, Side, Tile, Transfer
from tilewise.rows import count
from tilewise.script import operand, partial

Tensors = tuple[Tensor, ...]


@dataclass(frozen=True)
class Frame:
    """What both passes of one attention call share.

    Attributes:
        layouts: of the query and the KV shards.
        batch: sequences side by side, all of the same layout and mask.
        keep: received operands stay for the next pass.
    """

    layouts: tuple[Layout, Layout]
    binder: Binder
    kernel: Kernel
    scale: float
    batch: int
    dtype: torch.dtype
    device: torch.device
    keep: bool


class PassWork(ABC):
    """The executor's work; see execute.Work."""

    def __init__(
        self, frame: Frame, payload: Payload, own: dict[Item, Block], arenas: Sequence[Arena]
    ):
        self.frame, self.payload = frame, payload
        self.operands = own
        self.partials: dict[Item, Tensors] = {}
        self.results: dict[Item, Tensor] = {}
        self._arena_of = {item: arena for arena in arenas for item in arena.starts}
        for item in own.keys() & self._arena_of.keys():
            self.operands[item] = self._moved_in(item, own[item])

    def travels(self, item: Item) -> bool:
        return self.payload.row_bytes(item) > 0

    def departure(self, transfer: Transfer) -> Tensor:
        item, rows = transfer.item, transfer.rows
        fields = self.payload.fields(item.side, item.role)
        if item.role is Role.OPERAND:
            block = self.operands[item]
            if block.wire is None:
                wire = pack([block.fields[field.name] for field in fields], fields)
                block = self.operands[item] = block._replace(wire=wire)
            return take(block.wire, block.rows, rows)
        source = partial(item.side, item.shard, item.heads)
        if item.role is Role.RESULT:
            if item not in self.results:
                self.results[item] = pack(self._filled(source), fields)
            return self.results[item]
        tensors = self._filled(source)
        self.partials.pop(source, None)
        return pack([take(x, self._whole(item), rows) for x in tensors], fields)

    def room(self, transfer: Transfer) -> Tensor:
        item, arena = transfer.item, self._arena_of.get(transfer.item)
        num_rows = count(transfer.rows, self._size(item))
        if arena is not None and arena.wire is not None:
            return arena.wire[arena.starts[item] : arena.starts[item] + num_rows]
        shape = num_rows, self.frame.batch, self.payload.row_bytes(item)
        return torch.empty(shape, dtype=torch.uint8, device=self.frame.device)

    def arrive(self, transfer: Transfer, wire: Tensor) -> None:
        item = transfer.item
        fields = unpack(
            wire, self.payload.fields(item.side, item.role), self.payload.heads(item.side)
        )
        match item.role:
            case Role.OPERAND:
                rows = self._whole(item) if transfer.rows is None else transfer.rows
                before = self.operands.get(item)  # gathered in forward
                kept = before.fields if before else {}
                self.operands[item] = Block(rows, {**kept, **fields}, wire, self._place(item))
            case Role.PARTIAL:
                offset = 0
                for start, stop in self._whole(item) if transfer.rows is None else transfer.rows:
                    rows, here = slice(start, stop), slice(offset, offset + stop - start)
                    self._add(item, rows, tuple(x[here] for x in fields.values()))
                    offset += stop - start
            case Role.RESULT:
                self.results[item] = wire

    def free(self, item: Item) -> None:
        if not self.frame.keep:
            del self.operands[item]

    def run(self, tile: Tile) -> None:
        sides = [
            [self.operands[operand(side, shard, tile.heads)] for shard in shards]
            for side, shards in zip(Side, tile[:2], strict=True)
        ]
        held = tuple(tuple(block.rows for block in blocks) for blocks in sides)
        for bound in self.frame.binder.calls(tile, held):  # pyright: ignore[reportArgumentType]
            self._call(tile, bound, sides[0], sides[1])

    def final(self, item: Item) -> Tensors:
        """What a partial of this rank came to in the end, in the accumulators' dtype."""
        result = self.results.get(item._replace(role=Role.RESULT))
        if result is None:
            return self._filled(item)
        fields = self.payload.fields(item.side, Role.RESULT)
        accumulated = [x.dtype for x in self._empty(item, 0)]
        tensors = unpack(result, fields, self.payload.heads(item.side)).values()
        return tuple(x.to(dtype) for x, dtype in zip(tensors, accumulated, strict=True))

    @abstractmethod
    def _call(self, tile: Tile, bound: BoundCall, q: list[Block], kv: list[Block]) -> None:
        """Compute one kernel call and add its results to the partials."""

    @abstractmethod
    def _empty(self, item: Item, num_rows: int) -> Tensors:
        """A partial of so many rows that nothing was added to."""

    @abstractmethod
    def _merge(self, partials: Tensors, index: slice | Tensor, values: Tensors) -> None:
        """Add values to rows of a partial, in place."""

    def _add(self, item: Item, index: slice | Tensor, values: Tensors) -> None:
        size = self._size(item)
        if item not in self.partials and index == slice(0, size):
            self.partials[item] = tuple(
                x.to(e.dtype, copy=True) for x, e in zip(values, self._empty(item, 0), strict=True)
            )
            return
        if item not in self.partials:
            self.partials[item] = self._empty(item, size)
        self._merge(self.partials[item], index, values)

    def _add_parts(self, item: Item, part: Part, values: Tensors, heads: slice | None) -> None:
        rows = tuple(x[part.call] for x in values)
        if heads is None:
            self._add(item, part.local, rows)
            return
        if item not in self.partials:
            self.partials[item] = self._empty(item, self._size(item))
        self._merge(tuple(x[:, :, heads] for x in self.partials[item]), part.local, rows)

    def _filled(self, item: Item) -> Tensors:
        return self.partials.get(item) or self._empty(item, self._size(item))

    def _heads(self, bound: BoundCall) -> tuple[slice | None, slice | None]:
        """Which query and KV heads of the group a call is for; None: all."""
        if bound.kv_head is None:
            return None, None
        ratio = self.payload.num_heads // self.payload.num_kv_heads
        return slice(bound.kv_head * ratio, (bound.kv_head + 1) * ratio), slice(
            bound.kv_head, bound.kv_head + 1
        )

    def _zeros(self, num_rows: int, side: Side, width: int | None = None) -> Tensor:
        shape = [num_rows, self.frame.batch, self.payload.heads(side), *([width] if width else [])]
        return torch.zeros(shape, dtype=self.frame.dtype, device=self.frame.device)

    def _size(self, item: Item) -> int:
        return self.frame.layouts[item.side].size(item.shard)

    def _whole(self, item: Item) -> Rows:
        return ((0, self._size(item)),)

    def _place(self, item: Item) -> tuple[Arena, int] | None:
        arena = self._arena_of.get(item)
        return arena and (arena, arena.starts[item])

    def _moved_in(self, item: Item, block: Block) -> Block:
        """An operand that is here from the start, its rows copied to their place in the arena."""
        arena = self._arena_of[item]
        place = arena, arena.starts[item]
        fields = self.payload.fields(item.side, item.role)
        if arena.wire is None or not all(field.name in block.fields for field in fields):
            return block._replace(arena=place)
        wire = arena.wire[place[1] : place[1] + self._size(item)]
        wire.copy_(pack([block.fields[field.name] for field in fields], fields))
        moved = unpack(wire, fields, self.payload.heads(item.side))
        return Block(block.rows, {**block.fields, **moved}, wire, place)


def _read(blocks: list[Block], parts: tuple[Part, ...], names: Sequence[str], heads: slice | None):
    tensors = [gather(blocks, parts, name) for name in names]
    return tensors if heads is None else [x[:, :, heads] for x in tensors]


class Forward(PassWork):
    """Partials of queries are (out, lse), merged by lse; KV has none."""

    def _call(self, tile: Tile, bound: BoundCall, q: list[Block], kv: list[Block]) -> None:
        q_heads, kv_heads = self._heads(bound)
        (queries,) = _read(q, bound.q, ("q",), q_heads)
        k, v = _read(kv, bound.k, ("k", "v"), kv_heads)
        values = self.frame.kernel.forward(queries, k, v, bound.call, self.frame.scale)
        for part in bound.q:
            self._add_parts(partial(Side.Q, tile.q[part.shard], tile.heads), part, values, q_heads)

    def _empty(self, item: Item, num_rows: int) -> Tensors:
        out = self._zeros(num_rows, Side.Q, self.payload.head_dim)
        return out, self._zeros(num_rows, Side.Q) - torch.inf

    def _merge(self, partials: Tensors, index: slice | Tensor, values: Tensors) -> None:
        out, lse = partials[0][index], partials[1][index]
        merge_into(out, lse, *values)
        if isinstance(index, Tensor):  # an index made copies
            partials[0][index], partials[1][index] = out, lse


class Backward(PassWork):
    """Partials are sums: dq of queries, (dk, dv) of keys and values."""

    def _call(self, tile: Tile, bound: BoundCall, q: list[Block], kv: list[Block]) -> None:
        q_heads, kv_heads = self._heads(bound)
        queries, dout, lse, delta = _read(q, bound.q, ("q", "dout", "lse", "delta"), q_heads)
        k, v = _read(kv, bound.k, ("k", "v"), kv_heads)
        dq, dk, dv = self.frame.kernel.backward(
            queries, k, v, dout, lse, delta, bound.call, self.frame.scale
        )
        for part in bound.q:
            self._add_parts(partial(Side.Q, tile.q[part.shard], tile.heads), part, (dq,), q_heads)
        for part in bound.k:
            self._add_parts(
                partial(Side.KV, tile.kv[part.shard], tile.heads), part, (dk, dv), kv_heads
            )

    def _empty(self, item: Item, num_rows: int) -> Tensors:
        tensors = 1 if item.side is Side.Q else 2
        return tuple(
            self._zeros(num_rows, item.side, self.payload.head_dim) for _ in range(tensors)
        )

    def _merge(self, partials: Tensors, index: slice | Tensor, values: Tensors) -> None:
        for total, value in zip(partials, values, strict=True):
            if isinstance(index, Tensor):
                total.index_add_(0, index, value.to(total.dtype))
            else:
                total[index] += value
