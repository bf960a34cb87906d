"""Mask-aware plans for any mask and layout, and the layouts that go with them."""

from __future__ import annotations

from collections.abc import Iterable

from tilewise.balancing import balanced
from tilewise.layout import Layout, Run
from tilewise.mask import Mask
from tilewise.plan import Plan
from tilewise.tiling.assembly import assemble, flows_of
from tilewise.tiling.choosing import place
from tilewise.tiling.components import documents
from tilewise.tiling.placing import Placement
from tilewise.tiling.works import work_of


class PlacedLayout(Layout):
    """A layout, and the placement that it was made from, which is no part of its value."""

    def __init__(
        self, num_tokens: int, runs: Iterable[Iterable[Run]], placement: Placement, mask: Mask
    ):
        super().__init__(num_tokens, runs, "tiled_layout")
        self.placement, self.mask = placement, mask


def placed_layout(mask: Mask, num_tokens: int, n: int, kv_bytes: float) -> Layout:
    placement = place(mask, num_tokens, n, kv_bytes)
    if placement is None:
        return balanced(mask, num_tokens, n, chunk=1)
    runs: list[list[Run]] = [[] for _ in range(n)]
    for start, stop, rank in placement.owned:
        runs[rank].append(Run(start, stop - start))
    return PlacedLayout(num_tokens, runs, placement, mask)


def placed_plan(mask: Mask, layout: Layout, kv_bytes: float | None) -> Plan:
    placement = layout.placement
    cu = documents(mask, layout.num_tokens)
    work = work_of(placement, mask if cu is None else None, layout)
    return assemble(
        f"tiled({mask!r}, {layout.fingerprint})", work, flows_of(work), (mask, layout), kv_bytes or 2.0
    )
