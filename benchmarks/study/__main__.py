"""What the papers measure, as tables.

python -m benchmarks.study scaling memory [-o studies.json] [--page studies.html]
"""

import json
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, NamedTuple

import typer

from benchmarks.study.contexts import METHODS, OWN_USUAL, ROWS, contexts
from benchmarks.study.contexts import picture as contexts_picture
from benchmarks.study.controls import controls
from benchmarks.study.measured import measured
from benchmarks.study.memory import memory
from benchmarks.study.parts import journal
from benchmarks.study.printed import WIDTH, print_study
from benchmarks.study.published import published
from benchmarks.study.simulated import masks, model, scaling, schedules, tiles
from benchmarks.study.stress import stress
from benchmarks.study.table import StudyTable, page_of
from benchmarks.study.train import train
from benchmarks.study.video import video
from benchmarks.study.where import ROWS as WHERE_ROWS
from benchmarks.study.where import picture as where_picture
from benchmarks.study.where import where
from tilewise.arguments import of_kind
from tilewise.masks.base import Causal, Full
from tilewise.masks.lengths import Draw
from tilewise_tools.cli.group import OneCommand
from tilewise_tools.cli.options import (
    AsJson,
    WorkOptions,
    command_of,
    option,
    read_machine_option,
    workload_of,
)
from tilewise_tools.cli.output import (
    check_writable,
    print_json,
    refusing_bad_input,
    table_console,
    write_output,
)
from tilewise_tools.doctor import require
from tilewise_tools.report.page import written

STUDIES = MappingProxyType(
    {
        "controls": controls,
        "scaling": scaling,
        "memory": memory,
        "tiles": tiles,
        "schedules": schedules,
        "masks": masks,
        "model": model,
        "stress": stress,
        "train": train,
        "video": video,
        "published": published,
        "measured": measured,
    }
)
KEPT = ("contexts", "where")
"""Studies whose rows are committed: what is there is not simulated again."""
LEFT_OUT = ("layout", "wire_dtype", "wire", "save", "v_head_dim")
USUAL = MappingProxyType(
    {
        "num_tokens": "1M",
        "heads": "32:32",
        "head_dim": 128,
        "mask": "full",
        "dtype": "bfloat16",
        "machine": "h100x8",
    }
)


class StudyOptions(NamedTuple):
    """Which studies, and where their tables go."""

    names: Annotated[
        list[str],
        typer.Argument(help=f"{', '.join((*STUDIES, *KEPT))}; or all.", show_default=False),
    ]
    draws: Annotated[
        int | None, option("Of the documents, in contexts; from 10 to none.", min=1)
    ] = None
    draw: Annotated[
        str | None, option("Whose sampler draws them, in contexts: tilewise, or longca.")
    ] = None
    method: Annotated[
        list[str] | None, option(f"In contexts, may be repeated: {', '.join(METHODS)}; else all.")
    ] = None
    seed: Annotated[int | None, option("Of the documents, in masks; 0.", min=0)] = None
    devices: Annotated[int | None, option("Of the model's step, in model; 64.", min=2)] = None
    rows: Annotated[
        Path | None, option("File of the rows of contexts or where, instead of the committed one.")
    ] = None
    png: Annotated[
        Path | None, option("Write the chart of where or contexts here, as a picture.")
    ] = None
    output: Annotated[
        Path | None, option("Write the tables here too, as JSON.", "--output", "-o")
    ] = None
    page: Annotated[Path | None, option("Write a page of them here too, with charts.")] = None
    as_json: AsJson = False


def _study(options: StudyOptions, about: WorkOptions) -> None:
    """Run the papers' studies.

    All but the measured memory and train is simulated. contexts takes an hour of two cores
    where no row is there yet: what is done is kept, the same command goes on, and fewer --draws or
    some --method take less. The others take minutes; one that is stopped goes on too.
    """
    with refusing_bad_input():
        for name in ("output", "page", "png", "rows"):
            check_writable(f"--{name}", getattr(options, name))
        names = _names(options)
        given, about = about, about.filled(USUAL)
        machine = read_machine_option(about.machine)
        work = replace(workload_of(about, 1), layout="zigzag")
        if work.mask not in (Full(), Causal()):
            raise ValueError(
                f"--mask ({about.mask!r}) must be full or causal: the study masks has others"
            )
        own = {"masks": {"seed": options.seed or 0}, "model": {"n": options.devices or 64}}
        tables: list[StudyTable] = []
        if simulated := [name for name in names if name in STUDIES]:
            with journal(work, machine, own) as kept:
                for name in simulated:
                    tables += STUDIES[name](work, machine, kept.rows_of, **own.get(name, {}))
        if "where" in names:
            (table,) = where(work, machine, path=options.rows or WHERE_ROWS)
            tables.append(table)
            if options.png is not None:
                require("matplotlib", "the map's picture")
                where_picture(table.rows, options.png)
        if "contexts" in names:
            own_work = workload_of(given.filled(OWN_USUAL).filled(USUAL), 1)
            found = list(
                contexts(
                    own_work,
                    machine,
                    draws=options.draws,
                    sampler=options.draw or "tilewise",
                    methods=options.method or (),
                    path=options.rows or ROWS,
                )
            )
            tables += found
            if options.png is not None:
                require("matplotlib", "the chart's picture")
                contexts_picture(found, options.png)
        as_json = {"studies": [table.as_json() for table in tables]}
        if options.output is not None:
            write_output(options.output, json.dumps(as_json, indent=1))
        if options.page is not None:
            write_output(options.page, written(page_of(tables)))
    if options.as_json:
        print_json(as_json)
        return
    console = table_console(WIDTH)
    for table in tables:
        print_study(table, console)


OWN_OPTIONS = MappingProxyType(
    {
        "draws": ("contexts",),
        "draw": ("contexts",),
        "method": ("contexts",),
        "seed": ("masks",),
        "devices": ("model",),
        "rows": KEPT,
        "png": KEPT,
    }
)
"""Options of some studies alone; with two of KEPT, of one at a time."""


def _names(options: StudyOptions) -> list[str]:
    """The studies that are asked for; refuses options of others."""
    every = (*STUDIES, *KEPT)
    names = list(every) if "all" in options.names else list(dict.fromkeys(options.names))
    if unknown := [name for name in names if name not in every]:
        raise ValueError(
            f"study {unknown[0]!r} is not known; take some of {', '.join(every)}, or all"
        )
    for option_name, studies in OWN_OPTIONS.items():
        value = getattr(options, option_name)
        shown = ", ".join(value) if isinstance(value, list) else value
        mine = [name for name in studies if name in names]
        if value is not None and not mine:
            raise ValueError(
                f"--{option_name} ({shown}) is of {' or '.join(studies)}; add it to the studies"
            )
        if value is not None and len(mine) > 1:
            raise ValueError(f"--{option_name} ({shown}) is for one of {' and '.join(mine)}")
    if options.draw is not None:
        of_kind("--draw", options.draw, Draw)
    return names


app = typer.Typer(
    pretty_exceptions_show_locals=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command(cls=OneCommand)(
    command_of(_study, StudyOptions, WorkOptions, without=LEFT_OUT, usual=USUAL)
)

if __name__ == "__main__":
    app()
