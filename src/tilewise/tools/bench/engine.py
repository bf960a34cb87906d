"""Running cases: who is done, who cannot, who would not fit; then the rest side by side."""

import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from dataclasses import astuple, dataclass, replace
from functools import cache
from itertools import groupby
from pathlib import Path
from typing import Any

import torch

from tilewise.masks.lengths import histogram
from tilewise.simulation.machine import Machine
from tilewise.tools.bench.case import BenchCase, LabNetwork, Timing, key_of
from tilewise.tools.bench.contender import Contender, Prediction
from tilewise.tools.bench.environment import available_bytes, environment, versions
from tilewise.tools.bench.grid import Plan
from tilewise.tools.bench.inputs import needed_bytes, write_inputs
from tilewise.tools.bench.launched import Launched, LaunchedWorld
from tilewise.tools.bench.measure import Job
from tilewise.tools.bench.results import Results, Row
from tilewise.tools.bench.rows import PlannedRow, finished_row, unfinished_row
from tilewise.tools.bench.worlds import Blamed, World, world_on
from tilewise.tools.lab.rate_limited import LINE_SHARE
from tilewise.tools.outside import is_outside, version


@dataclass(frozen=True)
class EngineSettings:
    """Settings that all cases of a run share.

    Args:
        machine: what predictions are for; None: assumed processors, and links as the network's.
    """

    timing: Timing
    machine: Machine | None = None
    retry: bool = False  # rows that are not ok count as not finished
    launched: Launched | None = None  # whose ranks run the cases; None: processes made here


@dataclass(frozen=True)
class Started:
    """A case whose turn it is: the keys of all its rows, and how many are there already."""

    case: BenchCase
    keys: tuple[str, ...]
    num_known: int


def run_cases(plan: Plan, results: Results, settings: EngineSettings) -> Iterator[Started | Row]:
    """Run what is not in the results yet; yields each case before it runs, each row once written.

    Cases of one network follow each other, as its processes stay.
    """

    def network(entry: tuple[BenchCase, tuple[Contender, ...]]) -> tuple[Any, ...]:
        return entry[0].world_size, entry[0].device, *astuple(entry[0].network)

    for _, same in groupby(sorted(plan, key=network), key=network):
        yield from _on_one_network(list(same), results, settings)


def _on_one_network(
    plan: Plan, results: Results, settings: EngineSettings
) -> Iterator[Started | Row]:
    first, timeout, launched = plan[0][0], settings.timing.timeout_seconds, settings.launched
    with ExitStack() as stack:
        made = (
            closing(LaunchedWorld(launched, timeout, first.device))
            if launched
            else world_on(first.network, timeout, first.device)
        )
        world = cache(lambda: stack.enter_context(made))  # a lab is made if a case must run
        for case, contenders in plan:
            entries = [_entry(case, contender, settings) for contender in contenders]
            rows = [results.rows.get(entry.key) for entry in entries]
            done = [row and (row["outcome"] == "ok" or not settings.retry) for row in rows]
            todo = [entry for entry, is_done in zip(entries, done, strict=True) if not is_done]
            yield Started(case, tuple(e.key for e in entries), len(entries) - len(todo))
            for row in _case_rows(todo, world) if todo else ():
                results.append(row)
                yield row


def _entry(case: BenchCase, contender: Contender, settings: EngineSettings) -> PlannedRow:
    who = {"name": contender.name, "library": contender.library, "version": contender.version}
    key = key_of(case, settings.timing, who, versions(case.device) | _files(case))
    machine = settings.machine or assumed_machine(case.network, case.device)
    return PlannedRow(key, case, settings.timing, contender, machine, Prediction())


def _files(case: BenchCase) -> dict[str, str]:
    """Return the contents of files that the case names: its row depends on them, too."""
    found = {}
    if is_outside(case.mask):
        found["mask"] = version(case.mask)
    if case.axes.corpus is not None:
        found["corpus"] = repr(histogram(case.axes.corpus))
    return found


def _case_rows(todo: list[PlannedRow], world: Callable[[], World]) -> Iterator[Row]:
    """The rows of one case: first those that need no run, then the measured ones."""
    case, timing, about = todo[0].case, todo[0].timing, environment(todo[0].case.device)
    ready: list[PlannedRow] = []
    for entry in todo:
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
            job = Job(case, timing, tuple(entry.contender for entry in ready), str(path))
            try:
                found = world().run(job)
            except Blamed as blamed:
                entry = ready.pop(blamed.contender)
                yield unfinished_row(entry, blamed.outcome, blamed.message, about)
                continue
            for entry, ranks in zip(ready, found, strict=True):
                yield finished_row(entry, ranks, error_rows, about)
            return


def _foreseen(entry: PlannedRow) -> tuple[str, str, Prediction]:
    """An outcome that needs no run ("" if it must run), its message, and what is expected."""
    case, prediction = entry.case, Prediction()
    if reason := _device_missing(case) or entry.contender.supports(case):
        return "unsupported", reason, prediction
    free, wanted, what = available_bytes(case.device), needed_bytes(case), "inputs"
    if wanted <= free:
        prediction, what = entry.contender.predict(case, entry.machine), "inputs and the run"
        wanted += case.world_size * (prediction.peak_bytes or 0)
    if wanted <= free:
        return "", "", prediction
    message = (
        f"predicted: {what} need {wanted / 1e9:.3g} GB, {free / 1e9:.3g} GB may be used; "
        "take fewer tokens, ranks or heads"
    )
    return "out_of_memory", message, prediction


def _device_missing(case: BenchCase) -> str | None:
    """Why this machine has not the devices of a case; None if it has."""
    if case.device != "cuda":
        return None
    if not torch.cuda.is_available():
        return "no CUDA device here"
    here, wanted = torch.cuda.device_count(), case.network.ranks_per_host
    return f"{wanted} ranks here need {wanted} GPUs, there are {here}" if here < wanted else None


def assumed_machine(network: LabNetwork, device: str = "cpu") -> Machine:
    """A preset; the CPU's with links as fast as the NICs of a lab."""
    machine = Machine.preset("h100x8" if device == "cuda" else "cpu-gloo")
    if not network.mbit:
        return machine
    link = replace(machine.between, bandwidth=network.mbit * 1e6 / 8 * LINE_SHARE)
    name = f"{machine.name}, {network.mbit:g} Mbit/s"
    return replace(machine, name=name, node_size=network.ranks_per_host, between=link)
