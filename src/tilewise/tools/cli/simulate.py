"""tilewise simulate: what one plan takes on a machine, pass by pass."""

from pathlib import Path
from typing import Annotated, Any, NamedTuple

import typer
from rich import box
from rich.console import Console
from rich.table import Table

from tilewise.simulation.simulator import Simulation, simulate
from tilewise.tools.cli.options import (
    Dtype,
    HeadDim,
    Heads,
    LayoutName,
    MachineName,
    MaskText,
    NumTokens,
    PlanText,
    Save,
    WireDtype,
    WorldSize,
    command_of,
    read_machine_option,
    read_plans,
    workload_of,
)
from tilewise.tools.cli.output import (
    AsJson,
    as_bytes,
    print_json,
    refusing_bad_input,
    refusing_unwritable,
)


class SimulateOptions(NamedTuple):
    """What the command is told."""

    plan: PlanText
    num_tokens: NumTokens
    backward_plan: Annotated[
        str | None, typer.Option(help="Of the backward pass, if it is another.")
    ] = None
    world_size: WorldSize = None
    heads: Heads = "32:8"
    head_dim: HeadDim = 128
    mask: MaskText = "causal"
    machine: MachineName = "h100x8"
    layout: LayoutName = None
    dtype: Dtype = "bfloat16"
    wire_dtype: WireDtype = None
    save: Save = None
    trace: Annotated[
        Path | None, typer.Option(help="Write the timeline for Perfetto or chrome://tracing.")
    ] = None
    as_json: AsJson = False


def _simulate(options: SimulateOptions) -> None:
    """Replay a plan on a machine: time, waiting, bytes by link and memory."""
    with refusing_bad_input():
        machine = read_machine_option(options.machine)
        plan, other = read_plans(options.plan, options.world_size)
        if options.backward_plan:
            other, _ = read_plans(options.backward_plan, plan.world_size)
        work = workload_of(options, plan.world_size)
        found = simulate(plan, work, machine, backward_plan=other)
        if options.trace is not None:
            with refusing_unwritable():
                found.trace(options.trace)
    if options.as_json:
        print_json(_as_json(found))
        return
    console = Console()
    console.print(f"[bold]{plan.name}[/] on {plan.world_size} ranks of {machine.name}")
    console.print(_table(found))


_simulate.__name__ = "simulate"
simulate_command = command_of(SimulateOptions, _simulate)


def _as_json(found: Simulation) -> dict[str, Any]:
    names = ("seconds", "forward_seconds", "backward_seconds", "compute_seconds")
    names += ("exposed_seconds", "idle_seconds", "bytes_by_link", "peak_bytes")
    return {name: getattr(found, name) for name in names}


def _table(found: Simulation) -> Table:
    table = Table(box=box.SIMPLE_HEAD, header_style="bold")
    table.add_column("")
    for pass_name in ("forward", "backward"):
        table.add_column(pass_name, justify="right")
    passes = found.forward, found.backward

    def row(what: str, values: list[float]) -> None:
        table.add_row(what, *(f"{value * 1e3:.4g} ms" for value in values))

    row("time", [one.seconds for one in passes])
    for what in ("compute", "exposed", "idle"):
        row(what, [max(getattr(u, f"{what}_seconds") for u in one.ranks) for one in passes])
    links = {link for one in passes for use in one.ranks for link in use.bytes_by_link}
    for link in sorted(links):
        most = [max(use.bytes_by_link.get(link, 0) for use in one.ranks) for one in passes]
        table.add_row(f"sent {link}", *map(as_bytes, most))
    table.add_row("memory", *map(as_bytes, found.pass_peak_bytes))
    return table
