"""What the papers measure, as tables.

python -m benchmarks.study scaling memory [-o studies.json] [--page studies.html]
"""

import json
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, NamedTuple

import typer

from benchmarks.study.contexts import OWN_USUAL, ROWS, contexts
from benchmarks.study.controls import controls
from benchmarks.study.memory import memory
from benchmarks.study.simulated import masks, model, scaling, schedules, tiles
from benchmarks.study.stress import stress
from benchmarks.study.table import StudyTable, page_of
from benchmarks.study.train import train
from benchmarks.study.where import ROWS as WHERE_ROWS
from benchmarks.study.where import picture, where
from tilewise.masks.base import Causal, Full
from tilewise.tools.cli.options import (
    AsJson,
    WorkOptions,
    command_of,
    option,
    read_machine_option,
    workload_of,
)
from tilewise.tools.cli.output import (
    check_writable,
    print_json,
    refusing_bad_input,
    table_console,
    table_of,
    working,
    write_output,
)
from tilewise.tools.doctor import require
from tilewise.tools.report.page import written

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
    }
)
KEPT = ("contexts", "where")
"""Studies that take minutes, and keep the rows that are done: half an hour, and ten minutes."""
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
    draws: Annotated[int, option("Of the documents, in contexts.", min=1)] = 10
    seed: Annotated[int | None, option("Of the documents, in masks; 0.", min=0)] = None
    devices: Annotated[int | None, option("Of the model's step, in model; 64.", min=2)] = None
    rows: Annotated[
        Path | None, option("File of the rows of contexts or where, instead of the committed one.")
    ] = None
    png: Annotated[Path | None, option("Write the map of where here, as a picture.")] = None
    output: Annotated[
        Path | None, option("Write the tables here too, as JSON.", "--output", "-o")
    ] = None
    page: Annotated[Path | None, option("Write a page of them here too, with charts.")] = None
    as_json: AsJson = False


def _study(options: StudyOptions, about: WorkOptions) -> None:
    """Run the papers' studies.

    All but the measured memory and train is simulated. contexts takes half an hour of two cores
    where no row is there yet, and where ten minutes: what is done is kept, the same command goes
    on, and fewer --draws take less.
    """
    with refusing_bad_input():
        for path in (options.output, options.page):
            check_writable(path)
        every = (*STUDIES, *KEPT)
        names = list(every) if "all" in options.names else list(dict.fromkeys(options.names))
        if unknown := [name for name in names if name not in every]:
            raise ValueError(
                f"study {unknown[0]!r} is not known; take some of {', '.join(every)}, or all"
            )
        if options.rows is not None and len(set(names) & {*KEPT}) != 1:
            raise ValueError(f"--rows ({options.rows}) is for contexts or where, one of them")
        if options.png is not None and "where" not in names:
            raise ValueError(f"--png ({options.png}) is of where; add it to the studies")
        if options.seed is not None and "masks" not in names:
            raise ValueError(f"--seed ({options.seed}) is of masks; add it to the studies")
        if options.devices is not None and "model" not in names:
            raise ValueError(f"--devices ({options.devices}) is of model; add it to the studies")
        own = {"masks": {"seed": options.seed or 0}, "model": {"n": options.devices or 64}}
        check_writable(options.png)
        check_writable(options.rows)
        given, about = about, about.filled(USUAL)
        machine = read_machine_option(about.machine)
        work = replace(workload_of(about, 1), layout="zigzag")
        if work.mask not in (Full(), Causal()):
            raise ValueError(
                f"--mask ({about.mask!r}) must be full or causal: the study masks has others"
            )
        tables: list[StudyTable] = []
        with working("") as tell:
            for name in (name for name in names if name in STUDIES):
                tell(name)
                tables += STUDIES[name](work, machine, **own.get(name, {}))
        if "where" in names:
            (table,) = where(work, machine, path=options.rows or WHERE_ROWS)
            tables.append(table)
            if options.png is not None:
                require("matplotlib", "the map's picture")
                picture(table.rows, options.png)
        if "contexts" in names:
            own = workload_of(given.filled(OWN_USUAL).filled(USUAL), 1)
            path = options.rows or ROWS
            tables += contexts(own, machine, draws=options.draws, path=path)
        found = {"studies": [table.as_json() for table in tables]}
        if options.output is not None:
            write_output(options.output, json.dumps(found, indent=1))
        if options.page is not None:
            write_output(options.page, written(page_of(tables)))
    if options.as_json:
        print_json(found)
        return
    console = table_console(160)
    for table in tables:
        console.print(f"[bold]{table.title}[/]")
        console.print(table.about, markup=False, highlight=False)
        drawn = table_of(*table.units, no_wrap=False)
        for row in table.texts():
            drawn.add_row(*row)
        console.print(drawn)


app = typer.Typer(pretty_exceptions_show_locals=False)
app.command()(command_of(_study, StudyOptions, WorkOptions, without=LEFT_OUT, usual=USUAL))

if __name__ == "__main__":
    app()
