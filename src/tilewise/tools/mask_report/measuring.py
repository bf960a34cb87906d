"""What an actual plan moves and computes, by rank: for tests, tables and comparisons."""

from __future__ import annotations

from typing import NamedTuple

from tilewise.compiler.pruning import prune_shards
from tilewise.compiler.shards import shard_layouts
from tilewise.layouts.support import cells
from tilewise.plan.ir import Plan
from tilewise.plan.row_ranges import count
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
    plan = plan.tuned(work.num_heads, work.num_kv_heads)
    layouts = shard_layouts(plan, work.layout_for(plan.world_size))
    pruned = prune_shards(plan, work.mask, *layouts)
    payload, table = work.payload(plan, backward), cells(work.mask, *layouts)
    sent, received, areas = ([0] * plan.world_size for _ in range(3))
    for rank in range(plan.world_size):
        for step in pruned.rank_steps(rank):
            for hops, total in ((step.sends, sent), (step.recvs, received)):
                for hop in hops:
                    size = layouts[hop.item.side].size(hop.item.shard)
                    total[rank] += count(hop.rows, size) * payload.row_bytes(hop.item)
            for tile in step.tiles:
                pairs = ((q, kv) for q in tile.q for kv in tile.kv)
                areas[rank] += sum(table[pair].area for pair in pairs if pair in table)
    return Moved(tuple(sent), tuple(received), tuple(areas))
