"""The passes of a canonical call: every row is computed by one rank, of all rows that it meets.

    forward, dq    a rank has its queries, and gathers the keys and values that they see
    dk, dv         it has its keys, and gathers the queries, dout, lse and delta that see them

Both are ordinary passes of ordinary plans; in none of them does a partial result travel or meet
another.
"""

from __future__ import annotations

from tilewise.arguments import dtype_name
from tilewise.compiler.pruning import check_made_for
from tilewise.compiler.rank_plan import RankPlan
from tilewise.compiler.resolved import CallShape, ResolvedPass, resolve_passes
from tilewise.plan.ir import Plan, Side
from tilewise.plan.payload import accumulator, check_gathered, head_groups, saving
from tilewise.wires.wire import Plain, Wires

SERVED = "all_gather, needed, ulysses(degree, inner) around one of these or alone, and 'auto'"
"""Plans that serve reduction="canonical", in words."""


def exact_passes(
    call: CallShape, plan: Plan, backward_plan: Plan | None = None
) -> tuple[ResolvedPass, ResolvedPass]:
    """The forward and the backward pass of a canonical call.

    Raises:
        ValueError: if a plan would merge results; it names the plans that do not.
    """
    check_exact_wires(call.wires, call.dtype)
    save = saving(plan, call.save)
    if save == "gathered" and backward_plan is not None:
        check_gathered(plan, backward_plan)
    plans = [_whole_rows(x, call) for x in (plan, backward_plan or plan)]
    forward, backward = resolve_passes(call._replace(save=save), plans[0][Side.Q], plans[1][Side.Q])
    forward, backward = (
        one._replace(payload=one.payload._replace(whole_rows=True)) for one in (forward, backward)
    )
    if plans[1][Side.Q] is plans[1][Side.KV]:
        return forward, backward
    _, keys = resolve_passes(call._replace(save="replay"), plans[1][Side.KV])
    payload = keys.payload._replace(whole_rows=True, only=Side.KV)
    keys = keys._replace(payload=payload)
    queries = backward.payload._replace(only=Side.Q)
    return forward, backward._replace(payload=queries, then=keys)


def _whole_rows(plan: Plan, call: CallShape) -> tuple[Plan, Plan]:
    """The plans that compute whole rows of queries and of keys; one, if a rank has both whole."""
    if isinstance(plan, RankPlan):
        raise ValueError(
            f"{plan.name} was prepared for reduction='fast', not 'canonical'; take the plan that "
            "it was prepared from"
        )
    check_made_for(plan, call.mask, call.layout)
    check_served(plan, call.num_heads, call.num_kv_heads)
    if plan.world_size == 1:
        return plan, plan
    whole = plan.traits.whole_rows
    assert whole is not None, "served"
    queries = whole.plan(Side.Q)
    if plan.num_head_groups == plan.world_size:
        return queries, queries
    return queries, whole.plan(Side.KV)


def check_served(plan: Plan, num_heads: int, num_kv_heads: int) -> None:
    """Raise ValueError if a plan would merge results, naming the plans that do not."""
    groups = plan.num_head_groups
    degrees = ", ".join(str(d) for d in range(1, num_kv_heads + 1) if num_kv_heads % d == 0)
    if plan.replicated_queries or not (plan.world_size == 1 or plan.traits.whole_rows):
        raise ValueError(
            f"{plan.name} merges partial results, whose bits depend on how rows are split; "
            f"reduction='canonical' is served by {SERVED} (degrees: {degrees}); take one of "
            "these, or reduction='fast'"
        )
    head_groups(num_heads, num_kv_heads, groups)
    if num_kv_heads % groups:
        raise ValueError(
            f"{plan.name} spreads the query heads of a KV head over ranks, whose shares of dk and "
            f"dv would be merged: with reduction='canonical' the degree of ulysses ({groups}) must "
            f"divide num_kv_heads ({num_kv_heads}); degrees that work: {degrees}; or take "
            "all_gather or needed, or reduction='fast'"
        )


def check_exact_wires(wires: Wires, dtype: str) -> None:
    """Raise ValueError if anything of a canonical call may arrive as another number than was sent.

    Args:
        wires: as they are asked for.
    """
    operands = Plain(), Plain(dtype_name(dtype))
    results = *operands, Plain(dtype_name(accumulator(dtype))), Plain("float64")
    refusals = (
        (
            wires.latent is not None,
            "latents, whose keys and values would be computed by calls of any shape; pass k and v",
        ),
        (
            wires.forward not in operands or wires.backward not in operands,
            f"wires that round operands ({wires}); leave out wire",
        ),
        (
            wires.partials not in results,
            f"a wire that rounds results ({wires.partials}); leave out wire_dtype",
        ),
    )
    for refused, why in refusals:
        if refused:
            raise ValueError(f"reduction='canonical' does not take {why}, or take 'fast'")
