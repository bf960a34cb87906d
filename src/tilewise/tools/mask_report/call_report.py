"""Kernel calls of a whole plan, rank by rank: how many, and what they compute beyond the mask.

Stands beside tiles/cover.py because a tile is judged there, and a plan here, by the rows its ranks hold.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import numpy as np

from tilewise.compiler.pruning import prune_shards
from tilewise.compiler.shards import check_made_for, shard_layouts
from tilewise.layouts.layout import Layout
from tilewise.masks.base import Mask
from tilewise.plan.ir import Plan, RankStep, Role, Rows, Side, Tile
from tilewise.plan.payload import HeadGroups
from tilewise.tiles.calls import row_index
from tilewise.tiles.cover import Waste, tile_calls, waste

__all__ = ["report", "total"]

Holding = dict[tuple[Side, int, int], Rows | None]


def report(
    mask: Mask, layout: Layout, plan: Plan, *, ranks: Iterable[int] | None = None
) -> tuple[Waste, ...]:
    """Calls, slices, computed and allowed cells of each rank in one pass, after pruning.

    Cells are those of one KV head of a head group; of a mask that differs by head, of all heads.

    Args:
        ranks: which ranks; None: all.
    Raises:
        ValueError: if a mask-aware plan was made for another mask or layout.
    """
    check_made_for(plan, mask, layout)
    layouts = shard_layouts(plan, layout)
    pruned = prune_shards(plan, mask, *layouts)
    chosen = range(plan.world_size) if ranks is None else ranks
    return tuple(_of_rank(pruned, rank, mask, layouts) for rank in chosen)


def total(rows: Iterable[Waste]) -> Waste:
    """Several ranks' figures as one."""
    columns = np.array([tuple(row) for row in rows], object).reshape(-1, len(Waste._fields))
    return Waste(*(int(column.sum()) for column in columns.T))


def _of_rank(plan: Plan, rank: int, mask: Mask, layouts: tuple[Layout, Layout]) -> Waste:
    known: dict[tuple, Waste] = {}
    found: list[Waste] = []
    for tile, held in _tiles(plan, rank):
        key = tile[:2], held, tile.heads if hasattr(mask, "heads") else 0
        if key not in known:
            q, k = (_positions(*side) for side in zip(layouts, tile[:2], held, strict=True))
            calls = tuple(
                call for one in _masks(mask, plan, tile) for call in tile_calls(q, k, one)
            )
            known[key] = waste(calls, sum(call.area for call in calls))
        found.append(known[key])
    return total(found)


def _tiles(plan: Plan, rank: int) -> Iterator[tuple[Tile, tuple[tuple[Rows | None, ...], ...]]]:
    """A rank's tiles in order, each with the rows that it holds of their operands by then."""
    holding: Holding = {}
    for step in plan.rank_steps(rank):
        for tile in step.tiles:
            yield (
                tile,
                tuple(
                    tuple(holding.get((side, shard, tile.heads)) for shard in shards)
                    for side, shards in zip(Side, tile[:2], strict=True)
                ),
            )
        holding.update(_arrivals(step))


def _arrivals(step: RankStep) -> Iterator[tuple[tuple[Side, int, int], Rows | None]]:
    for hop in step.recvs:
        if hop.item.role is Role.OPERAND:
            yield (hop.item.side, hop.item.shard, hop.item.heads), hop.rows


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
