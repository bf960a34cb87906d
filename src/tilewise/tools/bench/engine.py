"""Running cases: who is done, who cannot, who would not fit; then the rest side by side."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import Any

from tilewise.simulation.machine import Machine
from tilewise.tools.bench.case import BenchCase, LabNetwork, Timing, key_of
from tilewise.tools.bench.contender import Contender, Prediction
from tilewise.tools.bench.environment import available_bytes, environment, versions
from tilewise.tools.bench.inputs import needed_bytes, write_inputs
from tilewise.tools.bench.measure import Job
from tilewise.tools.bench.results import Results
from tilewise.tools.bench.rows import PlannedRow, finished_row, unfinished_row
from tilewise.tools.bench.worlds import Blamed, LabWorld, LocalWorld
from tilewise.tools.lab.lab import Lab
from tilewise.tools.lab.rate_limited import nics

PAYLOAD = 1448 / 1514  # of an Ethernet frame
Row = dict[str, Any]
Plan = Sequence[tuple[BenchCase, tuple[Contender, ...]]]


@dataclass(frozen=True)
class EngineSettings:
    """What all cases of a run share.

    Args:
        machine: what predictions are for; None: assumed processors, and links as the network's.
        retry: rows that are not ok count as not finished.
    """

    timing: Timing
    machine: Machine | None = None
    retry: bool = False


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
    with _Worlds(settings.timing.timeout_seconds) as worlds:
        for case, contenders in sorted(plan, key=lambda one: _network_order(one[0])):
            entries = [_entry(case, contender, settings) for contender in contenders]
            todo = [entry for entry in entries if not _is_finished(entry, results, settings)]
            keys = tuple(entry.key for entry in entries)
            yield Started(case, keys, len(entries) - len(todo))
            for row in _case_rows(todo, worlds, settings):
                results.append(row)
                yield row


def _network_order(case: BenchCase) -> tuple[Any, ...]:
    network = case.network
    return case.world_size, network.name, network.hosts, network.mbit


def _entry(case: BenchCase, contender: Contender, settings: EngineSettings) -> PlannedRow:
    who = {"name": contender.name, "library": contender.library, "version": contender.version}
    key = key_of(case, settings.timing, who, versions(case.device))
    machine = settings.machine or assumed_machine(case.network)
    return PlannedRow(key, case, settings.timing, contender, machine, Prediction())


def _is_finished(entry: PlannedRow, results: Results, settings: EngineSettings) -> bool:
    row = results.rows.get(entry.key)
    return row is not None and (row["outcome"] == "ok" or not settings.retry)


def _case_rows(todo: list[PlannedRow], worlds: _Worlds, settings: EngineSettings) -> Iterator[Row]:
    """The rows of one case: first those that need no run, then the measured ones."""
    if not todo:
        return
    case, about = todo[0].case, environment(todo[0].case.device)
    ready: list[PlannedRow] = []
    for entry in todo:
        outcome, message, prediction = _foreseen(entry)
        entry = replace(entry, prediction=prediction)
        if outcome:
            yield unfinished_row(entry, outcome, message, about)
        else:
            ready.append(entry)
    if not ready:
        return
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "inputs"
        error_rows = write_inputs(case, case.make_mask(), settings.timing.truth_pairs, path)
        while ready:
            job = Job(case, settings.timing, tuple(e.contender for e in ready), str(path))
            try:
                found = worlds.of(case).run(job)
            except Blamed as blamed:
                entry = ready.pop(blamed.contender)
                yield unfinished_row(entry, blamed.outcome, blamed.message, about)
                continue
            for entry, ranks in zip(ready, found, strict=True):
                yield finished_row(entry, ranks, error_rows, about)
            return


def _foreseen(entry: PlannedRow) -> tuple[str, str, Prediction]:
    """An outcome that needs no run ("" if it must run), its message, and what is expected."""
    case, free = entry.case, available_bytes(entry.case.device)
    inputs = needed_bytes(case)
    if inputs > free:
        return "out_of_memory", _too_large(inputs, free, "inputs"), Prediction()
    reason = entry.contender.supports(case)
    if reason is not None:
        return "unsupported", reason, Prediction()
    prediction = entry.contender.predict(case, entry.machine)
    wanted = inputs + case.world_size * (prediction.peak_bytes or 0)
    if wanted > free:
        return "out_of_memory", _too_large(wanted, free, "inputs and the run"), prediction
    return "", "", prediction


def assumed_machine(network: LabNetwork) -> Machine:
    """The CPU preset, its links as fast as the NICs of a lab."""
    machine = Machine.preset("cpu-gloo")
    if network.name in ("none", "loopback"):
        return machine
    link = replace(machine.between, bandwidth=network.mbit * 1e6 / 8 * PAYLOAD)
    name = f"{machine.name}, {network.mbit:g} Mbit/s"
    return replace(machine, name=name, node_size=network.ranks_per_host, between=link)


def _too_large(wanted: int, free: int, what: str) -> str:
    return (
        f"predicted: {what} need {wanted / 1e9:.3g} GB, {free / 1e9:.3g} GB may be used; "
        "take fewer tokens, ranks or heads"
    )


class _Worlds:
    """The processes of one network at a time; those of another replace them."""

    def __init__(self, timeout_seconds: float):
        self._timeout_seconds = timeout_seconds
        self._open = ExitStack()
        self._now: tuple[int, LabNetwork] | None = None
        self._world: LocalWorld | None = None

    def __enter__(self) -> _Worlds:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._open.close()

    def of(self, case: BenchCase) -> LocalWorld:
        """The world that a case runs in."""
        wanted = case.world_size, case.network
        if self._world is None or wanted != self._now:
            self._open.close()
            self._now, self._world = wanted, self._make(case)
        return self._world

    def _make(self, case: BenchCase) -> LocalWorld:
        network = case.network
        sizes = network.hosts, network.ranks_per_host
        if network.name != "lab":
            limits = None
            if network.name == "limited":
                limits = self._open.enter_context(nics(*sizes, network.mbit * PAYLOAD))
            world = LocalWorld(case.world_size, self._timeout_seconds, limits)
            return self._open.enter_context(world)
        lab = Lab(*sizes, mbit=network.mbit)
        self._open.enter_context(lab)
        return self._open.enter_context(LabWorld(lab, self._timeout_seconds))
