"""A plan meets a mask and a layout: it is made for these, and its shards are tokens.

Mask and layout also say whether all ranks have the same work.
"""

from collections.abc import Mapping, Sequence

from tilewise.layouts.cells import Cell, cells
from tilewise.layouts.layout import Layout, from_positions, zigzag
from tilewise.masks.base import Causal, Mask
from tilewise.plan.builder import operand
from tilewise.plan.ir import Plan, PlanError, Side
from tilewise.plan.kept import kept_with_plan
from tilewise.plan.shifts import Symmetry


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
                f"{what} is for {given.world_size} ranks, but {plan.name} for {plan.world_size}; "
                "make both for the same number"
            )
    if plan.replicated_queries:
        last = [kv_layout.num_tokens - 1] if q_positions is None else q_positions
        layout = from_positions(kv_layout.num_tokens, [last], "queries")
    if plan.cuts is None:
        q_layout = layout if plan.replicated_queries else _by_home(plan, layout, Side.Q)
        return q_layout, _by_home(plan, kv_layout, Side.KV)
    q_homes, kv_homes = ([holders[0] for holders in side] for side in plan.owners)
    return layout.cut(q_homes, plan.cuts), kv_layout.cut(kv_homes, plan.cuts)


def _by_home(plan: Plan, layout: Layout, side: Side) -> Layout:
    """The layout of shards that are their homes' rows, one a rank."""
    homes, ranks = [holders[0] for holders in plan.owners[side]], range(plan.world_size)
    if homes == [*ranks]:
        return layout
    if sorted(homes) != [*ranks]:
        rank = next(
            rank for rank in (*homes, *ranks) if rank not in ranks or homes.count(rank) != 1
        )
        shard = homes.index(rank) if rank in homes else 0
        message = (
            f"{plan.name}: rank {rank} of {plan.world_size} is home to {homes.count(rank)} "
            f"{side.name.lower()} shards; in a plan without cuts every rank is home to one"
        )
        raise PlanError(message, 0, rank, operand(side, shard))
    return Layout(layout.num_tokens, [layout.runs[home] for home in homes], layout.name)


def check_made_for(plan: Plan, mask: Mask, layout: Layout) -> None:
    """Raise ValueError if a mask-aware plan is used with another mask or layout than its own."""
    if plan.made_for not in (None, (mask, layout)):
        theirs = " on ".join(map(repr, plan.made_for or ()))
        raise ValueError(
            f"{plan.name.split('(')[0]} is a plan for {theirs}, not for {mask!r} on {layout!r}; "
            "make it for these"
        )


def everything_needed(mask: Mask, q_layout: Layout, kv_layout: Layout) -> bool:
    """Whether a mask allows all pairs and no shard is empty: then there is nothing to prune."""
    edges = [0, q_layout.num_tokens], [0, kv_layout.num_tokens]
    return min(*q_layout.sizes, *kv_layout.sizes) > 0 and int(mask.coverage(*edges)[0, 0]) == 2


def all_alike(plan: Plan, mask: Mask, layouts: tuple[Layout, Layout]) -> bool | None:
    """Whether pairs of different shards all cost the same, by the mask and the layout alone.

    Returns:
        None if they do not; False if all cells are allowed; True if half of each pair's are:
        equal zigzag shards under a causal mask.
    """
    if plan.cuts is not None or plan.made_for is not None or plan.replicated_queries:
        return None
    n, tokens = plan.world_size, layouts[0].num_tokens
    if len({*layouts[0].sizes, *layouts[1].sizes}) > 1:
        return None
    if mask == Causal() and tokens % (2 * n) == 0 and {*layouts} == {zigzag(tokens, n)}:
        return True
    return False if everything_needed(mask, *layouts) else None


@kept_with_plan(2)
def table_cells(
    plan: Plan, mask: Mask, q_layout: Layout, kv_layout: Layout
) -> Mapping[tuple[int, int], Cell]:
    """The non-empty (query shard, KV shard) cells, kept with the plan."""
    return cells(mask, q_layout, kv_layout)


MAX_CLASSES = 128
"""With more classes ranks are taken as unlike."""


def find_symmetry(plan: Plan, blocks: tuple[int, ...] = ()) -> Symmetry:
    """The symmetry that a plan declares; all ranks apart if it declares none.

    Args:
        blocks: sizes of groups of neighbouring ranks that must be mapped to one another (nodes,
            those who share a NIC, racks).
    """
    n = plan.world_size
    inside = [block for block in blocks if block < n]
    shifts = tuple(part for shift in plan.traits.shifts for part in shift.cut(inside))
    kept = tuple(power for shift in shifts for power in shift.respecting(inside))
    symmetry = Symmetry(n, shifts, kept)
    return symmetry if symmetry.num_classes <= min(n // 2, MAX_CLASSES) else Symmetry(n)
