"""tilewise bench: run the benchmark's cases."""

from collections import Counter
from contextlib import ExitStack
from dataclasses import make_dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Any, NamedTuple

import typer
from rich.console import Console

from tilewise_tools.bench.case import BenchCase
from tilewise_tools.bench.engine import planned_rows, run_cases
from tilewise_tools.bench.grid import (
    FIELDS,
    LENGTHS,
    BenchRun,
    GridField,
    contenders_of,
    entered,
    preset,
    read_cases,
)
from tilewise_tools.bench.launched import Launched
from tilewise_tools.bench.results import Results, Row
from tilewise_tools.bench.rows import PlannedRow
from tilewise_tools.cli.examples import epilog
from tilewise_tools.cli.group import Commands, OneCommand
from tilewise_tools.cli.options import AsJson, command_of, option, read_count, read_machine_option
from tilewise_tools.cli.output import (
    check_folder,
    check_writable,
    counted,
    ending_on,
    print_json,
    refusing_bad_input,
    refusing_unwritable,
    table_console,
    table_of,
)
from tilewise_tools.lab.site import LabError
from tilewise_tools.naming import naming
from tilewise_tools.report.bench_cases import ReportCase, cases
from tilewise_tools.report.bench_report import Rows, page_of
from tilewise_tools.report.png import write_pngs
from tilewise_tools.report.words import quantity

INTERRUPTED = 130
TIMES = "repeats", "warmups", "timeout_seconds"
NAMES = MappingProxyType(
    {name: f"--{name.replace('_', '-')}" for name in (*FIELDS, "strategy", *TIMES)}
    | {"num_heads": "--heads: num_heads", "num_kv_heads": "--heads: num_kv_heads"}
)


def follow(
    todo: list[PlannedRow], results: Results, launched: Launched | None, profiles: Path | None
) -> None:
    """Run what is to be done under a progress bar, and write each row."""
    console = Console(stderr=True)
    if results.num_lost:
        console.print(f"{results.path}: {results.num_lost} incomplete rows dropped")
    try:
        with ending_on(LabError):
            rows = run_cases(todo, launched, profiles)
            for row in counted(rows, [_title(entry.case) for entry in todo]):
                results.append(row)
    except KeyboardInterrupt:
        console.print(
            f"\nstopped; {results.path} has {len(results.rows)} rows. The same command goes on."
        )
        raise typer.Exit(INTERRUPTED) from None


def _title(case: BenchCase) -> str:
    ranks = f", {case.world_size} ranks" if case.world_size > 1 else ""
    return f"{case.mask}, {case.num_tokens} tokens{ranks}, {case.which}"


def summary(rows: list[Row], path: Path) -> None:
    """The fastest contenders of every case, and how many rows have which outcome."""
    console = table_console()
    table = table_of(
        *("mask", "tokens", "ranks", "heads", "pass", "fastest", "second", "slowest", "not exact"),
        no_wrap=False,
    )
    for case in cases(rows):
        table.add_row(*_line(case))
    console.print(table)
    counts = Counter(row["outcome"] for row in rows)
    console.print(
        f"\n{path}: {', '.join(f'{count} {outcome}' for outcome, count in counts.items())}. "
        f"More: tilewise report {path}",
        highlight=False,
    )


def _line(case: ReportCase) -> list[str]:
    first, ok = case.rows[0], case.done
    results = [f"{row['contender']} {quantity(row['median_seconds'], 's')}" for row in ok]
    return [
        first["mask"],
        str(first["num_tokens"]),
        str(first["world_size"]),
        f"{first['num_heads']}:{first['num_kv_heads']}",
        first["pass"],
        results[0] if results else "",
        results[1] if len(results) > 1 else "",
        results[-1] if len(results) > 2 else "",
        ", ".join(row["contender"] for row in ok if not row["is_exact"]),
    ]


def _list(name: str, field: GridField) -> tuple[str, Any, None]:
    """A field of a grid as an option that may be repeated: its name, type and default."""
    names = {"contender": ["--strategy"], "pass": ["--pass"]}.get(name, [])
    of = str if name in LENGTHS else field.of  # 4096, or 4K
    many: Any = list[of] | None  # pyright: ignore[reportInvalidTypeForm]
    return name.replace("pass", "passes"), Annotated[many, option(field.about, *names)], None


Lists: Any = make_dataclass("Lists", [_list(*x) for x in FIELDS.items() if x[0] != "network"])
"""Lists in place of those of the preset or the file, as options."""


class BenchOptions(NamedTuple):
    """Options of `tilewise bench`: what to run, and where its rows go."""

    quick: Annotated[bool, option("Small: under 3 minutes on 2 cores.", "--quick")] = False
    cases: Annotated[Path | None, option("A TOML file with grids of cases.")] = None
    output: Annotated[Path, option("Results, JSON lines.", "--output", "-o")] = Path(
        "results.jsonl"
    )
    limited: Annotated[
        bool, option("No lab: a transport that keeps to the speed.", "--limited")
    ] = False
    draws: Annotated[
        int | None, option("Draws of every mask: seeds from 0 on, instead of --seed.", min=1)
    ] = None
    repeats: Annotated[int | None, option("Timed runs.")] = None
    warmups: Annotated[int | None, option("Runs before those.")] = None
    timeout_seconds: Annotated[float | None, option("Of one step of one case.")] = None
    machine: Annotated[
        str | None, option("Preset or TOML file: what predictions are for; unless given, assumed.")
    ] = None
    also: Annotated[
        list[str] | None,
        option("A module whose contenders() take part, such as benchmarks.peers."),
    ] = None
    profile: Annotated[
        Path | None,
        option(
            "Profile one more run of each measured row, by rank, into this folder.", file_okay=False
        ),
    ] = None
    png: Annotated[
        Path | None,
        option("Charts of the results, as tilewise report's, into this folder.", file_okay=False),
    ] = None
    retry: Annotated[bool, option("Run again what was not ok.", "--retry")] = False
    as_json: AsJson = False


def _bench(kind: str, options: BenchOptions, lists: Any) -> None:
    with refusing_bad_input(NAMES), ExitStack() as stack:
        launched = Launched.joined() if kind == "strategies" else None
        if launched is not None:
            stack.callback(launched.close)
            if launched.rank:
                return launched.serve()
        run = _run(kind, options, lists)
        if launched is not None:
            n = launched.world_size
            if set(lists.world_size or ()) - {n}:
                raise ValueError(f"--world-size ({lists.world_size}) must be {n}, as launched")
            run = run.narrowed({"world_size": [n]})
        with naming("--also"):
            others = [one for module in options.also or () for one in contenders_of(module)]
        plan = entered(run, others)
        machine = read_machine_option(options.machine) if options.machine else None
        if launched is not None:
            plan = [(replace(case, network=launched.network), who) for case, who in plan]
        planned = planned_rows(plan, run.timing, machine)
        check_folder("--png", options.png)
        if options.profile is not None:
            check_writable("--profile", options.profile / "rank0.json", makes_folders=True)
        with naming("--output"):
            results = stack.enter_context(Results(options.output))
        if options.profile is not None:
            with naming("--profile"), refusing_unwritable():
                options.profile.mkdir(parents=True, exist_ok=True)
        follow(
            [one for one in planned if not results.has(one.key, options.retry)],
            results,
            launched,
            options.profile,
        )
        rows = [results.rows[one.key] for one in planned]
        if options.png is not None:
            with naming("--png"), refusing_unwritable():
                read = Rows(list(rows), results.num_lost, (options.output.name,))
                write_pngs(page_of(read), options.png)
    if options.as_json:
        print_json({"results": str(options.output), "lost": results.num_lost, "rows": rows})
    else:
        summary(rows, options.output)


def _run(kind: str, options: BenchOptions, lists: Any) -> BenchRun:
    """The preset or file, with the options' lists and times in place of its own."""
    if options.quick and options.cases is not None:
        raise ValueError("--quick and --cases both say what to run; give one")
    if options.cases is not None:
        with naming("--cases"):
            run = read_cases(options.cases, kind)
    else:
        run = preset(kind, "quick" if options.quick else "standard")
    times = {name: getattr(options, name) for name in TIMES}
    times = {name: value for name, value in times.items() if value is not None}
    if lists.num_tokens and lists.tokens_per_rank:
        raise ValueError("--num-tokens and --tokens-per-rank both say how long; give one")
    lists_of_options = {"network": ["limited"] if options.limited else None, "pass": lists.passes}
    if options.draws is not None:
        if lists.seed:
            raise ValueError(f"--draws ({options.draws}) and --seed both say which masks; give one")
        lists_of_options["seed"] = list(range(options.draws))
    for name in LENGTHS:
        option_name = f"--{name.replace('_', '-')}"
        texts = vars(lists).get(name) or ()
        lists_of_options[name] = [read_count(option_name, text) for text in texts]
    run = run.narrowed({**{name: vars(lists).get(name) for name in FIELDS}, **lists_of_options})
    return replace(run, timing=replace(run.timing, **times))


bench_app = typer.Typer(
    cls=Commands,
    help="Measure kernels and strategies, ours and others', into a results file.",
    no_args_is_help=True,
)


def _add(kind: str, about: str, *without: str) -> None:
    """A command for a kind of cases, without the options that are not of it."""

    def run(options: BenchOptions, lists: Any) -> None:
        _bench(kind, options, lists)

    run.__name__, run.__doc__ = kind, about
    command = command_of(run, BenchOptions, Lists, without=without)
    bench_app.command(cls=OneCommand, epilog=epilog(f"bench {kind}"))(command)


LAB = "hosts", "ranks_per_host", "mbit", "limited"
ONE_RANK = "contender", "wire", "ulysses_degree", "world_size", "tokens_per_rank", "layout"
HERE = "over local processes, or over those that torchrun started."
_add("kernels", "Every kernel on every mask, one rank: time, memory, errors.", *ONE_RANK, *LAB)
_add("strategies", f"Every strategy on every mask, {HERE}", *LAB)
_add("network", "Strategies over hosts that the network lab makes: Linux, root.",
     "device", "world_size")  # fmt: skip
