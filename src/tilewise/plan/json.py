"""A plan as JSON: for plan files and other programs."""

import json
from typing import Any

from tilewise.arguments import require_type
from tilewise.plan.ir import Item, Plan, Role, Side, Step, Tile, Transfer

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
        ValueError: if the text is no such object.
    """
    try:
        data = json.loads(text)
        if data["format"] != FORMAT:
            raise ValueError(f"format is {data['format']!r}, not {FORMAT!r}")
        return Plan(
            str(data["name"]),
            int(data["world_size"]),
            int(data["num_head_groups"]),
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
    except (KeyError, TypeError, IndexError, json.JSONDecodeError) as error:
        raise ValueError(f"not a plan in JSON: {error!r}") from error


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
    return tuple(_tuples(x) for x in value) if isinstance(value, list) else value
