"""One rank's program followed with sizes for tensors: which buffers the executor will take, when.

As pass_work.PassWork does it and by the same ledger, so that what is counted is what is taken. It
stands alone because it has to change with PassWork, and what is made of the numbers has not.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from tilewise.compiler.liveness import CALLERS, BufferLifetimes, aligned, lifetimes
from tilewise.compiler.program import Compute, Free, Launch, Program, Wait, arrivals
from tilewise.masks.base import Causal
from tilewise.plan.builder import operand, partial
from tilewise.plan.ir import Item, Role, Rows, Side, Tile, Transfer
from tilewise.plan.payload import ITEM_BYTES, accumulator
from tilewise.plan.row_ranges import count, pieces
from tilewise.simulation.copies import Place, alike
from tilewise.simulation.setting import Setting
from tilewise.simulation.walked_totals import WalkedTotals


class Block(NamedTuple):
    """Rows of an operand, and the buffer that they are packed in (None: they are not)."""

    rows: Rows
    wire: int | None


class Look(NamedTuple):
    """A tile, where its operands lie, and most bytes that it copies.

    Attributes:
        number: of an empty buffer that is taken when its calls run.
    """

    number: int
    tile: Tile
    places: tuple[list[Place], list[Place]]
    most: int


class Walk:
    """A program followed from end to end; see PassWork, which does the same with tensors.

    Attributes:
        bytes: of each buffer, by its number in the ledger.
        kept: bytes of operands that stay from forward to backward.
        looks: tiles that may copy rows.
        own: the rank's shards, by side.
        plain: no tile of one shard a side copies rows.
        zigzagged: see copies.alike.
    """

    def __init__(self, setting: Setting, program: Program):
        self.setting, self.program, self.payload = setting, program, setting.payload
        self._sizes = [layout.sizes for layout in setting.table.layouts]
        self.ledger = BufferLifetimes()
        self.bytes: list[int] = []
        self.kept = 0
        self.operands: dict[Item, Block] = {}
        self.results: dict[Item, int] = {}
        self.arena_of: dict[Item, tuple[int, int]] = {}  # which, and first row in it
        self.totals = WalkedTotals(self.take, self.widths, self._sizes)
        ends = lifetimes(program)
        self.sends, self.with_free = dict(ends.sends), ends.with_free
        self.looks: list[Look] = []
        self.own = [
            [shard for shard, ranks in enumerate(owners) if program.rank in ranks]
            for owners in setting.plan.owners
        ]
        self.value = ITEM_BYTES(accumulator(self.payload.dtype))
        parts = [(side, role) for side in Side for role in Role]
        self.row_bytes = {part: self.payload.row_bytes(Item(*part, 0)) for part in parts}
        self.members: dict[Item, int] = {}  # buffers that lie in arenas
        whole = self.payload._replace(saved=False)
        self.read_bytes = [whole.row_bytes(operand(side, 0)) for side in Side]
        self.zigzagged = None if setting.everything else alike(setting.table)
        runs = max(len(runs) for layout in setting.table.layouts for runs in layout.runs)
        self.plain = setting.everything or (setting.table.mask == Causal() and runs <= 2)

    def size(self, item: Item) -> int:
        return self._sizes[item.side][item.shard]

    def take(self, *sizes: int) -> int:
        self.bytes += map(aligned, sizes)
        return self.ledger.take(len(sizes))

    def widths(self, side: Side) -> list[int]:
        """Bytes of a row of each tensor of a partial in memory."""
        heads = self.payload.heads(side) * self.value
        return [heads * field.width for field in self.payload.fields(side, Role.PARTIAL)]

    def find(self, before: Program) -> None:
        """Operands that a forward pass of this program kept."""
        payload = self.setting.forward
        assert payload is not None
        came = {item: rows or self._whole(item) for item, rows in arrivals(before).items()}
        self.operands = {item: Block(rows, CALLERS) for item, rows in came.items()}
        for number, items in enumerate(before.arenas):  # numbered below 0: not this pass's
            if payload.in_place(items[0]) and any(item in came for item in items):
                self.kept += self._placed(-1 - number, items, came) * payload.row_bytes(items[0])
        alone = came.keys() - self.arena_of.keys()
        self.kept += sum(count(came[item], 0) * payload.row_bytes(item) for item in alone)

    def start(self) -> None:
        """What a pass takes before its first instruction."""
        if self.payload.backward:
            heads = self.setting.table.groups.num_heads * self.value
            rows = sum(self._sizes[Side.Q][shard] for shard in self.own[Side.Q])
            product = self.take(rows * heads * self.payload.head_dim)
            self.take(rows * heads)  # delta
            self.ledger.give(product)
        for item in self._own(Role.OPERAND):
            wire = CALLERS if item in self.arena_of else None
            self.operands[item] = Block(self._whole(item), wire)
        came = {item: rows or self._whole(item) for item, rows in arrivals(self.program).items()}
        for number, items in enumerate(self.program.arenas):
            if self.payload.in_place(items[0]):
                self._placed(number, items, came)
                self._arena(items, came)
        arenas: dict[int, list[Item]] = {}
        for item, (number, _) in self.arena_of.items():
            arenas.setdefault(number, []).append(item)
        for items in arenas.values():
            self.totals.lie_as(items)

    def _arena(self, items: Sequence[Item], came: Mapping[Item, Rows]) -> None:
        row_bytes = self.row_bytes[items[0].side, items[0].role]
        sizes = [count(came.get(item, self._whole(item)), 0) * row_bytes for item in items]
        if self.setting.keeps:
            self.kept += sum(sizes)
            numbers = [CALLERS] * len(items)
        elif row_bytes:
            first = self.take(*sizes)
            numbers = range(first, first + len(items))
        else:
            return
        for item, number in zip(items, numbers, strict=True):
            self.members[item] = number
            if item in self.operands and item not in came:
                self.operands[item] = self.operands[item]._replace(wire=number)

    def _placed(self, number: int, items: Sequence[Item], came: Mapping[Item, Rows]) -> int:
        """Lay operands side by side; their rows."""
        start = 0
        for item in items:
            self.arena_of[item] = number, start
            start += count(came.get(item, self._whole(item)), 0)
        return start

    def _whole(self, item: Item) -> Rows:
        return ((0, self.size(item)),)

    def follow(self) -> None:
        """The instructions, and what is taken at the end."""
        launched: dict[int, tuple[tuple[Transfer, ...], list[int]]] = {}
        for instruction in self.program.instructions:
            match instruction:
                case Compute(tile):
                    self._run(tile)
                case Launch(handle, _, lane, sends, recvs):
                    launched[handle] = recvs, [self._room(hop) for hop in recvs]
                    for hop in sends:
                        self._depart(hop)
                    self.ledger.launched(handle, lane)
                case Wait(handle, indices):
                    recvs, rooms = launched[handle]
                    for index in indices:
                        self._arrive(recvs[index], rooms[index])
                    self.ledger.left(handle)
                case Free(item):
                    if not self.setting.keeps:
                        self._give(self.operands.pop(item).wire)
                        for own in self.with_free.get(item, ()):
                            self._give(self.operands[own].wire)
        for item in self._own(Role.PARTIAL):
            if item._replace(role=Role.RESULT) not in self.results:
                self.totals.of(item)

    def _own(self, role: Role) -> Iterator[Item]:
        """What the rank holds from the start, or is to hold in the end."""
        for side in Side:
            for shard in self.own[side]:
                for group in range(self.setting.table.groups.groups):
                    yield Item(side, role, shard, group)

    def _give(self, number: int | None) -> None:
        if number not in (None, CALLERS):
            self.ledger.give(number)

    def _sent(self, number: int, num_bytes: int) -> None:
        if num_bytes:
            self.ledger.sent(number)

    def _room(self, hop: Transfer) -> int:
        item, num_bytes = hop.item, self._bytes(hop)
        if item in self.members:
            return self.members[item]
        if item.role is Role.OPERAND and self.setting.keeps:
            self.kept += num_bytes
            return CALLERS
        return self.take(num_bytes)

    def _bytes(self, hop: Transfer) -> int:
        item = hop.item
        return count(hop.rows, self.size(item)) * self.row_bytes[item.side, item.role]

    def _arrive(self, hop: Transfer, wire: int) -> None:
        item = hop.item
        if item.role is Role.OPERAND:
            self.operands[item] = Block(hop.rows or self._whole(item), wire)
        elif item.role is Role.PARTIAL:
            self.totals.of(item)
            self._give(wire)
        else:
            self.results[item] = wire

    def _depart(self, hop: Transfer) -> None:
        item, num_bytes = hop.item, self._bytes(hop)
        if item.role is Role.OPERAND:
            self._depart_operand(hop, num_bytes)
        elif item.role is Role.RESULT:
            if item not in self.results:
                self.totals.of(item._replace(role=Role.PARTIAL))
                self.results[item] = self.take(num_bytes)
            self._sent(self.results[item], num_bytes)
        else:
            self._depart_partial(hop, num_bytes)

    def _depart_partial(self, hop: Transfer, num_bytes: int) -> None:
        item, numbers = hop.item, self.totals.of(hop.item)
        self.totals.leave(item)
        copied = numbers
        if pieces(self._whole(item), hop.rows) > 1:
            rows = count(hop.rows, 0)
            copied = tuple(self.take(rows * width) for width in self.widths(item.side))
        dtypes = [field.dtype for field in self.payload.fields(item.side, item.role)]
        as_it_is = dtypes == [accumulator(self.payload.dtype)]
        wire = copied[0] if as_it_is else self.take(num_bytes)
        self._sent(wire, num_bytes)
        for number in {*numbers, *copied, wire}:
            self.ledger.give(number)

    def _depart_operand(self, hop: Transfer, num_bytes: int) -> None:
        item, block = hop.item, self.operands[hop.item]
        if block.wire is None:
            if self._is_packed(item):
                block = block._replace(wire=CALLERS)
            else:
                row_bytes = self.row_bytes[item.side, item.role]
                block = block._replace(wire=self.take(self.size(item) * row_bytes))
            self.operands[item] = block
        wire = block.wire
        assert wire is not None
        if pieces(block.rows, hop.rows) > 1:
            part = self.take(num_bytes)
            self._sent(part, num_bytes)
            self.ledger.give(part)
        else:
            self._sent(wire, num_bytes)
        if item in self.sends:
            self.sends[item] -= 1
            if not self.sends[item] and item not in self.arena_of:
                self._give(wire)

    def _is_packed(self, item: Item) -> bool:
        """Whether an own operand lies in memory as it travels: one tensor, of all heads."""
        fields = self.payload.fields(item.side, item.role)
        return len(fields) == 1 and self.setting.table.groups.groups == 1

    def _run(self, tile: Tile) -> None:
        places: tuple[list[Place], list[Place]] = ([], [])
        for side in Side:
            for shard in (tile.q, tile.kv)[side]:
                if self.widths(side):
                    self.totals.of(partial(side, shard, tile.heads))
        if self.plain and len(tile.q) == len(tile.kv) == 1:
            return
        most = 0
        for side in Side:
            places[side].extend(self._places(side, tile))
            rows = sum(count(place.rows, 0) for place in places[side])
            most += rows * (self.read_bytes[side] + sum(self.widths(side)))
        self.looks.append(Look(self.take(0), tile, places, most))

    def _places(self, side: Side, tile: Tile) -> Iterator[Place]:
        items = [operand(side, shard, tile.heads) for shard in (tile.q, tile.kv)[side]]
        arena = self.arena_of.get(items[0], (None,))[0]
        for item in items:
            number, start = self.arena_of.get(item, (None, None))
            total = self.totals.starts.get(item._replace(role=Role.PARTIAL))
            rows = self.operands[item].rows
            yield Place(rows, start if number == arena else None, total)
