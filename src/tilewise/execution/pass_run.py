"""One pass of one checked call on this rank: its program, what it starts and what it ends with.

All but the tensors is known once the call is checked, and made once for calls of the same problem.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property, lru_cache
from itertools import accumulate, chain
from typing import NamedTuple

import torch
from torch import Tensor

from tilewise.compiler.liveness import Lifetimes, lifetimes
from tilewise.compiler.lowering import lower
from tilewise.compiler.program import Launch, Program, arrivals
from tilewise.execution import allocator as buffers
from tilewise.execution.allocator import (
    Allocator,
    CaptureAllocator,
    FreshAllocator,
    MemoryPlanCache,
)
from tilewise.execution.gather import Binder, Spans
from tilewise.execution.head_exchange import HeadExchange, head_exchange, whole_side
from tilewise.execution.memory_plan import WorkspacePool
from tilewise.execution.own_rows import OwnRows
from tilewise.execution.packing import Arena, PackedRows, Packing
from tilewise.execution.problem import Problem
from tilewise.execution.work import Frame, PassWork, packings
from tilewise.kernels.call_cache import CALL_CACHE
from tilewise.kernels.protocol import accumulator_dtype
from tilewise.plan.builder import operand
from tilewise.plan.cache import PlanCache
from tilewise.plan.ir import Item, Role, Rows, Side
from tilewise.plan.payload import Payload
from tilewise.plan.row_ranges import count
from tilewise.tiles.call_rows import CallStyle, TileCalls
from tilewise.transport.protocol import (
    SMALL_BYTES,
    Transport,
    team_transport,
    workspace_of,
)
from tilewise.transport.streams import is_capturing

MOST_AHEAD = 8
"""Launches by which receives of small shards are posted before their sends."""


@lru_cache(maxsize=64)
def _carries(payload: Payload) -> frozenset[tuple[Side, Role]]:
    return payload.carries


@lru_cache(maxsize=64)
def _row_bytes(payload: Payload) -> list[int]:
    """By side: bytes of a token's row of the item that has most."""
    return [max(payload.row_bytes(Item(side, role, 0)) for role in Role) for side in Side]


class _Place(NamedTuple):
    """Items whose rows lie side by side in one buffer, and the first row of each."""

    items: tuple[Item, ...]
    packing: Packing
    rows: list[int]
    starts: dict[Item, int]


def pass_run(
    problem: Problem, transport: Transport, *, backward: bool, batch: int, device: torch.device
) -> PassRun:
    """The pass of a problem, made at its first call."""

    def make() -> PassRun:
        return PassRun(problem, transport, backward=backward, batch=batch, device=device)

    if problem.kept is None:
        return make()
    ways = transport.receives_ahead, transport.node_size, team_transport(transport) is None
    key = backward, batch, device, *ways, workspace_of(transport), problem.kernel, problem.allocator
    return problem.kept.get("pass", key, make, 4)


class PassRun:
    """One pass of one problem on this rank: its program, its payload, what it starts and ends with.

    It keeps no tensors, and not the plan, which keeps it.
    """

    def __init__(
        self,
        problem: Problem,
        transport: Transport,
        *,
        backward: bool,
        batch: int,
        device: torch.device,
    ):
        self.batch, self.device, self._allocator = batch, device, problem.allocator
        resolved, rank = problem.passes[backward], transport.rank
        _, mask, self.layouts, self.groups, self.payload = resolved
        # A latent is of all heads: every group has the whole.
        latent = self.payload.wires.latent is not None
        carried = self.groups._replace(num_kv_heads=1) if latent else self.groups
        pruned = resolved.pruned if problem.prune else resolved.plan
        self.packing = packings(self.payload)
        ahead, exchanges = transport.receives_ahead, ()
        shard_bytes = batch * self._largest_shard_bytes()
        if team_transport(transport) and shard_bytes <= SMALL_BYTES:
            exchanges = pruned.traits.exchanges
        if ahead:  # more of small ones: posted while all is quiet, they meet nobody's sends
            ahead = max(ahead, min(MOST_AHEAD, SMALL_BYTES // max(1, shard_bytes)))
        carries, keep = _carries(self.payload), 4 * pruned.world_size
        key = rank, ahead, transport.node_size, carries, exchanges
        self.program: Program = pruned.memo(
            "program",
            key,
            lambda: lower(
                pruned,
                rank,
                node_size=transport.node_size,
                ahead=ahead,
                carries=carries,
                exchanges=exchanges,
            ),
            keep,
        )
        self._arriving: dict[Item, Rows | None] = pruned.memo(
            "arriving", key, lambda: arrivals(self.program), keep
        )
        self._lifetimes: Lifetimes = pruned.memo(
            "lifetimes", key, lambda: lifetimes(self.program), keep
        )
        self.own = OwnRows(pruned.owners, pruned.cuts, self.layouts, carried, rank)
        self._spans: Spans = {}
        self._exchanges: dict[int, HeadExchange] = {}
        if exchanges and all(one.by_head for one in exchanges) and batch:
            self._exchanges = self._whole_exchanges(rank)
        table = TileCalls(
            self.layouts,
            mask,
            self.groups,
            CallStyle(problem.kernel.square_causal, problem.kernel.whole_tile),
        )
        self._kernel = problem.kernel
        calls = pruned.memo("calls", table, dict)
        self._binder: Binder = pruned.memo(
            "binder", (table, device), lambda: Binder(table, device, calls)
        )
        self._bindings: PlanCache = pruned.memo(
            "bindings", (*key, self.payload, table, batch), PlanCache, keep
        )
        allocate = workspace_of(transport)
        self._pool: WorkspacePool = problem.passes[0].plan.memo(
            "pool", (rank, device, allocate), lambda: WorkspacePool(allocate), keep
        )

    def _whole_exchanges(self, rank: int) -> dict[int, HeadExchange]:
        """The launches of exchanges by head, all of them or none."""
        found = {}
        for launch in self.program.instructions:
            if isinstance(launch, Launch):
                role = (launch.sends or launch.recvs)[0].item.role
                whole = head_exchange(role, self.packing, self.layouts, self.groups, rank)
                if whole is None or self.payload.wires.latent is not None:
                    return {}
                found[launch.handle] = whole
        return found

    def _largest_shard_bytes(self) -> int:
        """Of all items of the longest shard at once: the same on all ranks."""
        row_bytes = _row_bytes(self.payload)
        return max(max(self.layouts[side].sizes, default=0) * row_bytes[side] for side in Side)

    def allocator(self, tensors: Sequence[Tensor | None], keep: bool = False) -> Allocator:
        """Who hands out this pass its buffers: on BOUND_DEVICES one that has them all already.

        A graph that is being captured gets memory of its own, which lives as long as the graph.
        The problem's own allocator goes before all that.

        Args:
            tensors: that the pass starts with, rows first; None: it starts without.
        """
        device = self.device
        if self._allocator is not None:
            return self._allocator(device)
        if device.type not in buffers.BOUND_DEVICES:
            return FreshAllocator(device)
        if is_capturing(device):
            return CaptureAllocator(device)
        strides = tuple(None if x is None else x.stride() for x in tensors)
        binding = self._bindings.get("binding", (device, keep, strides), MemoryPlanCache, 4)
        return binding.allocator(self._pool, device)

    def frame(
        self, problem: Problem, keep: bool = False, allocator: Allocator | None = None
    ) -> Frame:
        """What the pass's work needs beside its tensors.

        Args:
            allocator: None: of new memory.
        """
        CALL_CACHE.keep_if_capturing(self.device, self._binder)  # its index tables
        return Frame(
            self.layouts,
            self._binder,
            self._kernel,
            problem.scores,
            self.batch,
            accumulator_dtype(getattr(torch, self.payload.dtype)),
            self.device,
            keep,
            self.packing,
            problem.expansion,
            allocator or FreshAllocator(self.device),
            self._exchanges,
            self._spans,
        )

    def named_kv(self, tensors: Sequence[Tensor]) -> dict[str, Tensor]:
        """The caller's tensors of the KV side by the names of their fields."""
        names = (name for name, _ in self.payload.inputs(Side.KV))
        return dict(zip(names, tensors, strict=True))

    def start(
        self,
        named: Sequence[dict[str, Tensor]],
        gathered: dict[Item, PackedRows] | None = None,
        allocator: Allocator | None = None,
    ) -> tuple[dict[Item, PackedRows], list[Arena], Lifetimes, Sequence[dict[str, Tensor]]]:
        """The operands that this rank holds from the start, the arenas that they move into, how
        long they are needed, and the tensors that they are."""
        operands = dict(gathered or {})
        if self._exchanges:
            arenas = self._all_shards(operands)
            return operands, arenas, self._lifetimes, named
        operands.update(self.own.operands(named))
        allocator = allocator or FreshAllocator(self.device)
        arenas = [self._arena(place, operands, allocator) for place in self._places]
        if gathered:
            kept = {id(b.arena[0]): b.arena[0] for b in gathered.values() if b.arena}
            placed = {*chain.from_iterable(self.program.arenas)}
            arenas += [arena for arena in kept.values() if not placed.intersection(arena.starts)]
        return operands, arenas, self._lifetimes, named

    def _all_shards(self, operands: dict[Item, PackedRows]) -> list[Arena]:
        """Arenas of all shards by side, with what is there already; puts their operands in."""
        arenas = []
        for side in Side:
            own = operand(side, 0, self.program.rank)
            before = operands[own].arena if own in operands else None
            fields = {} if before is None else dict(before[0].fields)
            arena, found = whole_side(side, self.layouts[side], self.program.rank, fields)
            arenas.append(arena)
            operands.update(found)
        return arenas

    def collect(self, work: PassWork, side: Side, results: Sequence[Tensor]) -> None:
        """Write this rank's finished partials of a side, over its shards and head groups.

        Args:
            results: one for each of a partial's tensors, of all of this rank's rows and heads.
        """
        if self._exchanges:
            self._last.gather(work.arrived[False], side, results)
        else:
            self.own.collect(work, side, results)

    def buffers(self) -> Iterator[tuple[Item, ...]]:
        """The items that lie in each of the buffers that hold what arrives.

        Items of one arena share one buffer, own operands among them; all others have their own.
        """
        arriving = self._arriving
        shared: set[Item] = set()
        for items, packing, _, _ in self._places:
            if packing.names and any(item in arriving for item in items):
                yield items
                shared.update(items)
        yield from ((item,) for item in sorted(arriving.keys() - shared))

    def kept(self, work: PassWork) -> list[Tensor]:
        """The buffers of `buffers`, of a pass that kept its operands."""
        if self._exchanges:
            return [work.arrived[True]]
        kept, operands = [], work.operands
        for items in self.buffers():
            block = next(operands[item] for item in items if item in self._arriving)
            wire = block.arena[0].wire if block.arena else block.wire
            assert wire is not None
            kept.append(wire)
        return kept

    def found(self, kept: Sequence[Tensor], allocator: Allocator) -> dict[Item, PackedRows]:
        """What `kept` kept, as the operands of another pass, decoded into buffers of that."""
        operands: dict[Item, PackedRows] = {}
        if self._exchanges:
            for side, fields in self._first.fields(kept[0]):
                operands.update(whole_side(side, self.layouts[side], self.program.rank, fields)[1])
            return operands
        for wire, items in zip(kept, self.buffers(), strict=True):
            packing = self.packing[items[0].side, items[0].role]
            starts = dict(zip(items, self._starts(items), strict=True))
            shared = items in self.program.arenas
            arena = Arena(starts, wire, packing.unpack(wire)) if shared else None
            for item, start in starts.items():
                if item not in self._arriving:
                    continue
                rows = self._arriving[item] or ((0, self.layouts[item.side].size(item.shard)),)
                part = wire[start : start + self._num_rows(item)]
                place = None if arena is None else (arena, start)
                operands[item] = PackedRows(rows, packing.unpack(part, allocator), part, place)
        return operands

    @cached_property
    def _first(self) -> HeadExchange:
        return next(one for one in self._exchanges.values() if one.is_first)

    @cached_property
    def _last(self) -> HeadExchange:
        return next(one for one in self._exchanges.values() if not one.is_first)

    def _num_rows(self, item: Item) -> int:
        return count(self._arriving.get(item), self.layouts[item.side].size(item.shard))

    def _starts(self, items: Sequence[Item]) -> list[int]:
        """First row of each item in the arena of these items."""
        return [0, *accumulate(map(self._num_rows, items))][:-1]

    @cached_property
    def _places(self) -> list[_Place]:
        """The program's arenas but those whose packed fields could not be used in place."""
        found = []
        for items in self.program.arenas:
            packing, rows = self.packing[items[0].side, items[0].role], map(self._num_rows, items)
            starts = dict(zip(items, self._starts(items), strict=True))
            if packing.in_place:
                found.append(_Place(items, packing, [*rows], starts))
        return found

    def _arena(
        self, place: _Place, gathered: Mapping[Item, PackedRows], allocator: Allocator
    ) -> Arena:
        """One buffer for these items."""
        items, packing, rows, starts = place
        before = next((b.arena[0].fields for i in items if (b := gathered.get(i)) and b.arena), {})
        if not packing.names:
            return Arena(starts, None, dict(before))
        wire = allocator.take_parts((sum(rows), self.batch, *packing.row_shape), torch.uint8, rows)
        return Arena(starts, wire, {**before, **packing.unpack(wire)})
