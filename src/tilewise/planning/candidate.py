"""A candidate: what a search found, with its figures; read from and written to a file."""

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, fields, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any, NamedTuple

from tilewise.arguments import MOST_RANKS, Save, checks_arguments, whole_number
from tilewise.layouts.layout import Layout
from tilewise.plan.ir import Plan
from tilewise.plan.json import FORMAT as PLAN_FORMAT
from tilewise.plan.json import plan_from_data
from tilewise.plan.payload import head_groups
from tilewise.planning import candidate_format
from tilewise.planning.candidate_format import FileLayout, FilePlan
from tilewise.serializer import read, write
from tilewise.simulation.machine import Machine, read_machine
from tilewise.wires.wire import Wires
from tilewise.workload import Workload


class Distances(NamedTuple):
    """Lower bounds that hold for every plan.

    Attributes:
        compute_seconds: all pairs, equally shared, at the machine's highest kernel speeds.
        least_bytes: of the rank that sends most, both passes, under equal shares of work and
            tokens; docs/planner.md derives it.
    """

    compute_seconds: float
    least_bytes: int


class PlanRow(NamedTuple):
    """A line of the table that a candidate was chosen from.

    Attributes:
        sampled: as of a Candidate.
    """

    strategy: str
    plan: str
    backward_plan: str
    save: str
    seconds: float
    forward_seconds: float
    backward_seconds: float
    exposed_seconds: float
    bytes_by_link: dict[str, int]
    sent_bytes: int
    peak_bytes: int
    overhead_seconds: float = 0.0  # files of before have neither this
    sampled: bool = False  # nor this


def as_run(plan: Plan, work: Workload) -> tuple[Plan, Plan]:
    """The plans of the two passes that a plan becomes for a workload, one object if they are one.

    Those of a canonical call are made of the plan itself when it runs.
    """
    forward, backward = work.resolve(plan)
    return (plan, plan) if forward.payload.whole_rows else (forward.plan, backward.plan)


@dataclass(frozen=True)
class Candidate:
    """A way to run a workload on a machine.

    Attributes:
        strategy: in words, as in "ulysses(8) x mesh".
        plan, backward_plan: of the two passes; one object if they are equal.
        layout: which tokens each rank owns.
        save: "replay" or "gathered".
        wire: how what travels is encoded, for wire= of attention; a Latent needs its expand.
        seconds: of both passes; exposed_seconds is that of the rank that waits longest for
            messages, overhead_seconds that of the rank that copies, merges and posts longest.
        bytes_by_link: that a rank sends at most over each class of link; sent_bytes over all.
        reason: why it wins, in a sentence or two.
        distances: what no plan can fall below.
        sampled: True if times and bytes are those of a sample of ranks, taken for all.
        memory_sampled: True if peak_bytes is that of a few ranks, the one that needs most.
        count_peak, make_rows: functions that make peak_bytes and rows when they are first read.
    """

    work: Workload
    machine: Machine
    strategy: str
    plan: Plan
    backward_plan: Plan
    layout: Layout
    save: str
    wire: Wires
    forward_seconds: float
    backward_seconds: float
    exposed_seconds: float
    bytes_by_link: dict[str, int]
    sent_bytes: int
    count_peak: Callable[[], int] = field(repr=False, compare=False)
    distances: Distances
    reason: str = ""
    make_rows: Callable[[], tuple[PlanRow, ...]] = field(repr=False, compare=False, default=tuple)
    sampled: bool = False
    memory_sampled: bool = False
    overhead_seconds: float = 0.0

    @cached_property
    def peak_bytes(self) -> int:
        """Memory of the rank that needs most, counted when it is first read: that takes seconds."""
        return self.count_peak()

    @cached_property
    def rows(self) -> tuple[PlanRow, ...]:
        """The table that the candidate was ranked in, best first."""
        return self.make_rows()

    @property
    def seconds(self) -> float:
        return self.forward_seconds + self.backward_seconds

    @property
    def world_size(self) -> int:
        return self.plan.world_size

    @property
    def own_work(self) -> Workload:
        """The workload with this candidate's layout, save and wire."""
        changes = {"layout": self.layout, "save": self.save, "wire": self.wire}
        return replace(self.work, **changes, wire_dtype=None)

    @property
    def wire_dtype(self) -> str | None:
        """The dtype in which out, dq, dk and dv travel, if they are plain."""
        return self.wire.resolved(self.work.dtype).wire_dtype

    @property
    def row(self) -> PlanRow:
        """This candidate as a line of the table."""
        figures = (getattr(self, name) for name in PlanRow._fields[3:])
        return PlanRow(self.strategy, self.plan.name, self.backward_plan.name, *figures)

    def to_json(self) -> str:
        """The candidate as a file's text, which load_candidate reads."""
        one_plan = self.backward_plan is self.plan
        data = {
            "format": FORMAT,
            "world_size": self.world_size,
            "strategy": self.strategy,
            "reason": self.reason,
            "save": self.save,
            "wire": write(self.wire, candidate_format.KINDS),
            "workload": candidate_format.write_workload(self.work),
            "layout": candidate_format.write_layout(self.layout),
            "plan": candidate_format.write_plan(self.plan),
            "backward_plan": None if one_plan else candidate_format.write_plan(self.backward_plan),
            "predicted": {x.name: getattr(self, x.name) for x in fields(_Predicted)},
            "distances": self.distances._asdict(),
            "rows": [row._asdict() for row in self.rows],
            "machine": self.machine.to_toml().splitlines(),
        }
        return json.dumps(data, indent=1) + "\n"


FORMAT = "tilewise candidate 2"


@dataclass(frozen=True)
class _Predicted:
    seconds: float
    forward_seconds: float
    backward_seconds: float
    exposed_seconds: float
    bytes_by_link: dict[str, int]
    sent_bytes: int
    peak_bytes: int
    overhead_seconds: float = 0.0


@dataclass(frozen=True)
class _FileCandidate:
    format: str
    world_size: int
    strategy: str
    reason: str
    save: Save
    wire: Wires
    workload: dict[str, Any]
    layout: FileLayout
    plan: FilePlan
    backward_plan: FilePlan | None
    predicted: _Predicted
    distances: Distances
    rows: tuple[PlanRow, ...]
    machine: tuple[str, ...]


@checks_arguments
def load_plan(path: str | Path) -> Plan | Candidate:
    """Read a plan file: a plan that `plan.to_json()` wrote, or a candidate of a search.

    Raises:
        ValueError: as load_candidate.
    """
    data = read_json(path)
    if isinstance(data, dict) and data.get("format") == PLAN_FORMAT:
        with _reading(str(path), "plan"):
            return plan_from_data(data)
    return load_candidate(path)


@checks_arguments
def load_candidate(path: str | Path) -> Candidate:
    """The candidate that to_json wrote.

    Raises:
        ValueError: naming the file and the entry that is wrong: no JSON, an entry that is missing,
            a plan for another world, one that does not compute attention, heads that it cannot
            split; or that it cannot be read.
    """
    data = read_json(path)
    if not isinstance(data, dict) or data.get("format") != FORMAT:
        found_format = data.get("format") if isinstance(data, dict) else type(data).__name__
        raise ValueError(
            f"{path} is no candidate, such as tilewise plan -o writes: its format is "
            f"{found_format!r}, not {FORMAT!r}"
        )
    return _candidate(data, str(path))


def read_json(path: str | Path) -> Any:
    """The value of a JSON file; ValueError if it cannot be read or is no JSON."""
    try:
        return json.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror}") from None
    except (json.JSONDecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ValueError(f"{path} is no complete JSON: {error}") from None


def _candidate(data: dict[str, Any], path: str) -> Candidate:
    with _reading(path, "its entries"):
        file = read(_FileCandidate, data, "candidate", candidate_format.KINDS)
        world_size = whole_number("world_size", file.world_size, most=MOST_RANKS)
        num_tokens = read(int, file.workload.get("num_tokens"), "workload.num_tokens")
    with _reading(path, "layout"):
        layout = candidate_format.read_layout(file.layout, num_tokens, world_size)
    with _reading(path, "workload"):
        work = candidate_format.read_workload(file.workload, layout)
    plan = _plan(file.plan, "plan", work, file, path)
    backward = plan
    if file.backward_plan is not None:
        backward = _plan(file.backward_plan, "backward_plan", work, file, path)
    with _reading(path, "backward_plan"):
        if (backward.owners, backward.cuts) != (plan.owners, plan.cuts):
            raise ValueError(f"{backward.name} and {plan.name} own shards differently")
        if file.save == "gathered" and backward is not plan:
            raise ValueError("save='gathered' needs the same plan in backward")
    with _reading(path, "machine"):
        machine = read_machine("\n".join(file.machine), "TOML")
    return Candidate(
        work,
        machine,
        file.strategy,
        plan,
        backward,
        layout,
        file.save,
        file.wire,
        file.predicted.forward_seconds,
        file.predicted.backward_seconds,
        file.predicted.exposed_seconds,
        file.predicted.bytes_by_link,
        file.predicted.sent_bytes,
        partial(int, file.predicted.peak_bytes),
        file.distances,
        file.reason,
        partial(tuple, file.rows),
        overhead_seconds=file.predicted.overhead_seconds,
    )


def _plan(
    file: FilePlan, name: str, work: Workload, file_candidate: _FileCandidate, path: str
) -> Plan:
    with _reading(path, name):
        where = work.mask, work.layout_for(file_candidate.world_size).owned
        plan = candidate_format.read_plan(
            file, file_candidate.world_size, file_candidate.save, where
        )
        head_groups(work.num_heads, work.num_kv_heads, plan.num_head_groups)
        return plan


@contextmanager
def _reading(path: str, entry: str) -> Iterator[None]:
    """Errors of the block name the file and the entry."""
    try:
        yield
    except ValueError as error:
        raise ValueError(f"{path}: {entry}: {error}") from None
