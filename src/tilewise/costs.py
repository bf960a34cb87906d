"""What one pass of a workload costs: bytes of messages and of memory, seconds of kernels."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

from tilewise.layout import Layout
from tilewise.machine import Kernel, Machine
from tilewise.payload import ITEM_BYTES, Payload, accumulator
from tilewise.plan import Item, Plan, Role, Side, Tile, Transfer
from tilewise.rows import count
from tilewise.support import Cell
from tilewise.workload import Workload

MATMULS = (2, 5)
"""Products of [queries, keys, head_dim] in forward and in backward.

q k and p v; q k again, dout v, dv, dq and dk.
"""


@dataclass(frozen=True)
class Costs:
    """Prices of one pass.

    Args:
        layouts: of the query and the KV shards.
        cells: areas by (query shard, KV shard); None: all alike, but for the diagonal.
        halved: with cells None: whether a shard pair has half its cells, as zigzag under a causal
            mask has; a shard with itself has half a cell a row more.
    """

    work: Workload
    machine: Machine
    payload: Payload
    layouts: tuple[Layout, Layout]
    kernel: Kernel
    cells: Mapping[tuple[int, int], Cell] | None = None
    halved: bool = False

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
        return frozenset(s for s in Side if len(self.payload.fields(s, Role.OPERAND)) > 1)

    @cached_property
    def _known_seconds(self) -> dict[tuple[int, int], float]:
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

    def tile_seconds(self, tile: Tile) -> float:
        """One kernel: its launch, and its FLOP at the speed of a tile of so many rows."""
        area = self.area(tile)
        if not area:
            return 0.0
        queries = sum(self.layouts[0].sizes[shard] for shard in tile.q)
        seconds = self._known_seconds.get((queries, area))
        if seconds is None:
            payload = self.payload
            flop = 2 * MATMULS[payload.backward] * area * payload.num_heads * payload.head_dim
            seconds = self.machine.launch_seconds + flop / self.kernel.speed(
                queries, area / queries
            )
            self._known_seconds[queries, area] = seconds
        return seconds

    def own_bytes(self, plan: Plan, rank: int) -> int:
        """What a rank holds from the start: q, k, v; in backward also out, dout, lse and delta."""
        work = self.work
        rows = [
            sum(layout.size(s) for s, ranks in enumerate(holders) if rank in ranks)
            for holders, layout in zip(plan.owners, self.layouts, strict=True)
        ]
        value = work.head_dim * ITEM_BYTES(work.dtype)
        q = work.num_heads * value
        if self.payload.backward:
            q = 3 * q + 2 * work.num_heads * ITEM_BYTES(accumulator(work.dtype))
        return rows[Side.Q] * q + rows[Side.KV] * 2 * work.num_kv_heads * value
