"""Tracks of ranks whose programs are one program relabelled, but whose messages differ in size.

It stands beside simulation/timeline_ops.py because it prices a class of ranks at once: what differs between them are
arrays.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from tilewise.compiler.program import Collective, Compute, Free, Launch, Program, Wait
from tilewise.plan.ir import Item, Plan, Role, Side, Tile, Transfer
from tilewise.plan.shifts import absolutes
from tilewise.simulation.costs import PassCosts
from tilewise.simulation.network import Network
from tilewise.simulation.timeline_ops import (
    LOST,
    Flow,
    HostOp,
    KernelOp,
    Op,
    PricedPrograms,
    RankOps,
    SendOp,
    WaitOp,
)
from tilewise.simulation.zigzag_causal import Halves

Array = np.ndarray


class _Message(NamedTuple):
    """What one launch of every rank of a class sends to, or awaits from, one peer; by rank.

    Attributes:
        shard: the first.
        hops: so many.
    """

    side: Side
    role: Role
    peer: list[int]
    shard: list[int]
    num_bytes: list[int]
    hops: int


class _Awaited(NamedTuple):
    """Stands for an Await until all flows are known."""

    step: int
    messages: list[_Message]


Column = list[Op] | _Awaited
"""An operation of every rank of a class."""

Known = dict[tuple[int, int, int, Side, Role], tuple[int, int]]
"""Sender, step, receiver and part of a message -> its flow's rank and number among that rank's."""


def compile_relabelled(
    plan: Plan, programs: dict[int, Program], costs: PassCosts, network: Network, halves: Halves
) -> PricedPrograms:
    """Price the programs of all ranks.

    Args:
        programs: of the ranks that others are relabelled from.
    """
    known: Known = {}
    writers = [
        _Writer(program, halves.members(rank), (costs, network, halves), known)
        for rank, program in programs.items()
    ]
    for writer in writers:
        writer.write(costs.call_seconds(plan, writer.program.rank))
    flows = {r: sent for w in writers for r, sent in zip(w.ranks, w.flows, strict=True)}
    first = np.concatenate([[0], np.cumsum([len(flows[rank]) for rank in sorted(flows)])]).tolist()
    tracks = {}
    for writer in writers:
        for rank, ops in zip(writer.ranks, writer.resolved(known, first), strict=True):
            tracks[rank] = RankOps(rank, ops)
    moved = (
        flow._replace(after=flow.after + first[rank]) if flow.after != LOST else flow
        for rank in sorted(flows)
        for flow in flows[rank]
    )
    return PricedPrograms(tuple(tracks[rank] for rank in sorted(tracks)), tuple(moved))


class _Writer:
    """Prices one program for all ranks that are relabelled from its own."""

    def __init__(
        self,
        program: Program,
        members: Array,
        world: tuple[PassCosts, Network, Halves],
        known: Known,
    ):
        self.program, self.members, self.ranks = program, members, members.tolist()
        self.costs, self.network, self.halves = world
        self.columns: list[Column] = []
        self.flows: list[list[Flow]] = [[] for _ in self.ranks]
        self._known = known
        self._partials: set[Item] = set()
        self._received: set[Item] = set()
        self._packed: set[Item] = set()
        self._awaited: set[tuple[int, int, Side, Role]] = set()
        self._last: list[dict[int, int]] = [{} for _ in self.ranks]  # the last flow to each peer
        self._computing = [self.network.compute(rank) for rank in self.ranks]

    def write(self, call_seconds: float) -> None:
        self._busy("call", call_seconds)
        launched: dict[int, Launch | Collective] = {}
        for instruction in self.program.instructions:
            match instruction:
                case Compute(tile):
                    self._run(tile)
                case Launch() | Collective():
                    launched[instruction.handle] = instruction
                    self._depart(instruction)
                case Wait(handle, arrivals):
                    launch = launched[handle]
                    self._await(launch.step, [launch.recvs[index] for index in arrivals])
                case Free(item):
                    if not self.costs.payload.saved:
                        self._received.discard(item)
        self.columns.append([WaitOp(tuple(range(len(sent))), ()) for sent in self.flows])

    def resolved(self, known: Known, first: list[int]) -> Iterator[tuple[Op, ...]]:
        """Every rank's operations; flows are numbered on from the first of each rank."""
        for index, rank in enumerate(self.ranks):
            ops: list[Op] = []
            for column in self.columns:
                if isinstance(column, _Awaited):
                    ops.append(self._arriving(column, index, known, first))
                    continue
                op = column[index]
                if isinstance(op, SendOp | WaitOp):
                    op = op._replace(flows=tuple(flow + first[rank] for flow in op.flows))
                ops.append(op)
            yield tuple(ops)

    def _arriving(self, column: _Awaited, index: int, known: Known, first: list[int]) -> WaitOp:
        rank, step = self.ranks[index], column.step
        flows, hops = [], []
        for side, role, peer, shard, *_ in column.messages:
            src = peer[index]
            sender, number = known.get((src, step, rank, side, role), (LOST, LOST))
            flows.append(LOST if number == LOST else first[sender] + number)
            hops.append((step, Transfer(Item(side, role, shard[index]), src, rank)))
        return WaitOp(tuple(flows), tuple(hops))

    def _busy(self, name: str, seconds: float | Array) -> None:
        if np.any(seconds):
            each = np.broadcast_to(seconds, self.members.shape).tolist()
            self.columns.append(
                [HostOp(s, at, name) for s, at in zip(each, self._computing, strict=True)]
            )

    def _labels(self, number: int) -> list[int]:
        """A rank or shard of the program, as each rank calls it."""
        return self._labelled(number).tolist()

    def _labelled(self, number: int) -> Array:
        return absolutes(number, self.members, self.halves.symmetry.plan_shifts)

    def _run(self, tile: Tile) -> None:
        merging = sum(
            self._accumulate(Item(side, Role.PARTIAL, shard, tile.heads))
            for side, shards in zip(Side, (tile.q, tile.kv), strict=True)
            for shard in shards
        )
        seconds = self.costs.tile_seconds(tile)
        q, kv = (list(zip(*map(self._labels, side), strict=True)) for side in (tile.q, tile.kv))
        rows = zip(q, kv, self._computing, strict=True)
        self.columns.append([KernelOp(seconds, at, Tile(a, b, tile.heads)) for a, b, at in rows])
        self._busy("merge", merging if seconds else 0.0)

    def _accumulate(self, item: Item, whole: Array | None = None) -> float | Array:
        """Add to a partial; the seconds that this takes, none for the first."""
        if item not in self._partials:
            self._partials.add(item)
            return 0.0
        if not self.costs.partial_bytes(item):
            return 0.0
        seconds = self.costs.merge_seconds(item)
        if whole is None:
            return seconds
        return np.where(whole, seconds, self.costs.merge_seconds(item, self.halves.half[item.side]))

    def _bytes(self, step: int, hop: Transfer) -> Array:
        """Of a transfer's rows, by rank."""
        whole = self.costs.message_bytes(hop)
        half = self.costs.message_bytes(hop._replace(rows=self.halves.half[hop.item.side]))
        return np.where(self._whole(step, hop), whole, half)

    def _whole(self, step: int, hop: Transfer) -> Array:
        return self.halves.whole(step, hop, self.members)

    def _messages(
        self, step: int, hops: list[Transfer] | tuple[Transfer, ...], by: str
    ) -> list[_Message]:
        """Transfers joined by peer, side and role; by: the field that names the peer."""
        joined: dict[tuple[int, Side, Role], list[Transfer]] = {}
        for hop in hops:
            joined.setdefault((getattr(hop, by), hop.item.side, hop.item.role), []).append(hop)
        found = []
        for (peer, side, role), parts in joined.items():
            first = np.min([self._labelled(hop.item.shard) for hop in parts], axis=0)
            size = np.sum([self._bytes(step, hop) for hop in parts], axis=0)
            if size.any():
                found.append(
                    _Message(
                        side, role, self._labels(peer), first.tolist(), size.tolist(), len(parts)
                    )
                )
        return found

    def _depart(self, launch: Launch | Collective) -> None:
        step = launch.step
        self._received |= {h.item for h in launch.recvs if h.item.role is Role.OPERAND}
        messages = self._messages(step, launch.sends, "dst")
        column: list[Op] = []
        for index in range(len(self.ranks)):
            before = len(self.flows[index])
            self._send(index, step, messages)
            column.append(SendOp(tuple(range(before, len(self.flows[index])))))
        self._busy("pack", self.costs.pack_seconds(1) * self._copied(step, launch.sends))
        self.columns.append(column)
        number = len(launch.sends) + len(launch.recvs)
        self._busy("post", self.costs.machine.message_seconds * number)

    def _copied(self, step: int, sends: tuple[Transfer, ...]) -> int | Array:
        """Bytes packed for a launch: partials, and once own operands of several tensors."""
        copied: int | Array = 0
        own: dict[Item, list[Transfer]] = {}
        for hop in sends:
            if hop.item.role is Role.PARTIAL:
                self._partials.discard(hop.item)
                copied = copied + self._bytes(step, hop)
            elif hop.item.side in self.costs.packed and hop.item not in self._received:
                own.setdefault(hop.item, []).append(hop)
        for item, hops in own.items():
            if item not in self._packed:
                self._packed.add(item)
                nearest = np.argmin([self._labels(hop.dst) for hop in hops], axis=0)
                sizes = np.array([self._bytes(step, hop) for hop in hops])
                copied = copied + np.take_along_axis(sizes, nearest[None], 0)[0]
        return copied

    def _send(self, index: int, step: int, messages: list[_Message]) -> None:
        """A rank's flows: equal messages by one route after the same flow are one."""
        rank, sent, last = self.ranks[index], self.flows[index], self._last[index]
        groups: dict[tuple[int, int, int], list[tuple[_Message, int]]] = {}
        numbers: dict[tuple[int, int, int], int] = {}
        if len(messages) > 1:
            messages = sorted(
                messages, key=lambda m: (m.side, m.role, m.shard[index], m.peer[index])
            )
        for message in messages:
            dst, size = message.peer[index], message.num_bytes[index]
            group = self.network.message(rank, dst), size, last.get(dst, LOST)
            groups.setdefault(group, []).append((message, dst))
            last[dst] = numbers.setdefault(group, len(sent) + len(numbers))
            self._known[rank, step, dst, message.side, message.role] = rank, last[dst]
        for (route, size, after), parts in groups.items():
            first, dst = parts[0]
            link = self.network.link(rank, dst)
            seconds = size / self.network.bandwidth(link) + self.costs.machine.carry_seconds
            hops = sum(message.hops for message, _ in parts)
            name = f"{Item(first.side, first.role, first.shard[index])} to {dst}"
            name += f" and {hops - 1} more" * (hops > 1)
            latency = self.network.latency(link)
            sent.append(Flow(rank, route, link, seconds, size, len(parts), latency, after, name))

    def _await(self, step: int, hops: list[Transfer]) -> None:
        merging = sum(
            self._accumulate(hop.item._replace(role=Role.PARTIAL), self._whole(step, hop))
            for hop in hops
            if hop.item.role is not Role.OPERAND
        )
        late = [hop for hop in hops if (step, hop.src, *hop.item[:2]) not in self._awaited]
        self._awaited |= {(step, hop.src, *hop.item[:2]) for hop in late}
        messages = self._messages(step, late, "src")
        if messages:
            self.columns.append(_Awaited(step, messages))
        self._busy("merge", merging)
