"""tilewise lab: strategies on a network made for it, and what such networks leave behind."""

import math
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import replace
from itertools import product
from pathlib import Path
from statistics import median
from types import MappingProxyType
from typing import Annotated, Any, NamedTuple

import typer

from tilewise.arguments import dtype_name
from tilewise.expressions import WIRE, read_heads
from tilewise.simulation.simulator import simulate
from tilewise.strategies.catalog import near_square
from tilewise.transport.processes import RankError
from tilewise.workload import volume
from tilewise_tools.bench.case import BenchCase, LabNetwork, Timing
from tilewise_tools.bench.our_strategies import Strategy, strategy
from tilewise_tools.bench.worlds import Blamed, world_on
from tilewise_tools.calibration.measure import TIMEOUT_SECONDS, Settings, last, on_rank, other_work
from tilewise_tools.cli.calibrate import noted
from tilewise_tools.cli.examples import epilog
from tilewise_tools.cli.group import Commands, OneCommand
from tilewise_tools.cli.options import (
    OPTIONS,
    AsJson,
    CaseOptions,
    command_of,
    option,
    read_count,
    read_machine_option,
)
from tilewise_tools.cli.output import (
    as_bytes,
    as_seconds,
    check_writable,
    ending_on,
    print_error,
    print_json,
    print_plain,
    refusing_bad_input,
    steps,
    table_console,
    table_of,
    write_output,
)
from tilewise_tools.lab.comparison import ContestRow, compete
from tilewise_tools.lab.lab import Lab, clean
from tilewise_tools.lab.site import LabError
from tilewise_tools.naming import naming

USUAL: Mapping[str, Any] = MappingProxyType(
    {"heads": "16:16", "head_dim": 32, "mask": "full", "layout": "zigzag", "dtype": "float32"}
)

OWN = "hosts", "ranks_per_host", "mbit", "strategy"
NAMES: Mapping[str, str] = MappingProxyType(
    {**OPTIONS, **{name: f"--{name.replace('_', '-')}" for name in OWN}}
)

lab_app = typer.Typer(
    cls=Commands,
    help="A network on this machine: hosts as namespaces, NICs of a chosen speed (Linux, root).",
    no_args_is_help=True,
)


TOKENS_PER_RANK = "128"
Hosts = Annotated[int, option("Network namespaces, each with one NIC.")]
RanksPerHost = Annotated[int, option("Processes on each host.")]
Mbit = Annotated[float, option("Speed of a NIC, Mbit/s in each direction.")]


class LabOptions(NamedTuple):
    """Options of `tilewise lab`: what is compared, and on what network."""

    hosts: Hosts = 16
    ranks_per_host: RanksPerHost = 1
    mbit: Mbit = 50.0
    strategy: Annotated[
        list[str] | None,
        option(
            "As in 'mesh(16, q_tile=4)', needed or tiled; may be repeated, the first is what "
            "the others are compared with. Default: ring, a square mesh, ulysses."
        ),
    ] = None
    wire: Annotated[list[str] | None, option(f"Of every strategy in turn. {WIRE}")] = None
    tokens_per_rank: Annotated[
        str | None,
        option("Tokens of each rank, in place of --num-tokens.", show_default=TOKENS_PER_RANK),
    ] = None
    backward: Annotated[bool, option("Forward and backward, or forward alone.")] = False
    prune: Annotated[bool, option("Leave out what the mask makes needless.")] = True
    repeats: Annotated[int, option("Timed rounds.", min=1)] = 5
    limited: Annotated[
        bool, option("No namespaces: a transport that keeps to the speed.", "--limited")
    ] = False
    machine: Annotated[
        Path | None,
        option("The lab's file by `lab calibrate`: the time that it predicts stands beside."),
    ] = None
    as_json: AsJson = False


def run(options: LabOptions, about: CaseOptions) -> None:
    """Compare strategies on real sockets: interleaved, a ratio per repeat, bytes at the switch."""
    with refusing_bad_input(NAMES):
        case = _case(options, about.filled(USUAL))
        contenders = _contenders(options, case)
        predicted = _predicted(options, case, contenders)
    timing = Timing(options.repeats, warmups=0, timeout_seconds=600.0, truth_pairs=1)
    with ExitStack() as stack:
        stack.enter_context(ending_on(LabError, RankError, Blamed))
        try:
            world = stack.enter_context(world_on(case.network, timing.timeout_seconds))
        except LabError as error:
            print_error(f"tilewise: no lab: {error}. Using a rate-limited transport instead.")
            case = replace(case, network=replace(case.network, name="limited"))
            world = stack.enter_context(world_on(case.network, timing.timeout_seconds))
        begin = stack.enter_context(steps((1 + timing.repeats) * len(contenders)))
        names = [contender.name for contender in contenders]
        rows = compete(world, case, contenders, timing, lambda turn: begin(names[turn]))
    if options.as_json:
        values = {name: getattr(options, name) for name in ("hosts", "ranks_per_host", "mbit")}
        found = zip(rows, predicted, strict=True)
        print_json(values | {"rows": [_as_json(*row) for row in found]})
    else:
        _report(options, rows, predicted)


def clean_command(as_json: AsJson = False) -> None:
    """Remove what labs whose process was killed have left behind; nothing else."""
    with ending_on(LabError, RankError):
        removed = clean()
    if as_json:
        print_json(removed)
    else:
        print_plain("\n".join(f"removed {name}" for name in removed) or "nothing was left behind")


def calibrate(
    hosts: Hosts = 4,
    ranks_per_host: RanksPerHost = 1,
    mbit: Mbit = 50.0,
    output: Annotated[Path | None, option("A machine file.", "--output", "-o")] = None,
) -> None:
    """Measure the lab as a machine: kernels, links, overheads; the file is for plan, simulate."""
    with refusing_bad_input(NAMES):
        check_writable("--output", output)
        lab = Lab(hosts, ranks_per_host, mbit=mbit)
        if lab.world_size < 2:
            raise ValueError(
                f"--hosts ({hosts}) x --ranks-per-host ({ranks_per_host}) must be 2 or more: "
                "one rank has no links to measure"
            )
        busy = other_work()  # before the lab's own ranks add to the load
    settings = Settings(node_size=ranks_per_host, dtypes=("float32",), name="lab")
    with ending_on(LabError, RankError), lab:
        rows = lab.gather_yields(on_rank, settings, timeout_seconds=TIMEOUT_SECONDS)
        machine = noted(last((steps[0] for steps in rows), print_error), busy)
    if output is None:
        print_plain(machine.to_toml())
    else:
        write_output(output, machine.to_toml())


lab_app.command("run", cls=OneCommand, epilog=epilog("lab run"))(
    command_of(run, LabOptions, CaseOptions, usual=USUAL)
)
lab_app.command("clean", cls=OneCommand, epilog=epilog("lab clean"))(clean_command)
lab_app.command("calibrate", cls=OneCommand, epilog=epilog("lab calibrate"))(calibrate)


def _case(options: LabOptions, about: CaseOptions) -> BenchCase:
    assert about.heads and about.head_dim and about.mask and about.layout and about.dtype
    Lab(options.hosts, options.ranks_per_host, mbit=options.mbit)  # refuses numbers out of range
    name = "limited" if options.limited else "lab"
    network = LabNetwork(name, options.hosts, options.ranks_per_host, options.mbit)
    return BenchCase(
        "network",
        about.mask,
        _num_tokens(options, about, network.world_size),
        *read_heads(about.heads),
        about.head_dim,
        dtype_name(about.dtype),
        which="both" if options.backward else "forward",
        world_size=network.world_size,
        layout=about.layout,
        network=network,
    )


def _num_tokens(options: LabOptions, about: CaseOptions, world_size: int) -> int:
    if options.tokens_per_rank and about.num_tokens:
        raise ValueError("--num-tokens and --tokens-per-rank both say how long; give one")
    if about.num_tokens:
        return read_count("--num-tokens", about.num_tokens)
    text = options.tokens_per_rank or TOKENS_PER_RANK
    return world_size * read_count("--tokens-per-rank", text)


def _contenders(options: LabOptions, case: BenchCase) -> list[Strategy]:
    """Every strategy with every wire; refused where the heads or the layout do not allow one."""
    texts = options.strategy or _usual(case.world_size, min(case.num_heads, case.num_kv_heads))
    strategies = [
        strategy(text, wire=wire, prune=options.prune)
        for text, wire in product(texts, options.wire or [None])
    ]
    for one in strategies:
        if reason := one.supports(case):
            with naming("--strategy"):
                raise ValueError(reason.replace("--world-size", "--hosts x --ranks-per-host"))
        (plan, _, backward_plan), work = one.asked(case)
        volume(plan, work, backward_plan)
    return strategies


def _predicted(
    options: LabOptions, case: BenchCase, contenders: list[Strategy]
) -> list[float | None]:
    """Seconds of each strategy on the calibrated lab, if its file is given."""
    if options.machine is None:
        return [None] * len(contenders)
    machine, seconds = read_machine_option(str(options.machine)), list[float | None]()
    for one in contenders:
        (plan, _, backward_plan), work = one.asked(case)
        found = simulate(plan, work, machine, backward_plan, prune=one.prune)
        seconds += case.timed([found.forward_seconds], [found.backward_seconds])
    return seconds


def _usual(n: int, heads: int) -> list[str]:
    """A ring, a square mesh, ulysses, of those that there are."""
    wide, degree = near_square(n)[0], math.gcd(n, heads)
    inner = f"ulysses({degree}, inner=ring({n // degree}))" if 1 < degree < n else f"ulysses({n})"
    mesh = [f"mesh({n}, q_tile={wide})"] if wide > 1 else []
    return [f"ring({n})", *mesh, *([inner] if degree > 1 or n == 1 else [])]


def _as_json(row: ContestRow, predicted: float | None) -> dict[str, Any]:
    more = {"ratio": row.ratio, "median_seconds": median(row.seconds)}
    return row._asdict() | more | {"predicted_seconds": predicted}


def _report(options: LabOptions, rows: list[ContestRow], predicted: list[float | None]) -> None:
    console = table_console()
    console.print(
        f"\n{options.hosts} hosts x {options.ranks_per_host} ranks, {options.mbit:g} Mbit/s a NIC; "
        f"{rows[0].network}; {'forward and backward' if options.backward else 'forward'}.\n"
        "ratio: the first strategy's time over this one's, in the same repeat: median (range). "
        "bytes: the same by tw.volume, on the busiest NIC. line: time at line rate over time. "
        "all sent: by all hosts together. counted: the same at the switch, over tw.volume.\n",
        highlight=False,
    )
    table = table_of(
        *("strategy", "time", *["predicted"] * (options.machine is not None)),
        *("ratio", "range", "bytes"),
        *("ratio/bytes", "line", "all sent", "counted"),
    )
    for row, seconds in zip(rows, predicted, strict=True):
        counted = row.counted_bytes
        table.add_row(
            row.strategy,
            as_seconds(median(row.seconds)),
            *([] if seconds is None else [as_seconds(seconds)]),
            f"{row.ratio:.2f}",
            f"{min(row.ratios):.2f}-{max(row.ratios):.2f}",
            f"{row.byte_ratio:.2f}",
            f"{row.ratio / row.byte_ratio:.2f}",
            f"{row.line_share:.2f}",
            as_bytes(row.formula_bytes),
            "-" if counted is None else f"{counted / row.formula_bytes:.3f}",
        )
    console.print(table)
