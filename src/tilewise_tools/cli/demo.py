"""tilewise demo: every strategy on one real input, checked and counted."""

from typing import Annotated

import typer
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from tilewise.compiler.pruning import prune
from tilewise.layouts.layout import contiguous
from tilewise.masks.base import Causal
from tilewise.strategies.catalog import near_square
from tilewise.strategies.mesh import mesh
from tilewise.strategies.ring import ring
from tilewise.transport.processes import RankError
from tilewise_tools.cli.options import TOKENS, AsJson, option, read_count
from tilewise_tools.cli.output import (
    FAILED,
    as_bytes,
    counted,
    ending_on,
    print_json,
    refusing_bad_input,
    table_console,
)
from tilewise_tools.cli.show import draw
from tilewise_tools.demo import TOLERANCE, Demo, DemoRow, cases, run_demo


def demo(
    world_size: Annotated[int, option("Local processes, from 1 to 16.")] = 4,
    num_tokens: Annotated[str, option(TOKENS)] = "1021",
    as_json: AsJson = False,
) -> None:
    """Run every strategy on real text over local processes, against dense attention."""
    with refusing_bad_input({"world_size": "--world-size", "num_tokens": "--num-tokens"}):
        settings = Demo(world_size, read_count("--num-tokens", num_tokens)).checked()
        cu_seqlens = settings.input()[1]
    with ending_on(RankError, before=""):
        names = [case.plan.name for case in cases(settings)]
        rows = list(counted(run_demo(settings), names))
    faults = [row.fault for row in rows if row.fault]
    if as_json:
        heads = {"num_heads": settings.num_heads, "num_kv_heads": settings.num_kv_heads}
        values = settings._asdict() | heads | {"cu_seqlens": cu_seqlens, "dtype": "float64"}
        values |= {"tolerance": TOLERANCE, "faults": faults}
        print_json(values | {"rows": [row._asdict() for row in rows]})
    else:
        _report(settings, len(cu_seqlens) - 1, rows)
        for fault in faults:
            Console().print(f"FAULT: {fault}", style="bold red", markup=False)
    if faults:
        raise typer.Exit(FAILED)


def _report(settings: Demo, num_documents: int, rows: list[DemoRow]) -> None:
    console = table_console()
    n = settings.world_size
    console.print(
        f"\n{settings.num_tokens} bytes of Python's standard library, in {num_documents} "
        f"documents, split over {n} processes joined by gloo; {settings.num_heads} query and "
        f"{settings.num_kv_heads} KV heads of {settings.head_dim}; fp64; forward and backward.\n\n"
        "error: largest over all ranks, against dense attention. sent: by the busiest rank, as "
        "counted on its transport; by formula: as tw.volume says. Layouts are zigzag, but striped "
        "for attention2d, contiguous for balanced_ring and tree. tree decodes the last token.\n",
        highlight=False,
    )
    console.print(_table(rows))
    for title, plan in (
        (
            "A plan is a grid: here the mesh, of which every rank computes a tile",
            mesh(n, q_tile=near_square(n)[0]),
        ),
        (
            "Pruned by a mask: what is left of the ring under Causal, contiguous",
            prune(ring(n), Causal(), contiguous(4 * n, n)),
        ),
    ):
        console.print(f"\n{title}:\n", style="bold")
        draw(plan, console)
    console.print("\nMore: tilewise show --help", highlight=False)


def _table(rows: list[DemoRow]) -> Table:
    table = Table(box=SIMPLE_HEAD, padding=0, show_edge=False)
    table.add_column("strategy", min_width=17, overflow="fold")
    table.add_column("mask", no_wrap=True)
    for name in ("out", "dq", "dk", "dv", "sent", "formula", "msgs", "ms"):
        table.add_column(name, justify="right", no_wrap=True)
    previous_strategy = ""
    for row in rows:
        table.add_row(
            "" if row.strategy == previous_strategy else row.strategy,
            row.mask,
            *(f"{error:.0e}" for error in row.errors.values()),
            as_bytes(max(row.counted)),
            as_bytes(max(row.formula)),
            str(max(row.messages)),
            f"{1000 * row.seconds:.0f}",
            style="bold red" if row.fault else "",
        )
        previous_strategy = row.strategy
    return table
