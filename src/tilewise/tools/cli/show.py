"""tilewise show: the grid of a plan."""

from typing import Annotated, Literal

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from tilewise.compiler.pruning import prune
from tilewise.expressions import MASKS, read_mask
from tilewise.plan.ir import Plan
from tilewise.plan.json import to_json
from tilewise.plan.text import show as grid_text
from tilewise.tools.cli.options import PlanText, WorldSize, read_plans
from tilewise.tools.cli.output import AsJson, print_plain, refusing_bad_input
from tilewise.workload import LAYOUTS

STYLES = (("x", "bold cyan"), ("*", "yellow"), ("!", "magenta"))  # a word that holds the sign
OPERAND = "green"
WIDEST_CELL = 28


def draw(plan: Plan, console: Console) -> None:
    """Print the grid; where the output is no terminal, exactly the text that parse reads."""
    text = grid_text(plan)
    if not console.is_terminal:
        console.print(text, end="", soft_wrap=True, markup=False, highlight=False)
        return
    lines = text.splitlines()
    top = next(i for i, line in enumerate(lines) if line.lstrip().startswith("step"))
    for line in lines[:top]:
        console.print(line, markup=False, highlight=False, style="dim" if line != lines[0] else "")
    grid = [[cell.strip() for cell in line.split("|")] for line in lines[top:]]
    first = 1
    while first < len(grid[0]):
        count = _fitting(grid, first, console.width)
        console.print(_block(grid, range(first, first + count)))
        first += count
    console.print(
        "[bold cyan]q0xkv1[/] tile   [green]kv0>1[/] operand to rank 1   "
        "[yellow]kv0*>1[/] partial   [magenta]q0!>1[/] result",
        highlight=False,
    )


def _fitting(grid: list[list[str]], first: int, width: int) -> int:
    """How many columns from this one on fit beside the step numbers."""
    used, count = 8, 0
    for column in range(first, len(grid[0])):
        used += min(WIDEST_CELL, max(len(row[column]) for row in grid)) + 3
        if used > width and count:
            break
        count += 1
    return count


def _block(grid: list[list[str]], columns: range) -> Table:
    table = Table(show_lines=False, header_style="bold", row_styles=["", "on grey11"])
    table.add_column(grid[0][0], justify="right", no_wrap=True)
    for column in columns:
        table.add_column(grid[0][column], max_width=WIDEST_CELL)
    for row in grid[1:]:
        table.add_row(row[0], *(_cell(row[column]) for column in columns))
    return table


def _cell(words: str) -> Text:
    cell = Text()
    for i, word in enumerate(words.split()):
        style = next((style for sign, style in STYLES if sign in word), OPERAND)
        cell.append(f"{' ' * bool(i)}{word}", "dim" if word == "." else style)
    return cell


MOST_RANKS = 512  # a grid of this many is a megabyte of text


def show(
    strategy: PlanText,
    world_size: WorldSize = None,
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
