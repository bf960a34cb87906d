"""What one pass of a workload costs: bytes of messages and of memory, seconds of kernels."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

from tilewise.arguments import ITEM_BYTES
from tilewise.compiler.resolved import ResolvedPass
from tilewise.layouts.cells import Cell
from tilewise.layouts.layout import Layout
from tilewise.plan.ir import Item, Plan, Role, Rows, Side, Tile, Transfer
from tilewise.plan.payload import Payload, accumulator
from tilewise.plan.row_ranges import count
from tilewise.simulation.machine import KernelSpeed, Machine

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

    @cached_property
    def packed(self) -> frozenset[Side]:
        """The sides whose operands are several tensors, copied side by side before they leave."""
        fields = {side: self.payload.fields(side, Role.OPERAND) for side in Side}
        return frozenset(s for s, of in fields.items() if len(of) > 1 or any(f.wire for f in of))

    def encoded_bytes(self, hop: Transfer) -> int:
        """Bytes that encoding or decoding a transfer passes over memory, beside packing it."""
        side, role, shard, _ = hop.item
        return count(hop.rows, self.layouts[side].sizes[shard]) * self._encoded[side, role]

    @cached_property
    def _encoded(self) -> dict[tuple[Side, Role], int]:
        """Of a row."""
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

    def message_bytes(self, hop: Transfer) -> int:
        side, role, shard, _ = hop.item
        return count(hop.rows, self.layouts[side].sizes[shard]) * self._row_bytes[side, role]

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
        machine = self.machine
        if machine.merge_bandwidth is None:
            return machine.merge_seconds
        size = self.layouts[item.side].size(item.shard)
        share = count(rows, size) / max(size, 1)
        return machine.merge_seconds + share * self.partial_bytes(item) / machine.merge_bandwidth

    def pack_seconds(self, num_bytes: int) -> float:
        """Copying rows into a message."""
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
