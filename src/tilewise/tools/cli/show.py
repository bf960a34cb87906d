"""tilewise show: a plan's grid, whole or pruned by a mask."""

from typing import Annotated, Literal

import typer
from rich.console import Console

from tilewise.compiler.pruning import prune
from tilewise.expressions import MASKS, read_mask
from tilewise.plan.ir import Plan
from tilewise.plan.json import to_json
from tilewise.tools.cli.drawing import draw
from tilewise.tools.cli.output import AsJson, print_plain, refusing_bad_input
from tilewise.tools.cli.workload_options import PlanText, read_plans
from tilewise.workload import LAYOUTS

MOST_RANKS = 512  # a grid of this many is a megabyte of text


def show(
    strategy: PlanText,
    world_size: Annotated[
        int | None, typer.Option(min=1, help="Ranks, where only a name is given.")
    ] = None,
    mask: Annotated[
        str | None,
        typer.Option(
            help="Draw the plan pruned by this mask, as in 'causal & window(63, 0)'. "
            f"Known: {', '.join(MASKS)}, & and |."
        ),
    ] = None,
    layout: Annotated[
        Literal["contiguous", "zigzag", "striped"], typer.Option(help="Of the pruned plan.")
    ] = "zigzag",
    num_tokens: Annotated[
        int | None, typer.Option(min=1, help="Of the pruned plan; 8 a rank unless given.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Draw a strategy's plan: what each rank computes and sends in each step."""
    with refusing_bad_input():
        if mask is None and (num_tokens is not None or layout != "zigzag"):
            raise ValueError("--layout and --num-tokens are of a plan pruned by --mask; add it")
        plan, _ = read_plans(strategy, world_size)
        if plan.world_size > MOST_RANKS:
            raise ValueError(f"{plan.world_size} ranks cannot be shown, at most {MOST_RANKS} can")
        if mask is not None:
            plan = _pruned(plan, mask, layout, num_tokens)
    if as_json:
        print_plain(to_json(plan))
    else:
        draw(plan, Console())


def _pruned(plan: Plan, mask_text: str, layout: str, num_tokens: int | None) -> Plan:
    mask = read_mask(mask_text)
    num_tokens = 8 * plan.world_size if num_tokens is None else num_tokens
    mask.check_tokens(num_tokens)
    return prune(plan, mask, dict(LAYOUTS)[layout](num_tokens, plan.world_size))
