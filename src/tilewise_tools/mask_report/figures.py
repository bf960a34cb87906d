"""Figures of a mask and of plans made for it: bytes, balance, kernel calls."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from types import MappingProxyType
from typing import NamedTuple

import numpy as np

from tilewise.compiler.pruning import prune, shard_layouts
from tilewise.layouts.balanced import balanced
from tilewise.layouts.cells import cells
from tilewise.layouts.documents import zigzag_documents
from tilewise.layouts.layout import Layout, contiguous, striped, zigzag
from tilewise.masks.base import Mask
from tilewise.masks.components import components, row_areas
from tilewise.plan.builder import operand
from tilewise.plan.ir import Item, Plan, Role, Rows, Side, Tile
from tilewise.plan.payload import HeadGroups
from tilewise.tiles.call_rows import CallStyle, Held, TileCalls
from tilewise.tiles.calls import KernelCall
from tilewise.workload import Workload


class Moved(NamedTuple):
    """Bytes sent and received, and allowed pairs computed, by rank."""

    sent: tuple[int, ...]
    received: tuple[int, ...]
    areas: tuple[int, ...]

    @property
    def imbalance(self) -> float:
        """Largest over mean area."""
        return max(self.areas) * len(self.areas) / max(1, sum(self.areas))


def moved(plan: Plan, work: Workload, *, backward: bool = False) -> Moved:
    """Return what one pass of a plan sends, receives and computes on each rank, after pruning."""
    resolved = work.resolve(plan)[backward]
    pruned, table = resolved.pruned, cells(work.mask, *resolved.layouts)
    sent, received, areas = ([0] * plan.world_size for _ in range(3))
    for rank in range(plan.world_size):
        for step in pruned.rank_steps(rank):
            for transfers, total in ((step.sends, sent), (step.recvs, received)):
                total[rank] += sum(map(resolved.transfer_bytes, transfers))
            for tile in step.tiles:
                pairs = ((q, kv) for q in tile.q for kv in tile.kv)
                areas[rank] += sum(table[pair].area for pair in pairs if pair in table)
    return Moved(tuple(sent), tuple(received), tuple(areas))


class Waste(NamedTuple):
    """Cost of kernel calls beside what their mask allows."""

    num_calls: int
    num_slices: int
    computed: int
    allowed: int

    @property
    def ratio(self) -> float:
        """computed / allowed cells; 1 where nothing is allowed and nothing computed."""
        return self.computed / self.allowed if self.allowed else 1.0 + self.computed

    def __str__(self) -> str:
        return (
            f"{self.num_calls} calls, {self.num_slices} slices, {self.computed:,} cells computed "
            f"for {self.allowed:,} allowed ({self.ratio:.3f})"
        )


def waste(calls: Iterable[KernelCall]) -> Waste:
    """Computed beside allowed cells; a causal call computes its triangle, SLICES its rectangle."""
    return total(Waste(1, len(call.slices), call.computed, call.area) for call in calls)


def total(rows: Iterable[Waste]) -> Waste:
    """Several ranks' figures as one."""
    return Waste(*map(sum, zip(Waste(0, 0, 0, 0), *rows, strict=True)))


def report(
    mask: Mask, layout: Layout, plan: Plan, *, ranks: Iterable[int] | None = None
) -> tuple[Waste, ...]:
    """Calls, slices, computed and allowed cells of each rank in one pass, after pruning.

    Cells are those of one KV head of a head group; of a mask that differs by head, of all heads.

    Args:
        ranks: which ranks; None: all.
    """
    pruned, layouts = prune(plan, mask, layout), shard_layouts(plan, layout)
    heads = len(getattr(mask, "heads", ())) or plan.num_head_groups
    groups = HeadGroups(heads, heads, plan.num_head_groups)
    table = TileCalls(layouts, mask, groups, CallStyle(square_causal=True))
    chosen = range(plan.world_size) if ranks is None else ranks
    return tuple(_of_rank(pruned, rank, table) for rank in chosen)


def _of_rank(plan: Plan, rank: int, table: TileCalls) -> Waste:
    """All tiles of a rank, on the rows that it holds of their operands by then."""
    arrived: dict[Item, Rows | None] = {}
    waste_by_tile: dict[tuple[Tile, Held], Waste] = {}
    wastes: list[Waste] = []
    by_head = hasattr(table.mask, "heads")

    def held(side: Side, tile: Tile) -> tuple[Rows, ...]:
        sizes = table.layouts[side].sizes
        rows = ((shard, arrived.get(operand(side, shard, tile.heads))) for shard in tile[:2][side])
        return tuple(((0, sizes[shard]),) if part is None else part for shard, part in rows)

    for step in plan.rank_steps(rank):
        for tile in step.tiles:
            rows = held(Side.Q, tile), held(Side.KV, tile)
            alike = tile if by_head else tile._replace(heads=0)
            if (alike, rows) not in waste_by_tile:
                waste_by_tile[alike, rows] = waste(
                    call_parts.call for call_parts in table.calls(tile, rows)
                )
            wastes.append(waste_by_tile[alike, rows])
        arrived |= {x.item: x.rows for x in step.recvs if x.item.role is Role.OPERAND}
    return total(wastes)


class MaskCase(NamedTuple):
    """Ranks, their tokens, and the heads of a layer in bf16."""

    world_size: int
    num_tokens: int
    num_heads: int
    num_kv_heads: int
    head_dim: int

    @property
    def kv_bytes(self) -> float:
        return 2 * self.num_kv_heads / self.num_heads

    @property
    def ring_bytes(self) -> float:
        """Bytes that every rank of a ring sends under a full mask: all keys and values but its
        last.
        """
        share = (self.world_size - 1) / self.world_size
        return share * self.num_tokens * 2 * self.num_kv_heads * self.head_dim * 2

    def workload(self, mask: Mask, layout: Layout) -> Workload:
        heads = self.num_heads, self.num_kv_heads, self.head_dim
        return Workload(self.num_tokens, *heads, mask=mask, layout=layout)


class RankLoad(NamedTuple):
    """Bytes in forward, as shares of the ring's: sent on average, most sent or received."""

    mean: float
    busiest: float


LAYOUTS: Mapping[str, Callable[[Mask, int, int], Layout]] = MappingProxyType(
    {
        "contiguous": lambda _, num_tokens, n: contiguous(num_tokens, n),
        "zigzag": lambda _, num_tokens, n: zigzag(num_tokens, n),
        "striped": lambda _, num_tokens, n: striped(num_tokens, n),
        "balanced": balanced,
        "zigzag_documents": lambda mask, num_tokens, n: zigzag_documents(
            components(mask, num_tokens), n
        ),
    }
)
"""How the tokens lie: (mask, num_tokens, world_size). Documents are the ranges that no allowed pair
connects."""


def imbalance(mask: Mask, layout: Layout) -> float:
    """Largest over mean area, each rank computing its own queries; 1 where nothing is allowed."""
    areas = row_areas(mask, layout.num_tokens)
    own_areas = [float(areas[layout.rows(rank)].sum()) for rank in range(layout.world_size)]
    return max(own_areas) * len(own_areas) / sum(own_areas) if any(own_areas) else 1.0


def load(plan: Plan, mask: Mask, layout: Layout, case: MaskCase) -> tuple[RankLoad, float]:
    """Return what a plan moves, and its largest over mean area."""
    moved_rows = moved(plan, case.workload(mask, layout))
    ring_bytes = max(1.0, case.ring_bytes)
    busiest = max(*moved_rows.sent, *moved_rows.received)
    return RankLoad(
        float(np.mean(moved_rows.sent)) / ring_bytes, busiest / ring_bytes
    ), moved_rows.imbalance
