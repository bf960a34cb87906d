"""One pass of one checked call on this rank: its program, what it starts and what it ends with.

All but the tensors is known once the call is checked, and made once for calls of the same problem.
"""

from __future__ import annotations

from collections.abc import Sequence

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
from tilewise.execution.call import ResolvedCall
from tilewise.execution.gather import Binder, PlacedCall, PlacedTile, side_by_side
from tilewise.execution.head_exchange import HeadExchange, as_one_shard, head_exchange
from tilewise.execution.memory_plan import WorkspacePool
from tilewise.execution.own_rows import OwnRows
from tilewise.execution.packing import PackedRows, packings
from tilewise.kernels.call_cache import CALL_CACHE
from tilewise.kernels.protocol import accumulator_dtype
from tilewise.plan.builder import operand
from tilewise.plan.cache import PlanCache
from tilewise.plan.ir import Item, Role, Rows, Side, Tile
from tilewise.tiles.call_rows import CallStyle, TileCalls
from tilewise.transport.protocol import SMALL_BYTES, Transport, team_transport, workspace_of
from tilewise.transport.streams import is_capturing

MOST_AHEAD = 8
"""Launches by which receives of small shards are posted before their sends."""


def pass_run(
    problem: ResolvedCall, transport: Transport, *, backward: bool, batch: int, device: torch.device
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
        problem: ResolvedCall,
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
        keep = 4 * pruned.world_size
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
        arriving: dict[Item, Rows | None] = pruned.memo(
            "arriving", key, lambda: arrivals(self.program), keep
        )
        self.lifetimes: Lifetimes = pruned.memo(
            "lifetimes", key, lambda: lifetimes(self.program), keep
        )
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
        calls = pruned.memo("calls", table, dict)
        self.binder: Binder = pruned.memo(
            "binder", (table, device), lambda: Binder(table, device, calls)
        )
        self.bound: dict[Tile, PlacedTile] = {}
        self._bindings: PlanCache = pruned.memo(
            "bindings", (*key, of, table, batch), PlanCache, keep
        )
        allocate = workspace_of(transport)
        self._pool: WorkspacePool = problem.passes[0].plan.memo(
            "pool", (rank, device, allocate), lambda: WorkspacePool(allocate), keep
        )

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
        binding = self._bindings.get("binding", (device, keep, strides), MemoryPlanCache, 4)
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
