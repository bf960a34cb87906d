"""One rank's values during a pass: operands held, partials so far, and how tiles add to them.

Forward and backward differ in what a tile computes and how partials merge; all else is common.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from tilewise.binding import Binder, BoundCall, Index, Part, gather, pick
from tilewise.blocks import Arena, Block, Packing, take
from tilewise.kernels.merge import merge_into
from tilewise.kernels.protocol import Kernel
from tilewise.layout import Layout
from tilewise.payload import Payload
from tilewise.plan import Item, Role, Rows, Side, Tile, Transfer
from tilewise.rows import count
from tilewise.script import partial

Tensors = tuple[Tensor, ...]


@dataclass(frozen=True)
class Frame:
    """What both passes of one attention call share.

    Attributes:
        layouts: of the query and the KV shards.
        batch: sequences side by side, all of the same layout and mask.
        keep: received operands stay for the next pass.
        packing: how each side's and role's tensors lie in a row of bytes.
    """

    layouts: tuple[Layout, Layout]
    binder: Binder
    kernel: Kernel
    scale: float
    batch: int
    dtype: torch.dtype
    device: torch.device
    keep: bool
    packing: Mapping[tuple[Side, Role], Packing]


def packings(payload: Payload) -> dict[tuple[Side, Role], Packing]:
    """How every kind of item is packed in a pass."""
    return {
        (side, role): Packing(payload.fields(side, role), payload.heads(side))
        for side in Side
        for role in Role
    }


class PassWork(ABC):
    """The executor's work; see execute.Work."""

    def __init__(
        self, frame: Frame, payload: Payload, own: dict[Item, Block], arenas: Sequence[Arena]
    ):
        self.frame, self.payload, self._packing = frame, payload, frame.packing
        self._operand_packing = [frame.packing[side, Role.OPERAND] for side in Side]
        self._bytes = torch.empty(0, dtype=torch.uint8, device=frame.device)
        self._sizes = frame.layouts[0].sizes, frame.layouts[1].sizes
        self.operands = own
        self.partials: dict[Item, Tensors] = {}
        self.results: dict[Item, Tensor] = {}
        self._arena_of = {item: arena for arena in arenas for item in arena.starts}
        for item in own.keys() & self._arena_of.keys():
            self.operands[item] = self._moved_in(item, own[item])

    def departure(self, transfer: Transfer) -> Tensor:
        item, _, _, rows = transfer
        if item.role is Role.OPERAND:
            return self._operand_wire(item, rows)
        packing = self._packing[item.side, item.role]
        source = partial(item.side, item.shard, item.heads)
        if item.role is Role.RESULT:
            if item not in self.results:
                self.results[item] = packing.pack(self._filled(source))
            return self.results[item]
        tensors = self._filled(source)
        self.partials.pop(source, None)
        return packing.pack([take(x, self._whole(item), rows) for x in tensors])

    def room(self, transfer: Transfer) -> Tensor:
        item, _, _, rows = transfer
        num_rows = self._sizes[item.side][item.shard] if rows is None else count(rows, 0)
        arena = self._arena_of.get(item) if self._arena_of else None
        if arena is not None and arena.wire is not None:
            return arena.wire[arena.starts[item] : arena.starts[item] + num_rows]
        shape = self._packing[item.side, item.role].row_shape
        return self._bytes.new_empty((num_rows, self.frame.batch, *shape))

    def arrive(self, transfer: Transfer, wire: Tensor) -> None:
        item, _, _, rows = transfer
        if item.role is Role.OPERAND:
            fields = self._operand_packing[item.side].unpack(wire)
            before = self.operands.get(item)  # gathered in forward
            if before is not None:
                fields = {**before.fields, **fields}
            if rows is None:
                rows = ((0, self._sizes[item.side][item.shard]),)
            place = self._place(item) if self._arena_of else None
            self.operands[item] = Block(rows, fields, wire, place)
        elif item.role is Role.PARTIAL:
            values = self._packing[item.side, item.role].unpack(wire).values()
            self._merge_arrived(item, rows, tuple(values))
        else:
            self.results[item] = wire

    def _operand_wire(self, item: Item, rows: Rows | None) -> Tensor:
        block = self.operands[item]
        wire = block.wire
        if wire is None:
            packing = self._packing[item.side, item.role]
            wire = packing.pack([block.fields[name] for name in packing.names])
            self.operands[item] = block._replace(wire=wire)
        return wire if rows is None else take(wire, block.rows, rows)

    def _merge_arrived(self, item: Item, rows: Rows | None, values: Tensors) -> None:
        if rows is None:
            self._add(item, None, values)
            return
        offset = 0
        for start, stop in rows:
            here = slice(offset, offset + stop - start)
            self._add(item, slice(start, stop), tuple(x[here] for x in values))
            offset = here.stop

    def free(self, item: Item) -> None:
        if not self.frame.keep:
            del self.operands[item]

    def run(self, tile: Tile) -> None:
        bound = self.frame.binder.tile(tile)
        q = [self.operands[item] for item in bound.q]
        kv = [self.operands[item] for item in bound.kv]
        held = tuple([block.rows for block in q]), tuple([block.rows for block in kv])
        for call in self.frame.binder.calls(bound, held):
            self._call(call, q, kv)

    def final(self, item: Item) -> Tensors:
        """What a partial of this rank came to in the end, in the accumulators' dtype."""
        result = self.results.get(item._replace(role=Role.RESULT))
        if result is None:
            return self._filled(item)
        tensors = self._packing[item.side, Role.RESULT].unpack(result).values()
        return tuple(x.to(self.frame.dtype) for x in tensors)

    @abstractmethod
    def _call(self, bound: BoundCall, q: list[Block], kv: list[Block]) -> None:
        """Compute one kernel call and add its results to the partials."""

    @abstractmethod
    def _empty(self, item: Item, num_rows: int) -> Tensors:
        """A partial of so many rows that nothing was added to."""

    @abstractmethod
    def _merge(self, partials: Tensors, index: Index, values: Tensors) -> None:
        """Add values to rows of a partial, in place."""

    def _add(self, item: Item, index: Index, values: Tensors) -> None:
        """Add values, which nobody else uses, to rows of a partial."""
        partials = self.partials.get(item)
        if partials is None:
            if index is None:
                self.partials[item] = tuple([x.to(self.frame.dtype) for x in values])
                return
            partials = self.partials[item] = self._empty(item, self._size(item))
        self._merge(partials, index, values)

    def _add_part(self, part: Part, values: Tensors, heads: slice | None) -> None:
        """Add a call's results to the partial that one part of its rows belongs to."""
        if part.call is not None:
            values = tuple([x[part.call] for x in values])
        if heads is None:
            self._add(part.item, part.local, values)
            return
        if part.item not in self.partials:
            self.partials[part.item] = self._empty(part.item, self._size(part.item))
        self._merge(tuple([x[:, :, heads] for x in self.partials[part.item]]), part.local, values)

    def _filled(self, item: Item) -> Tensors:
        return self.partials.get(item) or self._empty(item, self._size(item))

    def _zeros(self, num_rows: int, side: Side, width: int | None = None) -> Tensor:
        shape = [num_rows, self.frame.batch, self.payload.heads(side), *([width] if width else [])]
        return torch.zeros(shape, dtype=self.frame.dtype, device=self.frame.device)

    def _size(self, item: Item) -> int:
        return self._sizes[item.side][item.shard]

    def _whole(self, item: Item) -> Rows:
        return ((0, self._size(item)),)

    def _place(self, item: Item) -> tuple[Arena, int] | None:
        arena = self._arena_of.get(item)
        return None if arena is None else (arena, arena.starts[item])

    def _moved_in(self, item: Item, block: Block) -> Block:
        """An operand that is here from the start, its rows copied to their place in the arena."""
        arena = self._arena_of[item]
        place = arena, arena.starts[item]
        packing = self._packing[item.side, item.role]
        if arena.wire is None or not all(name in block.fields for name in packing.names):
            return block._replace(arena=place)
        wire = arena.wire[place[1] : place[1] + self._size(item)]
        wire.copy_(packing.pack([block.fields[name] for name in packing.names]))
        moved = packing.unpack(wire)
        return Block(block.rows, {**block.fields, **moved}, wire, place)


class Forward(PassWork):
    """Partials of queries are (out, lse), merged by lse; KV has none."""

    def _call(self, bound: BoundCall, q: list[Block], kv: list[Block]) -> None:
        call, q_parts, k_parts, q_heads, kv_heads = bound
        queries = gather(q, q_parts, "q", q_heads)
        k, v = gather(kv, k_parts, "k", kv_heads), gather(kv, k_parts, "v", kv_heads)
        values = self.frame.kernel.forward(queries, k, v, call, self.frame.scale)
        for part in q_parts:
            self._add_part(part, values, q_heads)

    def _empty(self, item: Item, num_rows: int) -> Tensors:
        out = self._zeros(num_rows, Side.Q, self.payload.head_dim)
        return out, self._zeros(num_rows, Side.Q) - torch.inf

    def _merge(self, partials: Tensors, index: Index, values: Tensors) -> None:
        out, lse = partials
        if index is not None:
            out, lse = out[index], lse[index]
        merge_into(out, lse, *values)
        if isinstance(index, Tensor):  # an index made copies
            partials[0][index], partials[1][index] = out, lse


class Backward(PassWork):
    """Partials are sums: dq of queries, (dk, dv) of keys and values."""

    def _call(self, bound: BoundCall, q: list[Block], kv: list[Block]) -> None:
        call, q_parts, k_parts, q_heads, kv_heads = bound
        queries, dout, lse, delta = (
            gather(q, q_parts, name, q_heads) for name in ("q", "dout", "lse", "delta")
        )
        k, v = gather(kv, k_parts, "k", kv_heads), gather(kv, k_parts, "v", kv_heads)
        scale = self.frame.scale
        dq, dk, dv = self.frame.kernel.backward(queries, k, v, dout, lse, delta, call, scale)
        for part in q_parts:
            self._add_part(part, (dq,), q_heads)
        for part in k_parts:
            self._add_part(part, (dk, dv), kv_heads)

    def _empty(self, item: Item, num_rows: int) -> Tensors:
        tensors = 1 if item.side is Side.Q else 2
        return tuple(
            self._zeros(num_rows, item.side, self.payload.head_dim) for _ in range(tensors)
        )

    def _merge(self, partials: Tensors, index: Index, values: Tensors) -> None:
        for total, value in zip(partials, values, strict=True):
            if isinstance(index, Tensor):
                total.index_add_(0, index, value.to(total.dtype))
            else:
                pick(total, index).add_(value)
