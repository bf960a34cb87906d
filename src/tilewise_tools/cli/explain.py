"""tilewise explain: where the step of a recorded run goes, and what would change it."""

from pathlib import Path
from typing import Annotated

import typer

from tilewise.recording import FOLDER
from tilewise_tools.cli.options import AsJson, option, read_machine_option, read_plans
from tilewise_tools.cli.output import (
    check_writable,
    print_error,
    print_json,
    print_plain,
    refusing_bad_input,
    working,
    write_output,
)
from tilewise_tools.doctor import require
from tilewise_tools.explain.explanation import explain as explained
from tilewise_tools.explain.page import page_of
from tilewise_tools.explain.rows import read_run
from tilewise_tools.explain.trace import trace_text
from tilewise_tools.naming import naming
from tilewise_tools.report.page import written


def explain(
    paths: Annotated[
        list[Path] | None,
        typer.Argument(
            help="A folder that tw.record has written, or its files, one of each rank.",
            show_default=FOLDER,
        ),
    ] = None,
    machine: Annotated[
        str | None,
        option(
            "A preset, or a file of tilewise calibrate, to simulate on. Unless given, the machine "
            "of the run, or one of the rates that its rows show."
        ),
    ] = None,
    plan: Annotated[
        str | None, option("The plan that the run must have had, as of tilewise show.")
    ] = None,
    output: Annotated[Path | None, option("Write a page here.", "--output", "-o")] = None,
    trace: Annotated[
        Path | None, option("Write measured and simulated lanes for Perfetto.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Say where the step of a recorded run goes, for whom ranks wait, and what would change it.

    tw.record(cp) writes the rows. They are joined with the simulation of the same passes.
    """
    with refusing_bad_input():
        paths = paths or [Path(FOLDER)]
        check_writable("--output", output, (paths, plan, machine, trace))
        check_writable("--trace", trace, (paths, plan, machine))
        if output is not None:
            require("plotly", "tilewise explain -o")
        named = None if machine is None else read_machine_option(machine)
        run = read_run(paths)
        expected = None
        if plan is not None:
            with naming("--plan"):
                ranks_text = "the run's number of ranks"
                expected = read_plans(plan, len(run.ranks), ranks_option=ranks_text)[0]
        with working("simulating other plans"):
            explanation = explained(run, named, expected)
        if output is not None:
            write_output(output, written(page_of(explanation)))
        if trace is not None:
            write_output(trace, trace_text(explanation))
    if as_json:
        print_json(explanation.as_json())
        return
    print_plain("\n".join(explanation.lines()))
    if run.num_lost:
        print_error(f"{run.num_lost} lines were not whole and left out")
