"""Refusals of a canonical reduction: plans and wires under which its promise could not hold."""

from __future__ import annotations

from tilewise.arguments import dtype_name
from tilewise.compiler.resolved import ResolvedPass
from tilewise.layouts.leaves import edges_of_sides
from tilewise.layouts.whole_blocks import split_blocks
from tilewise.plan.ir import Side
from tilewise.plan.payload import accumulator
from tilewise.wires.wire import Plain, Wires


def check_exact_wires(wires: Wires, dtype: str) -> None:
    """Raise ValueError if anything of a canonical call may arrive as another number than was sent.

    Args:
        wires: as they are asked for.
    """
    exact = Plain(), Plain(dtype_name(accumulator(dtype))), Plain("float64")
    refusals = (
        (
            wires.latent is not None,
            "latents, whose keys and values would be computed by calls of any shape; pass k and v",
        ),
        (
            any(
                x not in (Plain(), Plain(dtype_name(dtype)))
                for x in (wires.forward, wires.backward)
            ),
            f"wires that round operands ({wires}); leave out wire",
        ),
        (
            wires.partials not in exact,
            f"a wire that rounds partial results ({wires.partials}): they travel whole, as "
            "integers; leave out wire_dtype",
        ),
    )
    for refused, why in refusals:
        if refused:
            raise ValueError(f"reduction='canonical' does not take {why}, or take 'fast'")


def check_whole_leaves(passes: tuple[ResolvedPass, ResolvedPass]) -> None:
    """Refuse plans whose shards split a leaf: parts of it would be computed apart."""
    for resolved in passes:
        layouts, groups = resolved.layouts, resolved.groups
        tokens = layouts[0].num_tokens, layouts[1].num_tokens
        edges = edges_of_sides(resolved.mask, tokens, groups.num_heads // groups.num_kv_heads)
        for side, layout in zip(Side, layouts, strict=True):
            if side is Side.Q and resolved.plan.replicated_queries:
                continue  # every rank has the same rows
            split = split_blocks(layout, edges[side])
            if split:
                start, stop = edges[side][split[0] : split[0] + 2]
                raise ValueError(
                    f"{resolved.plan.name} splits the {side.name.lower()} leaf of tokens {start} "
                    f"to {stop - 1}, and {len(split) - 1} more, over several shards, so their "
                    "results would depend on it; take a plan of whole shards, or reduction='fast'"
                )
