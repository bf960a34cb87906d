"""Prices: the seconds of every operation of a pass, and the messages that its launches send.

`price` says what one operation takes. `priced_tracks` prices the operations of all ranks for the
event loop. Ranks whose programs are one program relabelled are priced together: most operations
cost the same on all of them. What differs is a list by rank, because under a causal mask some
send half of a shard where others send all of it.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from tilewise.arguments import ITEM_BYTES
from tilewise.compiler.operations import (
    Attend,
    Await,
    Collect,
    Delta,
    Join,
    Merge,
    Operation,
    Pack,
    PackHeads,
    Unpack,
    operations,
)
from tilewise.compiler.program import Launch, Program
from tilewise.compiler.resolved import ResolvedPass
from tilewise.layouts.cells import Cell
from tilewise.layouts.layout import Layout
from tilewise.plan.ir import Item, Plan, Role, Rows, Side, Tile, Transfer
from tilewise.plan.payload import Payload, accumulator
from tilewise.plan.row_ranges import count
from tilewise.plan.shifts import absolutes, relative
from tilewise.simulation.engine import ARRIVED, LOST, Flow, RankOperation, Track
from tilewise.simulation.machine import KernelSpeed, Machine
from tilewise.simulation.network import Network
from tilewise.simulation.zigzag_causal import Halves

PASSES_OF_ENCODING = 8
"""Times that encoding, or decoding, goes over the memory of what it encodes."""


@dataclass(frozen=True)
class PassCosts:
    """Prices of one pass.

    Args:
        cells: areas by (query shard, KV shard); None: all alike, but for the diagonal.
        halved: with cells None: whether a shard pair has half its cells, as zigzag under a causal
            mask has; a shard with itself has half a cell a row more.
    """

    resolved: ResolvedPass
    machine: Machine
    cells: Mapping[tuple[int, int], Cell] | None = None
    halved: bool = False

    @property
    def payload(self) -> Payload:
        return self.resolved.payload

    @property
    def layouts(self) -> tuple[Layout, Layout]:
        """Of the query and the KV shards."""
        return self.resolved.layouts

    @cached_property
    def _kernel(self) -> KernelSpeed:
        payload = self.payload
        return self.machine.kernel(payload.dtype, payload.backward, payload.head_dim)

    @cached_property
    def _row_bytes(self) -> dict[tuple[Side, Role], int]:
        parts = ((side, role) for side in Side for role in Role)
        return {part: self.payload.row_bytes(Item(*part, 0)) for part in parts}

    @cached_property
    def _row_values(self) -> dict[Side, int]:
        """Numbers in one row of a partial."""
        return {
            side: self.payload.heads(side)
            * sum(field.width for field in self.payload.fields(side, Role.PARTIAL))
            for side in Side
        }

    def encoded_bytes(self, item: Item, rows: Rows | None = None) -> int:
        """Bytes that encoding or decoding an item passes over memory, beside packing it."""
        side, role, shard, _ = item
        return count(rows, self.layouts[side].sizes[shard]) * self._encoded_row_bytes[side, role]

    @cached_property
    def _encoded_row_bytes(self) -> dict[tuple[Side, Role], int]:
        return {
            (side, role): PASSES_OF_ENCODING
            * self.payload.heads(side)
            * sum(f.width * ITEM_BYTES(f.dtype) for f in self.payload.fields(side, role) if f.wire)
            for side in Side
            for role in Role
        }

    @cached_property
    def _known_seconds(self) -> dict[tuple[float, float], float]:
        return {}

    def item_bytes(self, item: Item, rows: Rows | None = None) -> int:
        """Bytes of an item as it travels."""
        side, role, shard, _ = item
        return count(rows, self.layouts[side].sizes[shard]) * self._row_bytes[side, role]

    def partial_bytes(self, item: Item) -> int:
        """A partial as it is accumulated: the whole shard, in the accumulator's dtype."""
        values = self.layouts[item.side].size(item.shard) * self._row_values[item.side]
        return values * ITEM_BYTES(accumulator(self.payload.dtype))

    def area(self, tile: Tile) -> int:
        """Allowed pairs of a tile."""
        if self.cells is not None:
            pairs = ((q, kv) for q in tile.q for kv in tile.kv)
            return sum(self.cells[pair].area for pair in pairs if pair in self.cells)
        rows = self.layouts[0].size(0), self.layouts[1].size(0)
        area = len(tile.q) * len(tile.kv) * rows[0] * rows[1]
        if not self.halved:
            return area
        return (area + len({*tile.q} & {*tile.kv}) * rows[0]) // 2

    def _edge_rows(self, tile: Tile) -> int:
        """Queries at an edge of the mask: those of shard pairs that are no full rectangle."""
        rows = self.layouts[0].sizes
        if self.cells is None:
            return sum(rows[s] for s in {*tile.q} & {*tile.kv}) if self.halved else 0
        cells = (self.cells.get((q, kv)) for q in tile.q for kv in tile.kv)
        return sum(
            count(cell.q_rows, 0)
            for cell in cells
            if cell and cell.area < count(cell.q_rows, 0) * count(cell.k_rows, 0)
        )

    def tile_seconds(self, tile: Tile) -> float:
        """One kernel: its launch, and its FLOP at the speed of a tile of so many rows."""
        area = self.area(tile)
        if not area:
            return 0.0
        area += int(self._kernel.edge_keys * self._edge_rows(tile))
        queries = sum(self.layouts[0].sizes[shard] for shard in tile.q)
        seconds = self.kernel_seconds(queries, area) + self._gathering_seconds(tile, area)
        return seconds + self._expanding_seconds(tile)

    def kernel_seconds(self, queries: float, area: float) -> float:
        """A kernel of so many queries and allowed pairs: its launch, and its FLOP."""
        seconds = self._known_seconds.get((queries, area))
        if seconds is None:
            flop = self.payload.flop * area
            launch = self.machine.launch_seconds + self._kernel.launch_seconds
            seconds = launch + flop / self._kernel.speed(queries, area / queries)
            self._known_seconds[queries, area] = seconds
        return seconds

    def _gathering_seconds(self, tile: Tile, area: int) -> float:
        """Copying keys together: under a mask a call reads parts of shards that lie apart."""
        q, kv = (
            sum(layout.sizes[shard] for shard in shards)
            for layout, shards in zip(self.layouts, tile[:2], strict=True)
        )
        if len(tile.kv) == 1 or area >= q * kv:
            return 0.0
        return self.pack_seconds(kv * self._row_bytes[Side.KV, Role.OPERAND])

    def _expanding_seconds(self, tile: Tile) -> float:
        """Making keys and values of a tile's latents; in backward again, and two gradients."""
        latent = self.payload.wires.latent
        if latent is None:
            return 0.0
        rows = sum(self.layouts[1].sizes[shard] for shard in tile.kv)
        products = 3 if self.payload.backward else 1
        return products * rows * latent.flop / self._kernel.speed(rows, rows)

    def call_seconds(self, plan: Plan, rank: int) -> float:
        """A rank's own time around its program, most of it before: agreement, views, results."""
        machine, backward = self.machine, self.payload.backward
        seconds = machine.call_seconds[backward]
        if not backward:
            seconds += machine.agree_seconds * (plan.world_size - 1)
        elif machine.pack_bandwidth:
            seconds += self.own_bytes(plan, rank) / machine.pack_bandwidth
        return seconds

    def merge_seconds(self, item: Item, rows: Rows | None = None) -> float:
        """Adding to a partial that is there."""
        machine, num_bytes = self.machine, self.partial_bytes(item)
        if machine.merge_bandwidth is None or not num_bytes:
            return machine.merge_seconds if num_bytes else 0.0
        size = self.layouts[item.side].size(item.shard)
        share = count(rows, size) / max(size, 1)
        return machine.merge_seconds + share * num_bytes / machine.merge_bandwidth

    def pack_seconds(self, num_bytes: int) -> float:
        """Copying bytes in memory."""
        bandwidth = self.machine.pack_bandwidth
        return num_bytes / bandwidth if bandwidth else 0.0

    def own_bytes(self, plan: Plan, rank: int) -> int:
        """What a rank holds from the start: q, k, v; in backward also out, dout, lse and delta."""
        payload, groups = self.payload, self.resolved.groups
        rows = [
            sum(layout.size(s) for s, ranks in enumerate(holders) if rank in ranks)
            for holders, layout in zip(plan.owners, self.layouts, strict=True)
        ]
        widths, size = (payload.head_dim, payload.v_head_dim), ITEM_BYTES(payload.dtype)
        q = groups.num_heads * payload.head_dim * size
        if payload.backward:
            statistics = 2 * ITEM_BYTES(accumulator(payload.dtype))
            q += groups.num_heads * (2 * payload.v_head_dim * size + statistics)
        return rows[Side.Q] * q + rows[Side.KV] * groups.num_kv_heads * sum(widths) * size


class Price(NamedTuple):
    """Seconds of one operation.

    Attributes:
        kernel: of kernels.
        own: of the rank's own work after them: copying, posting, merging.
    """

    kernel: float = 0.0
    own: float = 0.0


def price(operation: Operation, costs: PassCosts) -> Price:
    """The seconds that an operation keeps its rank busy; a rank also waits for what it awaits.

    Delta and Collect are free: the machine's seconds of a call, measured around whole passes,
    have them.
    """
    match operation:
        case Attend(tile, adds):
            kernel = costs.tile_seconds(tile)
            return Price(kernel, sum(map(costs.merge_seconds, adds)) if kernel else 0.0)
        case Join(item):
            return Price(own=costs.pack_seconds(costs.item_bytes(item)))
        case Pack(item, rows, encodes):
            num_bytes = costs.item_bytes(item, rows)
            num_bytes += costs.encoded_bytes(item, rows) if encodes else 0
            return Price(own=costs.pack_seconds(num_bytes))
        case Launch():
            messages = len(operation.sends) + len(operation.recvs)
            return Price(own=costs.machine.message_seconds * messages)
        case Unpack(transfer, decodes):
            passed = costs.encoded_bytes if decodes else costs.item_bytes
            return Price(own=costs.pack_seconds(passed(transfer.item, transfer.rows)))
        case Merge(transfer, adds):
            item, rows = transfer.item, transfer.rows
            if adds:
                return Price(own=costs.merge_seconds(item, rows))
            return Price(own=costs.pack_seconds(costs.item_bytes(item, rows)))
        case Delta() | Await() | Collect() | PackHeads():
            return Price()


def priced_tracks(
    plan: Plan,
    programs: Mapping[int, Program],
    costs: PassCosts,
    network: Network,
    halves: Halves | None = None,
) -> tuple[tuple[Track, ...], tuple[Flow, ...]]:
    """The priced operations of one rank per class of ranks that are alike, and their messages.

    Args:
        plan: whose programs they are.
        programs: by rank; of those that others' are relabelled from.
        halves: which rows of each transfer travel, by rank; None: those that the programs name.
    """
    symmetry = network.symmetry
    by_written: dict[int, list[int]] = {}
    for rank in symmetry.firsts():
        by_written.setdefault(symmetry.written(rank), []).append(rank)
    flows: list[Flow] = []
    flow_of: dict[MessageKey, int] = {}
    groups = [
        _RelabelledRanks(programs[written], ranks, plan.num_head_groups, costs, network, halves)
        for written, ranks in by_written.items()
    ]
    for group in groups:
        group.send(flows, flow_of)
    tracks: list[Track] = []
    for group in groups:
        tracks += group.tracks(flow_of, costs.call_seconds(plan, group.program.rank))
    return tuple(sorted(tracks, key=lambda track: track.rank)), tuple(flows)


MessageKey = tuple[int, int, int, Side, Role]
"""Key of a message: (step, the rank that stands for its sender, receiver relative to that, side,
role)."""

Column = RankOperation | list[RankOperation | None]
"""An operation of every rank of a class: one for all, or by rank; None: a rank does not have it."""


class _Message(NamedTuple):
    """Transfers of one launch to one peer, of one side and role.

    Attributes:
        peer, shard, num_bytes: by rank of the class; the lowest shard.
    """

    part: tuple[Side, Role]
    heads: int  # of the first item
    num_items: int
    peer: list[int]
    shard: list[int]
    num_bytes: list[int]


class _Arrival(NamedTuple):
    """One receive of an Await, and the operations that follow for it."""

    step: int
    transfer: Transfer
    columns: list[Column]


class _RelabelledRanks:
    """Ranks whose programs are one program relabelled.

    Their operations are that program's, in the canonical order of each rank's own numbers: what a
    launch packs, and what one operation after the other awaits, goes by item.

    Args:
        ranks: of the class.
        num_head_groups: of the plan.
    """

    def __init__(
        self,
        program: Program,
        ranks: list[int],
        num_head_groups: int,
        costs: PassCosts,
        network: Network,
        halves: Halves | None,
    ):
        self.program, self.ranks, self.num_head_groups = program, ranks, num_head_groups
        self.costs, self.network, self.halves = costs, network, halves
        self._members = np.array(ranks)
        self._alone = ranks == [program.rank]
        self._number_by_rank: dict[int, list[int]] = {}
        self._leaving: dict[int, list[tuple[int, ...]]] = {}  # handle -> flows by rank
        self._operations: list[list[RankOperation]] = [[] for _ in ranks]

    def send(self, flows: list[Flow], flow_of: dict[MessageKey, int]) -> None:
        """Append the flows of all launches."""
        last: list[dict[int, int]] = [{} for _ in self.ranks]  # the last flow to each peer
        for launch in self.program.instructions:
            if isinstance(launch, Launch):
                messages = self._messages(launch)
                by_rank: list[tuple[int, ...]] = []
                for index, before in enumerate(last):
                    first = len(flows)
                    self._send(index, launch.step, messages, before, flows, flow_of)
                    by_rank.append(tuple(range(first, len(flows))))
                self._leaving[launch.handle] = by_rank

    def _messages(self, launch: Launch) -> list[_Message]:
        joined: dict[tuple[int, tuple[Side, Role]], list[Transfer]] = {}
        for transfer in launch.sends:
            joined.setdefault((transfer.dst, transfer.item[:2]), []).append(transfer)
        messages = []
        for (peer, part), transfers in joined.items():
            sizes = [self._bytes_by_rank(launch.step, transfer) for transfer in transfers]
            total = sizes[0] if len(sizes) == 1 else list(map(sum, zip(*sizes, strict=True)))
            if any(total):
                shards = [self._numbers(transfer.item.shard) for transfer in transfers]
                first = shards[0] if len(shards) == 1 else list(map(min, zip(*shards, strict=True)))
                heads = transfers[0].item.heads
                peers = self._numbers(peer)
                messages.append(_Message(part, heads, len(transfers), peers, first, total))
        return messages

    def _bytes_by_rank(self, step: int, transfer: Transfer) -> list[int]:
        item, rows = transfer.item, transfer.rows
        whole = self.costs.item_bytes(item, rows)
        if self.halves is None:
            return [whole] * len(self.ranks)
        half = self.costs.item_bytes(item, self.halves.half[item.side])
        wholes = self.halves.whole(step, transfer, self._members).tolist()
        return [whole if all_rows else half for all_rows in wholes]

    def _send(
        self,
        index: int,
        step: int,
        messages: list[_Message],
        last: dict[int, int],
        flows: list[Flow],
        flow_of: dict[MessageKey, int],
    ) -> None:
        """Append a rank's flows: equal messages by one route after the same flow are one."""
        rank, first = self.ranks[index], len(flows)
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
            flow_of[self._key(step, rank, dst, message.part)] = last[dst]
        for (route, size, after), equal in groups.items():
            message, dst = equal[0], equal[0].peer[index]
            more = sum(message.num_items for message in equal) - 1
            link = self.network.link(rank, dst)
            seconds = size / self.network.bandwidth(link) + self.costs.machine.carry_seconds
            item = Item(*message.part, message.shard[index], message.heads)
            name = f"{item} to {dst}" + f" and {more} more" * (more > 0)
            latency = self.network.latency(link)
            flows.append(Flow(rank, route, link, seconds, size, len(equal), latency, after, name))

    def _key(self, step: int, src: int, dst: int, part: tuple[Side, Role]) -> MessageKey:
        symmetry = self.network.symmetry
        if symmetry.shifts:
            src, dst = symmetry.first(src), relative(dst, src, symmetry.shifts)
        return step, src, dst, *part

    def _numbers(self, number: int) -> list[int]:
        """A rank or shard of the program, as each rank calls it."""
        if self._alone:
            return [number]
        if number not in self._number_by_rank:
            shifts = self.network.symmetry.plan_shifts
            self._number_by_rank[number] = absolutes(number, self._members, shifts).tolist()
        return self._number_by_rank[number]

    def tracks(self, flow_of: dict[MessageKey, int], call_seconds: float) -> Iterator[Track]:
        """Every rank's operations, once the flows of all ranks are known."""
        packs: list[tuple[Pack, Pack]] = []
        awaits: list[list[_Arrival]] = []
        for operation, if_whole in self._variants():
            match operation:
                case Await(_, step, recvs):
                    awaits.append([_Arrival(step, transfer, []) for transfer in recvs])
                    continue
                case Unpack(transfer) | Merge(transfer):
                    arrival = next(x for x in awaits[-1] if x.transfer == transfer)
                    column = self._column(operation, if_whole, arrival.step, transfer)
                    arrival.columns.append(column)
                    continue
                case Pack():
                    assert isinstance(if_whole, Pack)
                    packs.append((operation, if_whole))
                    continue
            self._write_awaits(awaits, flow_of)
            awaits = []
            match operation:
                case Launch(handle):
                    self._write_packs(packs, operation)
                    packs = []
                    own = price(operation, self.costs).own
                    self._write([RankOperation(own=own, leaving=x) for x in self._leaving[handle]])
                case _:
                    self._write(RankOperation(*price(operation, self.costs)))
        self._write_awaits(awaits, flow_of)
        for rank, mine in zip(self.ranks, self._operations, strict=True):
            yield Track(rank, self.network.compute(rank), call_seconds, tuple(mine))

    def _variants(self) -> Iterator[tuple[Operation, Operation | None]]:
        """Every operation as it is where half of each shard travels, and where all of it does.

        Some are there only where half travels (None): a half that arrives is copied to its place.
        """
        payload, alone = self.costs.payload, self.num_head_groups > 1
        wholes = operations(self.program, payload, packs_alone=alone)
        if self.halves is None:
            yield from ((operation, operation) for operation in wholes)
            return
        halved = _with_rows(self.program, self.halves.half)
        whole = next(wholes, None)
        for half in operations(halved, payload, packs_alone=alone):
            if whole is not None and _same_place(half, whole):
                yield half, whole
                whole = next(wholes, None)
            else:
                yield half, None
        assert whole is None, f"{whole} has no place beside operations on half shards"

    def _column(
        self, operation: Operation, if_whole: Operation | None, step: int, transfer: Transfer
    ) -> Column:
        """An operation on rows of a transfer, of every rank."""
        priced = RankOperation(*price(operation, self.costs))
        whole = if_whole and RankOperation(*price(if_whole, self.costs))
        if self.halves is None or whole == priced:
            return priced
        wholes = self.halves.whole(step, transfer, self._members).tolist()
        return [whole if all_rows else priced for all_rows in wholes]

    def _write(self, column: Column) -> None:
        if isinstance(column, RankOperation):
            for mine in self._operations:
                mine.append(column)
        else:
            for mine, operation in zip(self._operations, column, strict=True):
                if operation is not None:
                    mine.append(operation)

    def _write_packs(self, packs: list[tuple[Pack, Pack]], launch: Launch) -> None:
        sent = {transfer.item: transfer for transfer in launch.sends}
        columns = [self._column(half, whole, launch.step, sent[half.item]) for half, whole in packs]
        if self._alone or len(columns) < 2 or all(x == y for x, y in pairwise(columns)):
            for column in columns:
                self._write(column)
            return
        for index, order in enumerate(self._orders([half.item for half, _ in packs])):
            self._append(index, (columns[place] for place in order))

    def _write_awaits(
        self, awaits: Sequence[Sequence[_Arrival]], flow_of: dict[MessageKey, int]
    ) -> None:
        """Awaits that follow one another, each with what is done about its arrivals."""
        if not awaits:
            return
        flows = {id(x): self._awaited(x, flow_of) for arrivals in awaits for x in arrivals}
        if len(awaits) == 1 and len(awaits[0]) == 1:
            (arrival,) = awaits[0]
            self._write([RankOperation(awaited=(flow,)) for flow in flows[id(arrival)]])
            for column in arrival.columns:
                self._write(column)
            return
        sources = [[self._numbers(x.transfer.src) for x in arrivals] for arrivals in awaits]
        for index, order in enumerate(self._orders([x[0].transfer.item for x in awaits])):
            for place in order:
                arrivals: Sequence[_Arrival] = awaits[place]
                if len(arrivals) > 1 and not self._alone:
                    by_source = range(len(arrivals))
                    by_source = sorted(by_source, key=lambda k: sources[place][k][index])
                    arrivals = [arrivals[k] for k in by_source]
                awaited = tuple(flows[id(x)][index] for x in arrivals)
                self._operations[index].append(RankOperation(awaited=awaited))
                self._append(index, (column for x in arrivals for column in x.columns))

    def _append(self, index: int, columns: Iterable[Column]) -> None:
        mine = self._operations[index]
        for column in columns:
            operation = column if isinstance(column, RankOperation) else column[index]
            if operation is not None:
                mine.append(operation)

    def _orders(self, items: list[Item]) -> Iterator[Sequence[int]]:
        """For each rank the places of some items in the order of its own labels."""
        places = range(len(items))
        if self._alone or len(items) == 1:
            yield from (places for _ in self.ranks)
            return
        # Heads follow the ranks that compute them.
        labels = [
            [
                (side, role, shard, heads % self.num_head_groups)
                for shard, heads in zip(self._numbers(shard), self._numbers(heads), strict=True)
            ]
            for side, role, shard, heads in items
        ]
        for index in range(len(self.ranks)):
            yield sorted(places, key=lambda place: labels[place][index])

    def _awaited(self, arrival: _Arrival, flow_of: dict[MessageKey, int]) -> list[int]:
        """The flow that brings an arrival, by rank."""
        step, (item, src, _, rows), _ = arrival
        if not self.costs.item_bytes(item, rows):
            return [ARRIVED] * len(self.ranks)
        ends = zip(self._numbers(src), self.ranks, strict=True)
        return [flow_of.get(self._key(step, a, b, item[:2]), LOST) for a, b in ends]


def _with_rows(program: Program, rows: tuple[Rows, Rows]) -> Program:
    """The program with these rows, by side, in every transfer."""

    def part(transfers: tuple[Transfer, ...]) -> tuple[Transfer, ...]:
        return tuple(x._replace(rows=rows[x.item.side]) for x in transfers)

    return program._replace(
        instructions=tuple(
            x._replace(sends=part(x.sends), recvs=part(x.recvs)) if isinstance(x, Launch) else x
            for x in program.instructions
        )
    )


def _same_place(half: Operation, whole: Operation) -> bool:
    """Whether operations differ in the rows of their transfers alone."""
    match half:
        case Pack(rows=rows) if rows is not None:
            return half._replace(rows=None) == whole
        case Unpack(transfer) | Merge(transfer):
            return half._replace(transfer=transfer._replace(rows=None)) == whole
        case _:
            return type(half) is type(whole)
