"""What the planner chose, as contenders: by itself for a case, or in a candidate's file."""

from __future__ import annotations

from typing import NamedTuple

from tilewise.layouts.layout import Layout
from tilewise.plan.ir import Plan
from tilewise.planning.candidate_file import load_candidate
from tilewise.planning.search import promising
from tilewise.simulation.machine import Machine
from tilewise.tools.bench.case import Case
from tilewise.workload import Workload


class Planned(NamedTuple):
    """What a strategy makes of a case; backward_plan None: backward runs the plan too."""

    plan: Plan
    layout: Layout
    backward_plan: Plan | None = None


def planner_choice(work: Workload, case: Case) -> Planned:
    """What ContextParallel takes for strategy "auto"."""
    machine = Machine.preset("h100x8" if case.device == "cuda" else "cpu-gloo")
    plan, backward = promising(work, machine, case.world_size)
    return Planned(plan, work.layout_for(case.world_size), None if backward is plan else backward)


def from_file(path: str, case: Case) -> Planned:
    """The candidate that tilewise plan wrote.

    Raises:
        ValueError: if it is for another case.
    """
    found = load_candidate(path)
    for what, told, wanted in (
        ("ranks", found.world_size, case.world_size),
        ("tokens", found.work.num_tokens, case.num_tokens),
        ("heads", (found.work.num_heads, found.work.num_kv_heads), case.heads[:2]),
        ("mask", found.work.mask, case.make_mask()),
    ):
        if told != wanted:
            raise ValueError(f"{path} is for {what} {told}, not {wanted}; plan for this case")
    same = found.backward_plan == found.plan
    return Planned(found.plan, found.layout, None if same else found.backward_plan)
