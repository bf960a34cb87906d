"""The work of a shard's rows by rank, and moves that even it out."""

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterable, Mapping

import numpy as np

from tilewise.layouts.cells import Cell, cells
from tilewise.layouts.layout import Layout
from tilewise.masks.base import Mask
from tilewise.strategies.tiling.ownership import Reading
from tilewise.strategies.tiling.placement import Balance, Placement
from tilewise.strategies.tiling.routing import LSE, Cells, ShardOwners


def work_of(placement: Placement, mask: Mask | None, layout: Layout) -> ShardOwners:
    """Return the pairs of shards that each rank computes under a placement.

    Args:
        placement: its owners are the layout's.
        mask: to look up which rows of its blocks are read; None: all are.
    """
    row_readings = placement.readings
    starts = [reading.start for reading in row_readings]
    shard_of, homes, cuts = _shards(row_readings, placement.world_size)
    sizes = tuple(stop - start for start, stop in cuts)
    cells_by_rank: list[Cells] = [defaultdict(set) for _ in range(placement.world_size)]
    for _, rank, (q0, q1, k0, k1), area in placement.pieces:
        if area or mask is not None:
            keys = shard_of[bisect_left(starts, k0) : bisect_left(starts, k1)]
            for q in set(shard_of[bisect_left(starts, q0) : bisect_left(starts, q1)]):
                cells_by_rank[rank][q].update(keys)
    table = None
    if mask is not None:
        cut_layout = layout.cut(homes, cuts)
        table = cells(mask, cut_layout, cut_layout)
        cells_by_rank = [_existing(cells_of, table) for cells_of in cells_by_rank]
    return ShardOwners(tuple(homes), sizes, tuple(cuts), cells_by_rank, table)


def _shards(parts: Iterable[Reading], n: int):
    """The shard of every part, and the shards' homes and (local, ascending) rows.

    A part that travels is a shard; neighbouring rows of a rank that nobody else reads are one.
    """
    shard_of, homes, cuts, rows_done = [], [], [], [0] * n
    last_shard_at_home: dict[int, int] = {}  # rank -> its last shard, if that stays at home
    for part in parts:
        start = rows_done[part.owner]
        stop = rows_done[part.owner] = start + part.stop - part.start
        travels = bool(part.q or part.kv)
        if not travels and part.owner in last_shard_at_home:
            shard = last_shard_at_home[part.owner]
            cuts[shard] = cuts[shard][0], stop
        else:
            shard = len(homes)
            homes.append(part.owner)
            cuts.append((start, stop))
            last_shard_at_home[part.owner] = shard
        if travels:
            last_shard_at_home.pop(part.owner)
        shard_of.append(shard)
    return shard_of, homes, cuts


def _existing(rank_cells: Cells, table: Mapping[tuple[int, int], Cell]) -> Cells:
    """The cells that hold an allowed pair."""
    existing_cells = {q: {kv for kv in kvs if (q, kv) in table} for q, kvs in rank_cells.items()}
    return {q: kvs for q, kvs in existing_cells.items() if kvs}


def areas_of(work: ShardOwners) -> np.ndarray:
    """Allowed pairs by rank, of a work with a table."""
    assert work.table is not None
    return np.array(
        [
            sum(work.table[q, kv].area for q in rank_cells for kv in rank_cells[q])
            for rank_cells in work.cells
        ],
        float,
    )


MOVES = 24  # per rank that level, and as many that save


def refined(
    work: ShardOwners, kv_bytes: float, balance: Balance, a: int | None = None
) -> ShardOwners:
    """The work with blocks moved until it is level, and then where that saves rows.

    Args:
        a: start from a mesh with query groups of a ranks instead.
    """
    assert work.table is not None
    blocks, n = BlockMoves(work, kv_bytes), len(work.cells)
    if a is None:
        rank_of = {
            (q, kv): rank
            for rank, rank_cells in enumerate(work.cells)
            for q in rank_cells
            for kv in rank_cells[q]
        }
        ranks = np.array([rank_of[pair] for pair in work.table], np.int64)
    else:
        ranks = blocks.mesh(a)
    blocks.start(ranks, n, balance)
    blocks.level()
    blocks.save()
    cells_by_rank: list[Cells] = [{} for _ in range(n)]
    for (q, kv), rank in zip(work.table, blocks.rank.tolist(), strict=True):
        cells_by_rank[rank].setdefault(q, set()).add(kv)
    return work._replace(cells=cells_by_rank)


class BlockMoves:
    """The state of a search: who computes each non-empty block, and what ranks read for it.

    Args:
        work: its shards and its table of non-empty blocks.
        kv_bytes: bytes of a row's k and v beside those of its q.
    """

    def __init__(self, work: ShardOwners, kv_bytes: float):
        table = work.table or {}
        self.q, self.kv = np.array(list(table), np.int64).reshape(-1, 2).T
        self.area = np.array([cell.area for cell in table.values()], float)
        self.homes, self.n = np.array(work.homes), 0
        self.sizes = np.array(work.sizes, float)
        self.price = (2 + LSE) * self.sizes, kv_bytes * self.sizes

    def start(self, rank: np.ndarray, n: int, balance: Balance) -> None:
        """Let these ranks compute the blocks."""
        self.n, self.rank = n, rank.copy()
        tokens = np.bincount(self.homes, self.sizes, n)
        self.load = np.bincount(rank, self.area, n) + balance.linear * tokens
        allowed_ratio = 1 + balance.slack - min(0.01, balance.slack / 3)
        self.limit = allowed_ratio * float(self.load.sum()) / n
        self.reads = tuple(np.zeros((n, len(self.homes)), np.int64) for _ in range(2))
        for reads, shard in zip(self.reads, (self.q, self.kv), strict=True):
            np.add.at(reads, (rank, shard), 1)

    def mesh(self, a: int) -> np.ndarray:
        """The ranks of a mesh with query groups of a ranks."""
        return self.homes[self.q] // a * a + self.homes[self.kv] % a

    def level(self) -> None:
        """Move blocks from the busiest ranks, cheapest for their area first."""
        for _ in range(MOVES * self.n):
            source = int(self.load.argmax())
            if self.load[source] <= self.limit:
                return
            source_blocks = np.flatnonzero(self.rank == source)
            cost = self._costs(source, source_blocks) / np.maximum(
                self.area[source_blocks, None], 1
            )
            load_after = self.load + self.area[source_blocks, None]
            ceiling = np.where(load_after <= self.limit, 1.0, 1e6)  # rather to where there is room
            cost = np.where(cost > 0, cost * ceiling, cost / ceiling)
            cost[load_after >= self.load[source]] = np.inf
            if not np.isfinite(cost).any():
                return
            self._move(source_blocks, cost)

    def save(self) -> None:
        """Move blocks to ranks with room for them as long as fewer rows travel."""
        for source in range(self.n):
            for _ in range(MOVES):
                source_blocks = np.flatnonzero(self.rank == source)
                cost = self._costs(source, source_blocks)
                cost[self.load + self.area[source_blocks, None] > self.limit] = np.inf
                if not len(source_blocks) or cost.min() >= 0:
                    break
                self._move(source_blocks, cost)

    def _costs(self, source: int, source_blocks: np.ndarray) -> np.ndarray:
        """The price of moving each of a rank's blocks to each rank, [num_blocks, n]."""
        cost = np.zeros((len(source_blocks), self.n))
        ranks = np.arange(self.n)
        for reads, shard, price in zip(self.reads, (self.q, self.kv), self.price, strict=True):
            s = shard[source_blocks]
            newly_read = (reads[:, s].T == 0) & (self.homes[s][:, None] != ranks)
            no_more_read = (reads[source, s] == 1) & (self.homes[s] != source)
            cost += price[s][:, None] * (newly_read.astype(float) - no_more_read[:, None])
        cost[:, source] = np.inf
        return cost

    def _move(self, source_blocks: np.ndarray, cost: np.ndarray) -> None:
        block_index, target = np.unravel_index(int(cost.argmin()), cost.shape)
        block, target = source_blocks[block_index], int(target)
        source = self.rank[block]
        for reads, shard in zip(self.reads, (self.q, self.kv), strict=True):
            reads[source, shard[block]] -= 1
            reads[target, shard[block]] += 1
        self.load[source] -= self.area[block]
        self.load[target] += self.area[block]
        self.rank[block] = target
