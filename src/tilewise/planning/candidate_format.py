"""Workloads, layouts and plans as plain values for a candidate's file.

A small plan is stored with all its steps; a large one of the library as the call that makes it,
with a digest of what some of its ranks do.
"""

import re
from dataclasses import dataclass, replace
from hashlib import blake2b
from typing import Any

from tilewise.compiler.checker import check
from tilewise.expressions import read_plan as read_call
from tilewise.layouts.layout import Layout, Run
from tilewise.masks.base import Mask
from tilewise.masks.tables import MASK_KINDS
from tilewise.plan.ir import Plan
from tilewise.plan.json import plan_from_data, plan_to_data
from tilewise.serializer import read, write
from tilewise.strategies.needed import needed
from tilewise.wires.wire import WIRE_KINDS, Wires, wires_of
from tilewise.workload import LAYOUTS, Workload

FULL_RANKS = 16
"""Up to this many ranks, all steps are stored."""


KINDS = (*MASK_KINDS, *WIRE_KINDS)


@dataclass(frozen=True)
class FileLayout:
    """A layout by its name, if that is all there is to it, else by its runs."""

    name: str
    runs: tuple[tuple[Run, ...], ...] | None = None


@dataclass(frozen=True)
class FilePlan:
    """A plan with all its steps, or by its name and a digest."""

    name: str
    steps: Any = None
    digest: str | None = None
    waiting_results: int | None = None


def write_workload(work: Workload) -> dict[str, Any]:
    """The entries of a workload but for its layout, which is written apart."""
    data = write(replace(work, layout="zigzag"), KINDS)
    del data["layout"]
    return data | {"wire": work.wire and write(wires_of(work.wire), KINDS)}


def read_workload(data: Any, layout: Layout) -> Workload:
    work = read(Workload, {**data, "wire": None}, "workload", KINDS)
    if data.get("wire") is not None:
        work = replace(work, wire=read(Wires, data["wire"], "workload.wire", KINDS))
    return replace(work, layout=layout)


def write_layout(layout: Layout) -> dict[str, Any]:
    """Return the layout as a value: its name if the library makes it from that, else its runs."""
    make_layout = dict(LAYOUTS).get(layout.name)
    is_named = (
        make_layout is not None and make_layout(layout.num_tokens, layout.world_size) == layout
    )
    return {"name": layout.name} | ({} if is_named else {"runs": layout.runs})


def read_layout(file: FileLayout, num_tokens: int, world_size: int) -> Layout:
    name, runs = file.name, file.runs
    if runs is None:
        if name not in dict(LAYOUTS):
            raise ValueError(f"layout {name!r} has no runs and is none of {[*dict(LAYOUTS)]}")
        return dict(LAYOUTS)[name](num_tokens, world_size)
    layout = Layout(num_tokens, runs, name)
    if layout.world_size != world_size or not layout.owned.is_partition:
        raise ValueError(
            f"layout gives {sum(layout.sizes)} of {num_tokens} tokens to {layout.world_size} of "
            f"{world_size} ranks; every token must belong to exactly one rank"
        )
    return layout


def write_plan(plan: Plan) -> dict[str, Any]:
    try:
        parsed_plan: Plan | None = read_call(plan.name, plan.world_size)
    except ValueError:
        parsed_plan = None
    if parsed_plan is None or plan.world_size <= FULL_RANKS:
        return {"name": plan.name, "steps": plan_to_data(plan)}
    most = plan.waiting_results
    waiting = {} if most is None else {"waiting_results": most}
    return {"name": plan.name, "digest": digest(plan), **waiting}


def read_plan(file: FilePlan, world_size: int, save: str, where: tuple[Mask, Layout]) -> Plan:
    """The plan that write_plan wrote, checked.

    Args:
        save: its default in backward, "replay" or "gathered".
        where: the mask and the layout that a plan which cuts shards or leaves pairs out is for.
    Raises:
        ValueError: if it is for another world, computes something else, or its digest differs.
    """
    name = file.name
    if file.steps is None:
        plan = read_call(name, world_size)
        if digest(plan) != file.digest:
            raise ValueError(
                f"{name} does not do what it did when the file was written (digest "
                f"{digest(plan)}, not {file.digest}); search again"
            )
        return with_save(plan.with_waiting_results(file.waiting_results), save)
    plan = _known(name, plan_from_data(file.steps), where)
    if plan.world_size != world_size:
        raise ValueError(f"{name} is for {plan.world_size} ranks, not for {world_size}")
    if name.startswith(("needed(", "tiled(")):
        check(plan, *where)
        return with_save(plan, save, where)
    check(plan)
    return with_save(plan, save)


def _known(name: str, plan: Plan, where: tuple[Mask, Layout]) -> Plan:
    """The plan as its strategy makes it, which knows how to make it anew for whole rows.

    Any other plan, or one with other steps, is returned as it is.
    """
    try:
        if name.startswith("needed("):
            node_size = re.search(r"node_size=(\d+)", name)
            made = needed(*where, node_size and int(node_size[1]))
        else:
            made = read_call(name, plan.world_size)
    except ValueError:
        return plan
    made = made.changed(default_save=plan.default_save, waiting_results=plan.waiting_results)
    return made if made.traits.whole_rows is not None and made == plan else plan


def digest(plan: Plan) -> str:
    """A text that differs between plans whose first, second or last rank do something else."""
    ranks = sorted({0, min(1, plan.world_size - 1), plan.world_size - 1})
    steps_text = repr([plan.rank_steps(rank) for rank in ranks]).encode()
    return blake2b(steps_text, digest_size=12).hexdigest()


def with_save(plan: Plan, save: str, made_for: tuple[Mask, Layout] | None = None) -> Plan:
    """Return the plan with another default `save`, and the (mask, layout) that it is made for."""
    if plan.default_save == save and made_for is None:
        return plan
    traits = plan.traits._replace(made_for=made_for or plan.made_for, tuning=None)
    return plan.changed(default_save=save, traits=traits)
