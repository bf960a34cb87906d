"""What the papers claim, as simulated here, and what our best plan reaches on the same machines.

    python benchmarks/papers.py [--only volume,time,grid,scaling] [--json]

Volumes are counted, times are simulated: nothing is measured. docs/papers.md shows the tables.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from types import MappingProxyType

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from benchmarks.paper_claims import Claim, Paper, Study
from benchmarks.paper_grid import attention2d
from benchmarks.paper_scaling import longca
from benchmarks.paper_times import mesh_times
from benchmarks.paper_volume import mesh_volume
from tilewise_tools.cli.output import table_console
from tilewise_tools.naming import Parser, run_script

STUDIES: MappingProxyType[str, Study] = MappingProxyType(
    {"volume": mesh_volume, "time": mesh_times, "grid": attention2d, "scaling": longca}
)


def figure(value: float | None, unit: str) -> str:
    return "" if value is None else f"{value:.1f} %" if unit == "%" else f"{value:.2f}{unit}"


def claims_table(paper: Paper) -> Table:
    """Each claim beside ours and its control; the number leads to what would explain it.

    Of which topology: what a double ring reaches. Of which bytes: ours over the best plan of a
    ring's bytes.
    """
    table = Table(
        title=f"{paper.name} ({paper.source})",
        title_justify="left",
        box=SIMPLE_HEAD,
        padding=(0, 1),
        show_edge=False,
    )
    for name in ("", "claim", "on"):
        table.add_column(name)
    for name in ("paper", "ours", "off by", "of which topology", "of which bytes", "our best"):
        table.add_column(name, justify="right", min_width=max(map(len, name.split())))
    table.add_column("by", no_wrap=True)
    for number, claim in enumerate(paper.claims, 1):
        table.add_row(
            *(str(number), claim.what, claim.where, figure(claim.claimed, claim.unit)),
            *(figure(claim.found, claim.unit), claim.off),
            figure(claim.topology, claim.unit),
            f"{claim.by_bytes:+.1f} points" if claim.unit == "%" else figure(claim.by_bytes, "x"),
            *(figure(claim.best, claim.unit), claim.best_plan.replace(" x mesh", "\nx mesh")),
        )
    return table


def rows_table(paper: Paper) -> Table:
    names = list(dict.fromkeys(name for row in paper.rows for name in row.figures))
    table = Table(title=paper.unit, title_justify="left", box=SIMPLE_HEAD)
    table.add_column("on")
    table.add_column("plan")
    for name in names:
        table.add_column(name, justify="right")
    last = ""
    for row in paper.rows:
        cells = (f"{row.figures[x]:.4g}" if x in row.figures else "" for x in names)
        table.add_row("" if row.machine == last else row.machine, row.plan, *cells)
        last = row.machine
    return table


def reasons(claims: Sequence[Claim]) -> list[str]:
    """What would explain a difference, once, with the numbers of its claims."""
    numbers: dict[str, list[str]] = {}
    for number, claim in enumerate(claims, 1):
        numbers.setdefault(claim.why, []).append(str(number))
    return [f"{', '.join(which)}: {why}." for why, which in numbers.items()]


def show(paper: Paper, console: Console) -> None:
    console.print(claims_table(paper))
    for line in reasons(paper.claims):
        console.print(line, highlight=False)
    console.print(rows_table(paper))
    console.print("Assumed:", highlight=False)
    for line in paper.assumptions:
        console.print(f"- {line}", highlight=False)
    console.print()


def main() -> None:
    parser = Parser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--only", default=",".join(STUDIES), help="some of %(default)s")
    parser.add_argument("--json", action="store_true", help="one object per claim and row")
    given = parser.parse_args()
    wanted = given.only.split(",")
    if unknown := [name for name in wanted if name not in STUDIES]:
        parser.error(f"--only {unknown[0]!r} is not known; take some of {', '.join(STUDIES)}")
    console = table_console(100)
    with ProcessPoolExecutor(min(2, len(wanted))) as pool:
        papers = list(pool.map(_run, wanted))
    if given.json:
        print(json.dumps([record for paper in papers for record in paper.records()], indent=1))
        return
    for paper in papers:
        show(paper, console)


def _run(name: str) -> Paper:
    return STUDIES[name]()


if __name__ == "__main__":
    run_script(main)
