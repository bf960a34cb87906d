"""One pass of one checked call on this rank: its program, what it starts and what it ends with."""

from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property, lru_cache
from itertools import accumulate, chain

import torch
from torch import Tensor

from tilewise.compiler.liveness import Lifetimes, lifetimes
from tilewise.compiler.lowering import lower
from tilewise.compiler.program import Program, arrivals
from tilewise.execution import allocator as buffers
from tilewise.execution.allocator import (
    Allocator,
    CaptureAllocator,
    FreshAllocator,
    MemoryPlanCache,
)
from tilewise.execution.gather import Binder
from tilewise.execution.memory_plan import WorkspacePool
from tilewise.execution.packing import Arena, PackedRows
from tilewise.execution.problem import Problem
from tilewise.execution.work import Frame, PassWork, packings
from tilewise.kernels.call_cache import CALL_CACHE
from tilewise.kernels.protocol import accumulator_dtype
from tilewise.plan.builder import operand, partial
from tilewise.plan.ir import Item, Role, Rows, Side
from tilewise.plan.payload import Payload
from tilewise.plan.row_ranges import count
from tilewise.tiles.call_rows import CallStyle, TileCalls
from tilewise.transport.protocol import SMALL_BYTES, Transport, team_transport
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


class PassRun:
    """One pass of one call on this rank: its program, its payload, what it starts and ends with."""

    def __init__(
        self,
        problem: Problem,
        transport: Transport,
        *,
        backward: bool,
        batch: int,
        device: torch.device,
    ):
        self.problem, self.batch, self.device = problem, batch, device
        resolved = problem.passes[backward]
        self.groups, self.payload = resolved.groups, resolved.payload
        # A latent is of all heads: every group has the whole.
        latent = self.payload.wires.latent is not None
        self._carried = self.groups._replace(num_kv_heads=1) if latent else self.groups
        self.mask, self.layouts = resolved.mask, resolved.layouts
        self.rank = transport.rank
        pruned = self.plan = resolved.pruned if problem.prune else resolved.plan
        self._cut = CallStyle(problem.kernel.square_causal, problem.kernel.whole_tile)
        self.packing = packings(self.payload)
        ahead, exchanges = transport.receives_ahead, ()
        shard_bytes = batch * self._largest_shard_bytes()
        if team_transport(transport) and shard_bytes <= SMALL_BYTES:
            exchanges = pruned.traits.exchanges
        if ahead:  # more of small ones: posted while all is quiet, they meet nobody's sends
            ahead = max(ahead, min(MOST_AHEAD, SMALL_BYTES // max(1, shard_bytes)))
        carries = _carries(self.payload)
        self._key = self.rank, ahead, transport.node_size, carries, exchanges
        self.program: Program = pruned.memo(
            "program",
            self._key,
            lambda: lower(
                pruned,
                self.rank,
                node_size=transport.node_size,
                ahead=ahead,
                carries=carries,
                exchanges=exchanges,
            ),
            keep=4 * pruned.world_size,
        )

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
        problem, device = self.problem, self.device
        if problem.allocator is not None:
            return problem.allocator(device)
        if device.type not in buffers.BOUND_DEVICES:
            return FreshAllocator(device)
        if is_capturing(device):
            return CaptureAllocator(device)
        strides = tuple(None if x is None else x.stride() for x in tensors)
        calls = self.layouts, self.mask, self._cut
        key = self._key, self.payload, calls, self.batch, device, keep, strides
        binding = self.plan.memo("binding", key, MemoryPlanCache, keep=4 * self.plan.world_size)
        pool = problem.passes[0].plan.memo(
            "pool", (self.rank, device), WorkspacePool, keep=2 * self.plan.world_size
        )
        return binding.allocator(pool, device)

    def frame(self, keep: bool, allocator: Allocator | None = None) -> Frame:
        """What the pass's work needs beside its tensors.

        Args:
            allocator: None: of new memory.
        """
        problem = self.problem
        table = TileCalls(self.layouts, self.mask, self.groups, self._cut)
        calls = self.plan.memo("calls", table, dict)
        binder = self.plan.memo(
            "binder", (table, self.device), lambda: Binder(table, self.device, calls)
        )
        CALL_CACHE.keep_if_capturing(self.device, binder)  # its index tables
        dtype = accumulator_dtype(getattr(torch, self.payload.dtype))
        return Frame(
            self.layouts,
            binder,
            problem.kernel,
            problem.scores,
            self.batch,
            dtype,
            self.device,
            keep,
            self.packing,
            problem.expansion,
            allocator or FreshAllocator(self.device),
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
    ) -> tuple[dict[Item, PackedRows], list[Arena], Lifetimes]:
        """The operands that this rank holds from the start, the arenas that they move into, and
        how long they are needed."""
        gathered = gathered or {}
        operands = dict(gathered)
        for side, tensors in zip(Side, named, strict=True):
            for shard, rows in self._held(side):
                for group in range(self.groups.groups):
                    item, heads = operand(side, shard, group), self._carried.slice(side, group)
                    fields = {name: x[rows][:, :, heads] for name, x in tensors.items()}
                    operands[item] = PackedRows(((0, rows.stop - rows.start),), fields)
        allocator = allocator or FreshAllocator(self.device)
        arenas = [self._arena(items, gathered, allocator) for items in self.program.arenas]
        kept = {id(b.arena[0]): b.arena[0] for b in gathered.values() if b.arena}
        placed = {*chain.from_iterable(self.program.arenas)}
        arenas += [arena for arena in kept.values() if not placed.intersection(arena.starts)]
        ends: Lifetimes = self.plan.memo(
            "lifetimes", self._key, lambda: lifetimes(self.program), keep=4 * self.plan.world_size
        )
        return operands, [arena for arena in arenas if arena], ends

    def collect(self, work: PassWork, side: Side, results: Sequence[Tensor]) -> None:
        """Write this rank's finished partials of a side, over its shards and head groups.

        Args:
            results: one for each of a partial's tensors, of all of this rank's rows and heads.
        """
        held = self._held(side)
        if len(held) == self.groups.groups == 1:
            for result, value in zip(results, work.final(partial(side, held[0][0])), strict=True):
                result.copy_(value)
            return
        for shard, rows in held:
            sums: dict[int, tuple[Tensor, ...]] = {}  # by first head
            for group in range(self.groups.groups):
                values = work.final(partial(side, shard, group))
                heads = self._carried.slice(side, group)
                # Groups may share a KV head, whose gradients sum.
                for total, value in zip(sums.setdefault(heads.start, values), values, strict=True):
                    if total is not value:
                        total.add_(value)
            width = self._carried.slice(side, 0).stop
            for first, values in sums.items():
                for result, value in zip(results, values, strict=True):
                    result[rows][:, :, first : first + width].copy_(value)

    def buffers(self) -> Iterator[tuple[Item, ...]]:
        """The items that lie in each of the buffers that hold what arrives.

        Items of one arena share one buffer, own operands among them; all others have their own.
        """
        arriving = self._arriving
        shared: set[Item] = set()
        for items in self.program.arenas:
            packing = self.packing[items[0].side, items[0].role]
            if packing.in_place and packing.names and any(item in arriving for item in items):
                yield items
                shared.update(items)
        yield from ((item,) for item in sorted(arriving.keys() - shared))

    def kept(self, operands: Mapping[Item, PackedRows]) -> list[Tensor]:
        """The buffers of `buffers`, of a pass that kept its operands."""
        kept = []
        for items in self.buffers():
            block = next(operands[item] for item in items if item in self._arriving)
            wire = block.arena[0].wire if block.arena else block.wire
            assert wire is not None
            kept.append(wire)
        return kept

    def found(self, kept: Sequence[Tensor]) -> dict[Item, PackedRows]:
        """What `kept` kept, as the operands of another pass."""
        operands = {}
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
                operands[item] = PackedRows(rows, packing.unpack(part), part, place)
        return operands

    @cached_property
    def _arriving(self) -> dict[Item, Rows | None]:
        return self.plan.memo(
            "arriving",
            self._key,
            lambda: arrivals(self.program),
            keep=4 * self.plan.world_size,
        )

    def _num_rows(self, item: Item) -> int:
        return count(self._arriving.get(item), self.layouts[item.side].size(item.shard))

    def _starts(self, items: Sequence[Item]) -> list[int]:
        """First row of each item in the arena of these items."""
        return [0, *accumulate(map(self._num_rows, items))][:-1]

    def _held(self, side: Side) -> list[tuple[int, slice]]:
        """This rank's shards of a side, and where their rows are among its own."""
        owners, cuts = self.plan.owners[side], self.plan.cuts
        held = [shard for shard, ranks in enumerate(owners) if self.rank in ranks]
        sizes = self.layouts[side].sizes
        return [(s, slice(*cuts[s]) if cuts else slice(0, sizes[s])) for s in held]

    def _arena(
        self, items: Sequence[Item], gathered: dict[Item, PackedRows], allocator: Allocator
    ) -> Arena | None:
        """One buffer for these items; None where their packed fields could not be used in place."""
        packing = self.packing[items[0].side, items[0].role]
        if not packing.in_place:
            return None
        before = next((b.arena[0].fields for i in items if (b := gathered.get(i)) and b.arena), {})
        starts = dict(zip(items, self._starts(items), strict=True))
        if not packing.names:
            return Arena(starts, None, dict(before))
        rows = [self._num_rows(item) for item in items]
        wire = allocator.take_parts((sum(rows), self.batch, *packing.row_shape), torch.uint8, rows)
        return Arena(starts, wire, {**before, **packing.unpack(wire)})
