"""One pass of one checked call on this rank: its program, what it starts and what it ends with.

All but the tensors is known once the call is checked, and made once for calls of the same problem.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Any

import numpy as np
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
from tilewise.execution.arenas import ArenaTable, Operands
from tilewise.execution.gather import Binder, PlacedCall, PlacedTile, side_by_side
from tilewise.execution.head_exchange import HeadExchange, as_one_shard, head_exchange
from tilewise.execution.memory_plan import WorkspacePool
from tilewise.execution.own_rows import OwnRows
from tilewise.execution.packing import PackedRows, packings
from tilewise.execution.problem import Problem
from tilewise.kernels.call_cache import CALL_CACHE
from tilewise.kernels.protocol import accumulator_dtype
from tilewise.plan.builder import operand
from tilewise.plan.ir import Item, Plan, Role, Rows, Side, TeamExchange, Tile
from tilewise.plan.kept import RecentValues, kept_with_plan
from tilewise.tiles.call_rows import CallParts, CallStyle, Held, TileCalls
from tilewise.transport.protocol import SMALL_BYTES, Transport, team_transport, workspace_of
from tilewise.transport.streams import is_capturing

MOST_AHEAD = 8
"""Launches by which receives of small shards are posted before their sends."""


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
    return problem.kept.runs.get(key, make)


Part = tuple[Side, Role]
Calls = dict[tuple[Tile, Held], tuple[CallParts[np.ndarray], ...]]


@kept_with_plan(4, each_rank=True)
def program_of(
    pruned: Plan,
    rank: int,
    ahead: int,
    node_size: int | None,
    carries: frozenset[Part],
    exchanges: tuple[TeamExchange, ...],
) -> Program:
    """The program of a rank."""
    sizes = {"node_size": node_size, "ahead": ahead}
    return lower(pruned, rank, **sizes, carries=carries, exchanges=exchanges)


@kept_with_plan(4, each_rank=True)
def incoming(pruned: Plan, *key: Any) -> dict[Item, Rows | None]:
    """What arrives in a program; key: as of `program_of`."""
    return arrivals(program_of(pruned, *key))


@kept_with_plan(4, each_rank=True)
def lifetimes_of(pruned: Plan, *key: Any) -> Lifetimes:
    """Until when the buffers of a program live; key: as of `program_of`."""
    return lifetimes(program_of(pruned, *key))


@kept_with_plan()
def calls_of(pruned: Plan, table: TileCalls) -> Calls:
    """The calls of tiles, which a Binder adds."""
    return {}


@kept_with_plan()
def _binder(pruned: Plan, table: TileCalls, device: torch.device) -> Binder:
    return Binder(table, device, calls_of(pruned, table))


@kept_with_plan(4, each_rank=True)
def _bindings(pruned: Plan, *key: Hashable) -> RecentValues[Hashable, MemoryPlanCache]:
    """Memory plans of a program on shapes; key: all that these depend on."""
    return RecentValues(4)


@kept_with_plan(4, each_rank=True)
def _pool(
    plan: Plan, rank: int, device: torch.device, allocate: Callable[[int], Tensor | None] | None
) -> WorkspacePool:
    """Memory that passes take one after the other."""
    return WorkspacePool(allocate)


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
        _, mask, self.layouts, groups, of = resolved
        self.groups, self.payload = groups, of
        # A latent is of all heads: every group has the whole.
        latent = of.wires.latent is not None
        carried = groups._replace(num_kv_heads=1) if latent else groups
        pruned = resolved.pruned if problem.prune else resolved.plan
        self.packing = packings(of)
        ahead, exchanges = transport.receives_ahead, ()
        self._longest = [max(layout.sizes, default=0) for layout in self.layouts]
        largest = max(map(self.shard_bytes, self.packing))
        if team_transport(transport) and largest <= SMALL_BYTES:
            exchanges = pruned.traits.exchanges
        if ahead:  # more of small ones: posted while all is quiet, they meet nobody's sends
            ahead = max(ahead, min(MOST_AHEAD, SMALL_BYTES // max(1, largest)))
        carries = frozenset(part for part, packing in self.packing.items() if packing.names)
        key = rank, ahead, transport.node_size, carries, exchanges
        self.program = program_of(pruned, *key)
        arriving = incoming(pruned, *key)
        self.lifetimes = lifetimes_of(pruned, *key)
        self.own = OwnRows(pruned.owners, pruned.cuts, self.layouts, carried, rank)
        given = self.program, arriving, self.packing, self.layouts, batch
        self.arenas = ArenaTable(*given, saved=of.backward and of.saved)
        self.exchanges: dict[int, HeadExchange] = {}
        if exchanges and all(one.by_head for one in exchanges) and batch and not latent:
            self.exchanges = self._whole_exchanges(rank)
        if self.exchanges:
            q_layout, kv_layout = map(as_one_shard, self.layouts)
            self.layouts = q_layout, kv_layout
        self.kernel, self.dtype = problem.kernel, accumulator_dtype(getattr(torch, of.dtype))
        cut = CallStyle(self.kernel.square_causal, self.kernel.whole_tile)
        table = TileCalls(self.layouts, mask, groups, cut)
        self.binder = _binder(pruned, table, device)
        self.bound: dict[Tile, PlacedTile] = {}
        self._bindings = _bindings(pruned, *key, of, table, batch)
        self._pool = _pool(problem.passes[0].plan, rank, device, workspace_of(transport))

    def shard_bytes(self, part: tuple[Side, Role]) -> int:
        """Of a part's item of the longest shard: the same on all ranks."""
        return self.batch * self._longest[part[0]] * self.packing[part].row_bytes

    def _whole_exchanges(self, rank: int) -> dict[int, HeadExchange]:
        """The launches of exchanges by head, all of them or none."""
        found, layouts = {}, self.layouts
        for launch in self.program.instructions:
            if isinstance(launch, Launch):
                role = (launch.sends or launch.recvs)[0].item.role
                whole = head_exchange(role, self.payload, layouts, self.groups, rank, self.batch)
                if whole is None:
                    return {}
                found[launch.handle] = whole
        return found

    def allocator(self, tensors: Sequence[Tensor | None], keep: bool = False) -> Allocator:
        """Who hands out this pass its buffers: on BOUND_DEVICES one that has them all already.

        A graph that is being captured gets memory of its own, which lives as long as the graph.
        The problem's own allocator goes before all that.

        Args:
            tensors: that the pass starts with, rows first; None: it starts without.
        """
        device = self.device
        CALL_CACHE.keep_if_capturing(device, self.binder)  # its index tables
        if self._allocator is not None:
            return self._allocator(device)
        if device.type not in buffers.BOUND_DEVICES:
            return FreshAllocator(device)
        if is_capturing(device):
            return CaptureAllocator(device)
        strides = tuple(None if x is None else x.stride() for x in tensors)
        binding = self._bindings.get((device, keep, strides), MemoryPlanCache)
        return binding.allocator(self._pool, device)

    def bind(self, tile: Tile, operands: Operands) -> PlacedTile:
        """A tile's calls, and where their rows lie: the same whenever the program runs."""
        whole = Tile((0,), (0,), tile.heads) if self.exchanges else tile
        bound = self.binder.tile(whole)
        q, kv = ([operands[item] for item in items] for items in (bound.q, bound.kv))
        held = tuple(block.rows for block in q), tuple(block.rows for block in kv)
        calls = [
            PlacedCall(call, side_by_side(q, call.q), side_by_side(kv, call.k))
            for call in self.binder.calls(bound, held)
        ]
        return self.bound.setdefault(tile, PlacedTile(bound.q, bound.kv, calls))

    def found(self, kept: Sequence[Tensor], allocator: Allocator) -> Operands:
        """What `PassWork.kept` kept, as the operands of another pass."""
        if not self.exchanges:
            return self.arenas.found(kept, allocator)
        first = next(one for one in self.exchanges.values() if one.is_first)
        return self.exchanged(first, kept[0], {})

    def exchanged(self, first: HeadExchange, arrived: Tensor, known: Operands) -> Operands:
        """The operands, each of all rows, with what has arrived by the first exchange."""
        for side, fields in first.fields(arrived).items():
            item, rows = operand(side, 0, self.program.rank), self.layouts[side].size(0)
            before = known[item].fields if item in known else {}
            known[item] = PackedRows(((0, rows),), {**before, **fields})
        return known
