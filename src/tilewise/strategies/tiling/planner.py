"""Mask-aware plans for any mask and layout, and the layouts that go with them.

Several ways to place blocks are tried. Level loads come first, then what the plan would move; where
`needed` on the same layout is as level, never is more moved than by it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from math import ceil
from typing import NamedTuple

import numpy as np

from tilewise.layouts.balanced import balanced
from tilewise.layouts.cells import cells
from tilewise.layouts.layout import Layout, Run, contiguous, striped, zigzag
from tilewise.masks.base import Causal, Mask
from tilewise.masks.components import documents
from tilewise.plan.ir import Plan
from tilewise.strategies.tiling.causal.planner import (
    suits,
    triangle_layout,
    triangle_loads,
    triangle_plan,
)
from tilewise.strategies.tiling.ownership import readings
from tilewise.strategies.tiling.placement import (
    BUSIEST,
    LEVEL,
    Balance,
    Placement,
    assign,
    keys_read,
    own_rows,
    place,
)
from tilewise.strategies.tiling.routing import (
    LSE,
    Cells,
    RowReaders,
    ShardOwners,
    assemble,
    flows_of,
    received,
)
from tilewise.strategies.tiling.shard_work import areas_of, refined, work_of

GRAIN = 0.05  # of the mean area: differences in excess that count
MAX_RANGES = 48  # of a rank, up to which blocks are fitted to a layout's own ranges
PARTS = 64  # shards, about, into which all rows are cut on layouts of fewer ranks


class PlacedLayout(Layout):
    """A layout, and the placement that it was made from, which is no part of its value."""

    def __init__(
        self, num_tokens: int, placement: Placement, mask: Mask, kv_bytes: float, balance: Balance
    ):
        runs: list[list[Run]] = [[] for _ in range(placement.world_size)]
        for start, stop, rank in placement.owned:
            runs[rank].append(Run(start, stop - start))
        super().__init__(num_tokens, runs, "tiled_layout")
        self.placement, self.mask, self.balance = placement, mask, balance
        shape = f"{num_tokens}, {self.world_size}"
        self.call = f"tiled_layout({mask!r}, {shape}, kv_bytes={kv_bytes}{balance})"


class RoutedWork(NamedTuple):
    """A way to compute the mask on shards, and the rows that it moves."""

    work: ShardOwners
    flows: list[RowReaders]
    total: float  # units moved: a row of q
    rank: tuple[int, float]  # grains by which the largest work exceeds the limit, units that count

    @classmethod
    def of(
        cls, work: ShardOwners, kv_bytes: float, balance: Balance, areas: np.ndarray | None = None
    ) -> RoutedWork:
        """Return the work with the transfers that it needs, and what ranks receive.

        Args:
            areas: allowed pairs by rank; None: counted here.
        """
        flows, n = flows_of(work), len(work.cells)
        load = received(flows, n, kv_bytes)
        areas = areas_of(work) if areas is None else areas
        rank = _rank(load, areas, np.bincount(work.homes, work.sizes, n), balance)
        return cls(work, flows, float(load.sum()), rank)


def _rank(
    load: np.ndarray, areas: np.ndarray, tokens: np.ndarray, balance: Balance
) -> tuple[int, float]:
    """Rank of a choice: its excess of work in grains, then the units that it moves.

    Args:
        load: units that each rank receives.
        areas, tokens: pairs that each rank computes, and rows that it owns.
    """
    work = areas + balance.linear * tokens
    excess = float(work.max() / work.mean()) - (1 + balance.slack) if work.any() else 0.0
    return ceil(max(0.0, excess) / GRAIN), float(load.mean() + BUSIEST * load.max())


def _better(choices: list[RoutedWork], own_queries: RoutedWork) -> RoutedWork:
    """Return the choice with the most level work, and among these the one that moves least.

    It never moves more than own_queries, unless own_queries is less level.
    """
    allowed_choices = [
        c for c in choices if c.total <= own_queries.total or c.rank[0] < own_queries.rank[0]
    ]
    return min((own_queries, *allowed_choices), key=lambda c: c.rank)


def placed_layout(mask: Mask, num_tokens: int, n: int, kv_bytes: float, balance: Balance) -> Layout:
    """Equal tokens, and the owners that let a tiled plan move least.

    Args:
        kv_bytes: bytes of a row's k and v beside those of its q.
    """
    placement = place(mask, num_tokens, n, kv_bytes, balance)
    if placement is None:
        return balanced(mask, num_tokens, n)
    tiled, other_layout = PlacedLayout(num_tokens, placement, mask, kv_bytes, balance), None
    if mask == Causal():
        other_layout = triangle_layout(num_tokens, n, kv_bytes)
    elif documents(mask, num_tokens) is None:
        other_layout = balanced(mask, num_tokens, n)
    if other_layout is None:
        return tiled
    return min((tiled, other_layout), key=lambda x: _least(mask, x, kv_bytes, balance)[0])


def placed_plan(
    mask: Mask,
    layout: Layout,
    kv_bytes: float,
    balance: Balance = LEVEL,
    edges: tuple[int, ...] | None = None,
) -> Plan:
    """The plan that moves least on this layout of those whose work is level.

    Args:
        edges: positions at which blocks begin that are not cut, each whole on a rank; and
            num_tokens. None: shards may begin and end anywhere.
    """
    if edges is None:
        _, chosen = _least(mask, layout, kv_bytes, balance)
        if chosen is None:
            return triangle_plan(mask, layout, kv_bytes)
    else:
        own_queries = RoutedWork.of(_own_queries(mask, layout), kv_bytes, balance)
        works = _meshes(mask, layout, kv_bytes, balance, edges)
        chosen = _better([RoutedWork.of(work, kv_bytes, balance) for work in works], own_queries)
    name = f"tiled({mask!r}, {_call(mask, layout)}, kv_bytes={kv_bytes}{balance})"
    return assemble(name, chosen.work, chosen.flows, (mask, layout), kv_bytes)


class PlacedPlans(NamedTuple):
    """placed_plan of a balance, as a value: plans that keep how they were made compare by it."""

    balance: Balance
    edges: tuple[int, ...] | None = None

    def __call__(self, mask: Mask, layout: Layout, kv_bytes: float) -> Plan:
        return placed_plan(mask, layout, kv_bytes, *self)


def _least(
    mask: Mask, layout: Layout, kv_bytes: float, balance: Balance
) -> tuple[tuple[int, float], RoutedWork | None]:
    """Return the best choice for a layout, after its score (how level, how much it moves).

    The choice is None if the causal triangle's own plan is best.
    """
    chosen = _choice(mask, layout, kv_bytes, balance)
    if suits(mask, layout):
        load, areas = triangle_loads(layout, kv_bytes)
        rank = _rank(load, areas, np.array(layout.sizes), balance)
        if rank <= chosen.rank:
            return rank, None
    return chosen.rank, chosen


def _call(mask: Mask, layout: Layout) -> str:
    """The text of a layout in a plan's name: the call that made it, or a fingerprint."""
    if isinstance(layout, PlacedLayout) and layout.mask == mask:
        return layout.call
    make_layout = {"contiguous": contiguous, "zigzag": zigzag, "striped": striped}.get(layout.name)
    is_made_by_name = (
        make_layout is not None and make_layout(layout.num_tokens, layout.world_size) == layout
    )
    return repr(layout) if is_made_by_name else layout.fingerprint


def _choice(mask: Mask, layout: Layout, kv_bytes: float, balance: Balance) -> RoutedWork:
    if isinstance(layout, PlacedLayout) and (layout.mask, layout.balance) == (mask, balance):
        cu = documents(mask, layout.num_tokens)
        if cu is not None:
            return _of_documents(cu, layout, kv_bytes)
    own_queries = RoutedWork.of(_own_queries(mask, layout), kv_bytes, balance)
    works = _works(mask, layout, kv_bytes, balance)
    return _better([RoutedWork.of(work, kv_bytes, balance) for work in works], own_queries)


def _of_documents(cu: np.ndarray, layout: PlacedLayout, kv_bytes: float) -> RoutedWork:
    """The choice for causal documents, whose areas are known in closed form."""
    placement, balance = layout.placement, layout.balance
    own_placement = own_rows(cu, placement.owned, layout.world_size)
    tiled = RoutedWork.of(work_of(placement, None, layout), kv_bytes, balance, placement.areas)
    limit = balance.limit(own_placement.areas.mean(), layout.num_tokens / layout.world_size)
    if tiled.total <= kv_bytes * keys_read(own_placement).sum() or own_placement.imbalance > limit:
        return tiled
    return _better(
        [tiled],
        RoutedWork.of(work_of(own_placement, None, layout), kv_bytes, balance, own_placement.areas),
    )


def _own_queries(mask: Mask, layout: Layout) -> ShardOwners:
    """Every rank computes its own queries, as `needed` does."""
    n = layout.world_size
    table = cells(mask, layout, layout)
    cells_by_rank: list[Cells] = [{} for _ in range(n)]
    for q, kv in table:
        cells_by_rank[q].setdefault(q, set()).add(kv)
    return ShardOwners(tuple(range(n)), layout.sizes, None, cells_by_rank, table)


def _works(mask: Mask, layout: Layout, kv_bytes: float, balance: Balance) -> Iterator[ShardOwners]:
    """Other ways to compute a mask on a layout."""
    if isinstance(layout, PlacedLayout) and (layout.mask, layout.balance) == (mask, balance):
        placement = layout.placement
    else:
        placement = _fitted(mask, layout, kv_bytes, balance)
    if placement is not None:
        work = work_of(placement, mask, layout)
        yield work
        yield refined(work, kv_bytes, balance)
    yield from _meshes(mask, layout, kv_bytes, balance)


def _fitted(mask: Mask, layout: Layout, kv_bytes: float, balance: Balance) -> Placement | None:
    """Place blocks as on a layout of their own, then give each part to the rank that owns most of
    its rows. None if the layout's rows lie too far apart for that."""
    n = layout.world_size
    for runs in layout.runs:
        has_gaps = any(run.count > 1 and run.stride != 1 for run in runs)
        descends = any(a.start + a.count > b.start for a, b in pairwise(runs))
        if has_gaps or descends or len(runs) > MAX_RANGES:
            return None
    placement = place(mask, layout.num_tokens, n, kv_bytes, balance)
    if placement is None:
        return None
    owned_ranges = [(x.start, x.start + x.count, r) for r in range(n) for x in layout.runs[r]]
    placed_here = replace(placement, owned=tuple(sorted(owned_ranges)))
    shared_rows = np.zeros((n, n))
    for start, stop, owner, q, kv in readings(
        placed_here.pieces, placed_here.owned, placed_here.spans, beside_owner=False
    ):
        np.add.at(shared_rows, (list(q), owner), (2 + LSE) * (stop - start))
        np.add.at(shared_rows, (list(kv), owner), kv_bytes * (stop - start))
    rank_of = assign(shared_rows)
    pieces = (p._replace(rank=int(rank_of[p.rank])) for p in placed_here.pieces)
    return replace(placed_here, pieces=tuple(pieces))


def _meshes(
    mask: Mask,
    layout: Layout,
    kv_bytes: float,
    balance: Balance,
    edges: tuple[int, ...] | None = None,
) -> Iterator[ShardOwners]:
    """Mesh patterns on parts of every rank's rows, made level.

    Args:
        edges: positions at which parts may begin; None: anywhere.
    """
    n = layout.world_size
    homes, cuts = [], []
    for rank, size in enumerate(layout.sizes):
        allowed = np.arange(size + 1)
        if edges is not None:
            blocks = np.searchsorted(edges, layout.rows(rank), "right")
            allowed = np.flatnonzero(np.diff(blocks, prepend=-1, append=-1))
        places = np.linspace(0, len(allowed) - 1, max(1, PARTS // n) + 1).astype(int)
        starts = np.unique(allowed[places]).tolist() if size else [0, 0]
        for piece in pairwise(starts):
            homes.append(rank)
            cuts.append(piece)
    cut_layout = layout.cut(homes, cuts)
    table = cells(mask, cut_layout, cut_layout)
    if not table:
        return
    work = ShardOwners(tuple(homes), cut_layout.sizes, tuple(cuts), [{}] * n, table)
    for a in (a for a in range(1, n + 1) if n % a == 0):
        yield refined(work, kv_bytes, balance, a)
