"""Workloads, layouts and plans as plain values for a candidate's file.

A small plan is stored with all its steps; a large one of the library as the call that makes it,
with a digest of what some of its ranks do.
"""

import json
from dataclasses import fields
from hashlib import blake2b
from typing import Any

from tilewise.compiler.checker import check
from tilewise.expressions import read_plan as read_call
from tilewise.layouts.layout import Layout, Run
from tilewise.masks.base import Mask
from tilewise.masks.json import read_mask, write_mask
from tilewise.plan.ir import Plan
from tilewise.plan.json import from_json, to_json
from tilewise.wires.wire import read_wires, wires_of, write_wires
from tilewise.workload import LAYOUTS, Workload

FULL_RANKS = 16
"""Up to so many ranks all steps are stored."""


def write_workload(work: Workload) -> dict[str, Any]:
    """All but the layout."""
    apart = {"mask": write_mask(work.mask), "wire": work.wire and write_wires(wires_of(work.wire))}
    names = [field.name for field in fields(work) if field.name not in (*apart, "layout")]
    return {**{name: getattr(work, name) for name in names}, **apart}


def read_workload(data: Any, layout: Layout) -> Workload:
    apart = {"mask": read_mask(data["mask"]), "wire": data.get("wire") and read_wires(data["wire"])}
    return Workload(**{**data, **apart}, layout=layout)


def write_layout(layout: Layout) -> dict[str, Any]:
    """The layout as a value: its name where the library makes it from that, else its runs."""
    named = dict(LAYOUTS).get(layout.name)
    if named and named(layout.num_tokens, layout.world_size) == layout:
        return {"name": layout.name}
    return {"name": layout.name, "runs": layout.runs}


def read_layout(data: Any, num_tokens: int, world_size: int) -> Layout:
    name, runs = data["name"], data.get("runs")
    if runs is None:
        if name not in dict(LAYOUTS):
            raise ValueError(f"layout {name!r} has no runs and is none of {[*dict(LAYOUTS)]}")
        return dict(LAYOUTS)[name](num_tokens, world_size)
    layout = Layout(num_tokens, [[Run(*run) for run in shard] for shard in runs], name)
    if layout.world_size != world_size or not layout.is_partition:
        raise ValueError(
            f"layout gives {sum(layout.sizes)} of {num_tokens} tokens to {layout.world_size} of "
            f"{world_size} ranks; every token must belong to exactly one rank"
        )
    return layout


def write_plan(plan: Plan) -> dict[str, Any]:
    try:
        made: Plan | None = read_call(plan.name, plan.world_size)
    except ValueError:
        made = None
    if made is None or plan.world_size <= FULL_RANKS:
        return {"name": plan.name, "steps": json.loads(to_json(plan))}
    return {"name": plan.name, "digest": digest(plan)}


def read_plan(data: Any, world_size: int, save: str, where: tuple[Mask, Layout]) -> Plan:
    """The plan that write_plan wrote, checked.

    Args:
        save: what it does in backward unless told otherwise.
        where: mask and layout, for which a plan that cuts shards or leaves pairs out was made.
    Raises:
        ValueError: if it is for another world, computes something else, or its digest differs.
    """
    name = data["name"]
    if "steps" not in data:
        plan = read_call(name, world_size)
        if digest(plan) != data["digest"]:
            raise ValueError(
                f"{name} does not do what it did when the file was written (digest "
                f"{digest(plan)}, not {data['digest']}); search again"
            )
        return with_save(plan, save)
    plan = from_json(json.dumps(data["steps"]))
    if plan.world_size != world_size:
        raise ValueError(f"{name} is for {plan.world_size} ranks, not for {world_size}")
    if name.startswith(("needed(", "tiled(")):
        check(plan, *where)
        return with_save(plan, save, where)
    check(plan)
    return with_save(plan, save)


def digest(plan: Plan) -> str:
    """A text that differs between plans whose first, second or last rank do something else."""
    ranks = sorted({0, min(1, plan.world_size - 1), plan.world_size - 1})
    written = repr([plan.rank_steps(rank) for rank in ranks]).encode()
    return blake2b(written, digest_size=12).hexdigest()


def with_save(plan: Plan, save: str, made_for: tuple[Mask, Layout] | None = None) -> Plan:
    """The plan, doing this in backward unless told otherwise.

    Args:
        made_for: the mask and layout that it covers, if it does not know.
    """
    if plan.default_save == save and made_for is None:
        return plan
    traits = plan.traits._replace(made_for=made_for or plan.made_for, tuning=None)
    return plan.changed(default_save=save, traits=traits)
