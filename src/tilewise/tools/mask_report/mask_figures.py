"""What a mask costs on some ranks: how even layouts are, what each plan moves, its kernel calls.

Stands alone so that commands, docs and tests count alike. Bytes are those of actual plans in the
forward pass, as shares of a ring that sends all keys and values to everybody.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from types import MappingProxyType
from typing import NamedTuple

import numpy as np

from tilewise import lengths, masks
from tilewise.layouts.balanced import balanced
from tilewise.layouts.layout import Layout, contiguous, striped, zigzag
from tilewise.masks.base import Mask
from tilewise.masks.components import row_areas
from tilewise.plan.ir import Plan
from tilewise.strategies.mesh import mesh
from tilewise.strategies.needed import needed
from tilewise.strategies.ring import ring
from tilewise.strategies.tiled import tiled, tiled_layout
from tilewise.tiles.cover import Waste
from tilewise.tools.mask_report.call_report import report, total
from tilewise.tools.mask_report.measuring import moved
from tilewise.workload import Workload

__all__ = [
    "LAYOUTS",
    "PLANS",
    "Case",
    "Load",
    "drawn",
    "imbalance",
    "kernel_calls",
    "load",
    "planned",
]

DENSITY = 0.2  # of the block-sparse patterns, one of those that the benchmark draws
CAP = 4  # the longest document is this part of the sequence
MESHES = 2  # tile shapes tried, those nearest to the best for a full mask
PLANS = ("ring", "mesh", "needed", "tiled")


class Case(NamedTuple):
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


class Load(NamedTuple):
    """Bytes in forward, as shares of the ring's: sent on average, most sent or received."""

    mean: float
    busiest: float


def drawn(name: str, num_tokens: int, seed: int, corpus: str = "prolong512k") -> Mask:
    """One of the 14 patterns: documents of a corpus, capped at a quarter; block tables at 0.2."""
    cap = max(1, num_tokens // CAP)
    return masks.random(
        name,
        num_tokens,
        seed=seed,
        cu_seqlens=lengths.sample(corpus, num_tokens, seed=seed, cap=cap),
        density=DENSITY,
    )


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


def planned(mask: Mask, case: Case, name: str) -> tuple[Plan, Layout]:
    """A plan of PLANS with the layout that it is at home on; of the meshes the one that sends
    least."""
    n, num_tokens = case.world_size, case.num_tokens
    match name:
        case "needed":
            layout = balanced(mask, num_tokens, n)
            return needed(mask, layout), layout
        case "tiled":
            layout = tiled_layout(mask, num_tokens, n, kv_bytes=case.kv_bytes)
            return tiled(mask, layout, kv_bytes=case.kv_bytes), layout
        case "ring":
            return ring(n), zigzag(num_tokens, n)
        case "mesh":
            layout = zigzag(num_tokens, n)
            return min(
                (mesh(n, q_tile=a) for a in _tiles(case)),
                key=lambda plan: sum(moved(plan, case.workload(mask, layout)).sent),
            ), layout
    raise ValueError(f"plan {name!r} is not known; take one of {', '.join(PLANS)}")


def load(plan: Plan, mask: Mask, layout: Layout, case: Case) -> tuple[Load, float]:
    """What a plan moves, and its largest over mean area."""
    found = moved(plan, case.workload(mask, layout))
    ring_bytes = max(1.0, case.ring_bytes)
    busiest = max(*found.sent, *found.received)
    return Load(float(np.mean(found.sent)) / ring_bytes, busiest / ring_bytes), found.imbalance


def kernel_calls(plan: Plan, mask: Mask, layout: Layout, most: int = 8) -> tuple[float, Waste]:
    """Calls per rank on average, and the waste of all: of up to `most` ranks, evenly spread."""
    n = plan.world_size
    ranks = sorted({i * n // most for i in range(most)}) if n > most else range(n)
    waste = total(report(mask, layout, plan, ranks=ranks))
    return waste.num_calls / len(ranks), waste


def _tiles(case: Case) -> Iterator[int]:
    """Query shards per tile of a few meshes, those that are near the best for a full mask first."""
    n, best = case.world_size, math.sqrt(case.world_size * case.num_kv_heads / case.num_heads)
    inner = [a for a in range(2, n) if n % a == 0] or [1]
    yield from sorted(inner, key=lambda a: abs(math.log(a / best)))[:MESHES]
