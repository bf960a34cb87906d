"""The first pass: a rank's program as obvious operations, without a thought for memory.

Every operand is copied to a buffer of its own, every message is packed, every partial begins blank.
Later passes take out what is needless. What the rank has at any time is one value, `Holdings`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import product
from typing import TypeAlias

from tilewise.compiler.code import Home
from tilewise.compiler.draft import (
    AttendTile,
    Draft,
    Held,
    RowBuffer,
    View,
    blank_value,
    narrow_fields,
)
from tilewise.compiler.facts import Facts, shares_message
from tilewise.compiler.ops import (
    Ask,
    ComputeDelta,
    Copy,
    Fill,
    Merge,
    Message,
    Post,
    Wait,
)
from tilewise.compiler.program import Compute, Launch, compute_label, held_ranges, wait_label
from tilewise.plan.builder import operand, partial
from tilewise.plan.ir import Item, Role, Rows, Side, Tile, Transfer, rows_label
from tilewise.plan.payload import Field
from tilewise.plan.row_ranges import count, count_rows, packed_ranges

Travelling: TypeAlias = tuple[Item, Rows | None]
"""An item as it travels, and which of its rows; None: all that are here."""


@dataclass
class Holdings:
    """The items that a rank has at some point of its pass.

    Attributes:
        operands: what tiles read.
        partials: what results are added to; finished ones that have travelled are among them.
        wires: items as they travel: packed here, or as they arrived.
    """

    operands: dict[Item, Held] = field(default_factory=dict[Item, Held])
    partials: dict[Item, View] = field(default_factory=dict[Item, View])
    wires: dict[Travelling, View] = field(default_factory=dict[Travelling, View])


def naive(facts: Facts) -> Draft:
    """Return the operations of a rank's pass, in the order of its program."""
    writer = _Writer(facts)
    writer.begin()
    for instruction in facts.program.instructions:
        match instruction:
            case Launch():
                writer.launch(instruction)
            case Compute(tile):
                writer.compute(tile)
            case _:
                writer.wait(instruction.handle, instruction.arrivals)
    for side in Side:
        if facts.payload.results(side):
            writer.collect(side)
    return writer.draft


class _Writer:
    """Writes the operations of a program, and remembers what the rank has."""

    def __init__(self, facts: Facts):
        self.facts = facts
        self.draft = Draft(facts.call.batch)
        self.here = Holdings()
        self._results: dict[Item, View] = {}
        self._launches: dict[int, Launch] = {}
        self._arriving: dict[tuple[int, int], View] = {}
        self._numbers: dict[tuple[int, int], int] = {}
        self._saved: dict[Item, tuple[Rows, View]] = {}
        self._unread: dict[Item, Copy[View]] = {}

    # What is here from the start

    def begin(self) -> None:
        """Write the first operations: this rank's q, k and v become operands, backward computes
        delta.

        What the forward pass kept is found, too.
        """
        facts, draft = self.facts, self.draft
        if facts.forward is not None:
            self._find_saved(facts.forward)
        for side in Side:
            rows, heads = facts.num_own_rows(side), facts.own_heads(side)
            fields = facts.own_fields(side)
            own = draft.new(RowBuffer(f"own {side.name.lower()}", rows, fields, heads, Home.GIVEN))
            if side is Side.Q and facts.payload.backward:
                self._delta(own)
            for (shard, at), group in product(facts.held[side], range(facts.groups.groups)):
                of_group = facts.groups.slice(side, group) if facts.groups.groups > 1 else None
                mine = draft.heads(draft.rows(own, at if facts.plan.cuts else None), of_group)
                self._own(operand(side, shard, group), mine)
        for item in self._saved.keys() - self.here.operands.keys():
            self.here.operands[item] = Held(self._saved[item][0], self._read_saved(item))

    def _own(self, item: Item, mine: View) -> None:
        """Copy rows of the call's tensors to buffers of their own."""
        facts, draft = self.facts, self.draft
        size = draft.num_rows(mine)
        views: tuple[View, ...] = ()
        fields = facts.own_fields(item.side)
        if facts.payload.saved:
            names = tuple(name for name, _ in facts.payload.inputs(item.side))
            if item in self._saved:
                views = self._read_saved(item)
            else:
                inputs = tuple(x for x in fields if x.name in names)
                views = (self._copied(item, mine._replace(fields=names), inputs),)
            fields = tuple(x for x in fields if x.name not in names)
            mine = mine._replace(fields=tuple(x.name for x in fields))
        if fields:
            views = *views, self._copied(item, mine, fields)
        self.here.operands[item] = Held(((0, size),), views)

    def _copied(self, item: Item, source: View, fields: Sequence[Field]) -> View:
        heads = self.draft.num_heads(source)
        target = self.draft.apart(str(item), self.draft.num_rows(source), fields, heads, item=item)
        self.draft.ops.append(Copy(f"join {item}", source, target))
        return target

    def _find_saved(self, forward: Draft) -> None:
        """Find what the forward pass kept: buffers as it had them."""
        for number, kept in enumerate(forward.kept):
            buffer = forward.buffers[kept.buffer]
            saved = self.draft.new(
                buffer._replace(name=f"kept{number}", home=Home.SAVED, part_rows=())
            )
            for item, start, rows in kept.items:
                part = self.draft.rows(saved, (start, start + count_rows(rows)))
                self._saved[item] = rows, part

    def _read_saved(self, item: Item) -> tuple[View, ...]:
        """Return room for an operand that forward kept; it is copied there before the first tile
        reads it.
        """
        rows, source = self._saved[item]
        fields = tuple(x._replace(wire=None) for x in self.draft.fields_of(source))
        heads = self.draft.num_heads(source)
        target = self.draft.apart(str(item), count_rows(rows), fields, heads, item=item)
        self._unread[item] = Copy(f"unpack {item}", source, target)
        return (target,)

    def _delta(self, own: View) -> None:
        facts, draft = self.facts, self.draft
        rows, width = facts.num_own_rows(Side.Q), facts.payload.v_head_dim
        heads = facts.own_heads(Side.Q)
        field = Field("out", width, facts.payload.dtype)
        out = draft.apart("out", rows, (field,), heads, Home.GIVEN)
        product = draft.apart("out * dout", rows, (field._replace(dtype=facts.accumulator),), heads)
        dout, delta = own._replace(fields=("dout",)), own._replace(fields=("delta",))
        draft.ops.append(ComputeDelta("delta", out, dout, product, delta))

    # Messages

    def launch(self, launch: Launch) -> None:
        """Pack what leaves, and post it with room for what arrives."""
        handle, step, lane, sends, recvs, team = launch
        self._launches[handle] = launch
        leaving = tuple(self._leaving(transfer) for transfer in sends)
        arriving = tuple(self._room(handle, index, one) for index, one in enumerate(recvs))
        numbers = (
            self._numbers.setdefault((handle, index), len(self._numbers))
            for index in range(len(recvs))
        )
        self.draft.ops.append(
            Post(
                str(launch),
                handle,
                lane,
                leaving,
                arriving,
                tuple(Message(one.dst, step, one.item) for one in sends),
                tuple(Message(one.src, step, one.item) for one in recvs),
                tuple(numbers),
                self._apart(recvs, arriving) if team is None else (),
            )
        )

    def _apart(
        self, recvs: Sequence[Transfer], arriving: Sequence[View]
    ) -> tuple[tuple[int, ...], ...]:
        """Group the receives of a launch (by index) into those that are posted and awaited as one.

        Small messages from one rank share a receive. Empty if receives are not posted ahead.
        """
        if not self.facts.traits.receives_ahead or len(recvs) < 2:
            return ()
        by_peer: dict[int, list[int]] = {}
        for index, received in enumerate(recvs):
            by_peer.setdefault(received.src, []).append(index)
        groups: list[tuple[int, ...]] = []
        for indices in by_peer.values():
            if shares_message([self.draft.num_bytes(arriving[index]) for index in indices]):
                groups.append(tuple(indices))
            else:
                groups += [(index,) for index in indices]
        return tuple(groups)

    def _packed(self, name: str, item: Item, num_rows: int, *, whole: bool = True) -> View:
        """A new buffer for rows of an item as they travel.

        Args:
            whole: False: a selection of the rows that are here, copied for one message.
        """
        row, heads = self.facts.formats[item[:2]], self.facts.payload.heads(item.side)
        of = item if whole else None
        return self.draft.new(RowBuffer(name, num_rows, row.fields, heads, Home.WORKSPACE, row, of))

    def _leaving(self, transfer: Transfer) -> View:
        item, _, _, rows = transfer
        if item.role is Role.PARTIAL:
            return self._leaving_partial(item, rows)
        if item.role is Role.RESULT:
            return self._leaving_result(item)
        held, wire = self.here.operands[item], self.here.wires.get((item, None))
        if wire is None:
            wire = self._packed(str(item), item, self.draft.num_rows(held.views[-1]))
            self.draft.ops.append(Copy(f"pack {item}", held.views[-1], wire))
            self.here.wires[item, None] = wire
        if rows is None:
            return wire
        ranges = held_ranges(held.rows, rows)
        if len(ranges) == 1:
            return self.draft.rows(wire, ranges[0])
        if (item, rows) not in self.here.wires:
            name, label = f"{item} to send", f"pack {item}{rows_label(rows)}"
            self.here.wires[item, rows] = part = self._packed(
                name, item, count_rows(rows), whole=False
            )
            self._copy_ranges(label, wire, ranges, part)
        return self.here.wires[item, rows]

    def _copy_ranges(
        self, label: str, source: View, ranges: Sequence[tuple[int, int]], target: View
    ) -> None:
        """Copy ranges of rows one after the other."""
        for rows, here in packed_ranges(ranges):
            source_rows, target_rows = self.draft.rows(source, rows), self.draft.rows(target, here)
            self.draft.ops.append(Copy(label, source_rows, target_rows))

    def _leaving_partial(self, item: Item, rows: Rows | None) -> View:
        """Pack a partial into a message; what is added later goes to a new partial."""
        mine = self._made(item)
        del self.here.partials[item]
        num_rows = count(rows, self.draft.num_rows(mine))
        wire, label = self._packed(f"{item} to send", item, num_rows), f"pack {item}"
        label += rows_label(rows)
        if rows is not None and len(rows) > 1 and not self.facts.formats[item[:2]].in_place:
            buffer = self.draft.buffers[mine.buffer]  # numbers of one message are encoded together
            joined = self.draft.new(buffer._replace(name=f"{item} joined", num_rows=num_rows))
            self._copy_ranges(label, mine, rows, joined)
            mine, rows = joined, None
        self._copy_ranges(label, mine, rows or ((0, num_rows),), wire)
        return wire

    def _leaving_result(self, item: Item) -> View:
        """A result as it travels: passed on as it arrived, or a finished partial of this rank."""
        wire = self.here.wires.get((item, None))
        if wire is None:
            mine = self._made(partial(*item[:1], *item[2:]))
            wire = self._packed(str(item), item, self.draft.num_rows(mine))
            self.draft.ops.append(Copy(f"pack {item}", mine, wire))
            self.here.wires[item, None] = wire
            if self.facts.rank in self.facts.plan.owners[item.side][item.shard]:
                self._keep_result(item, wire, f"unpack {item}")
        return wire

    def _keep_result(self, item: Item, wire: View, label: str) -> None:
        self._results[partial(*item[:1], *item[2:])] = self._read(item, wire, label)

    def _read(self, item: Item, wire: View, label: str) -> View:
        """Copy packed rows to tensors that can be read."""
        buffer = self.draft.buffers[wire.buffer]
        fields = [x._replace(wire=None) for x in buffer.fields]
        rows, of = self.draft.num_rows(wire), item if item.role is Role.OPERAND else None
        target = self.draft.apart(str(item), rows, fields, buffer.heads, item=of)
        self.draft.ops.append(Copy(label, wire, target))
        return target

    def _room(self, handle: int, index: int, transfer: Transfer) -> View:
        """Return a buffer into which a transfer is received."""
        item = transfer.item
        num_rows = count(transfer.rows, self._num_rows(item))
        room = self._packed(f"{item} from {transfer.src}", item, num_rows)
        self._arriving[handle, index] = room
        return room

    def _num_rows(self, item: Item) -> int:
        return self.facts.num_rows(item)

    def wait(self, handle: int, indices: tuple[int, ...]) -> None:
        """Let messages arrive; operands can then be read, partials are merged."""
        launch = self._launches[handle]
        transfers = [launch.recvs[index] for index in indices]
        rooms = tuple(self._arriving.pop((handle, index)) for index in indices)
        numbers = tuple(self._numbers[handle, index] for index in indices)
        self.draft.ops.append(Wait(wait_label(transfers), handle, numbers, rooms))
        for transfer, room in zip(transfers, rooms, strict=True):
            item, rows, arrival = transfer.item, transfer.rows, transfer.arrival()
            values = self._read(item, room, f"unpack {arrival}")
            if item.role is Role.PARTIAL:
                total = self._made(item)
                for mine, here in packed_ranges(rows or ((0, self._num_rows(item)),)):
                    ends = self.draft.rows(values, here), self.draft.rows(total, mine)
                    by_lse = not self.facts.payload.backward
                    self.draft.ops.append(Merge(f"merge {arrival}", *ends, by_lse))
                continue
            self.here.wires[item, None] = room
            if item.role is Role.RESULT:
                self._results[partial(*item[:1], *item[2:])] = values
                continue
            saved = self.here.operands[item].views[:1] if item in self._saved else ()
            held = ((0, self._num_rows(item)),) if rows is None else rows
            self.here.operands[item] = Held(held, (*saved, values))

    # Tiles and results

    def _made(self, item: Item) -> View:
        """A partial to be added to; a new one is blank."""
        if item not in self.here.partials:
            fields = self.facts.result_fields(item.side)
            heads = self.facts.payload.heads(item.side)
            made = self.draft.apart(str(item), self._num_rows(item), fields, heads, item=item)
            self.here.partials[item] = made
            values = tuple(blank_value(x.name) for x in fields)
            self.draft.ops.append(Fill(f"fill {item}", made, values))
        return self.here.partials[item]

    def compute(self, tile: Tile) -> None:
        """Write the attention of a tile over the rows of its shards that this rank holds."""
        label = compute_label(tile)
        if self.facts.call.asks:
            item = partial(Side.Q, tile.q[0], tile.heads)
            fields, heads = self.facts.result_fields(Side.Q), self.facts.payload.heads(Side.Q)
            target = self.draft.apart(str(item), self._num_rows(item), fields, heads, Home.MADE)
            self.here.partials[item] = target
            self.draft.ops.append(Ask(label, target))
            return
        operands: list[tuple[Held, ...]] = []
        partials: list[tuple[View, ...]] = []
        for side, shards in zip(Side, (tile.q, tile.kv), strict=True):
            items = [operand(side, shard, tile.heads) for shard in shards]
            for item in items:
                if item in self._unread:
                    self.draft.ops.append(self._unread.pop(item))
            operands.append(tuple(self.here.operands[item] for item in items))
            results = self.facts.payload.results(side)
            homes = (partial(side, shard, tile.heads) for shard in shards) if results else ()
            partials.append(tuple(map(self._made, homes)))
        both = (operands[0], operands[1]), (partials[0], partials[1])
        self.draft.ops.append(AttendTile(label, tile, *both))

    def collect(self, side: Side) -> None:
        """Write this rank's finished partials of a side, over its shards and head groups."""
        facts, draft = self.facts, self.draft
        names = " ".join(name for name, _ in facts.payload.results(side))
        fields = narrow_fields(facts.result_fields(side), facts.payload.dtype)
        rows, heads = facts.num_own_rows(side), facts.own_heads(side)
        results = draft.apart("results", rows, fields, heads, Home.GIVEN)
        one = len(facts.held[side]) == facts.groups.groups == 1
        for shard, at in facts.held[side]:
            sums: dict[int, View] = {}  # by first head
            for group in range(facts.groups.groups):
                item, first = partial(side, shard, group), facts.groups.slice(side, group).start
                value = self._results.get(item) or self._made(item)
                before = sums.setdefault(first, value)
                if before is not value:  # groups may share a KV head, whose gradients sum
                    draft.ops.append(Merge(f"merge {item}", value, before, by_lse=False))
            width = facts.groups.slice(side, 0).stop
            for first, value in sums.items():
                target = draft.rows(results, at)
                if not one:
                    target = draft.heads(target, slice(first, first + width))
                draft.ops.append(Copy(f"collect {names}", value, target))
