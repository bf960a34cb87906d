"""tilewise report: a page to look at, of a plan file or of a benchmark's rows."""

from dataclasses import asdict
from pathlib import Path
from typing import Annotated, NamedTuple

import typer
from rich.console import Console

from tilewise.plan.ir import Plan
from tilewise.planning.candidate import Candidate
from tilewise.simulation.machine import Machine
from tilewise.workload import Workload
from tilewise_tools.cli.options import (
    OPTIONS,
    SHOWN_USUAL,
    AsJson,
    WorkOptions,
    command_of,
    option,
    read_machine_option,
    workload_of,
)
from tilewise_tools.cli.output import (
    check_folder,
    check_writable,
    print_json,
    refusing_bad_input,
    refusing_unwritable,
    working,
)
from tilewise_tools.doctor import require

PAGE = ".html"
PNG_ABOUT = "A folder for the charts as PNG files too."


class ReportOptions(NamedTuple):
    """Options of `tilewise report`: what is drawn, and where the page goes."""

    files: Annotated[
        list[Path],
        typer.Argument(
            help="A plan file of tilewise plan, or of plan.to_json() with --num-tokens; or results "
            "of tilewise bench (.jsonl), several as one."
        ),
    ]
    output: Annotated[
        Path | None,
        option("The page; unless given the first file's name, .html.", "--output", "-o"),
    ] = None
    csv: Annotated[Path | None, option("A file for a benchmark's rows too.")] = None
    png: Annotated[Path | None, option(PNG_ABOUT, file_okay=False)] = None
    full: Annotated[
        bool, option("Simulate a plan's work on up to 4096 devices, not 1024.", "--full")
    ] = False
    as_json: AsJson = False


def _report(options: ReportOptions, about: WorkOptions) -> None:
    """Write one page that needs no network: what a plan does, or what a benchmark found.

    A file of plan.to_json() is a plan alone: options say its workload and machine. Those of a file
    of tilewise plan are replaced by options; its table of plans, which is of others, is left out.
    """
    from tilewise_tools.report.png import write_pngs
    from tilewise_tools.report.report import read  # here, so that other commands start sooner

    def described(plan: Plan, planned: Candidate | None) -> tuple[Workload, Machine]:
        work = workload_of(
            about, plan.world_size, planned and planned.own_work, plan.made_for if planned else None
        )
        if planned and about.machine is None:
            return work, planned.machine
        return work, read_machine_option(about.machine)

    replaces = any(value is not None for value in asdict(about).values())

    files, csv = options.files, options.csv
    with refusing_bad_input(OPTIONS):
        require("plotly", "tilewise report")
        if folder := next((path for path in files if path.is_dir()), None):
            raise ValueError(f"{folder} is a folder; give a file in it")
        page = files[0].with_suffix(PAGE) if options.output is None else options.output
        check_writable("--output", page, (files, csv, about), makes_folders=True)
        check_writable("--csv", csv, (files, page, about), makes_folders=True)
        check_folder("--png", options.png)
        with working("reading") as progress:
            report = read(
                files,
                csv is not None,
                full=options.full,
                progress=progress,
                about=described,
                replaces=replaces,
            )
        with refusing_unwritable():
            for path in filter(None, (page, csv)):
                path.parent.mkdir(parents=True, exist_ok=True)
            written = report.write(page, csv)
            if options.png is not None:
                written += write_pngs(report.page, options.png)
    if options.as_json:
        print_json({"files": [str(path) for path in written], "lost_lines": report.num_lost})
        return
    console = Console()
    if report.num_lost:
        lines = "line was" if report.num_lost == 1 else "lines were"
        console.print(f"{report.num_lost} {lines} not whole and left out", markup=False)
    for path in written:
        console.print(f"wrote {path}", markup=False, soft_wrap=True, highlight=False)


report_command = command_of(_report, ReportOptions, WorkOptions, usual=SHOWN_USUAL)
