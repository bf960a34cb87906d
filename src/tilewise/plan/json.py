"""A plan as JSON: for plan files and other programs."""

import json
from dataclasses import dataclass
from typing import Any, cast

from tilewise.arguments import Save, checks_arguments, require_type
from tilewise.plan.ir import Item, Plan, Role, Rows, Side, Step, Tile, Transfer
from tilewise.plan.numbers import checked
from tilewise.serializer import read, write

FORMAT = "tilewise plan 1"

Holders = tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class _FileTransfer:
    """A transfer with the fields of its item."""

    side: Side
    role: Role
    shard: int
    heads: int
    src: int
    dst: int
    rows: Rows | None = None

    @property
    def transfer(self) -> Transfer:
        item = Item(self.side, self.role, self.shard, self.heads)
        return Transfer(item, self.src, self.dst, self.rows)


@dataclass(frozen=True)
class _FileStep:
    tiles: tuple[tuple[Tile, ...], ...]
    transfers: tuple[_FileTransfer, ...]


@dataclass(frozen=True)
class _FileOwners:
    Q: Holders
    KV: Holders


@dataclass(frozen=True, kw_only=True)
class _FilePlan:
    format: str = FORMAT
    name: str
    world_size: int
    num_head_groups: int
    owners: _FileOwners
    cuts: Rows | None = None
    save: Save
    replicated_queries: bool
    waiting_results: int | None = None
    steps: tuple[_FileStep, ...]


@checks_arguments
def to_json(plan: Plan) -> str:
    """The plan as one JSON object; the inverse of from_json."""
    return json.dumps(plan_to_data(plan))


@checks_arguments
def from_json(text: str) -> Plan:
    """The plan that to_json wrote.

    Raises:
        ValueError: if the text is no such object, naming the entry and its value; a PlanError if
            an entry names a rank, a shard or a head group that there is not.
    """
    try:
        data = json.loads(text)
    except ValueError as error:
        raise ValueError(f"not a plan in JSON: {error}") from None
    return plan_from_data(data)


def plan_to_data(plan: Plan) -> dict[str, Any]:
    """The object that to_json writes."""
    require_type(Plan, "plan", plan)
    steps = tuple(
        _FileStep(step.tiles, tuple(_FileTransfer(*x.item, *x[1:]) for x in step.transfers))
        for step in plan.steps
    )
    file = _FilePlan(
        name=plan.name,
        world_size=plan.world_size,
        num_head_groups=plan.num_head_groups,
        owners=_FileOwners(*plan.owners),
        cuts=plan.cuts,
        save=cast(Save, plan.default_save),
        replicated_queries=plan.replicated_queries,
        waiting_results=plan.waiting_results,
        steps=steps,
    )
    data = write(file)
    if plan.waiting_results is None:  # versions of before read it too
        del data["waiting_results"]
    return data


def plan_from_data(data: Any) -> Plan:
    """The plan of the object that plan_to_data returned.

    Raises:
        ValueError, PlanError: as from_json.
    """
    try:
        found_format = (
            cast("dict[str, Any]", data).get("format") if isinstance(data, dict) else FORMAT
        )
        if found_format != FORMAT:
            raise ValueError(f"format is {found_format!r}, not {FORMAT!r}")
        file = read(_FilePlan, data, "plan")
        plan = Plan(
            file.name,
            file.world_size,
            file.num_head_groups,
            (file.owners.Q, file.owners.KV),
            [Step(step.tiles, tuple(x.transfer for x in step.transfers)) for step in file.steps],
            cuts=file.cuts,
            default_save=file.save,
            replicated_queries=file.replicated_queries,
            waiting_results=file.waiting_results,
        )
    except ValueError as error:
        raise ValueError(f"not a plan in JSON: {error}") from None
    return checked(plan)
