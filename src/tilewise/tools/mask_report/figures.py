"""Figures of a mask and of plans made for it: bytes, balance, kernel calls."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple

import numpy as np

from tilewise.compiler.pruning import prune
from tilewise.compiler.shards import shard_layouts
from tilewise.layouts.balanced import balanced
from tilewise.layouts.cells import cells
from tilewise.layouts.layout import Layout, contiguous, striped, zigzag
from tilewise.masks.base import Mask
from tilewise.masks.components import row_areas
from tilewise.plan.ir import Plan, Role, Rows, Side, Tile
from tilewise.plan.payload import HeadGroups
from tilewise.plan.row_ranges import row_index
from tilewise.strategies import catalog
from tilewise.strategies.mesh import mesh
from tilewise.strategies.ring import ring
from tilewise.tiles.calls import KernelCall
from tilewise.tiles.cover import tile_calls
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
    """One pass of a plan, after pruning; sent is what volume counts."""
    resolved = work.resolve(plan)[backward]
    pruned, table = resolved.pruned, cells(work.mask, *resolved.layouts)
    sent, received, areas = ([0] * plan.world_size for _ in range(3))
    for rank in range(plan.world_size):
        for step in pruned.rank_steps(rank):
            for hops, total in ((step.sends, sent), (step.recvs, received)):
                total[rank] += sum(map(resolved.hop_bytes, hops))
            for tile in step.tiles:
                pairs = ((q, kv) for q in tile.q for kv in tile.kv)
                areas[rank] += sum(table[pair].area for pair in pairs if pair in table)
    return Moved(tuple(sent), tuple(received), tuple(areas))


def report(
    mask: Mask, layout: Layout, plan: Plan, *, ranks: Iterable[int] | None = None
) -> tuple[Waste, ...]:
    """Calls, slices, computed and allowed cells of each rank in one pass, after pruning.

    Cells are those of one KV head of a head group; of a mask that differs by head, of all heads.

    Args:
        ranks: which ranks; None: all.
    """
    pruned, layouts = prune(plan, mask, layout), shard_layouts(plan, layout)
    chosen = range(plan.world_size) if ranks is None else ranks
    return tuple(_of_rank(pruned, rank, mask, layouts) for rank in chosen)


def total(rows: Iterable[Waste]) -> Waste:
    """Several ranks' figures as one."""
    return Waste(*map(sum, zip(Waste(0, 0, 0, 0), *rows, strict=True)))


def _of_rank(plan: Plan, rank: int, mask: Mask, layouts: tuple[Layout, Layout]) -> Waste:
    known: dict[tuple, Waste] = {}
    found: list[Waste] = []
    for tile, held in _computed_tiles(plan, rank):
        key = tile[:2], held, tile.heads if hasattr(mask, "heads") else 0
        if key not in known:
            q, k = (_positions(*side) for side in zip(layouts, tile[:2], held, strict=True))
            calls = tuple(
                call for one in _masks(mask, plan, tile) for call in tile_calls(q, k, one)
            )
            known[key] = waste(calls, sum(call.area for call in calls))
        found.append(known[key])
    return total(found)


def _computed_tiles(
    plan: Plan, rank: int
) -> Iterator[tuple[Tile, tuple[tuple[Rows | None, ...], ...]]]:
    """A rank's tiles in order, each with the rows that it holds of their operands by then."""
    holding: dict[tuple[Side, int, int], Rows | None] = {}
    for step in plan.rank_steps(rank):
        for tile in step.tiles:
            yield (
                tile,
                tuple(
                    tuple(holding.get((side, shard, tile.heads)) for shard in shards)
                    for side, shards in zip(Side, tile[:2], strict=True)
                ),
            )
        for hop in step.recvs:
            if hop.item.role is Role.OPERAND:
                holding[hop.item.side, hop.item.shard, hop.item.heads] = hop.rows


def _positions(layout: Layout, shards: Sequence[int], held: Sequence[Rows | None]) -> np.ndarray:
    """Global positions of the rows of a tile's operands, one after the other."""
    rows = [layout.rows(shard) for shard in shards]
    return np.concatenate(
        [x if part is None else x[row_index(part)] for x, part in zip(rows, held, strict=True)]
    )


def _masks(mask: Mask, plan: Plan, tile: Tile) -> Sequence[Mask]:
    """The masks of a tile's heads: one each if they differ."""
    by_head: Sequence[Mask] | None = getattr(mask, "heads", None)
    if by_head is None:
        return (mask,)
    groups = HeadGroups(len(by_head), len(by_head), plan.num_head_groups)
    return by_head[groups.slice(Side.KV, tile.heads)]


MESHES = 2  # tile shapes tried, those nearest to the best for a full mask
PLANS = ("ring", "mesh", "needed", "tiled")


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
        """What every rank of a ring sends of a full mask: all keys and values but its last."""
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
    }
)


def imbalance(mask: Mask, layout: Layout) -> float:
    """Largest over mean area, each rank computing its own queries; 1 where nothing is allowed."""
    areas = row_areas(mask, layout.num_tokens)
    mine = [float(areas[layout.rows(rank)].sum()) for rank in range(layout.world_size)]
    return max(mine) * len(mine) / sum(mine) if any(mine) else 1.0


def planned(mask: Mask, case: MaskCase, name: str) -> tuple[Plan, Layout]:
    """A plan of PLANS with the layout that it is at home on; of the meshes the one that sends
    least."""
    if name not in PLANS:
        raise ValueError(f"plan {name!r} is not known; take one of {', '.join(PLANS)}")
    n, num_tokens, kv_bytes = case.world_size, case.num_tokens, case.kv_bytes
    for entry in catalog.MASK_AWARE:
        if entry.name == name:
            layout = entry.layout(mask, num_tokens, n, kv_bytes)
            return entry.plan(mask, layout, kv_bytes), layout
    layout = zigzag(num_tokens, n)
    if name == "ring":
        return ring(n), layout
    best = math.sqrt(n * case.num_kv_heads / case.num_heads)
    tiles = sorted(catalog.tile_sizes(n), key=lambda a: abs(math.log(a / best)))
    return min(
        (mesh(n, q_tile=a) for a in tiles[:MESHES]),
        key=lambda plan: sum(moved(plan, case.workload(mask, layout)).sent),
    ), layout


def load(plan: Plan, mask: Mask, layout: Layout, case: MaskCase) -> tuple[RankLoad, float]:
    """What a plan moves, and its largest over mean area."""
    found = moved(plan, case.workload(mask, layout))
    ring_bytes = max(1.0, case.ring_bytes)
    busiest = max(*found.sent, *found.received)
    return RankLoad(float(np.mean(found.sent)) / ring_bytes, busiest / ring_bytes), found.imbalance


def kernel_calls(plan: Plan, mask: Mask, layout: Layout, most: int = 8) -> tuple[float, Waste]:
    """Calls per rank on average, and the waste of all: of up to `most` ranks, evenly spread."""
    n = plan.world_size
    ranks = sorted({i * n // most for i in range(most)}) if n > most else range(n)
    waste = total(report(mask, layout, plan, ranks=ranks))
    return waste.num_calls / len(ranks), waste


class Waste(NamedTuple):
    """What a tile's calls cost beside what its mask allows."""

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


def waste(calls: tuple[KernelCall, ...], area: int) -> Waste:
    """Computed beside allowed cells; a causal call computes its triangle, SLICES its rectangle.

    Args:
        area: allowed pairs of the tile (of several tiles: concatenate calls and add areas).
    """
    slices = sum(len(call.slices) for call in calls)
    return Waste(len(calls), slices, sum(call.computed for call in calls), int(area))
