"""Every rank's operations with prices, for the event loop; messages become flows.

Ranks whose programs are one program relabelled are priced together: most operations cost the same
on all of them. What differs is a list by rank, because under a causal mask some send half of a
shard where others send all of it: `Halves` says which.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from tilewise.compiler.program import (
    Await,
    Launch,
    Merge,
    Operation,
    Pack,
    Program,
    Unpack,
    operations,
)
from tilewise.plan.ir import Item, Plan, RankStep, Role, Rows, Side, Transfer
from tilewise.plan.kept import kept_with_plan
from tilewise.plan.shifts import Shift, Symmetry, absolutes, relative
from tilewise.simulation.engine import ARRIVED, LOST, Flow, RankOperation, Track
from tilewise.simulation.network import Network
from tilewise.simulation.prices import PassCosts, price


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
    """Return whether operations differ in the rows of their transfers alone."""
    match half:
        case Pack(rows=rows) if rows is not None:
            return half._replace(rows=None) == whole
        case Unpack(transfer) | Merge(transfer):
            return half._replace(transfer=transfer._replace(rows=None)) == whole
        case _:
            return type(half) is type(whole)


EXACT_RANKS = 64
"""Up to so many ranks every one is simulated as pruned under a causal mask."""

Array = np.ndarray


class _Place(NamedTuple):
    """A shard on a rank that others are relabelled from; least is by the ranks of its class."""

    written: int
    side: Side
    shard: int


Least = dict[_Place, Array]
"""The lowest number of the shards that each shard meets."""


class Halves:
    """The rows of every transfer of a plan whose ranks are relabelled from a few.

    Args:
        shifts: those that map the plan to itself.
        size: rows of a shard.
    Attributes:
        symmetry: which rank each is relabelled from.
        half: the rows that are half a shard, by side.
        complete: whether all is right: nothing is dropped, and no rank only passes a value on.
    """

    def __init__(self, plan: Plan, shifts: tuple[Shift, ...], size: int):
        self._shifts, self.symmetry = shifts, Symmetry(plan.world_size, shifts)
        every = np.arange(plan.world_size)
        self._class = np.broadcast_to(relative(every, every, self._shifts), every.shape)
        self._members = {int(w): np.flatnonzero(self._class == w) for w in np.unique(self._class)}
        self._index = np.empty(plan.world_size, np.int64)
        for members in self._members.values():
            self._index[members] = np.arange(len(members))
        self.half: tuple[Rows, Rows] = ((size // 2, size),), ((0, size // 2),)
        steps = {written: plan.rank_steps(written) for written in self._members}
        self._whole: dict[tuple[int, Role, _Place], Array] = {}
        self.complete = all(map(_no_relay, steps.values()))
        self._follow(steps, Role.OPERAND)
        self._follow(steps, Role.PARTIAL)

    def members(self, written: int) -> Array:
        """The ranks that are relabelled from one, ascending."""
        return self._members[written]

    def whole(self, step: int, transfer: Transfer, members: Array) -> Array:
        """Return, by rank, whether all rows of a transfer travel, as a rank writes it that others
        are relabelled from.

        Args:
            members: the ranks of its class.
        """
        rank, whole = self._decided(step, transfer)
        return whole[self._index[absolutes(rank, members, self._shifts)]]

    def pruned(self, plan: Plan) -> Plan:
        """The plan with what the mask leaves of every transfer, written by rank as it is."""

        def left(step: int, transfers: tuple[Transfer, ...]) -> tuple[Transfer, ...]:
            return tuple(
                transfer._replace(rows=self._rows(step, transfer)) for transfer in transfers
            )

        def script(rank: int) -> tuple[RankStep, ...]:
            return tuple(
                RankStep(tiles, left(step, sends), left(step, recvs))
                for step, (tiles, sends, recvs) in enumerate(plan.rank_steps(rank))
            )

        return plan.changed(script=script)

    def _rows(self, step: int, transfer: Transfer) -> Rows | None:
        rank, whole = self._decided(step, transfer)
        return None if whole[self._index[rank]] else self.half[transfer.item.side]

    def _decided(self, step: int, transfer: Transfer) -> tuple[int, Array]:
        """The rank that decides a transfer's rows, and whether all travel, by rank of its class."""
        side, role, shard, _ = transfer.item
        rank = transfer.dst if role is Role.OPERAND else transfer.src
        place = _Place(int(self._class[rank]), side, relative(shard, rank, self._shifts))
        return rank, self._whole[step, role, place]

    def _follow(self, steps: dict[int, tuple[RankStep, ...]], role: Role) -> None:
        """Operands from their readers back to their owners, partials from their first filler on."""
        met: Least = {}
        numbers = range(max(map(len, steps.values())))
        for number in reversed(numbers) if role is Role.OPERAND else numbers:
            parts = [(w, part[number]) for w, part in steps.items() if number < len(part)]
            passed: list[tuple[_Place, Array]] = []
            for written, step in parts:
                transfers = step.recvs if role is Role.OPERAND else step.sends
                for transfer in transfers:
                    if transfer.item.role is role:
                        passed += self._passed(met, number, written, transfer)
            for written, step in parts:
                passed += self._tiles(written, step)
            for place, least in passed:
                met[place] = np.minimum(met.get(place, least), least)

    def _passed(
        self, met: Least, number: int, written: int, transfer: Transfer
    ) -> Iterator[tuple[_Place, Array]]:
        """Note a transfer's rows at the end that decides them, and pass that on to the other."""
        side, role, shard, _ = transfer.item
        place, members = _Place(written, side, shard), self._members[written]
        least = met.pop(place, None)
        if least is None:
            self.complete = False
            return
        self._whole[number, role, place] = least <= absolutes(shard, members, self._shifts)
        other = transfer.src if role is Role.OPERAND else transfer.dst
        others = absolutes(other, members, self._shifts)
        at_other = np.empty_like(least)
        at_other[self._index[others]] = least
        seen = relative(shard, other, self._shifts)
        yield _Place(int(self._class[other]), side, seen), at_other

    def _tiles(self, written: int, step: RankStep) -> Iterator[tuple[_Place, Array]]:
        members = self._members[written]
        for tile in step.tiles:
            for side, mine, theirs in ((Side.Q, tile.q, tile.kv), (Side.KV, tile.kv, tile.q)):
                met = [absolutes(shard, members, self._shifts) for shard in theirs]
                least = np.min(met, axis=0)
                for shard in mine:
                    yield _Place(written, side, shard), least


@kept_with_plan(2)
def halves_of(plan: Plan, shifts: tuple[Shift, ...], size: int) -> Halves:
    """The halves of a plan, kept with it."""
    return Halves(plan, shifts, size)


def _no_relay(steps: tuple[RankStep, ...]) -> bool:
    """Return whether a rank reads what it receives and adds to what it sends."""
    tiles = [tile for step in steps for tile in step.tiles]
    used = {s for tile in tiles for s in tile.q}, {s for tile in tiles for s in tile.kv}
    moved: Iterator[Item] = (
        transfer.item
        for step in steps
        for transfers, role in ((step.recvs, Role.OPERAND), (step.sends, Role.PARTIAL))
        for transfer in transfers
        if transfer.item.role is role
    )
    return all(item.shard in used[item.side] for item in moved)
