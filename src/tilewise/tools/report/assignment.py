"""Who computes which cell of the table query shards x KV shards, for each group of heads."""

from __future__ import annotations

import numpy as np

from tilewise.compiler.resolved import ResolvedPass
from tilewise.compiler.shards import everything_needed, table_cells
from tilewise.plan.ir import Plan, Side
from tilewise.tools.report.chart import CROSS, Figure, Table, Tiles

MOST_CELLS = 256  # a side
MOST_GROUPS = 2
MOST_RANKS = 1024  # of larger plans some ranks' cells are shown
SHOWN_RANKS = 64


def figures(resolved: ResolvedPass) -> tuple[Figure, ...]:
    """One figure per group of heads, for a few of them."""
    plan, mask, layouts, *_ = resolved
    shown = min(plan.num_head_groups, MOST_GROUPS)
    tables = _tables(plan, shown)
    if plan.world_size <= MOST_CELLS and not everything_needed(mask, *layouts):
        needed = np.zeros(tables[0].shape, bool)
        pairs = np.array(list(table_cells(plan, mask, *layouts)), np.int64).reshape(-1, 2)
        needed[pairs[:, 0], pairs[:, 1]] = True
        tables = [np.where(needed, table, -1) for table in tables]
    return tuple(_figure(plan, table, group) for group, table in enumerate(tables))


def _tables(plan: Plan, groups: int) -> list[np.ndarray]:
    """int [query shards, KV shards] per head group: the rank that computes the cell, or -1."""
    n, shape = plan.world_size, [plan.num_shards(side) for side in Side]
    kind = np.int16 if n < 1 << 15 else np.int32
    tables = [np.full(shape, -1, kind) for _ in range(groups)]
    ranks = range(n) if n <= MOST_RANKS else range(0, n, n // SHOWN_RANKS)
    for rank in ranks:
        for step in plan.rank_steps(rank):
            for tile in step.tiles:
                if tile.heads < groups:
                    tables[tile.heads][np.ix_(tile.q, tile.kv)] = rank
    return tables


def _thinned(table: np.ndarray) -> tuple[np.ndarray, tuple[int, ...], tuple[int, ...]]:
    """At most so many cells a side, each the first that anybody computes among those it is for."""
    steps = [-(-size // MOST_CELLS) for size in table.shape]
    if max(steps) > 1:
        padded = [-(-size // step) * step for size, step in zip(table.shape, steps, strict=True)]
        pads = [(0, to - size) for to, size in zip(padded, table.shape, strict=True)]
        blocks = np.pad(table, pads, constant_values=-1)
        parts = blocks.reshape(padded[0] // steps[0], steps[0], padded[1] // steps[1], steps[1])
        table = parts.max(axis=(1, 3))
    rows, columns = (
        tuple(range(0, size * step, step)) for size, step in zip(table.shape, steps, strict=True)
    )
    return table, rows, columns


def _figure(plan: Plan, table: np.ndarray, group: int) -> Figure:
    n, groups = plan.world_size, plan.num_head_groups
    whole = table.shape
    table, rows, columns = _thinned(table)
    heads = f", head group {group} of {groups}" if groups > 1 else ""
    sides = f" {CROSS} ".join(str(size) for size in whole)
    ranks = f"{len(set(table[table >= 0].tolist()))} of {n}"
    caption = (
        f"{sides} cells, one colour per rank ({ranks} ranks compute here). "
        + ("Wide blocks share keys and values, tall ones queries. " if group == 0 else "")
        + ("Blank cells are not needed under the mask. " if (table < 0).any() and n <= 256 else "")
        + ("Each cell stands for several. " if table.shape != whole else "")
    )
    title = f"Who computes what{heads}"
    tiles = Tiles(table, rows, columns)
    name = f"assignment-{group}"
    return Figure(name, title, caption.strip(), tiles, _owners(table))


def _owners(table: np.ndarray) -> Table | None:
    """How many cells each rank computes, where the table is not too large to say."""
    if table.size > MOST_CELLS**2 or not (table >= 0).any():
        return None
    ranks, cells = np.unique(table[table >= 0], return_counts=True)
    rows = zip(map(str, ranks.tolist()), map(str, cells.tolist()), strict=True)
    return Table(("rank", "cells"), tuple(rows))
