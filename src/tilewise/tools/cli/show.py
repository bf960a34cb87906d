"""tilewise show: the grid of a plan."""

from collections.abc import Iterator, Sequence
from typing import Annotated, NamedTuple

from rich.console import Console
from rich.table import Table
from rich.text import Text

from tilewise.arguments import dtype_name, require_range
from tilewise.compiler.code import Code
from tilewise.compiler.pruning import prune
from tilewise.expressions import MASKS
from tilewise.masks.base import Full
from tilewise.plan.ir import Plan
from tilewise.plan.json import to_json
from tilewise.plan.text import show as grid_text
from tilewise.tools.cli.options import (
    MOST_TOKENS,
    AsJson,
    PlanText,
    WorkOptions,
    WorldSize,
    command_of,
    layout_of,
    option,
    read_plans,
)
from tilewise.tools.cli.output import print_plain, refusing_bad_input
from tilewise.tools.mask_report.figures import LAYOUTS
from tilewise.tools.mask_report.named import mask_of
from tilewise.workload import Workload

STYLES = (("x", "bold cyan"), ("*", "yellow"), ("!", "magenta"))  # a word that holds the sign
OPERAND = "green"
WIDEST_CELL = 28
MOST_BELOW = 16  # ranks drawn one below the other


def draw(plan: Plan, console: Console, rank: int | None = None) -> None:
    """Print the grid; where the output is no terminal, exactly the text that parse reads.

    Args:
        rank: print its steps alone. None: all ranks', one below the other where the terminal is
            too narrow for the grid, the first MOST_BELOW of them.
    """
    text = grid_text(plan)
    if not console.is_terminal and rank is None:
        console.print(text, end="", soft_wrap=True, markup=False, highlight=False)
        return
    lines = text.splitlines()
    top = next(i for i, line in enumerate(lines) if line.lstrip().startswith("step"))
    for line in lines[:top]:
        console.print(line, markup=False, highlight=False, style="dim" if line != lines[0] else "")
    grid = [[cell.strip() for cell in line.split("|")] for line in lines[top:]]
    columns = range(1, len(grid[0]))
    width = 8 + sum(3 + min(WIDEST_CELL, max(len(row[c]) for row in grid)) for c in columns)
    if rank is None and width <= console.width:
        console.print(_block(grid, columns))
    else:
        for column in columns[:MOST_BELOW] if rank is None else [rank + 1]:
            console.print(_block(grid, [column], console.width))
    console.print(
        "[bold cyan]q0xkv1[/] tile   [green]kv0>1[/] operand to rank 1   "
        "[yellow]kv0*>1[/] partial   [magenta]q0!>1[/] result",
        highlight=False,
    )
    if rank is None and width > console.width and len(columns) > MOST_BELOW:
        console.print(f"{MOST_BELOW} of {len(columns)} ranks; --rank shows another", style="dim")


def _block(
    grid: list[list[str]], columns: Sequence[int], widest: int | None = WIDEST_CELL
) -> Table:
    table = Table(show_lines=False, header_style="bold", row_styles=["", "on grey11"])
    table.add_column(grid[0][0], justify="right", no_wrap=True)
    for column in columns:
        table.add_column(grid[0][column], max_width=widest)
    for row in grid[1:]:
        table.add_row(row[0], *(_cell(row[column]) for column in columns))
    return table


def _cell(words: str) -> Text:
    def style(word: str) -> str:
        usual = "dim" if word == "." else OPERAND
        return next((style for sign, style in STYLES if sign in word), usual)

    return Text(" ").join(Text(word, style(word)) for word in words.split())


MOST_RANKS = 512  # a grid of this many is a megabyte of text


class ShowOptions(NamedTuple):
    """Options of `tilewise show`: which plan is drawn, and what of it."""

    strategy: PlanText
    world_size: WorldSize = None
    mask: Annotated[
        str | None,
        option(
            "Draw the plan pruned by this mask, as in 'causal & window(63, 0)'. "
            f"Known: {', '.join(MASKS)}, & and |; or a pattern of tilewise mask."
        ),
    ] = None
    layout: Annotated[
        str | None,
        option(f"Of the pruned plan: {', '.join(LAYOUTS)} or tiled; zigzag unless given."),
    ] = None
    num_tokens: Annotated[
        int | None, option("Of the pruned plan; 8 a rank unless given.", min=1, max=MOST_TOKENS)
    ] = None
    rank: Annotated[int | None, option("Show this rank's steps alone.", min=0)] = None
    code: Annotated[
        bool,
        option("List what the rank (0 unless given) runs: every copy, message, call and merge."),
    ] = False
    backward: Annotated[bool, option("With --code: of the backward pass.")] = False
    num_heads: Annotated[int, option("With --code: query heads.", min=1)] = 8
    num_kv_heads: Annotated[int, option("With --code: KV heads.", min=1)] = 8
    head_dim: Annotated[int, option("With --code: of q, k and v.", min=1)] = 64
    dtype: Annotated[str, option("With --code: of q, k and v.")] = "bfloat16"
    as_json: AsJson = False


def show(options: ShowOptions) -> None:
    """Draw a strategy's plan: what each rank computes and sends in each step."""
    strategy, world_size, mask, layout, num_tokens, rank = options[:6]
    with refusing_bad_input():
        tokens = str(num_tokens or 8 * (world_size or 1))
        about = WorkOptions(num_tokens=tokens, mask=mask, layout=layout)
        plan, _ = read_plans(strategy, world_size, about)
        if options.code:
            for line in code_lines(plan, options, tokens):
                print_plain(line)
            return
        if mask is None and not plan.made_for and (num_tokens or layout):
            raise ValueError("--layout and --num-tokens are of a plan pruned by --mask; add it")
        if plan.world_size > MOST_RANKS:
            raise ValueError(f"{plan.world_size} ranks cannot be shown, at most {MOST_RANKS} can")
        if rank is not None:
            require_range("--rank", rank, 0, plan.world_size - 1)
        if mask is not None and not plan.made_for:
            num_tokens = num_tokens or 8 * plan.world_size
            seen = mask_of(mask, num_tokens)
            where = layout_of(layout or "zigzag", seen, num_tokens, plan.world_size)
            plan = prune(plan, seen, where)
    if options.as_json:
        print_plain(to_json(plan))
    else:
        draw(plan, Console(), rank)


def code_lines(plan: Plan, options: ShowOptions, tokens: str) -> Iterator[str]:
    """The listing of a rank's code, and what it takes."""
    num_tokens = int(tokens) if options.num_tokens else 8 * plan.world_size
    if plan.made_for:
        mask, layout = plan.made_for
    else:
        mask = Full() if options.mask is None else mask_of(options.mask, num_tokens)
        layout = layout_of(options.layout or "zigzag", mask, num_tokens, plan.world_size)
    work = Workload(
        num_tokens=layout.num_tokens,
        num_heads=options.num_heads,
        num_kv_heads=options.num_kv_heads,
        head_dim=options.head_dim,
        dtype=dtype_name(options.dtype),
        mask=mask,
        layout=layout,
    )
    code: Code = plan.code(work, options.rank or 0, options.backward)
    yield from code.listing()
    yield f"workspace: {code.num_bytes} bytes; sent: {code.bytes_sent} bytes"


show_command = command_of(show, ShowOptions)
