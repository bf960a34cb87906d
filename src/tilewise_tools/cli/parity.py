"""tilewise parity: is the split model of a file the unsplit one, and if not, why."""

from pathlib import Path
from typing import Annotated, Literal

import typer
from rich.table import Table

from tilewise_tools.cli.options import AsJson, option
from tilewise_tools.cli.output import (
    FAILED,
    check_writable,
    print_json,
    print_plain,
    refusing_bad_input,
    table_console,
    write_output,
)
from tilewise_tools.outside import called, is_outside, load
from tilewise_tools.report.page import Fact, Page, Section, TextTable, written
from tilewise_verify.causes import CAUSES
from tilewise_verify.parity import ParityReport
from tilewise_verify.parity import parity as compare

SHOWN = 12  # rows of the table


def parity(
    function: Annotated[
        str,
        typer.Argument(
            help="FILE.py:NAME, a function that returns (model, inputs, split); split None: "
            "transformers through tilewise."
        ),
    ],
    world_size: Annotated[int, option("Ranks.", min=1)] = 4,
    timeout: Annotated[float, option("Seconds for everything.")] = 60.0,
    backend: Annotated[
        Literal["gloo", "loopback"] | None, option("Local processes, or threads.")
    ] = None,
    html: Annotated[
        Path | None, option("Write a page with pictures here too.", dir_okay=False)
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Compare a split model with the unsplit one: which layer deviates first, and why."""
    with refusing_bad_input({"timeout": "--timeout", "world_size": "--world-size"}):
        check_writable("--html", html, function)
        make = load(function) if is_outside(function) else None
        if not callable(make):
            raise ValueError(f"{function!r} must be FILE.py:NAME of a function")
        model_inputs_split = called(function, make)
        if not isinstance(model_inputs_split, tuple) or len(model_inputs_split) != 3:
            raise ValueError(
                f"{function} must return three things, (model, inputs, split), but returned "
                f"{type(model_inputs_split).__name__}"
            )
        report = compare(
            *model_inputs_split, world_size=world_size, timeout=timeout, backend=backend
        )
        if html:
            write_output(html, written(_page(function, world_size, report)))
    if as_json:
        print_json(report.to_json())
    else:
        _print(report)
    if not report.equal:
        raise typer.Exit(FAILED)


def _print(report: ParityReport) -> None:
    print_plain(str(report))
    if not report.equal and report.deviations:
        table = Table(
            "what", "module or parameter", "times rounding", title="deviations, first ones"
        )
        for row in _rows(report)[:SHOWN]:
            table.add_row(*row)
        table_console().print(table)


def _rows(report: ParityReport) -> tuple[tuple[str, ...], ...]:
    return tuple((d.kind, d.name or "(the model)", f"{d.error:.3g}") for d in report.deviations)


def _page(function: str, world_size: int, report: ParityReport) -> Page:
    causes = tuple((f.cause, CAUSES[f.cause], f.text) for f in report.findings)
    attended = (
        f"{report.layer}: blue pairs are attended in both models, red ones in the split one alone, "
        "yellow ones in the unsplit one alone."
    )
    rounding = "In the order of the passes; 1 is what rounding explains."
    rows = TextTable(("what", "name", "times rounding"), _rows(report))
    sections = [
        Section("causes", "Causes", table=TextTable(("cause", "meaning", "evidence"), causes)),
        Section("attended", "What is attended", attended, picture=report.svg() or ""),
        Section("deviations", "What deviates", rounding, table=rows),
    ]
    facts = (
        Fact("equal", "yes" if report.equal else "no"),
        *[Fact("first layer", report.layer or "-"), Fact("cause", report.cause or "-")]
        * (not report.equal),
        Fact("compared", str(report.compared), "outputs, gradients, parameters"),
        Fact("ranks", str(world_size)),
    )
    lead = f"{function}: a training step, split over {world_size} ranks, beside the same on one."
    if report.equal:
        title, verdict = "The split model is the unsplit one", f"{report.compared} values agree."
    else:
        title = "The split model differs from the unsplit one"
        where = f"It differs first in {report.layer}. " if report.layer else ""
        verdict = where + (CAUSES.get(report.cause, "") if report.cause else "")
    sections_shown = tuple(x for x in sections if x.picture or (x.table and x.table.rows))
    notes = "; ".join(report.notes)
    return Page("Parity", title, lead, facts, sections_shown, notes, verdict)
