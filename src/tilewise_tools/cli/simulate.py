"""tilewise simulate: what one plan takes on a machine, pass by pass."""

from pathlib import Path
from types import MappingProxyType
from typing import Annotated, NamedTuple

from rich.console import Console
from rich.table import Table

from tilewise.simulation.simulator import Simulation, simulate
from tilewise_tools.cli.options import (
    OPTIONS,
    SHOWN_USUAL,
    AsJson,
    PlanText,
    WorkOptions,
    WorldSize,
    command_of,
    option,
    read_machine_option,
    read_plans,
    workload_of,
)
from tilewise_tools.cli.output import (
    as_bytes,
    as_seconds,
    check_writable,
    print_json,
    refusing_bad_input,
    refusing_unwritable,
    table_of,
    working,
)
from tilewise_tools.naming import naming


class SimulateOptions(NamedTuple):
    """Options of `tilewise simulate`: what is simulated, and where its timeline goes."""

    plan: PlanText
    backward_plan: Annotated[str | None, option("Of the backward pass, if it is another.")] = None
    world_size: WorldSize = None
    trace: Annotated[
        Path | None, option("Write the timeline for Perfetto or chrome://tracing.")
    ] = None
    as_json: AsJson = False


def _simulate(options: SimulateOptions, about: WorkOptions) -> None:
    """Replay a plan on a machine: time, waiting, bytes by link and memory.

    A plan file also says the backward plan, the workload and the machine; options replace them.
    """
    with refusing_bad_input(OPTIONS):
        check_writable("--trace", options.trace, (options, about))
        plan, planned = read_plans(options.plan, options.world_size, about)
        candidate_machine = planned.machine if planned and about.machine is None else None
        machine = candidate_machine or read_machine_option(about.machine)
        back = planned.backward_plan if planned else None
        if options.backward_plan is not None:
            with naming("--backward-plan"):
                back, _ = read_plans(
                    options.backward_plan, plan.world_size, about, "the number of ranks"
                )
        work = planned.own_work if planned else None
        work = workload_of(about, plan.world_size, work, plan.made_for)
        with working(f"simulating {plan.world_size} ranks of {machine.name}"):
            simulation = simulate(plan, work, machine, backward_plan=back)
        if options.trace is not None:
            with refusing_unwritable():
                simulation.trace(options.trace)
    if options.as_json:
        print_json({name: getattr(simulation, name) for name in NAMES})
        return
    console = Console()
    console.print(f"[bold]{plan.name}[/] on {plan.world_size} ranks of {machine.name}")
    console.print(_table(simulation))


simulate_command = command_of(_simulate, SimulateOptions, WorkOptions, usual=SHOWN_USUAL)


NAMES = (
    *("seconds", "forward_seconds", "backward_seconds", "compute_seconds"),
    *("overhead_seconds", "exposed_seconds", "idle_seconds"),
    *("bytes_by_link", "sent_bytes", "peak_bytes"),
)


PARTS = MappingProxyType(
    {
        "compute": "compute_seconds",
        "copies, merges": "overhead_seconds",
        "waiting": "exposed_seconds",
        "idle": "idle_seconds",
    }
)


def _table(simulation: Simulation) -> Table:
    table = table_of("", "forward", "backward")
    passes = simulation.forward, simulation.backward
    rows = {"time": [timeline.seconds for timeline in passes]}
    for label, name in PARTS.items():
        rows[label] = [max(getattr(u, name) for u in timeline.ranks) for timeline in passes]
    for label, values in rows.items():
        table.add_row(label, *map(as_seconds, values))
    for link in sorted(
        {link for timeline in passes for use in timeline.ranks for link in use.bytes_by_link}
    ):
        most_texts = [
            max(use.bytes_by_link.get(link, 0) for use in timeline.ranks) for timeline in passes
        ]
        table.add_row(f"sent {link}", *map(as_bytes, most_texts))
    table.add_row("memory", *map(as_bytes, simulation.pass_peak_bytes))
    return table
