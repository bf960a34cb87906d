"""A candidate: everything that a run of attention needs, and what it was predicted to take."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import NamedTuple

from tilewise.layouts.layout import Layout
from tilewise.plan.ir import Plan
from tilewise.planning import candidate_format
from tilewise.simulation.machine import Machine
from tilewise.workload import Workload


class Distances(NamedTuple):
    """What no plan can fall below, whatever it does.

    Attributes:
        compute_seconds: all pairs, equally shared, at the machine's highest kernel speeds.
        least_bytes: of the rank that sends most, both passes, under equal shares of work and
            tokens; docs/planner.md derives it.
    """

    compute_seconds: float
    least_bytes: int


class Row(NamedTuple):
    """A line of the table that a candidate was chosen from."""

    strategy: str
    plan: str
    backward_plan: str
    save: str
    seconds: float
    forward_seconds: float
    backward_seconds: float
    exposed_seconds: float
    bytes_by_link: dict[str, int]
    peak_bytes: int


@dataclass(frozen=True)
class Candidate:
    """A way to run a workload on a machine.

    Attributes:
        strategy: in words, as in "ulysses(8) x mesh".
        plan, backward_plan: of the two passes; one object if they are equal.
        layout: which tokens each rank owns.
        save: "replay" or "gathered".
        wire_dtype: of travelling out, dq, dk, dv.
        seconds: of both passes; exposed_seconds, bytes_by_link and peak_bytes are those of the
            simulation: of the busiest rank.
        reason: why it wins, in a sentence or two.
        distances: what no plan can fall below.
        rows: the table it was ranked in, best first.
    """

    work: Workload
    machine: Machine
    strategy: str
    plan: Plan
    backward_plan: Plan
    layout: Layout
    save: str
    wire_dtype: str
    forward_seconds: float
    backward_seconds: float
    exposed_seconds: float
    bytes_by_link: dict[str, int]
    peak_bytes: int
    distances: Distances
    reason: str = ""
    rows: tuple[Row, ...] = field(default=(), repr=False)

    @property
    def seconds(self) -> float:
        return self.forward_seconds + self.backward_seconds

    @property
    def world_size(self) -> int:
        return self.plan.world_size

    @property
    def row(self) -> Row:
        """This candidate as a line of the table."""
        return Row(
            self.strategy,
            self.plan.name,
            self.backward_plan.name,
            self.save,
            self.seconds,
            self.forward_seconds,
            self.backward_seconds,
            self.exposed_seconds,
            self.bytes_by_link,
            self.peak_bytes,
        )

    def to_json(self) -> str:
        """The candidate as a file's text, which load_candidate reads."""
        same = self.backward_plan is self.plan
        data = {
            "format": FORMAT,
            "world_size": self.world_size,
            "strategy": self.strategy,
            "reason": self.reason,
            "save": self.save,
            "wire_dtype": self.wire_dtype,
            "workload": candidate_format.write_workload(self.work),
            "layout": candidate_format.write_layout(self.layout),
            "plan": candidate_format.write_plan(self.plan),
            "backward_plan": None if same else candidate_format.write_plan(self.backward_plan),
            "predicted": {name: getattr(self, name) for name in PREDICTED},
            "distances": self.distances._asdict(),
            "rows": [row._asdict() for row in self.rows],
            "machine": self.machine.to_toml().splitlines(),
        }
        return json.dumps(data, indent=1) + "\n"


FORMAT = "tilewise candidate 1"

PREDICTED = (
    *("seconds", "forward_seconds", "backward_seconds", "exposed_seconds"),
    *("bytes_by_link", "peak_bytes"),
)
