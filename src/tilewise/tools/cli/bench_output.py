"""What tilewise bench shows: how far it is, then who was fastest on which mask."""

from collections import Counter
from pathlib import Path
from typing import Any

import typer
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from tilewise.tools.bench.case import Case
from tilewise.tools.bench.engine import Plan, Settings, Started, run_cases
from tilewise.tools.bench.results import Results
from tilewise.tools.lab.site import LabError

PIPED_WIDTH = 120
INTERRUPTED, NO_LAB = 130, 1
Row = dict[str, Any]


def follow(plan: Plan, results: Results, settings: Settings) -> list[str]:
    """Run a plan under a progress bar; the keys of its rows."""
    console = Console(stderr=True)
    if results.num_lost:
        console.print(f"{results.path}: {results.num_lost} incomplete rows dropped")
    total = sum(len(contenders) for _, contenders in plan)
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn()
    keys: list[str] = []
    try:
        with Progress(*columns, TimeElapsedColumn(), console=console) as progress:
            task = progress.add_task("starting", total=total)
            for event in run_cases(plan, results, settings):
                if isinstance(event, Started):
                    keys += event.keys
                    progress.update(task, description=_title(event.case))
                    progress.advance(task, event.num_known)
                else:
                    progress.advance(task)
            progress.update(task, description="done")
    except KeyboardInterrupt:
        console.print(
            f"\nstopped; {results.path} has {len(results.rows)} rows. The same command goes on."
        )
        raise typer.Exit(INTERRUPTED) from None
    except LabError as error:
        console.print(f"tilewise: {error}", markup=False, soft_wrap=True)
        raise typer.Exit(NO_LAB) from None
    return keys


def _title(case: Case) -> str:
    ranks = f", {case.world_size} ranks" if case.world_size > 1 else ""
    return f"{case.mask}, {case.num_tokens} tokens{ranks}, {case.which}"


def summary(rows: list[Row], path: Path) -> None:
    """The fastest contenders of every case, and how many rows have which outcome."""
    console = Console()
    if not console.is_terminal:
        console = Console(width=PIPED_WIDTH)
    table = Table(box=SIMPLE_HEAD, padding=(0, 1), show_edge=False)
    for name in (
        "mask",
        "tokens",
        "ranks",
        "pass",
        "fastest, ms",
        "second",
        "slowest",
        "not exact",
    ):
        table.add_column(name, no_wrap=name in ("mask", "pass"))
    for rows_of_case in _by_case(rows):
        table.add_row(*_line(rows_of_case))
    console.print(table)
    counts = Counter(row["outcome"] for row in rows)
    console.print(
        f"\n{path}: {', '.join(f'{count} {outcome}' for outcome, count in counts.items())}. "
        f"More: tilewise report {path}",
        highlight=False,
    )


def _by_case(rows: list[Row]) -> list[list[Row]]:
    fields = ("mask", "seed", "num_tokens", "num_heads", "num_kv_heads", "head_dim", "dtype")
    fields += ("pass", "world_size", "layout", "device", "network", "hosts", "mbit")
    found: dict[tuple[Any, ...], list[Row]] = {}
    for row in rows:
        found.setdefault(tuple(row[field] for field in fields), []).append(row)
    return list(found.values())


def _line(rows: list[Row]) -> list[str]:
    first = rows[0]
    ok = sorted((row for row in rows if row["outcome"] == "ok"), key=lambda r: r["median_seconds"])
    named = [f"{row['contender']} {1000 * row['median_seconds']:.3g}" for row in ok]
    wrong = [row["contender"] for row in ok if not row["is_exact"]]
    return [
        first["mask"],
        str(first["num_tokens"]),
        str(first["world_size"]),
        first["pass"],
        named[0] if named else "",
        named[1] if len(named) > 1 else "",
        named[-1] if len(named) > 2 else "",
        ", ".join(wrong),
    ]
