"""The program of one rank's pass, in order, and the operations of that.

A program names in four kinds of instruction what is launched, awaited and computed. Its operations
also say what is copied, encoded and merged for that. The simulator prices them, and code generation
gives them buffers, so that what is timed is what runs; neither needs to know the strategy. The text
of an operation is its label in a listing of the code, in a profile and in a simulated trace.
"""

from collections.abc import Iterable, Iterator
from typing import NamedTuple, TypeAlias

from tilewise.plan.ir import Item, Role, Rows, Side, Tile, Transfer, rows_label
from tilewise.plan.payload import Payload
from tilewise.plan.row_ranges import Ranges

LAUNCHES_IN_FLIGHT = 1
"""Launches of a lane whose sends are left to themselves.

By lane, since a slow link's sends last for many launches of a fast one.
"""


class Team(NamedTuple):
    """Ranks that all launch an exchange together, and the sides and roles that travel."""

    ranks: range
    parts: tuple[tuple[Side, Role], ...]


class Launch(NamedTuple):
    """Start sends and receives, in this order on both ends of every pair.

    A partial leaves its place at once; an operand's or result's buffer stays in use until sent.
    step is the plan's, for messages. team: who all launch this together, and exchange with nobody
    else; None: whoever has something to send or receive.
    """

    handle: int
    step: int
    lane: int
    sends: tuple[Transfer, ...]
    recvs: tuple[Transfer, ...]
    team: Team | None = None

    def __str__(self) -> str:
        return _launch_label(self.sends, self.recvs)


class Wait(NamedTuple):
    """Let these receives of a launch arrive (by their place in recvs)."""

    handle: int
    arrivals: tuple[int, ...]


class Compute(NamedTuple):
    """Compute a tile into this rank's partials."""

    tile: Tile

    def __str__(self) -> str:
        return compute_label(self.tile)


class Free(NamedTuple):
    """A received operand is not needed any more."""

    item: Item

    def __str__(self) -> str:
        return f"free {self.item}"


Instruction = Launch | Wait | Compute | Free


class Program(NamedTuple):
    """One rank's instructions; str() prints their labels, one a line.

    arenas: received and own operands that tiles read together, all of which arrive before the first
    is freed, so that their rows can lie side by side in one buffer, in this order.
    """

    rank: int
    world_size: int
    instructions: tuple[Instruction, ...]
    arenas: tuple[tuple[Item, ...], ...]

    def __str__(self) -> str:
        return "\n".join(self.labels())

    def labels(self) -> Iterator[str]:
        """Yield the label of each instruction: "launch kv0>2 kv1<1", "wait kv1<1", "compute q0 x
        kv1".
        """
        launched: dict[int, tuple[Transfer, ...]] = {}
        for instruction in self.instructions:
            if isinstance(instruction, Wait):
                recvs = launched[instruction.handle]
                yield wait_label([recvs[index] for index in instruction.arrivals])
                continue
            if isinstance(instruction, Launch):
                launched[instruction.handle] = instruction.recvs
            yield str(instruction)


def wait_label(transfers: Iterable[Transfer]) -> str:
    return " ".join(["wait", *(transfer.arrival() for transfer in transfers)])


def compute_label(tile: Tile) -> str:
    q, kv = _shards("q", tile.q), _shards("kv", tile.kv)
    group = f", head group {tile.heads}" if tile.heads else ""
    return f"compute {q} x {kv}{group}"


def _launch_label(sends: Iterable[Transfer], recvs: Iterable[Transfer]) -> str:
    return " ".join(["launch", *map(str, sends), *(transfer.arrival() for transfer in recvs)])


def _shards(prefix: str, shards: tuple[int, ...]) -> str:
    if len(shards) > 3:
        return f"{prefix}{shards[0]}..{shards[-1]} ({len(shards)})"
    return " ".join(f"{prefix}{shard}" for shard in shards)


def arrivals(program: Program) -> dict[Item, Rows | None]:
    """The operands that a program receives, and which of their rows."""
    return {
        transfer.item: transfer.rows
        for instruction in program.instructions
        if isinstance(instruction, Launch)
        for transfer in instruction.recvs
        if transfer.item.role is Role.OPERAND
    }


class Delta(NamedTuple):
    """Compute delta = rowsum(out * dout) - dlse of this rank's queries."""

    name: str = "delta"

    def __str__(self) -> str:
        return self.name


class Join(NamedTuple):
    """Copy an operand of this rank to its place beside those that tiles read with it."""

    item: Item

    def __str__(self) -> str:
        return f"join {self.item}"


class Pack(NamedTuple):
    """Copy, and encode where a wire says so, rows of an item into bytes that can be sent.

    Attributes:
        rows: rows of the shard; None: all that are here.
        encodes: whether numbers are written in a wire's format.
        filled: False: the item is a partial that nothing was added to, and is blank.
    """

    item: Item
    rows: Rows | None = None
    encodes: bool = False
    filled: bool = True

    def __str__(self) -> str:
        verb = "encode" if self.encodes else "pack"
        return f"{verb} {self.item}{rows_label(self.rows)}"


class PackHeads(NamedTuple):
    """Copy tensors into one buffer for all ranks, each head where its rank is to find it."""

    role: Role
    names: tuple[str, ...]

    def __str__(self) -> str:
        return f"pack heads of {' '.join(self.names)}"


class Await(NamedTuple):
    """Let these receives of a launch arrive.

    Attributes:
        left: partials among them that are the first of all their rows, and are left where they
            arrive.
    """

    handle: int
    step: int
    recvs: tuple[Transfer, ...]
    indices: tuple[int, ...]
    left: tuple[Transfer, ...] = ()

    def __str__(self) -> str:
        return wait_label(self.recvs)


class Unpack(NamedTuple):
    """Copy, and decode, what has arrived into tensors that can be read."""

    transfer: Transfer
    decodes: bool

    def __str__(self) -> str:
        return f"{'decode' if self.decodes else 'unpack'} {self.transfer.arrival()}"


class MergeArrived(NamedTuple):
    """Add a partial that has arrived to what is here of it.

    Attributes:
        adds: False: nothing is here yet, and it is only copied.
    """

    transfer: Transfer
    adds: bool

    def __str__(self) -> str:
        return f"merge {self.transfer.arrival()}"


class AttendTile(NamedTuple):
    """Compute a tile into this rank's partials, with what its kernel calls copy and merge.

    Attributes:
        adds: the partials that something was added to before.
    """

    tile: Tile
    adds: tuple[Item, ...]

    def __str__(self) -> str:
        return compute_label(self.tile)


class Collect(NamedTuple):
    """Copy the finished partials of a side to the tensors that the pass returns."""

    side: Side
    names: tuple[str, ...]

    def __str__(self) -> str:
        return f"collect {' '.join(self.names)}"


Operation: TypeAlias = (
    Delta | Join | Pack | PackHeads | Launch | Await | Unpack | MergeArrived | AttendTile | Collect
)


def operations(
    program: Program, payload: Payload, *, packs_alone: bool, by_head: bool = False
) -> Iterator[Operation]:
    """The operations of a program, in order.

    Args:
        payload: of the pass that the program was lowered for.
        packs_alone: operands of one tensor are packed too, because their rows do not lie side by
            side in the caller's tensor: there are several head groups, or a batch.
        by_head: the launches of teams exchange all heads by one buffer each way.
    """
    writer = _Writer(program, payload, packs_alone)
    if payload.backward:
        yield Delta()
    if not by_head:
        yield from writer.joins()
    for instruction in program.instructions:
        match instruction:
            case Launch():
                if by_head:
                    yield writer.pack_heads(instruction)
                else:
                    yield from writer.packs(instruction)
                yield instruction
            case Wait(handle, indices):
                yield from writer.wait(handle, indices, by_head)
            case Compute(tile):
                yield writer.attend(tile)
            case Free():  # placement reads from the ops when a buffer is used again
                pass
    for side in Side:
        names = tuple(name for name, _ in payload.results(side))
        if names:
            yield Collect(side, names)


class _Writer:
    def __init__(self, program: Program, payload: Payload, packs_alone: bool):
        self._program, self._payload, self._packs_alone = program, payload, packs_alone
        self._formats = {
            (side, role): payload.row_format(side, role) for side in Side for role in Role
        }
        self._received = arrivals(program)
        self._launched: dict[int, Launch] = {}
        self._packed: set[Item] = set()
        self._partials: set[Item] = set()
        self._arenas = made_arenas(program, payload)
        self._joined = {item for arena in self._arenas for item in arena}

    def joins(self) -> Iterator[Operation]:
        for arena in self._arenas:
            for item in arena:
                if item not in self._received and self._formats[item[:2]].fields:
                    self._packed.add(item)
                    yield Join(item)

    def pack_heads(self, launch: Launch) -> Operation:
        """The one operation before a launch of heads: all launches of the program are such."""
        self._launched[launch.handle] = launch
        first = (launch.sends or launch.recvs)[0].item.role
        names = [field.name for side in Side for field in self._formats[side, first].fields]
        return PackHeads(first, tuple(names))

    def packs(self, launch: Launch) -> Iterator[Operation]:
        self._launched[launch.handle] = launch
        for transfer in launch.sends:
            item, _, _, rows = transfer
            encodes = self._encodes(item)
            if item.role is Role.PARTIAL:
                yield Pack(item, rows, encodes, item in self._partials)
                self._partials.discard(item)
            elif item.role is Role.RESULT:
                if item not in self._packed:
                    self._packed.add(item)
                    yield Pack(item, None, encodes)
            else:
                if self._needs_packing(item):
                    self._packed.add(item)
                    yield Pack(item, None, encodes)
                if rows is not None and len(held_ranges(self._received.get(item), rows)) > 1:
                    yield Pack(item, rows)

    def _needs_packing(self, item: Item) -> bool:
        if item in self._received or item in self._packed:
            return False
        several = len(self._formats[item[:2]].fields) > 1
        return self._packs_alone or several or self._encodes(item)

    def _encodes(self, item: Item) -> bool:
        """Return whether a wire encodes any of an item's tensors."""
        return any(field.wire is not None for field in self._formats[item[:2]].fields)

    def wait(self, handle: int, indices: tuple[int, ...], by_head: bool) -> Iterator[Operation]:
        launch = self._launched[handle]
        transfers = tuple(launch.recvs[index] for index in indices)
        if by_head:
            yield Await(handle, launch.step, transfers, indices)
            return
        left: list[Transfer] = []
        after: list[Operation] = []
        for transfer in transfers:
            row = self._formats[transfer.item[:2]]
            encodes = self._encodes(transfer.item)
            if not row.in_place and transfer.item.role is not Role.RESULT:
                after.append(Unpack(transfer, encodes))
            if transfer.item.role is Role.RESULT:  # passed on as it arrived
                self._packed.add(transfer.item)
            if transfer.item.role is Role.PARTIAL:
                merge = self._merge(transfer, encodes)
                if merge is None:
                    left.append(transfer)
                else:
                    after.append(merge)
        yield Await(handle, launch.step, transfers, indices, tuple(left))
        yield from after

    def _merge(self, transfer: Transfer, encodes: bool) -> MergeArrived | None:
        """None: the partial is the first of all its rows, and left where it arrived."""
        item, adds = transfer.item, transfer.item in self._partials
        self._partials.add(item)
        kept = self._payload.partial_dtype
        fields = self._formats[item[:2]].fields
        converts = not encodes and any(field.dtype != kept for field in fields)
        in_arena = item._replace(role=Role.OPERAND) in self._joined
        moves = adds or converts or in_arena or transfer.rows is not None
        return MergeArrived(transfer, adds) if moves else None

    def attend(self, tile: Tile) -> Operation:
        partials = [
            Item(side, Role.PARTIAL, shard, tile.heads)
            for side, shards in zip(Side, tile[:2], strict=True)
            if self._formats[side, Role.PARTIAL].fields
            for shard in shards
        ]
        adds = tuple(item for item in partials if item in self._partials)
        self._partials.update(partials)
        return AttendTile(tile, adds)


def made_arenas(program: Program, payload: Payload) -> tuple[tuple[Item, ...], ...]:
    """The program's arenas whose operands can be used where they lie, in this pass and forward."""
    forward = payload._replace(backward=False, saved=False)
    usable = {
        side
        for side in Side
        if payload.row_format(side, Role.OPERAND).in_place
        and not (payload.saved and not forward.row_format(side, Role.OPERAND).in_place)
    }
    return tuple(arena for arena in program.arenas if arena[0].side in usable)


def held_ranges(held: Rows | None, wanted: Rows) -> Ranges:
    """Rows of a buffer that are the wanted rows of a shard; the buffer has its held rows in turn.

    Args:
        held: None: all of the shard's rows. Both ascend.
    """
    if held is None:
        return _joined_ranges(wanted)
    found: list[tuple[int, int]] = []
    offset = at = 0  # at: of the first wanted range that ends after this held one starts
    for start, stop in held:
        while at < len(wanted) and wanted[at][1] <= start:
            at += 1
        place = at
        while place < len(wanted) and wanted[place][0] < stop:
            first, last = max(wanted[place][0], start), min(wanted[place][1], stop)
            found.append((offset + first - start, offset + last - start))
            place += 1
        offset += stop - start
    return _joined_ranges(found)


def _joined_ranges(ranges: Iterable[tuple[int, int]]) -> Ranges:
    """Ranges in order, neighbours as one."""
    joined: list[tuple[int, int]] = []
    for start, stop in ranges:
        if joined and joined[-1][1] == start:
            joined[-1] = joined[-1][0], stop
        else:
            joined.append((start, stop))
    return tuple(joined)
