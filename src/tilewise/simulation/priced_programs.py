"""Every rank's operations with prices, for the event loop; messages become flows.

Ranks whose programs are one program relabelled are priced together: most operations cost the same
on all of them. Where they differ there is a list by rank: under a causal mask some ranks send half
of a shard and others all of it. `Halves` says which rank sends which.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from tilewise.compiler.program import (
    Await,
    Launch,
    MergeArrived,
    Operation,
    Pack,
    Program,
    Unpack,
    operations,
)
from tilewise.plan.ir import Item, Plan, RankStep, Role, Rows, Side, Transfer
from tilewise.plan.kept import kept_with_plan
from tilewise.plan.shifts import Shift, Symmetry, absolutes, relative
from tilewise.simulation.engine import ARRIVED, LOST, Flow, PricedProgram, RankOperation
from tilewise.simulation.network import Network
from tilewise.simulation.prices import PassCosts, price


def price_programs(
    plan: Plan,
    programs: Mapping[int, Program],
    costs: PassCosts,
    network: Network,
    halves: Halves | None = None,
) -> tuple[tuple[PricedProgram, ...], tuple[Flow, ...]]:
    """Price the operations of one rank for each class of alike ranks, and collect their messages.

    Args:
        programs: of the plan, by rank: those from which the other ranks' are relabelled.
        halves: the rows of each transfer that travel, by rank; None: those that the programs name.
    """
    symmetry = network.symmetry
    ranks_by_template: dict[int, list[int]] = {}
    for rank in symmetry.representatives():
        ranks_by_template.setdefault(symmetry.template(rank), []).append(rank)
    flows: list[Flow] = []
    flow_by_key: dict[MessageKey, int] = {}
    groups = [
        _RelabelledRanks(programs[written], ranks, plan.num_head_groups, costs, network, halves)
        for written, ranks in ranks_by_template.items()
    ]
    for group in groups:
        group.send(flows, flow_by_key)
    priced: list[PricedProgram] = []
    for group in groups:
        priced += group.priced(flow_by_key, costs.call_seconds(plan, group.program.rank))
    return tuple(sorted(priced, key=lambda program: program.rank)), tuple(flows)


MessageKey = tuple[int, int, int, Side, Role]
"""Key of a message: (step, the rank that stands for its sender, receiver relative to that, side,
role)."""

Column = RankOperation | list[RankOperation | None]
"""An operation of the ranks of a class: one for all, or a list by rank. None: the rank has none."""


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

    Their operations are those of the program. Where the order of operations follows items (what a
    launch packs, what is awaited one after the other), it is the order of each rank's own numbers.

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

    def send(self, flows: list[Flow], flow_by_key: dict[MessageKey, int]) -> None:
        """Append the flows of all launches."""
        last_flows: list[dict[int, int]] = [{} for _ in self.ranks]  # the last flow to each peer
        for launch in self.program.instructions:
            if isinstance(launch, Launch):
                messages = self._messages(launch)
                flows_by_rank: list[tuple[int, ...]] = []
                for index, flow_by_peer in enumerate(last_flows):
                    first_flow = len(flows)
                    self._send(index, launch.step, messages, flow_by_peer, flows, flow_by_key)
                    flows_by_rank.append(tuple(range(first_flow, len(flows))))
                self._leaving[launch.handle] = flows_by_rank

    def _messages(self, launch: Launch) -> list[_Message]:
        transfers_by_peer: dict[tuple[int, tuple[Side, Role]], list[Transfer]] = {}
        for transfer in launch.sends:
            transfers_by_peer.setdefault((transfer.dst, transfer.item[:2]), []).append(transfer)
        messages = []
        for (peer, part), transfers in transfers_by_peer.items():
            sizes = [self._bytes_by_rank(launch.step, transfer) for transfer in transfers]
            total_bytes = sizes[0] if len(sizes) == 1 else list(map(sum, zip(*sizes, strict=True)))
            if any(total_bytes):
                shards = [self._numbers(transfer.item.shard) for transfer in transfers]
                lowest_shards = (
                    shards[0] if len(shards) == 1 else list(map(min, zip(*shards, strict=True)))
                )
                heads = transfers[0].item.heads
                peers = self._numbers(peer)
                messages.append(
                    _Message(part, heads, len(transfers), peers, lowest_shards, total_bytes)
                )
        return messages

    def _bytes_by_rank(self, step: int, transfer: Transfer) -> list[int]:
        item, rows = transfer.item, transfer.rows
        shard_bytes = self.costs.item_bytes(item, rows)
        if self.halves is None:
            return [shard_bytes] * len(self.ranks)
        half_bytes = self.costs.item_bytes(item, self.halves.half[item.side])
        sends_all_rows = self.halves.whole(step, transfer, self._members).tolist()
        return [shard_bytes if all_rows else half_bytes for all_rows in sends_all_rows]

    def _send(
        self,
        index: int,
        step: int,
        messages: list[_Message],
        flow_by_peer: dict[int, int],
        flows: list[Flow],
        flow_by_key: dict[MessageKey, int],
    ) -> None:
        """Append a rank's flows. Equal messages by one route after the same flow are one flow."""
        rank, first_flow = self.ranks[index], len(flows)
        if len(self.ranks) > 1:
            messages = sorted(messages, key=lambda m: (m.part, m.shard[index], m.peer[index]))
        messages_by_group: dict[tuple[int, int, int], list[_Message]] = {}
        flow_by_group: dict[tuple[int, int, int], int] = {}
        for message in messages:
            dst = message.peer[index]
            route = self.network.message(rank, dst)
            group = route, message.num_bytes[index], flow_by_peer.get(dst, LOST)
            messages_by_group.setdefault(group, []).append(message)
            flow_by_peer[dst] = flow_by_group.setdefault(group, first_flow + len(flow_by_group))
            flow_by_key[self._key(step, rank, dst, message.part)] = flow_by_peer[dst]
        for (route, size, previous), equal_messages in messages_by_group.items():
            message, dst = equal_messages[0], equal_messages[0].peer[index]
            num_others = sum(message.num_items for message in equal_messages) - 1
            link = self.network.link(rank, dst)
            seconds = size / self.network.bandwidth(link) + self.costs.machine.carry_seconds
            item = Item(*message.part, message.shard[index], message.heads)
            name = f"{item} to {dst}" + f" and {num_others} more" * (num_others > 0)
            latency = self.network.latency(link)
            flows.append(
                Flow(rank, route, link, seconds, size, len(equal_messages), latency, previous, name)
            )

    def _key(self, step: int, src: int, dst: int, part: tuple[Side, Role]) -> MessageKey:
        symmetry = self.network.symmetry
        if symmetry.shifts:
            src, dst = symmetry.representative(src), relative(dst, src, symmetry.shifts)
        return step, src, dst, *part

    def _numbers(self, number: int) -> list[int]:
        """The number that each rank has for a rank or a shard of the program."""
        if self._alone:
            return [number]
        if number not in self._number_by_rank:
            shifts = self.network.symmetry.plan_shifts
            self._number_by_rank[number] = absolutes(number, self._members, shifts).tolist()
        return self._number_by_rank[number]

    def priced(
        self, flow_by_key: dict[MessageKey, int], call_seconds: float
    ) -> Iterator[PricedProgram]:
        """Every rank's operations, once the flows of all ranks are known."""
        packs: list[tuple[Pack, Pack]] = []
        awaits: list[list[_Arrival]] = []
        for operation, if_whole in self._variants():
            match operation:
                case Await(_, step, recvs):
                    awaits.append([_Arrival(step, transfer, []) for transfer in recvs])
                    continue
                case Unpack(transfer) | MergeArrived(transfer):
                    arrival = next(x for x in awaits[-1] if x.transfer == transfer)
                    column = self._column(operation, if_whole, arrival.step, transfer)
                    arrival.columns.append(column)
                    continue
                case Pack():
                    assert isinstance(if_whole, Pack)
                    packs.append((operation, if_whole))
                    continue
            self._write_awaits(awaits, flow_by_key)
            awaits = []
            match operation:
                case Launch(handle):
                    self._write_packs(packs, operation)
                    packs = []
                    own_seconds = price(operation, self.costs).own
                    ends = zip(
                        self._leaving[handle], self._posted(operation, flow_by_key), strict=True
                    )
                    self._write(
                        [RankOperation(own=own_seconds, leaving=x, posted=y) for x, y in ends]
                    )
                case _:
                    self._write(RankOperation(*price(operation, self.costs)))
        self._write_awaits(awaits, flow_by_key)
        for rank, rank_operations in zip(self.ranks, self._operations, strict=True):
            yield PricedProgram(
                rank, self.network.compute(rank), call_seconds, tuple(rank_operations)
            )

    def _variants(self) -> Iterator[tuple[Operation, Operation | None]]:
        """Yield each operation as it is if half of each shard travels, and if all of it does.

        None: there is no such operation if all travels. (A half that arrives is copied to its
        place, a whole shard stays where it arrived.)
        """
        payload, packs_alone = self.costs.payload, self.num_head_groups > 1
        whole_operations = operations(self.program, payload, packs_alone=packs_alone)
        if self.halves is None:
            yield from ((operation, operation) for operation in whole_operations)
            return
        half_program = _with_rows(self.program, self.halves.half)
        whole_operation = next(whole_operations, None)
        for half_operation in operations(half_program, payload, packs_alone=packs_alone):
            if whole_operation is not None and _same_place(half_operation, whole_operation):
                yield half_operation, whole_operation
                whole_operation = next(whole_operations, None)
            else:
                yield half_operation, None
        assert whole_operation is None, (
            f"{whole_operation} has no place beside operations on half shards"
        )

    def _column(
        self, operation: Operation, if_whole: Operation | None, step: int, transfer: Transfer
    ) -> Column:
        """An operation on rows of a transfer, of every rank."""
        half_operation = RankOperation(*price(operation, self.costs))
        whole_operation = if_whole and RankOperation(*price(if_whole, self.costs))
        if self.halves is None or whole_operation == half_operation:
            return half_operation
        sends_all_rows = self.halves.whole(step, transfer, self._members).tolist()
        return [whole_operation if all_rows else half_operation for all_rows in sends_all_rows]

    def _write(self, column: Column) -> None:
        if isinstance(column, RankOperation):
            for rank_operations in self._operations:
                rank_operations.append(column)
        else:
            for rank_operations, operation in zip(self._operations, column, strict=True):
                if operation is not None:
                    rank_operations.append(operation)

    def _write_packs(self, packs: list[tuple[Pack, Pack]], launch: Launch) -> None:
        transfer_by_item = {transfer.item: transfer for transfer in launch.sends}
        columns = [
            self._column(half, whole, launch.step, transfer_by_item[half.item])
            for half, whole in packs
        ]
        if self._alone or len(columns) < 2 or all(x == y for x, y in pairwise(columns)):
            for column in columns:
                self._write(column)
            return
        for index, order in enumerate(self._orders([half.item for half, _ in packs])):
            self._append(index, (columns[index_in_launch] for index_in_launch in order))

    def _write_awaits(
        self, awaits: Sequence[Sequence[_Arrival]], flow_by_key: dict[MessageKey, int]
    ) -> None:
        """Write awaits that follow one another, each with the operations on what arrived."""
        if not awaits:
            return
        flows = {id(x): self._awaited(x, flow_by_key) for arrivals in awaits for x in arrivals}
        if len(awaits) == 1 and len(awaits[0]) == 1:
            (arrival,) = awaits[0]
            self._write([RankOperation(awaited=(flow,)) for flow in flows[id(arrival)]])
            for column in arrival.columns:
                self._write(column)
            return
        sources = [[self._numbers(x.transfer.src) for x in arrivals] for arrivals in awaits]
        for index, order in enumerate(self._orders([x[0].transfer.item for x in awaits])):
            for await_index in order:
                arrivals: Sequence[_Arrival] = awaits[await_index]
                if len(arrivals) > 1 and not self._alone:
                    by_source = range(len(arrivals))
                    by_source = sorted(by_source, key=lambda k: sources[await_index][k][index])
                    arrivals = [arrivals[k] for k in by_source]
                awaited = tuple(flows[id(x)][index] for x in arrivals)
                self._operations[index].append(RankOperation(awaited=awaited))
                self._append(index, (column for x in arrivals for column in x.columns))

    def _append(self, index: int, columns: Iterable[Column]) -> None:
        rank_operations = self._operations[index]
        for column in columns:
            operation = column if isinstance(column, RankOperation) else column[index]
            if operation is not None:
                rank_operations.append(operation)

    def _orders(self, items: list[Item]) -> Iterator[Sequence[int]]:
        """For each rank the indices of some items in the order of its own labels."""
        indices = range(len(items))
        if self._alone or len(items) == 1:
            yield from (indices for _ in self.ranks)
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
            yield sorted(indices, key=lambda index_in_items: labels[index_in_items][index])

    def _posted(
        self, launch: Launch, flow_by_key: dict[MessageKey, int]
    ) -> Iterator[tuple[int, ...]]:
        """The flows of the messages whose receives a launch posts, by rank."""
        messages = {
            (transfer.src, transfer.item[:2]): _Arrival(launch.step, transfer, [])
            for transfer in launch.recvs
            if self.costs.item_bytes(transfer.item, transfer.rows)
        }
        flows = [self._awaited(message, flow_by_key) for message in messages.values()]
        for index in range(len(self.ranks)):
            yield tuple(column[index] for column in flows if column[index] != LOST)

    def _awaited(self, arrival: _Arrival, flow_by_key: dict[MessageKey, int]) -> list[int]:
        """The flow that brings an arrival, by rank."""
        step, (item, src, _, rows), _ = arrival
        if not self.costs.item_bytes(item, rows):
            return [ARRIVED] * len(self.ranks)
        ends = zip(self._numbers(src), self.ranks, strict=True)
        return [flow_by_key.get(self._key(step, a, b, item[:2]), LOST) for a, b in ends]


def _with_rows(program: Program, rows: tuple[Rows, Rows]) -> Program:
    """The program with these rows, by side, in every transfer."""

    def with_rows(transfers: tuple[Transfer, ...]) -> tuple[Transfer, ...]:
        return tuple(x._replace(rows=rows[x.item.side]) for x in transfers)

    return program._replace(
        instructions=tuple(
            x._replace(sends=with_rows(x.sends), recvs=with_rows(x.recvs))
            if isinstance(x, Launch)
            else x
            for x in program.instructions
        )
    )


def _same_place(half: Operation, whole: Operation) -> bool:
    """Return whether operations differ in the rows of their transfers alone."""
    match half:
        case Pack(rows=rows) if rows is not None:
            return half._replace(rows=None) == whole
        case Unpack(transfer) | MergeArrived(transfer):
            return half._replace(transfer=transfer._replace(rows=None)) == whole
        case _:
            return type(half) is type(whole)


EXACT_RANKS = 64
"""Up to this many ranks, every rank is simulated as it is pruned under a causal mask."""

Array = np.ndarray


class _ShardPlace(NamedTuple):
    """A shard on a template: the rank from which the others of its class are relabelled."""

    template: int
    side: Side
    shard: int


LowestMet = dict[_ShardPlace, Array]
"""The lowest number of the shards that each shard meets, by rank of the template's class."""


class Halves:
    """The rows of every transfer of a causal plan whose ranks are relabelled from a few templates.

    Args:
        shifts: those that map the plan to itself.
        size: rows of a shard.
    Attributes:
        symmetry: the template of each rank.
        half: the rows that are half a shard, by side.
        complete: True if this description is exact: no transfer is dropped, and no rank passes a
            value on that it does not use.
    """

    def __init__(self, plan: Plan, shifts: tuple[Shift, ...], size: int):
        self._shifts, self.symmetry = shifts, Symmetry(plan.world_size, shifts)
        ranks = np.arange(plan.world_size)
        self._class = np.broadcast_to(relative(ranks, ranks, self._shifts), ranks.shape)
        self._members = {int(w): np.flatnonzero(self._class == w) for w in np.unique(self._class)}
        self._index = np.empty(plan.world_size, np.int64)
        for members in self._members.values():
            self._index[members] = np.arange(len(members))
        self.half: tuple[Rows, Rows] = ((size // 2, size),), ((0, size // 2),)
        steps = {template: plan.rank_steps(template) for template in self._members}
        self._whole: dict[tuple[int, Role, _ShardPlace], Array] = {}
        self.complete = all(map(_no_relay, steps.values()))
        self._follow(steps, Role.OPERAND)
        self._follow(steps, Role.PARTIAL)

    def members(self, template: int) -> Array:
        """The ranks that are relabelled from a template, ascending."""
        return self._members[template]

    def whole(self, step: int, transfer: Transfer, members: Array) -> Array:
        """Return, for each rank of a template's class, whether all rows of a transfer travel.

        Args:
            transfer: as the template has it.
            members: the ranks of the class.
        """
        deciding_rank, all_rows = self._decided(step, transfer)
        return all_rows[self._index[absolutes(deciding_rank, members, self._shifts)]]

    def pruned(self, plan: Plan) -> Plan:
        """The plan with the rows that the mask leaves of every transfer."""

        def pruned_transfers(step: int, transfers: tuple[Transfer, ...]) -> tuple[Transfer, ...]:
            return tuple(
                transfer._replace(rows=self._rows(step, transfer)) for transfer in transfers
            )

        def script(rank: int) -> tuple[RankStep, ...]:
            return tuple(
                RankStep(tiles, pruned_transfers(step, sends), pruned_transfers(step, recvs))
                for step, (tiles, sends, recvs) in enumerate(plan.rank_steps(rank))
            )

        return plan.changed(script=script)

    def _rows(self, step: int, transfer: Transfer) -> Rows | None:
        deciding_rank, all_rows = self._decided(step, transfer)
        return None if all_rows[self._index[deciding_rank]] else self.half[transfer.item.side]

    def _decided(self, step: int, transfer: Transfer) -> tuple[int, Array]:
        """The rank that decides a transfer's rows, and whether all travel, by rank of its class."""
        side, role, shard, _ = transfer.item
        rank = transfer.dst if role is Role.OPERAND else transfer.src
        if role is Role.RESULT:
            return rank, np.ones(len(self._members[int(self._class[rank])]), bool)
        shard_place = _ShardPlace(int(self._class[rank]), side, relative(shard, rank, self._shifts))
        return rank, self._whole[step, role, shard_place]

    def _follow(self, steps: dict[int, tuple[RankStep, ...]], role: Role) -> None:
        """Follow operands from their readers back to their owners, and partials from their first
        contributor on.
        """
        lowest_met: LowestMet = {}
        step_numbers = range(max(map(len, steps.values())))
        for number in reversed(step_numbers) if role is Role.OPERAND else step_numbers:
            rank_steps = [(w, part[number]) for w, part in steps.items() if number < len(part)]
            arrivals: list[tuple[_ShardPlace, Array]] = []
            for template, step in rank_steps:
                transfers = step.recvs if role is Role.OPERAND else step.sends
                for transfer in transfers:
                    if transfer.item.role is role:
                        arrivals += self._passed(lowest_met, number, template, transfer)
            for template, step in rank_steps:
                arrivals += self._tiles(template, step)
            for shard_place, lowest in arrivals:
                lowest_met[shard_place] = np.minimum(lowest_met.get(shard_place, lowest), lowest)

    def _passed(
        self, lowest_met: LowestMet, number: int, template: int, transfer: Transfer
    ) -> Iterator[tuple[_ShardPlace, Array]]:
        """Note a transfer's rows at the end that decides them; yield what the other end learns."""
        side, role, shard, _ = transfer.item
        shard_place, members = _ShardPlace(template, side, shard), self._members[template]
        lowest = lowest_met.pop(shard_place, None)
        if lowest is None:
            self.complete = False
            return
        self._whole[number, role, shard_place] = lowest <= absolutes(shard, members, self._shifts)
        other_rank = transfer.src if role is Role.OPERAND else transfer.dst
        other_ranks = absolutes(other_rank, members, self._shifts)
        lowest_at_other = np.empty_like(lowest)
        lowest_at_other[self._index[other_ranks]] = lowest
        relative_shard = relative(shard, other_rank, self._shifts)
        yield _ShardPlace(int(self._class[other_rank]), side, relative_shard), lowest_at_other

    def _tiles(self, template: int, step: RankStep) -> Iterator[tuple[_ShardPlace, Array]]:
        members = self._members[template]
        for tile in step.tiles:
            for side, shards, other_shards in (
                (Side.Q, tile.q, tile.kv),
                (Side.KV, tile.kv, tile.q),
            ):
                other_numbers = [absolutes(shard, members, self._shifts) for shard in other_shards]
                lowest = np.min(other_numbers, axis=0)
                for shard in shards:
                    yield _ShardPlace(template, side, shard), lowest


@kept_with_plan(2)
def halves_of(plan: Plan, shifts: tuple[Shift, ...], size: int) -> Halves:
    """The halves of a plan, kept with it."""
    return Halves(plan, shifts, size)


def _no_relay(steps: tuple[RankStep, ...]) -> bool:
    """Return whether a rank reads what it receives and adds to what it sends."""
    tiles = [tile for step in steps for tile in step.tiles]
    tile_shards = {s for tile in tiles for s in tile.q}, {s for tile in tiles for s in tile.kv}
    moved_items: Iterator[Item] = (
        transfer.item
        for step in steps
        for transfers, role in ((step.recvs, Role.OPERAND), (step.sends, Role.PARTIAL))
        for transfer in transfers
        if transfer.item.role is role
    )
    return all(item.shard in tile_shards[item.side] for item in moved_items)
