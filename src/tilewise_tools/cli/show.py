"""tilewise show: the grid of a plan."""

from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Annotated, Any, NamedTuple

from rich.console import Console
from rich.table import Table
from rich.text import Text

from tilewise.arguments import require_range
from tilewise.compiler.code import Code
from tilewise.compiler.codegen import draft_listing
from tilewise.compiler.pruning import prune
from tilewise.layouts.layout import Layout
from tilewise.plan.ir import Plan
from tilewise.plan.json import to_json
from tilewise.plan.text import show as grid_text
from tilewise.planning.candidate import Candidate
from tilewise.strategies.catalog import MASK_AWARE
from tilewise.workload import Workload
from tilewise_tools.cli.options import (
    OPTIONS,
    AsJson,
    PlanText,
    WorkOptions,
    WorldSize,
    command_of,
    option,
    read_plans,
    workload_of,
)
from tilewise_tools.cli.output import print_plain, refusing_bad_input

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


SIZES: Mapping[str, Any] = MappingProxyType({"heads": "8:8", "head_dim": 64, "dtype": "bfloat16"})
OF_CODE = ("heads", "head_dim", "v_head_dim", "dtype", "wire_dtype", "wire", "save", "reduction")
"""Options of a workload on which the grid does not depend."""
USUAL: Mapping[str, Any] = MappingProxyType(
    {
        **SIZES,
        "num_tokens": "8 a rank",
        "mask": "none, but full with --code or --check",
        "layout": "zigzag",
    }
)


class ShowOptions(NamedTuple):
    """Options of `tilewise show`: which plan is drawn, and what of it."""

    strategy: PlanText
    world_size: WorldSize = None
    rank: Annotated[int | None, option("Show this rank's steps alone.", min=0)] = None
    code: Annotated[
        bool,
        option("List what the rank (0 unless given) runs: every copy, message, call and merge."),
    ] = False
    backward: Annotated[bool, option("With --code: of the backward pass.")] = False
    after: Annotated[
        str | None,
        option("With --code: the operations after this pass of the compiler: naive, tiles, ..."),
    ] = None
    check: Annotated[
        bool,
        option(
            "Say whether every pair is computed once; and with --reduction canonical whether every "
            "result has the same bits at any split."
        ),
    ] = False
    as_json: AsJson = False


def show(options: ShowOptions, about: WorkOptions) -> None:
    """Draw a strategy's plan: what each rank computes and sends in each step.

    With --mask the plan is pruned, for --num-tokens tokens that lie by --layout. The other options
    of the workload are for --code and --check.
    """
    rank = options.rank
    with refusing_bad_input({**OPTIONS, "rank": "--rank", "pass": "--after"}):
        _check_used(options, about)
        eight_a_rank = {"num_tokens": str(8 * (options.world_size or 1))}
        plan, planned = read_plans(options.strategy, options.world_size, about.filled(eight_a_rank))
        if options.check:
            print_plain(checked(_work(plan, planned, about), plan))
            return
        if options.code:
            for line in code_lines(_work(plan, planned, about), plan, options):
                print_plain(line)
            return
        unused = [x for x in ("num_tokens", "layout") if getattr(about, x) is not None]
        if about.mask is None and not plan.made_for and unused:
            raise ValueError(f"{OPTIONS[unused[0]]} is of a plan pruned by --mask; add it")
        if plan.world_size > MOST_RANKS:
            raise ValueError(f"{plan.world_size} ranks cannot be shown, at most {MOST_RANKS} can")
        if rank is not None:
            require_range("--rank", rank, 0, plan.world_size - 1)
        if about.mask is not None and not plan.made_for:
            work = _work(plan, None, about)
            assert isinstance(work.layout, Layout)
            plan = prune(plan, work.mask, work.layout)
    if options.as_json:
        print_plain(to_json(plan))
    else:
        draw(plan, Console(), rank)


def _check_used(options: ShowOptions, about: WorkOptions) -> None:
    """Refuse options that the command would not use."""
    if options.code and options.check:
        raise ValueError("--code and --check both say what is printed; give one")
    of_work = {OPTIONS[name]: getattr(about, name) is not None for name in OF_CODE}
    if any(entry.name == options.strategy for entry in MASK_AWARE):
        del of_work["--heads"]  # the plan is made for them
    of_listing = {"--backward": options.backward, "--after": options.after is not None}
    of_grid = {"--json": options.as_json, "--rank": options.check and options.rank is not None}
    for given_options, is_used, what in (
        (of_listing, options.code, "a rank's code; add --code"),
        (of_work, options.code or options.check, "a rank's code; add --code or --check"),
        (of_grid, not (options.code or options.check), "the grid; leave it out here"),
    ):
        for name, is_given in given_options.items():
            if is_given and not is_used:
                raise ValueError(f"{name} is of {what}")


def _work(plan: Plan, planned: Candidate | None, about: WorkOptions) -> Workload:
    """The workload for which a plan is shown: a file's, or that of the options."""
    if planned is not None:
        return workload_of(about, plan.world_size, planned.own_work, plan.made_for)
    usual = {**SIZES, "num_tokens": str(8 * plan.world_size)}
    if not plan.made_for:  # plans for a mask are made for a causal one by default
        usual |= {"mask": "full", "layout": "zigzag"}
    return workload_of(about.filled(usual), plan.world_size, made_for=plan.made_for)


def checked(work: Workload, plan: Plan) -> str:
    """Check a plan for a workload; returns what was found to be true."""
    found = f"{plan.name}: every pair is computed once"
    plan.check(work.mask, work.layout_for(plan.world_size).owned)
    if work.strategies is None:
        return found
    plan.check_canonical(work)
    return f"{found}, and every result has the same bits at any split"


def code_lines(work: Workload, plan: Plan, options: ShowOptions) -> Iterator[str]:
    """The listing of a rank's code, with its memory and bytes."""
    rank = options.rank or 0
    if options.after is not None:
        passes = work.resolve(plan)
        yield from draft_listing(passes, rank, backward=options.backward, after=options.after)
        return
    code: Code = plan.code(work, rank, options.backward)
    yield from code.listing()
    yield (
        f"workspace: {code.num_bytes} bytes; sent: {code.bytes_sent} bytes; "
        f"read and written beside kernels: {code.traffic_bytes} bytes"
    )


show_command = command_of(show, ShowOptions, WorkOptions, without=["machine"], usual=USUAL)
