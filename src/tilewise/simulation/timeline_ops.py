"""Programs with prices: what the replay runs. Messages become flows, tiles seconds.

Compiling knows plans and payloads; the replay after it only flows and seconds. Ranks whose programs
are one program relabelled are priced together, and the bytes of a message are a list by rank: under
a causal mask some of them send fewer rows than others.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple, TypeVar

import numpy as np

from tilewise.compiler.program import Compute, Free, Launch, Program, Wait
from tilewise.plan.ir import Item, Plan, Role, Side, Tile, Transfer
from tilewise.plan.shifts import absolutes, relative
from tilewise.simulation.costs import PassCosts
from tilewise.simulation.network import Network
from tilewise.simulation.zigzag_causal import Halves

Number = TypeVar("Number", int, float)

LOST = -1
"""The flow of a message that nobody sends."""


class Flow(NamedTuple):
    """Equal messages that leave a rank at once by one route, to one peer each.

    What one launch sends to one peer of one side and role is one message.
    """

    rank: int
    route: int
    link: str
    seconds: float  # that each takes alone
    num_bytes: int  # of each
    messages: int
    latency: float
    after: int  # the flow before it to the same peers, which is through first; LOST: none
    name: str


class KernelOp(NamedTuple):
    """Run a kernel; route is that of shared cores, if any."""

    seconds: float
    route: int | None
    tile: Tile


class HostOp(NamedTuple):
    """A rank's own time for messages: packing, posting, merging; and around the whole pass."""

    seconds: float
    route: int | None
    name: str


class SendOp(NamedTuple):
    """Let flows leave."""

    flows: tuple[int, ...]


class WaitOp(NamedTuple):
    """Wait for flows; hops name what is awaited."""

    flows: tuple[int, ...]
    hops: tuple[tuple[int, Transfer], ...]


Op = KernelOp | HostOp | SendOp | WaitOp


class RankOps(NamedTuple):
    """One rank's program, priced."""

    rank: int
    ops: tuple[Op, ...]


class PricedPrograms(NamedTuple):
    """All tracks and flows of a pass."""

    tracks: tuple[RankOps, ...]
    flows: tuple[Flow, ...]


def compile_tracks(
    plan: Plan,
    programs: Mapping[int, Program],
    costs: PassCosts,
    network: Network,
    halves: Halves | None = None,
) -> PricedPrograms:
    """Price the programs of one rank per class of ranks that are alike.

    Args:
        plan: whose programs they are.
        programs: by rank; of those that others' are relabelled from.
        halves: which rows of each transfer travel, by rank; None: those that the programs name.
    """
    symmetry = network.symmetry
    classes: dict[int, list[int]] = {}
    for rank in symmetry.firsts():
        classes.setdefault(symmetry.written(rank), []).append(rank)
    flows, known = [], {}
    writers = [
        _PriceWriter(programs[written], ranks, (costs, network, halves), (flows, known))
        for written, ranks in classes.items()
    ]
    for writer in writers:
        writer.write(costs.call_seconds(plan, writer.program.rank))
    tracks = sorted(track for writer in writers for track in writer.tracks())
    return PricedPrograms(tuple(tracks), tuple(flows))


Address = tuple[int, int, int, Side, Role]
"""A message: step, the rank that stands for its sender, receiver as seen by that, side, role."""


class _Message(NamedTuple):
    """What one launch sends to, or awaits from, one peer, of one side and role.

    Attributes:
        peer, shard, num_bytes: by rank of the class; the first shard.
    """

    part: tuple[Side, Role]  # side and role
    heads: int  # of the first item
    peer: list[int]
    shard: list[int]
    num_bytes: list[int]
    items: list[tuple[Item, list[int]]]  # with their bytes, by rank of the class

    def first(self, index: int) -> Item:
        """As one rank of the class calls it."""
        return Item(*self.part, self.shard[index], self.heads)


class _PriceWriter:
    """Prices one program for all ranks of a class, whose programs are this one relabelled.

    What differs between them are lists, in the order of the ranks.

    Args:
        ranks: of the class.
        world: what prices depend on.
        sent: where flows go, and their numbers by address.
    """

    def __init__(
        self,
        program: Program,
        ranks: list[int],
        world: tuple[PassCosts, Network, Halves | None],
        sent: tuple[list[Flow], dict[Address, int]],
    ):
        self.program, self.ranks = program, ranks
        self.costs, self.network, self.halves = world
        self._flows, self._known = sent
        self._members = np.array(ranks)
        self._own = ranks == [program.rank]
        self._computing = [self.network.compute(rank) for rank in ranks]
        self._ops: list[list[Op]] = [[] for _ in ranks]
        self._sent: list[list[int]] = [[] for _ in ranks]
        self._last: list[dict[int, int]] = [{} for _ in ranks]  # the last flow to each peer
        self._labelled: dict[int, list[int]] = {}
        self._partials: set[Item] = set()
        self._received: set[Item] = set()
        self._packed: set[Item] = set()
        self._encoded: set[Item] = set()
        self._awaited: set[tuple[int, int, Side, Role]] = set()

    def write(self, call_seconds: float) -> None:
        self._busy("call", self._each(call_seconds))
        launched: dict[int, Launch] = {}
        for instruction in self.program.instructions:
            match instruction:
                case Compute(tile):
                    self._run(tile)
                case Launch(handle):
                    launched[handle] = instruction
                    self._depart(instruction)
                case Wait(handle, arrivals):
                    launch = launched[handle]
                    self._await(launch.step, [launch.recvs[index] for index in arrivals])
                case Free(item):
                    if not self.costs.payload.saved:
                        self._received.discard(item)
        self._write([WaitOp(tuple(sent), ()) for sent in self._sent])

    def tracks(self) -> Iterator[RankOps]:
        """When all programs are written, and so all flows known."""
        for rank, ops in zip(self.ranks, self._ops, strict=True):
            yield RankOps(rank, tuple(map(self._resolved, ops)))

    def _resolved(self, op: Op) -> Op:
        if not isinstance(op, WaitOp) or not op.hops:
            return op
        addresses = (self._address(step, hop.src, hop.dst, *hop.item[:2]) for step, hop in op.hops)
        return op._replace(flows=tuple(self._known.get(address, LOST) for address in addresses))

    def _write(self, column: Iterable[Op]) -> None:
        """An operation of every rank."""
        for ops, op in zip(self._ops, column, strict=True):
            ops.append(op)

    def _each(self, value: Number) -> list[Number]:
        """What is the same for every rank."""
        return [value] * len(self.ranks)

    def _busy(self, name: str, seconds: list[float]) -> None:
        if any(seconds):
            each = zip(seconds, self._computing, strict=True)
            self._write(HostOp(x, route, name) for x, route in each)

    def _labels(self, number: int) -> list[int]:
        """A rank or shard of the program, as each rank calls it."""
        if self._own:
            return [number]
        if number not in self._labelled:
            shifts = self.network.symmetry.plan_shifts
            self._labelled[number] = absolutes(number, self._members, shifts).tolist()
        return self._labelled[number]

    def _address(self, step: int, src: int, dst: int, side: Side, role: Role) -> Address:
        symmetry = self.network.symmetry
        if symmetry.shifts:
            src, dst = symmetry.first(src), relative(dst, src, symmetry.shifts)
        return step, src, dst, side, role

    def _rows_priced(
        self, step: int, hop: Transfer, price: Callable[[Transfer], Number]
    ) -> list[Number]:
        """The price of a transfer by the rows that travel."""
        whole = price(hop)
        if self.halves is None:
            return self._each(whole)
        half = price(hop._replace(rows=self.halves.half[hop.item.side]))
        wholes = self.halves.whole(step, hop, self._members).tolist()
        return [whole if all_rows else half for all_rows in wholes]

    def _run(self, tile: Tile) -> None:
        parts = (
            Item(side, Role.PARTIAL, shard, tile.heads)
            for side, shards in zip(Side, tile[:2], strict=True)
            for shard in shards
        )
        merging = sum(self.costs.merge_seconds(item) for item in parts if self._adds(item))
        seconds = self.costs.tile_seconds(tile)
        each = zip(self._tiles(tile), self._computing, strict=True)
        self._write(KernelOp(seconds, route, own) for own, route in each)
        self._busy("merge", self._each(merging if seconds else 0.0))

    def _tiles(self, tile: Tile) -> Iterable[Tile]:
        if self._own:
            return [tile]
        q, kv = (zip(*map(self._labels, shards), strict=True) for shards in tile[:2])
        return (Tile(*sides, tile.heads) for sides in zip(q, kv, strict=True))

    def _adds(self, item: Item) -> bool:
        """Whether there is a partial to add to, of any bytes; from now on there is."""
        there = item in self._partials
        self._partials.add(item)
        return there and self.costs.partial_bytes(item) > 0

    def _messages(self, step: int, hops: Sequence[Transfer], by: str) -> list[_Message]:
        """Transfers joined by peer, side and role; by: the field that names the peer."""
        joined: dict[tuple[int, tuple[Side, Role]], list[Transfer]] = {}
        for hop in hops:
            joined.setdefault((getattr(hop, by), hop.item[:2]), []).append(hop)
        messages = []
        for (peer, part), hops in joined.items():
            sizes = [self._rows_priced(step, hop, self.costs.message_bytes) for hop in hops]
            total = _by_rank(sum, sizes)
            if any(total):
                items = [hop.item for hop in hops]
                first = _by_rank(min, [self._labels(item.shard) for item in items])
                named = part, items[0].heads, self._labels(peer), first
                sized = [*zip(items, sizes, strict=True)]
                messages.append(_Message(*named, total, sized))
        return messages

    def _depart(self, launch: Launch) -> None:
        self._received |= {hop.item for hop in launch.recvs if hop.item.role is Role.OPERAND}
        messages = self._messages(launch.step, launch.sends, "dst")
        self._busy("pack", [*map(self.costs.pack_seconds, self._copied(messages))])
        fresh = [hop for hop in launch.sends if self._encodes(hop.item)]
        self._encode("encode", launch.step, fresh)
        for index, sent in enumerate(self._sent):
            first = len(self._flows)
            self._send(index, launch.step, messages)
            flows = tuple(range(first, len(self._flows)))
            self._ops[index].append(SendOp(flows))
            sent += flows
        number = len(launch.sends) + len(launch.recvs)
        self._busy("post", self._each(self.costs.machine.message_seconds * number))

    def _encodes(self, item: Item) -> bool:
        """Whether an item is encoded now: a partial, or an own operand that never left before."""
        if item.role is Role.PARTIAL:
            return True
        new = item not in self._received and item not in self._encoded
        self._encoded.add(item)
        return new

    def _encode(self, name: str, step: int, hops: Sequence[Transfer]) -> None:
        sizes = [self._rows_priced(step, hop, self.costs.encoded_bytes) for hop in hops]
        if any(map(any, sizes)):
            self._busy(name, [*map(self.costs.pack_seconds, _by_rank(sum, sizes))])

    def _copied(self, messages: list[_Message]) -> list[int]:
        """Bytes packed for a launch: partials, and once own operands of several tensors."""
        copied: list[list[int]] = []
        own: dict[Item, list[tuple[_Message, list[int]]]] = {}
        for message in messages:
            for item, size in message.items:
                if item.role is Role.PARTIAL:
                    self._partials.discard(item)
                    copied.append(size)
                elif item.role is Role.OPERAND and item.side in self.costs.packed:
                    own.setdefault(item, []).append((message, size))
        for item in own.keys() - self._received - self._packed:
            self._packed.add(item)
            copied.append(
                [
                    min((m.shard[i], m.peer[i], s[i]) for m, s in own[item])[2]
                    for i in range(len(self.ranks))
                ]
            )
        return _by_rank(sum, copied)

    def _send(self, index: int, step: int, messages: list[_Message]) -> None:
        """A rank's flows: equal messages by one route after the same flow are one."""
        rank, last, first = self.ranks[index], self._last[index], len(self._flows)
        if len(self.ranks) > 1:
            messages = sorted(messages, key=lambda m: (m.part, m.shard[index], m.peer[index]))
        groups: dict[tuple[int, int, int], list[_Message]] = {}
        numbers: dict[tuple[int, int, int], int] = {}
        for message in messages:
            dst = message.peer[index]
            route = self.network.message(rank, dst)
            group = route, message.num_bytes[index], last.get(dst, LOST)
            groups.setdefault(group, []).append(message)
            last[dst] = numbers.setdefault(group, first + len(numbers))
            self._known[self._address(step, rank, dst, *message.part)] = last[dst]
        for (route, size, after), equal in groups.items():
            dst, hops = equal[0].peer[index], sum(len(message.items) for message in equal)
            link = self.network.link(rank, dst)
            seconds = size / self.network.bandwidth(link) + self.costs.machine.carry_seconds
            name = f"{equal[0].first(index)} to {dst}" + f" and {hops - 1} more" * (hops > 1)
            latency = self.network.latency(link)
            self._flows.append(
                Flow(rank, route, link, seconds, size, len(equal), latency, after, name)
            )

    def _await(self, step: int, hops: list[Transfer]) -> None:
        late = [hop for hop in hops if (step, hop.src, *hop.item[:2]) not in self._awaited]
        self._awaited |= {(step, hop.src, *hop.item[:2]) for hop in late}
        messages = self._messages(step, late, "src")
        if messages:
            self._write(
                WaitOp((), tuple((step, Transfer(m.first(i), m.peer[i], rank)) for m in messages))
                for i, rank in enumerate(self.ranks)
            )
        self._encode("decode", step, hops)
        merging = [
            self._rows_priced(step, hop, lambda hop: self.costs.merge_seconds(hop.item, hop.rows))
            for hop in hops
            if hop.item.role is not Role.OPERAND
            and self._adds(hop.item._replace(role=Role.PARTIAL))
        ]
        self._busy("merge", _by_rank(sum, merging))


def _by_rank(
    join: Callable[[Iterable[Number]], Number], columns: list[list[Number]]
) -> list[Number]:
    """Join lists of values by rank to one; none: an empty one."""
    return columns[0] if len(columns) == 1 else [join(row) for row in zip(*columns, strict=True)]
