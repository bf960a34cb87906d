"""tilewise report: a page to look at, of a plan file or of a benchmark's rows."""

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from tilewise.tools.cli.output import (
    AsJson,
    print_json,
    refusing_bad_input,
    refusing_unwritable,
    working,
)
from tilewise.tools.doctor import require

PAGE = ".html"


def report(
    files: Annotated[
        list[Path],
        typer.Argument(
            help="A plan file of tilewise plan; or results of tilewise bench (.jsonl) and of "
            "LongCA-bench (.csv), several as one."
        ),
    ],
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", help="The page; unless given the first file's name, .html."),
    ] = None,
    csv: Annotated[Path | None, typer.Option(help="A file for a benchmark's rows too.")] = None,
    full: Annotated[
        bool, typer.Option("--full", help="Simulate a plan's work on up to 4096 devices, not 1024.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Write one page that needs no network: what a plan does, or what a benchmark found."""
    from tilewise.tools.report.report import read  # here, so that other commands start sooner

    with refusing_bad_input():
        require("plotly", "tilewise report")
        page = files[0].with_suffix(PAGE) if output is None else output
        with working("reading") as tell:
            found = read(files, with_rows=csv is not None, full=full, tell=tell)
        with refusing_unwritable():
            written = found.write(page, csv)
    if as_json:
        print_json({"files": [str(path) for path in written], "lost_lines": found.num_lost})
        return
    console = Console()
    if found.num_lost:
        lines = "line was" if found.num_lost == 1 else "lines were"
        console.print(f"{found.num_lost} {lines} not whole and left out", markup=False)
    for path in written:
        console.print(f"wrote {path}", markup=False, soft_wrap=True, highlight=False)
