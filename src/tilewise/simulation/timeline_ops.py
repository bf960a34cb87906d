"""Programs with prices: what the replay runs. Messages become flows, tiles seconds.

Compiling knows plans and payloads; the replay after it only flows and seconds.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from typing import NamedTuple

from tilewise.compiler.program import Collective, Compute, Free, Launch, Program, Wait
from tilewise.plan.ir import Item, Plan, Role, Rows, Side, Tile, Transfer
from tilewise.plan.shifts import absolute, relative
from tilewise.simulation.costs import PassCosts
from tilewise.simulation.network import Network

LOST = -1
"""The flow of a message that nobody sends."""


class Flow(NamedTuple):
    """Equal messages that leave a rank at once by one route, to one peer each.

    What one launch sends to one peer of one side and role is one message.

    Attributes:
        seconds: that each takes alone.
        num_bytes: of each.
        after: the flow before it to the same peers, which is through first; LOST: none.
    """

    rank: int
    route: int
    link: str
    seconds: float
    num_bytes: int
    messages: int
    latency: float
    after: int
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
    plan: Plan, programs: dict[int, Program], costs: PassCosts, network: Network
) -> PricedPrograms:
    """Price the programs of one rank per class.

    Args:
        plan: whose programs they are.
        programs: by rank; of those that others' are relabelled from.
    """
    symmetry, flows, known = network.symmetry, [], {}
    writers = [
        _PriceWriter(rank, programs[symmetry.written(rank)], costs, network)
        for rank in symmetry.firsts()
    ]
    for writer in writers:
        writer.busy("call", costs.call_seconds(plan, writer.rank))
        writer.write(flows, known)
    tracks = (RankOps(writer.rank, tuple(_resolved(writer, known))) for writer in writers)
    return PricedPrograms(tuple(tracks), tuple(flows))


def _resolved(writer: _PriceWriter, known: dict[Hashable, int]) -> Iterable[Op]:
    for op in writer.ops:
        if isinstance(op, WaitOp) and op.hops:
            keys = (writer.key(step, hop) for step, hop in op.hops)
            op = op._replace(flows=tuple(known.get(key, LOST) for key in keys))
        yield op


class _PriceWriter:
    """Prices one program, for its own rank or relabelled for a rank like it."""

    def __init__(self, rank: int, program: Program, costs: PassCosts, network: Network):
        self.rank, self.program = rank, program
        self.costs, self.network, self.symmetry = costs, network, network.symmetry
        self.ops: list[Op] = []
        self._copied = 0  # bytes packed for the next launch
        self._partials: set[Item] = set()
        self._received: set[Item] = set()
        self._packed: set[Item] = set()
        self._sent: list[int] = []
        self._last: dict[int, int] = {}  # the last flow to each peer

    def key(self, step: int, hop: Transfer) -> Hashable:
        """What a message is called at both ends, by the rank that stands for its sender."""
        shifts = self.symmetry.shifts
        item = hop.item[:2] if shifts else (hop.item, hop.rows)
        return self.symmetry.first(hop.src), step, relative(hop.dst, hop.src, shifts), item

    def busy(self, name: str, seconds: float) -> None:
        if seconds:
            route = self.network.compute(self.rank)
            self.ops.append(HostOp(seconds, route, name))

    def write(self, flows: list[Flow], known: dict[Hashable, int]) -> None:
        launched: dict[int, tuple[int, tuple[Transfer, ...]]] = {}
        for instruction in self.program.instructions:
            match instruction:
                case Compute(tile):
                    self._run(self._tile(tile))
                case Launch() | Collective():
                    step, recvs = instruction.step, self._hops(instruction.recvs)
                    launched[instruction.handle] = step, recvs
                    self._depart(step, self._hops(instruction.sends), recvs, (flows, known))
                case Wait(handle, arrivals):
                    step, recvs = launched[handle]
                    self._await(step, [recvs[index] for index in arrivals])
                case Free(item):
                    if not self.costs.payload.saved:
                        self._received.discard(self._item(item))
        self.ops.append(WaitOp(tuple(self._sent), ()))

    def _hops(self, hops: tuple[Transfer, ...]) -> tuple[Transfer, ...]:
        if self.rank == self.program.rank:
            return hops
        shifts, rank = self.symmetry.plan_shifts, self.rank
        return tuple(
            Transfer(
                self._item(item), absolute(src, rank, shifts), absolute(dst, rank, shifts), rows
            )
            for item, src, dst, rows in hops
        )

    def _item(self, item: Item) -> Item:
        if self.rank == self.program.rank:
            return item
        return item._replace(shard=absolute(item.shard, self.rank, self.symmetry.plan_shifts))

    def _tile(self, tile: Tile) -> Tile:
        if self.rank == self.program.rank:
            return tile
        shifts, rank = self.symmetry.plan_shifts, self.rank
        q, kv = (tuple(absolute(s, rank, shifts) for s in side) for side in tile[:2])
        return Tile(q, kv, tile.heads)

    def _run(self, tile: Tile) -> None:
        parts = (
            Item(side, Role.PARTIAL, shard, tile.heads)
            for side, shards in zip(Side, tile[:2], strict=True)
            for shard in shards
        )
        merging = sum(map(self._accumulate, parts))
        seconds, route = self.costs.tile_seconds(tile), self.network.compute(self.rank)
        self.ops.append(KernelOp(seconds, route, tile))
        self.busy("merge", merging if seconds else 0.0)

    def _accumulate(self, item: Item, rows: Rows | None = None) -> float:
        """Add to a partial; the seconds that this takes, none for the first."""
        if item in self._partials:
            return self.costs.merge_seconds(item, rows) if self.costs.partial_bytes(item) else 0.0
        self._partials.add(item)
        return 0.0

    def _depart(
        self,
        step: int,
        sends: tuple[Transfer, ...],
        recvs: tuple[Transfer, ...],
        store: tuple[list[Flow], dict[Hashable, int]],
    ) -> None:
        self._received |= {hop.item for hop in recvs if hop.item.role is Role.OPERAND}
        first = len(store[0])
        for (route, size, after), hops in self._grouped(sends, first).items():
            link = self.network.link(self.rank, hops[0].dst)
            seconds, latency = size / self.network.bandwidth(link), self.network.latency(link)
            seconds += self.costs.machine.carry_seconds
            for hop in hops:
                self._pack(hop.item, self.costs.message_bytes(hop))
            store[1].update((self.key(step, hop), len(store[0])) for hop in hops)
            messages = len({(hop.dst, *hop.item[:2]) for hop in hops})
            name = f"{hops[0].item} to {hops[0].dst}"
            name += f" and {len(hops) - 1} more" * (len(hops) > 1)
            store[0].append(
                Flow(self.rank, route, link, seconds, size, messages, latency, after, name)
            )
        numbers = tuple(range(first, len(store[0])))
        self._sent += numbers
        self.busy("pack", self.costs.pack_seconds(self._copied))
        self.ops.append(SendOp(numbers))
        self.busy("post", self.costs.machine.message_seconds * (len(sends) + len(recvs)))
        self._copied = 0

    def _grouped(
        self, sends: tuple[Transfer, ...], first: int
    ) -> dict[tuple[int, int, int], list[Transfer]]:
        """(route, bytes of each message, flow before it) -> hops; flows count from first."""
        messages: dict[tuple[int, Side, Role], list[Transfer]] = {}
        for hop in sends:
            messages.setdefault((hop.dst, hop.item.side, hop.item.role), []).append(hop)
        groups: dict[tuple[int, int, int], list[Transfer]] = {}
        numbers: dict[tuple[int, int, int], int] = {}
        for (dst, _, _), hops in messages.items():
            size = sum(map(self.costs.message_bytes, hops))
            if size:
                group = self.network.message(self.rank, dst), size, self._last.get(dst, LOST)
                groups.setdefault(group, []).extend(hops)
                self._last[dst] = numbers.setdefault(group, first + len(numbers))
        return groups

    def _pack(self, item: Item, size: int) -> None:
        """Count what is copied to send it: partials, and once what consists of several tensors."""
        if item.role is Role.PARTIAL:
            self._partials.discard(item)
            self._copied += size
        own = item.role is Role.OPERAND and item not in self._received
        if own and item.side in self.costs.packed and item not in self._packed:
            self._packed.add(item)
            self._copied += size

    def _await(self, step: int, hops: list[Transfer]) -> None:
        merging = sum(
            self._accumulate(hop.item._replace(role=Role.PARTIAL), hop.rows)
            for hop in hops
            if hop.item.role is not Role.OPERAND
        )
        full = tuple((step, hop) for hop in hops if self.costs.message_bytes(hop))
        if full:
            self.ops.append(WaitOp((), full))
            self.busy("merge", merging)
