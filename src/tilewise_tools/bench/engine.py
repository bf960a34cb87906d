"""Running cases: who cannot, who would not fit; then the rest side by side."""

import re
import tempfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, closing
from dataclasses import astuple, replace
from functools import cache
from itertools import groupby
from pathlib import Path
from typing import Any

import torch

from tilewise.masks.lengths import histogram
from tilewise.simulation.machine import Machine
from tilewise_tools.bench.case import BenchCase, LabNetwork, Timing, key_of
from tilewise_tools.bench.contender import Contender, Prediction
from tilewise_tools.bench.environment import available_bytes, environment, versions
from tilewise_tools.bench.grid import Plan
from tilewise_tools.bench.inputs import needed_bytes, write_inputs
from tilewise_tools.bench.launched import Launched, LaunchedWorld
from tilewise_tools.bench.measure import Job
from tilewise_tools.bench.results import Row
from tilewise_tools.bench.rows import PlannedRow, finished_row, unfinished_row
from tilewise_tools.bench.worlds import Blamed, World, world_on
from tilewise_tools.lab.rate_limited import LINE_SHARE
from tilewise_tools.outside import is_outside, version


def planned_rows(plan: Plan, timing: Timing, machine: Machine | None = None) -> list[PlannedRow]:
    """Return the rows that a plan asks for; those of one network follow each other.

    Args:
        machine: what predictions are for; None: assumed processors, and links as the network's.
    """
    return [
        PlannedRow(
            _key(case, contender, timing),
            case,
            timing,
            contender,
            machine or assumed_machine(case.network, case.device),
            Prediction(),
        )
        for case, contenders in sorted(plan, key=lambda entry: _network(entry[0]))
        for contender in contenders
    ]


def run_cases(
    planned: Iterable[PlannedRow], launched: Launched | None = None, profiles: Path | None = None
) -> Iterator[Row]:
    """Measure rows, each yielded once it is known; contenders of one case run side by side.

    Args:
        planned: in the order of planned_rows, since the processes of a network and the inputs of a
            case are kept until another one comes.
        launched: whose ranks run the cases; None: processes that are made here.
        profiles: a folder for the profile of one more run of every row and rank, as a trace that
            Chrome's tracing page and Perfetto read, named by the contender and the row's key.
    """
    for _, same in groupby(planned, key=lambda row: _network(row.case)):
        yield from _on_one_network(list(same), launched, profiles)


def _on_one_network(
    planned: list[PlannedRow], launched: Launched | None, profiles: Path | None
) -> Iterator[Row]:
    first, timeout = planned[0].case, planned[0].timing.timeout_seconds
    with ExitStack() as stack:
        new_world = (
            closing(LaunchedWorld(launched, timeout, first.device))
            if launched
            else world_on(first.network, timeout, first.device)
        )
        world = cache(lambda: stack.enter_context(new_world))  # a lab is made if a case must run
        for _, rows in groupby(planned, key=lambda row: row.case):
            yield from _case_rows(list(rows), world, profiles)


def _network(case: BenchCase) -> tuple[Any, ...]:
    return case.world_size, case.device, *astuple(case.network)


def _key(case: BenchCase, contender: Contender, timing: Timing) -> str:
    identity = {"name": contender.name, "library": contender.library, "version": contender.version}
    return key_of(case, timing, identity, versions(case.device) | _files(case))


def _files(case: BenchCase) -> dict[str, str]:
    """Return the contents of files that the case names: its row depends on them, too."""
    contents = {}
    if is_outside(case.mask):
        contents["mask"] = version(case.mask)
    if case.axes.corpus is not None:
        contents["corpus"] = repr(histogram(case.axes.corpus))
    return contents


def _case_rows(
    planned: list[PlannedRow], world: Callable[[], World], profiles: Path | None
) -> Iterator[Row]:
    """The rows of one case: first those that need no run, then the measured ones."""
    case, timing = planned[0].case, planned[0].timing
    about = environment(case.device)
    ready: list[PlannedRow] = []
    for entry in planned:
        outcome, message, prediction = _foreseen(entry)
        entry = replace(entry, prediction=prediction)
        if outcome:
            yield unfinished_row(entry, outcome, message, about)
        else:
            ready.append(entry)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "inputs"
        error_rows = write_inputs(case, case.make_mask(), timing.truth_pairs, path) if ready else 0
        while ready:
            contenders = tuple(entry.contender for entry in ready)
            files = tuple(_profile(entry, profiles) for entry in ready) if profiles else ()
            job = Job(case, timing, contenders, str(path), files)
            try:
                answers = world().run(job)
            except Blamed as blamed:
                entry = ready.pop(blamed.contender)
                yield unfinished_row(entry, blamed.outcome, blamed.message, about)
                continue
            for entry, ranks in zip(ready, answers, strict=True):
                yield finished_row(entry, ranks, error_rows, about)
            return


def _profile(entry: PlannedRow, folder: Path) -> str:
    """The file of a row's profile, without rank and suffix."""
    name = re.sub(r"[^\w.]+", "-", entry.contender.name).strip("-")
    return str(folder.absolute() / f"{name}-{entry.key}")


def _foreseen(entry: PlannedRow) -> tuple[str, str, Prediction]:
    """An outcome that needs no run ("" if it must run), its message, and what is expected."""
    case, prediction = entry.case, Prediction()
    if reason := _device_missing(case) or entry.contender.supports(case):
        return "unsupported", reason, prediction
    free, needed, what_needs_it = available_bytes(case.device), needed_bytes(case), "inputs"
    if needed <= free:
        prediction = entry.contender.predict(case, entry.machine)
        what_needs_it = "inputs and the run"
        needed += case.world_size * (prediction.peak_bytes or 0)
    if needed <= free:
        return "", "", prediction
    message = (
        f"predicted: {what_needs_it} need {needed / 1e9:.3g} GB, {free / 1e9:.3g} GB may be used; "
        "take fewer tokens, ranks or heads"
    )
    return "out_of_memory", message, prediction


def _device_missing(case: BenchCase) -> str | None:
    """Why this machine has not the devices of a case; None if it has."""
    if case.device != "cuda":
        return None
    if not torch.cuda.is_available():
        return "no CUDA device here"
    num_gpus, num_needed = torch.cuda.device_count(), case.network.ranks_per_host
    return (
        f"{num_needed} ranks here need {num_needed} GPUs, there are {num_gpus}"
        if num_gpus < num_needed
        else None
    )


def assumed_machine(network: LabNetwork, device: str = "cpu") -> Machine:
    """A preset; the CPU's with links as fast as the NICs of a lab."""
    machine = Machine.preset("h100x8" if device == "cuda" else "cpu-gloo")
    if not network.mbit:
        return machine
    link = replace(machine.between, bandwidth=network.mbit * 1e6 / 8 * LINE_SHARE)
    name = f"{machine.name}, {network.mbit:g} Mbit/s"
    return replace(machine, name=name, node_size=network.ranks_per_host, between=link)
