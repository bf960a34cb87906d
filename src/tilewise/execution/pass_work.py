"""One rank's values during a pass: operands held, partials so far, and how tiles add to them.

What forward and backward have in common; in what they differ is in execution/work.py.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch
from torch import Tensor

from tilewise.compiler.lifetimes import Lifetimes
from tilewise.execution.allocator import Fresh, Scratch, address
from tilewise.execution.frame import Frame
from tilewise.execution.gather import BoundCall, Index, TensorPart, pick
from tilewise.execution.packing import Arena, Block, take
from tilewise.execution.partials import Tensors, Totals
from tilewise.plan.builder import partial
from tilewise.plan.ir import Item, Role, Rows, Side, Tile, Transfer
from tilewise.plan.payload import Payload
from tilewise.plan.row_ranges import count


class PassWork(ABC):
    """The executor's work; see execute.Work."""

    def __init__(
        self,
        frame: Frame,
        payload: Payload,
        own: dict[Item, Block],
        arenas: Sequence[Arena],
        lifetimes: Lifetimes,
    ):
        self.frame, self.payload, self._packing = frame, payload, frame.packing
        self._operand_packing = [frame.packing[side, Role.OPERAND] for side in Side]
        self._lender, self._sent = frame.lender, frame.lender.sent
        self.launched, self.left = frame.lender.launched, frame.lender.left
        # What stays for the next pass is no buffer of this one.
        self._operand_lender = Fresh(frame.device) if frame.keep else frame.lender
        self._scratch = Scratch(frame.lender)
        self._sizes = frame.layouts[0].sizes, frame.layouts[1].sizes
        self.operands = own
        self.partials: dict[Item, Tensors] = {}
        self.results: dict[Item, Tensor] = {}
        self._arena_of = {item: arena for arena in arenas for item in arena.starts}
        self._sends = dict(lifetimes.sends)  # of own operands, still to come
        self._with_free = lifetimes.with_free
        self._totals = Totals(self._blank, self._sizes, arenas)
        for item in own.keys() & self._arena_of.keys():
            self.operands[item] = self._moved_in(item, own[item])

    def departure(self, transfer: Transfer) -> Tensor:
        item, _, _, rows = transfer
        if item.role is Role.OPERAND:
            return self._operand_wire(item, rows)
        lender, packing = self._lender, self._packing[item.side, item.role]
        source = partial(item.side, item.shard, item.heads)
        if item.role is Role.RESULT:
            wire = self.results.get(item)
            if wire is None:
                wire = self.results[item] = packing.pack(self._filled(source), lender)
            self._sent(wire)
            return wire
        tensors = self._filled(source)
        self.partials.pop(source, None)
        self._totals.leave(source)
        cut = [take(x, self._whole(item), rows, lender) for x in tensors]
        wire = packing.pack(cut, lender)
        self._sent(wire)
        for x in (*tensors, *cut, wire):
            lender.give(x)
        return wire

    def room(self, transfer: Transfer) -> Tensor:
        item, _, _, rows = transfer
        num_rows = self._sizes[item.side][item.shard] if rows is None else count(rows, 0)
        arena = self._arena_of.get(item) if self._arena_of else None
        if arena is not None and arena.wire is not None:
            return arena.wire[arena.starts[item] : arena.starts[item] + num_rows]
        shape = self._packing[item.side, item.role].row_shape
        lender = self._operand_lender if item.role is Role.OPERAND else self._lender
        return lender.take((num_rows, self.frame.batch, *shape), torch.uint8)

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
            self._lender.give(wire)
        else:
            self.results[item] = wire

    def _operand_wire(self, item: Item, rows: Rows | None) -> Tensor:
        block = self.operands[item]
        wire = block.wire
        if wire is None:
            packing = self._packing[item.side, item.role]
            wire = packing.pack([block.fields[name] for name in packing.names], self._lender)
            self.operands[item] = block._replace(wire=wire)
        lender, sends = self._lender, self._sends
        part = wire
        if rows is not None and rows != block.rows:
            part = take(wire, block.rows, rows, lender)
        self._sent(part)
        if part is not wire and address(part) != address(wire):
            lender.give(part)  # a copy
        if sends and item in sends:
            sends[item] -= 1
            if not sends[item]:
                del sends[item]
                if block.arena is None:
                    lender.give(wire)
        return part

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
        if self.frame.keep:
            return
        wire = self.operands.pop(item).wire
        if wire is not None:
            self._lender.give(wire)
        for own in self._with_free.get(item, ()) if self._with_free else ():
            wire = self.operands[own].wire
            if wire is not None:
                self._lender.give(wire)

    def run(self, tile: Tile) -> None:
        bound = self.frame.binder.tile(tile)
        q = [self.operands[item] for item in bound.q]
        kv = [self.operands[item] for item in bound.kv]
        held = tuple([block.rows for block in q]), tuple([block.rows for block in kv])
        for call in self.frame.binder.calls(bound, held):
            self._call(call, q, kv)
            if self._scratch.lent:
                self._scratch.clear()

    def final(self, item: Item) -> Tensors:
        """What a partial of this rank came to in the end."""
        result = self.results.get(item._replace(role=Role.RESULT))
        if result is None:
            return self._filled(item)
        return tuple(self._packing[item.side, Role.RESULT].unpack(result).values())

    @abstractmethod
    def _call(self, bound: BoundCall, q: list[Block], kv: list[Block]) -> None:
        """Compute one kernel call and add its results to the partials."""

    @abstractmethod
    def _blanks(self, side: Side) -> Sequence[tuple[float, *tuple[int, ...]]]:
        """Per tensor of a partial: what it is at first, and its width if it has one."""

    @abstractmethod
    def _merge(self, partials: Tensors, index: Index, values: Tensors) -> None:
        """Add values to rows of a partial, in place."""

    def _target(self, parts: Sequence[TensorPart], heads: slice | None) -> Tensors | None:
        """Where a kernel itself can add a call's results: neighbouring rows of partials, in order.

        None as well where the results may become the partial.
        """
        if heads is not None:
            return None
        if len(parts) != 1:
            return self._beside(parts)
        _, item, in_call, _, local = parts[0]
        if in_call is not None or isinstance(local, Tensor):
            return None
        partials = self.partials.get(item)
        if partials is None:
            if local is None and self._lender.adopts and item not in self._totals:
                return None
            partials = self.partials[item] = self._empty(item)
        return partials if local is None else tuple([x[local] for x in partials])

    def _beside(self, parts: Sequence[TensorPart]) -> Tensors | None:
        """Partials of several shards that lie side by side as their operands do."""
        place = self._totals.beside(parts)
        if place is None:
            return None
        for part in parts:
            if part.item not in self.partials:
                self.partials[part.item] = self._totals.take(part.item)
        return self._totals.between(place)

    def _add(self, item: Item, index: Index, values: Tensors) -> None:
        """Add values, which nobody else uses, to rows of a partial."""
        partials = self.partials.get(item)
        if partials is None:
            if index is None and item not in self._totals:
                lasting, dtype = self._lender.lasting, self.frame.dtype
                self.partials[item] = tuple([lasting(x, dtype) for x in values])
                return
            partials = self.partials[item] = self._empty(item)
        self._merge(partials, index, values)

    def _add_part(self, part: TensorPart, values: Tensors, heads: slice | None) -> None:
        """Add a call's results to the partial that one part of its rows belongs to."""
        if part.call is not None:
            values = tuple([pick(x, part.call, self._scratch) for x in values])
        if heads is None:
            self._add(part.item, part.local, values)
            return
        if part.item not in self.partials:
            self.partials[part.item] = self._empty(part.item)
        self._merge(tuple([x[:, :, heads] for x in self.partials[part.item]]), part.local, values)

    def _filled(self, item: Item) -> Tensors:
        return self.partials.get(item) or self._empty(item)

    def _empty(self, item: Item) -> Tensors:
        """A partial that nothing was added to."""
        if item in self._totals:
            return self._totals.take(item)
        return self._blank(item.side, (self._size(item),))

    def _blank(self, side: Side, rows: Sequence[int]) -> Tensors:
        """Partials of so many rows each, one after the other, that nothing was added to."""
        frame, shape = self.frame, (sum(rows), self.frame.batch, self.payload.heads(side))
        return tuple(
            [
                self._lender.take_parts((*shape, *width), frame.dtype, rows).fill_(value)
                for value, *width in self._blanks(side)
            ]
        )

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
        if arena.wire is None or not packing.names or packing.names[0] not in block.fields:
            return block._replace(arena=place)
        wire = arena.wire[place[1] : place[1] + self._size(item)]
        moved = packing.unpack(wire)
        if wire.numel():
            for name, x in moved.items():
                x.copy_(block.fields[name])
        return Block(block.rows, {**block.fields, **moved}, wire, place)
