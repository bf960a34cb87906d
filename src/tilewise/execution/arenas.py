"""Arenas: buffers in which operands that one tile reads together lie side by side.

What backward is to find again is kept by these buffers.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate, chain
from typing import NamedTuple

import torch
from torch import Tensor

from tilewise.compiler.program import Program
from tilewise.execution.allocator import Allocator
from tilewise.execution.packing import Arena, PackedRows, Packing
from tilewise.layouts.layout import Layout
from tilewise.plan.ir import Item, Role, Rows, Side
from tilewise.plan.row_ranges import count

Operands = dict[Item, PackedRows]


class _Place(NamedTuple):
    """Items whose rows lie side by side in one buffer, and the first row of each."""

    items: tuple[Item, ...]
    rows: list[int]
    starts: dict[Item, int]


class ArenaTable:
    """The arenas of a program, and the buffers of what it receives.

    Args:
        arriving: the operands that the program receives, and which rows of them; None: all.
        saved: what an earlier pass kept is among the operands of this one.
    """

    def __init__(
        self,
        program: Program,
        arriving: Mapping[Item, Rows | None],
        packing: Mapping[tuple[Side, Role], Packing],
        layouts: Sequence[Layout],
        batch: int,
        *,
        saved: bool,
    ):
        self._program, self._arriving, self._packing = program, arriving, packing
        self._layouts, self._batch, self._saved = layouts, batch, saved
        # Fields that cannot be used as they are packed have no arena.
        places = map(self._place, program.arenas)
        self._places = [x for x in places if self._packing_of(x.items).in_place]

    def take(self, operands: Operands, allocator: Allocator) -> list[Arena]:
        """The arenas of a pass, into which what is there already is copied.

        Args:
            operands: this rank's own, and those that an earlier pass kept.
        """
        kept = {id(b.arena[0]): b.arena[0] for b in operands.values() if b.arena}
        made = (self._arena(place, operands, allocator) for place in self._places)
        arenas = [arena for arena in made if arena is not None]
        placed = {*chain.from_iterable(self._program.arenas)}
        arenas += [arena for arena in kept.values() if not placed.intersection(arena.starts)]
        for arena in arenas:
            for item in operands.keys() & arena.starts.keys():
                operands[item] = self._moved_in(item, operands[item], arena)
        return arenas

    def kept(self, operands: Mapping[Item, PackedRows]) -> list[Tensor]:
        """The buffers of what a pass has received and kept."""
        kept = []
        for items in self._buffers():
            block = next(operands[item] for item in items if item in self._arriving)
            wire = block.arena[0].wire if block.arena else block.wire
            assert wire is not None
            kept.append(wire)
        return kept

    def found(self, kept: Sequence[Tensor], allocator: Allocator) -> Operands:
        """What `kept` kept, as the operands of another pass, decoded into buffers of that."""
        operands: Operands = {}
        for wire, items in zip(kept, self._buffers(), strict=True):
            packing, starts = self._packing_of(items), self._place(items).starts
            shared = items in self._program.arenas
            arena = Arena(starts, wire, packing.unpack(wire)) if shared else None
            for item, start in starts.items():
                if item not in self._arriving:
                    continue
                rows = self._arriving[item] or ((0, self._layouts[item.side].size(item.shard)),)
                part = wire[start : start + self._num_rows(item)]
                place = None if arena is None else (arena, start)
                operands[item] = PackedRows(rows, packing.unpack(part, allocator), part, place)
        return operands

    def _buffers(self) -> Iterator[tuple[Item, ...]]:
        """The items that lie in each of the buffers that hold what arrives.

        Items of one arena share one buffer, own operands among them; all others have their own.
        """
        shared: set[Item] = set()
        for items, _, _ in self._places:
            if self._packing_of(items).names and any(item in self._arriving for item in items):
                yield items
                shared.update(items)
        yield from ((item,) for item in sorted(self._arriving.keys() - shared))

    def _packing_of(self, items: Sequence[Item]) -> Packing:
        return self._packing[items[0].side, items[0].role]

    def _num_rows(self, item: Item) -> int:
        return count(self._arriving.get(item), self._layouts[item.side].size(item.shard))

    def _place(self, items: tuple[Item, ...]) -> _Place:
        rows = [*map(self._num_rows, items)]
        return _Place(items, rows, dict(zip(items, accumulate(rows, initial=0), strict=False)))

    def _arena(self, place: _Place, operands: Operands, allocator: Allocator) -> Arena | None:
        """One buffer for these items; None: what an earlier pass kept of them lies apart."""
        items, rows, starts = place
        blocks = [operands[item] for item in items if item in operands]
        before = next((block.arena[0].fields for block in blocks if block.arena), {})
        if self._saved and not before:
            return None
        packing = self._packing_of(items)
        if any(block.fields.keys() - before.keys() - set(packing.names) for block in blocks):
            return None
        if not packing.names:
            return Arena(starts, None, dict(before))
        shape = sum(rows), self._batch, *packing.row_shape
        wire = allocator.take_parts(shape, torch.uint8, rows)
        return Arena(starts, wire, {**before, **packing.unpack(wire)})

    def _moved_in(self, item: Item, block: PackedRows, arena: Arena) -> PackedRows:
        """An operand that is here from the start, its rows copied to their place in the arena."""
        place, packing = (arena, arena.starts[item]), self._packing_of((item,))
        if arena.wire is None or not packing.names or packing.names[0] not in block.fields:
            return block._replace(arena=place)
        size = self._layouts[item.side].size(item.shard)
        wire = arena.wire[place[1] : place[1] + size]
        moved = packing.unpack(wire)
        if wire.numel():
            for name, x in moved.items():
                x.copy_(block.fields[name])
        return PackedRows(block.rows, {**block.fields, **moved}, wire, place)
