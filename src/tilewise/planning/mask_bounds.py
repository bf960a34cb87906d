"""What a pass takes at least under a mask that leaves out other pairs for every rank.

Pruning leaves of each cell the rows that it needs, so a rank receives at least the rows of other
ranks' shards that its cells read, and computes at least their areas.
"""

from __future__ import annotations

from functools import cached_property

import numpy as np

from tilewise.plan import Item, Plan, Role, Side
from tilewise.planning.bounds import SAFE
from tilewise.planning.options import Option
from tilewise.planning.scene import Scene
from tilewise.rows import count
from tilewise.support import cells

Array = np.ndarray


class MaskBounds:
    """Bounds by who computes which cells; options that share them out alike have one bound."""

    def __init__(self, scene: Scene):
        self.scene = scene
        self._known: dict[tuple, float] = {}

    def seconds(self, option: Option, plan: Plan) -> float:
        """Seconds that the busiest rank computes, or receives, or sends."""
        shards = "ring" if option.shape.q == 1 else option.kind
        key = option.degree, shards, option.shape.q, option.shape.kv, option.shape.nodes
        if key not in self._known:
            self._known[key] = SAFE * self._seconds(plan)
        return self._known[key]

    @cached_property
    def _tables(self) -> tuple[Array, Array, Array]:
        """Areas, and the rows needed of queries and of keys, [query shard, KV shard]."""
        n, layout = self.scene.world_size, self.scene.layout
        tables = np.zeros((3, n, n))
        for (i, j), cell in cells(self.scene.work.mask, layout, layout).items():
            tables[:, i, j] = cell.area, count(cell.q_rows, 0), count(cell.k_rows, 0)
        return tables[0], tables[1], tables[2]

    def _seconds(self, plan: Plan) -> float:
        scene = self.scene
        payload = scene.payload(plan.num_head_groups)
        pairs = 2.0 * (5 if payload.backward else 2) * payload.num_heads * payload.head_dim
        sizes = [
            [payload.row_bytes(Item(side, role, 0)) for role in (Role.OPERAND, Role.PARTIAL)]
            for side in Side
        ]
        busiest = received = sent = 0.0
        total = 0.0
        for rank in range(plan.world_size):
            area, rows = self._of_rank(plan, rank)
            arriving, leaving = (
                sum(count * size[role] for count, size in zip(rows, sizes, strict=True))
                for role in (0, 1)
            )
            busiest = max(busiest, area)
            received, sent = max(received, arriving), max(sent, leaving)
            total += arriving + leaving
        fastest = max(scene.bandwidths().values())
        kernels = busiest * pairs / scene.best_speed(2.0**60, 2.0**60)
        return max(kernels, max(received, sent, total / plan.world_size) / fastest)

    def _of_rank(self, plan: Plan, rank: int) -> tuple[float, tuple[float, float]]:
        """A rank's area, and the rows of others' query and KV shards that it needs."""
        areas, q_rows, k_rows = self._tables
        mine = np.zeros(areas.shape, bool)
        for step in plan.rank_steps(rank):
            for tile in step.tiles:
                mine[np.ix_(tile.q, tile.kv)] = True
        q, k = (q_rows * mine).max(1), (k_rows * mine).max(0)
        q[rank] = k[rank] = 0
        return float(areas[mine].sum()), (float(q.sum()), float(k.sum()))
