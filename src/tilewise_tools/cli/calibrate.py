"""tilewise calibrate: measure this machine, into a file that plan and simulate read."""

from dataclasses import replace
from pathlib import Path
from typing import Annotated

from rich.console import Console

from tilewise.simulation.machine import Machine
from tilewise.transport.processes import RankError
from tilewise_tools.calibration.measure import Settings, calibrate_here, last, other_work
from tilewise_tools.cli.options import option
from tilewise_tools.cli.output import (
    as_bytes,
    check_writable,
    ending_on,
    print_error,
    print_plain,
    refusing_bad_input,
    working,
    write_output,
)


def calibrate(
    world_size: Annotated[
        int | None, option("Processes; unless given twice the cores, 8 at most.")
    ] = None,
    node_size: Annotated[
        int | None, option("Ranks per host; unless given, all are on one.")
    ] = None,
    output: Annotated[
        Path | None, option("Write the machine here, not to stdout.", "-o", "--output")
    ] = None,
) -> None:
    """Measure kernels, links, cores and overheads of this machine, and write them as TOML."""
    with refusing_bad_input({"world_size": "--world-size", "node_size": "--node-size"}):
        check_writable("--output", output)
        busy = other_work()  # before this command's own ranks add to the load
        with ending_on(RankError, before=""):
            machine = _measured(world_size, Settings(node_size))
    machine = noted(machine, busy)
    if output is None:
        print_plain(machine.to_toml())
        return
    write_output(output, machine.to_toml())
    Console().print(f"{output}: {_summary(machine)}", highlight=False, soft_wrap=True)


def noted(machine: Machine, busy: str) -> Machine:
    """Add to a machine's source what other_work() said, and print it on the error stream."""
    if not busy:
        return machine
    print_error(f"tilewise: {busy}")
    return replace(machine, source=f"{machine.source} {busy}")


def _measured(world_size: int | None, settings: Settings) -> Machine:
    with working("starting the ranks") as progress:
        return last(calibrate_here(world_size, settings), progress)


def _summary(machine: Machine) -> str:
    speed = machine.kernel("float32", False).speed(1024, 1024) / 1e9
    inside = machine.inside
    return (
        f"{speed:.0f} GFLOP/s a rank in fp32, {machine.cores or machine.node_size:.1f} at once, "
        f"{as_bytes(inside.bandwidth)}/s and {inside.latency * 1e6:.0f} µs between two"
    )
