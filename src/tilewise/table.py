"""A plan's shards as tokens: which layout each side has, and which cells of the table a mask needs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from tilewise.layout import Layout, from_positions
from tilewise.mask import Mask
from tilewise.plan import Plan
from tilewise.support import Cell, cells


def shard_layouts(
    plan: Plan,
    layout: Layout,
    kv_layout: Layout | None = None,
    q_positions: Sequence[int] | None = None,
) -> tuple[Layout, Layout]:
    """The query and the KV shards' tokens.

    Args:
        layout: of all tensors; of k and v alone for plans whose queries are replicated.
        kv_layout: of k and v if it differs from the queries'.
        q_positions: the replicated queries' global positions; default the last token.
    Raises:
        ValueError: if the layout's ranks are not the plan's.
    """
    kv_layout = layout if kv_layout is None else kv_layout
    for what, given in (("layout", layout), ("kv_layout", kv_layout)):
        if given.world_size != plan.world_size:
            raise ValueError(
                f"{what} is for {given.world_size} ranks, but {plan.name} for {plan.world_size}; make both for the same number"
            )
    if plan.replicated_queries:
        last = [kv_layout.num_tokens - 1] if q_positions is None else q_positions
        layout = from_positions(kv_layout.num_tokens, [last], "queries")
    elif q_positions is not None:
        raise ValueError(
            f"q_positions are for plans with replicated queries (tree), not {plan.name}; use layout instead"
        )
    if plan.cuts is None:
        return layout, kv_layout
    q_homes, kv_homes = ([holders[0] for holders in side] for side in plan.owners)
    return layout.cut(q_homes, plan.cuts), kv_layout.cut(kv_homes, plan.cuts)


def everything_needed(mask: Mask, q_layout: Layout, kv_layout: Layout) -> bool:
    """Whether a mask allows all pairs and no shard is empty: then there is nothing to prune."""
    edges = [0, q_layout.num_tokens], [0, kv_layout.num_tokens]
    return min(*q_layout.sizes, *kv_layout.sizes) > 0 and int(mask.coverage(*edges)[0, 0]) == 2


def table_cells(
    plan: Plan, mask: Mask, q_layout: Layout, kv_layout: Layout
) -> Mapping[tuple[int, int], Cell]:
    """The non-empty (query shard, KV shard) cells, kept with the plan."""
    return plan.memo(("cells", mask, q_layout, kv_layout), lambda: cells(mask, q_layout, kv_layout))
