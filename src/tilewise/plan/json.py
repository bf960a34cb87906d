"""A plan as JSON: for plan files and other programs."""

import json
from typing import Any, cast

from tilewise.arguments import require_type
from tilewise.plan.ir import Item, Plan, Role, Side, Step, Tile, Transfer
from tilewise.plan.json_shapes import OrNull, require_shape
from tilewise.plan.numbers import checked

FORMAT = "tilewise plan 1"


def to_json(plan: Plan) -> str:
    """The plan as one JSON object; the inverse of from_json."""
    require_type(Plan, "plan", plan)
    return json.dumps(
        {
            "format": FORMAT,
            "name": plan.name,
            "world_size": plan.world_size,
            "num_head_groups": plan.num_head_groups,
            "owners": {side.name: plan.owners[side] for side in Side},
            "cuts": plan.cuts,
            "save": plan.default_save,
            "replicated_queries": plan.replicated_queries,
            "steps": [
                {"tiles": step.tiles, "transfers": [_write(hop) for hop in step.transfers]}
                for step in plan.steps
            ],
        }
    )


def from_json(text: str) -> Plan:
    """The plan that to_json wrote.

    Raises:
        ValueError: if the text is no such object, naming the entry and its value; a PlanError if
            an entry names a rank, a shard or a head group that there is not.
    """
    try:
        data = json.loads(text)
        require_shape(data, {"format": str}, "plan")
        if data["format"] != FORMAT:
            raise ValueError(f"format is {data['format']!r}, not {FORMAT!r}")
        require_shape(data, _shape(), "plan")
        plan = Plan(
            data["name"],
            data["world_size"],
            data["num_head_groups"],
            (_tuples(data["owners"]["Q"]), _tuples(data["owners"]["KV"])),
            [
                Step(
                    tuple(tuple(Tile(*tile) for tile in _tuples(tiles)) for tiles in step["tiles"]),
                    tuple(_read(hop) for hop in step["transfers"]),
                )
                for step in data["steps"]
            ],
            cuts=_tuples(data["cuts"]),
            default_save=data["save"],
            replicated_queries=data["replicated_queries"],
        )
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"not a plan in JSON: {error}") from None
    return checked(plan)


def _write(hop: Transfer) -> dict[str, Any]:
    side, role, shard, heads = hop.item
    return {
        "side": side.name,
        "role": role.name,
        "shard": shard,
        "heads": heads,
        "src": hop.src,
        "dst": hop.dst,
        "rows": hop.rows,
    }


def _read(hop: dict[str, Any]) -> Transfer:
    item = Item(Side[hop["side"]], Role[hop["role"]], hop["shard"], hop["heads"])
    return Transfer(item, hop["src"], hop["dst"], _tuples(hop["rows"]))


def _tuples(value: Any) -> Any:
    return tuple(map(_tuples, cast("list[Any]", value))) if isinstance(value, list) else value


def _shape() -> dict[str, Any]:
    rows = OrNull([(int, int)])
    item = {"side": str, "role": str, "shard": int, "heads": int}
    hop = {**item, "src": int, "dst": int, "rows": rows}
    return {
        "name": str,
        "world_size": int,
        "num_head_groups": int,
        "owners": {side.name: [[int]] for side in Side},
        "cuts": rows,
        "save": str,
        "replicated_queries": bool,
        "steps": [{"tiles": [[([int], [int], int)]], "transfers": [hop]}],
    }
