"""What a plan comes to, executed step by step on numbers: an oracle that shares no code with check.

Attention is replaced by sums in which every allowed (query, key) pair has a random weight of its
own, one for the query's sum and one for the key's. A sum at its home is right only if every pair
is in it exactly once, as it is with out and lse, dq, dk and dv.
"""

from __future__ import annotations

from collections import defaultdict
from typing import NamedTuple

import numpy as np

import tilewise as tw
from tilewise.plan.ir import Item, Role, Rows, Side, Transfer


class BrokenPlanError(Exception):
    """A plan that no executor could carry out."""


class Table(NamedTuple):
    """The shards' token positions, and per head group what each cell adds to its two sides.

    sums[side][group][q, kv] is [rows of that side's shard]; seen[side][q, kv] the rows concerned.
    """

    positions: tuple[list[np.ndarray], list[np.ndarray]]
    sums: tuple[list[dict], list[dict]]
    seen: tuple[dict, dict]

    @classmethod
    def of(cls, plan: tw.Plan, mask: tw.Mask, layout: tw.Layout) -> Table:
        """The table of a plan whose shards are the ranks' rows."""
        kv = [layout.rows(shard) for shard in range(layout.world_size)]
        q = [np.array([layout.num_tokens - 1])] if plan.replicated_queries else kv
        make = np.random.default_rng(0)
        size = plan.num_head_groups, layout.num_tokens, layout.num_tokens
        weights = make.random((2, *size)) + 0.5
        sums: tuple[list[dict], list[dict]] = ([], [])
        seen: tuple[dict, dict] = ({}, {})
        for side in Side:
            for group in range(plan.num_head_groups):
                sums[side].append({})
                for i, rows in enumerate(q):
                    for j, columns in enumerate(kv):
                        allowed = np.asarray(mask.dense(rows, columns))
                        pairs = weights[side, group][np.ix_(rows, columns)] * allowed
                        sums[side][group][i, j] = pairs.sum(axis=1 - side)
                        seen[side][i, j] = allowed.any(axis=1 - side)
        return cls((q, kv), sums, seen)


def right(plan: tw.Plan, table: Table) -> bool:
    """Whether executing the plan brings every sum to every holder of its shard."""
    try:
        return _Ranks(plan, table).run()
    except BrokenPlanError:
        return False


class _Ranks:
    """Every rank's values: operands as which rows are there, partials and results as numbers."""

    def __init__(self, plan: tw.Plan, table: Table):
        self.plan, self.table = plan, table
        self.operands: list[dict[Item, np.ndarray]] = [{} for _ in range(plan.world_size)]
        self.partials: list[dict[Item, np.ndarray]] = [defaultdict(float) for _ in self.operands]
        self.results: list[dict[Item, np.ndarray]] = [{} for _ in self.operands]
        for side in Side:
            for shard, holders in enumerate(plan.owners[side]):
                for rank in holders:
                    for group in range(plan.num_head_groups):
                        item = Item(side, Role.OPERAND, shard, group)
                        self._of(self.operands, rank)[item] = np.ones(self._size(item), bool)

    def run(self) -> bool:
        for step in self.plan.steps:
            if len(step.tiles) != self.plan.world_size:
                raise BrokenPlanError("tiles for another number of ranks")
            taken = [(transfer, self._depart(transfer)) for transfer in step.transfers]
            for transfer, _ in taken:
                if transfer.item.role is Role.PARTIAL:
                    self.partials[transfer.src].pop(transfer.item, None)
            for rank, tiles in enumerate(step.tiles):
                for tile in tiles:
                    self._compute(rank, tile)
            for transfer, value in taken:
                self._arrive(transfer, value)
        return all(self._home(side, shard) for side in Side for shard in self._shards(side))

    def _depart(self, transfer: Transfer) -> np.ndarray:
        """What leaves, as it stood when the step began; the rows not sent are nan or False."""
        item = transfer.item
        if transfer.src == transfer.dst or transfer.dst not in range(self.plan.world_size):
            raise BrokenPlanError("no such peer")
        rows = self._rows(item, transfer.rows)
        if item.role is Role.OPERAND:
            held = self._of(self.operands, transfer.src).get(item)
            if held is None or not held[rows].all():
                raise BrokenPlanError("sends what it has not")
            return rows
        stem = item._replace(role=Role.PARTIAL)
        if item.role is Role.RESULT and stem in self.results[transfer.src]:
            return self.results[transfer.src][stem]
        if stem not in self._of(self.partials, transfer.src):
            raise BrokenPlanError("sends what it has not")
        return np.where(rows, self.partials[transfer.src][stem], 0.0)

    def _arrive(self, transfer: Transfer, value: np.ndarray) -> None:
        match transfer.item.role:
            case Role.OPERAND:
                self.operands[transfer.dst][transfer.item] = value
            case Role.PARTIAL:
                self.partials[transfer.dst][transfer.item] = (
                    self.partials[transfer.dst][transfer.item] + value
                )
            case Role.RESULT:
                self.results[transfer.dst][transfer.item._replace(role=Role.PARTIAL)] = value

    def _compute(self, rank: int, tile: tw.plan.Tile) -> None:
        for q in tile.q:
            for kv in tile.kv:
                for side, shard in zip(Side, (q, kv), strict=True):
                    item = Item(side, Role.OPERAND, shard, tile.heads)
                    held = self.operands[rank].get(item)
                    if held is None or not held[self.table.seen[side][q, kv]].all():
                        raise BrokenPlanError("reads what is not there")
                for side, shard in zip(Side, (q, kv), strict=True):
                    item = Item(side, Role.PARTIAL, shard, tile.heads)
                    value = self.table.sums[side][tile.heads][q, kv]
                    self.partials[rank][item] = self.partials[rank][item] + value

    def _home(self, side: Side, shard: int) -> bool:
        """Whether all holders of a shard have its whole sum in the end."""
        for group, cells in enumerate(self.table.sums[side]):
            item = Item(side, Role.PARTIAL, shard, group)
            whole = sum(value for pair, value in cells.items() if pair[side] == shard)
            for rank in self.plan.owners[side][shard]:
                got = self.results[rank].get(item, self.partials[rank].get(item, 0.0))
                if not np.allclose(got, whole, rtol=0, atol=1e-9):
                    return False
        return True

    def _shards(self, side: Side) -> range:
        return range(len(self.table.positions[side]))

    def _size(self, item: Item) -> int:
        if item.shard not in self._shards(item.side):
            raise BrokenPlanError("no such shard")
        return len(self.table.positions[item.side][item.shard])

    def _rows(self, item: Item, rows: Rows | None) -> np.ndarray:
        """The rows of a transfer as flags; they must be ascending ranges within the shard."""
        size = self._size(item)
        rows = ((0, size),) if rows is None else rows
        ends = [0, *(end for pair in rows for end in pair), size]
        if ends != sorted(ends) or any(start == stop for start, stop in rows if size):
            raise BrokenPlanError("rows that no buffer has")
        flags = np.zeros(size, bool)
        for start, stop in rows:
            flags[start:stop] = True
        return flags

    def _of(self, ranks: list[dict], rank: int) -> dict:
        if rank not in range(self.plan.world_size):
            raise BrokenPlanError("no such rank")
        return ranks[rank]
