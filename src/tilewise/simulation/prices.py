"""Prices: the seconds that each operation of a pass takes on a machine, and bytes of items."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from tilewise.arguments import ITEM_BYTES, item_bytes
from tilewise.compiler.program import (
    AttendTile,
    Await,
    Collect,
    Delta,
    Join,
    Launch,
    MergeArrived,
    Operation,
    Pack,
    PackHeads,
    Unpack,
)
from tilewise.compiler.resolved import ResolvedPass
from tilewise.layouts.cells import Cell
from tilewise.layouts.layout import Layout
from tilewise.plan.ir import Item, Plan, Role, Rows, Side, Tile
from tilewise.plan.payload import Payload, accumulator
from tilewise.plan.row_ranges import count
from tilewise.simulation.machine import KernelSpeed, Machine

PASSES_OF_ENCODING = 8
"""Number of times that encoding, or decoding, passes over the memory of its operand."""


@dataclass(frozen=True)
class PassCosts:
    """Prices of one pass.

    Args:
        cells: areas by (query shard, KV shard); None: all alike, but for the diagonal.
        halved: with cells None: whether a shard pair has half its cells, as zigzag under a causal
            mask has; a shard with itself has half a cell a row more.
        follows: the pass is a later part of one call of attention.
    """

    resolved: ResolvedPass
    machine: Machine
    cells: Mapping[tuple[int, int], Cell] | None = None
    halved: bool = False
    follows: bool = False

    @property
    def payload(self) -> Payload:
        return self.resolved.payload

    @property
    def layouts(self) -> tuple[Layout, Layout]:
        """Layouts of the query and the KV shards."""
        return self.resolved.layouts

    @cached_property
    def _kernel(self) -> KernelSpeed:
        payload = self.payload
        return self.machine.kernel(payload.dtype, payload.backward, payload.head_dim)

    @cached_property
    def row_bytes(self) -> dict[tuple[Side, Role], int]:
        """Bytes of a row of an item as it travels."""
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
            * sum(f.width * f.item_bytes for f in self.payload.fields(side, role) if f.wire)
            for side in Side
            for role in Role
        }

    @cached_property
    def _known_seconds(self) -> dict[tuple[float, float], float]:
        return {}

    def item_bytes(self, item: Item, rows: Rows | None = None) -> int:
        """Bytes of an item as it travels."""
        side, role, shard, _ = item
        return count(rows, self.layouts[side].sizes[shard]) * self.row_bytes[side, role]

    def partial_bytes(self, item: Item) -> int:
        """A partial as it is accumulated: the whole shard, in the accumulator's dtype."""
        values = self.layouts[item.side].size(item.shard) * self._row_values[item.side]
        return values * item_bytes(self.payload.partial_dtype)

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
        """Seconds of one kernel: its launch, and its FLOP at the speed of a tile of its size."""
        area = self.area(tile)
        if not area:
            return 0.0
        area += int(self._kernel.edge_keys * self._edge_rows(tile))
        queries = sum(self.layouts[0].sizes[shard] for shard in tile.q)
        seconds = self.kernel_seconds(queries, area) + self._gathering_seconds(tile, area)
        return seconds + self._expanding_seconds(tile)

    def kernel_seconds(self, queries: float, area: float) -> float:
        """Seconds of a kernel with these numbers of queries and allowed pairs."""
        seconds = self._known_seconds.get((queries, area))
        if seconds is None:
            flop = self.payload.flop * area
            launch = self.machine.launch_seconds + self._kernel.launch_seconds
            heads = self.payload.heads(Side.Q)
            seconds = launch + flop / self._kernel.speed(queries, area / queries, heads)
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
        return self.pack_seconds(kv * self.row_bytes[Side.KV, Role.OPERAND])

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
        if self.follows:
            return 0.0
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
        """Return the bytes that a rank holds from the start: q, k, v; in backward also out, dout,
        lse and delta.
        """
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


class OperationSeconds(NamedTuple):
    """Seconds of one operation.

    Attributes:
        kernel: of kernels.
        own: of the rank's own work after them: copying, posting, merging.
    """

    kernel: float = 0.0
    own: float = 0.0


def price(operation: Operation, costs: PassCosts) -> OperationSeconds:
    """The seconds that an operation keeps its rank busy; a rank also waits for what it awaits.

    Delta and Collect are free: the machine's seconds of a call, measured around whole passes,
    have them.
    """
    match operation:
        case AttendTile(tile, adds):
            kernel = costs.tile_seconds(tile)
            return OperationSeconds(kernel, sum(map(costs.merge_seconds, adds)) if kernel else 0.0)
        case Join(item):
            return OperationSeconds(own=costs.pack_seconds(costs.item_bytes(item)))
        case Pack(item, rows, encodes):
            num_bytes = costs.item_bytes(item, rows)
            num_bytes += costs.encoded_bytes(item, rows) if encodes else 0
            return OperationSeconds(own=costs.pack_seconds(num_bytes))
        case Launch():
            messages = len(operation.sends) + len(operation.recvs)
            return OperationSeconds(own=costs.machine.message_seconds * messages)
        case Unpack(transfer, decodes):
            copied_bytes = costs.encoded_bytes if decodes else costs.item_bytes
            return OperationSeconds(
                own=costs.pack_seconds(copied_bytes(transfer.item, transfer.rows))
            )
        case MergeArrived(transfer, adds):
            item, rows = transfer.item, transfer.rows
            if adds:
                return OperationSeconds(own=costs.merge_seconds(item, rows))
            return OperationSeconds(own=costs.pack_seconds(costs.item_bytes(item, rows)))
        case Delta() | Await() | Collect() | PackHeads():
            return OperationSeconds()
