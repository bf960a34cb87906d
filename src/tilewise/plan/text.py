"""A plan as text: a step x rank grid that people read and `parse` reads back.

    step | rank 0            | rank 1
       0 | q0xkv0 kv0>1      | q1xkv1 kv1>0
       1 | q0xkv1            | q1xkv0
       2 | kv1*>1            | kv0*>0

q0,1xkv2 is a tile; kv0>1 sends an operand to rank 1, kv0*>1 a partial, q0!>1 a result; /2 is head
group 2; [0:5,8:9] are the rows sent if not all.
"""

import re
from collections.abc import Sequence

from tilewise.arguments import checks_arguments, require_type
from tilewise.plan.grid import grid
from tilewise.plan.ir import Item, Owners, Plan, Role, Rows, Side, Step, Tile, Transfer
from tilewise.plan.numbers import checked

_HEAD = ("plan", "ranks", "q held by", "kv held by")
_RANKS = re.compile(r"(\d+), head groups: (\d+)")
_TILE = re.compile(r"q(\d+(?:,\d+)*)xkv(\d+(?:,\d+)*)(?:/(\d+))?$")
_TRANSFER = re.compile(r"(q|kv)(\d+)(?:/(\d+))?([*!]?)(?:\[(\d+:\d+(?:,\d+:\d+)*)\])?>(\d+)$")
_ROLES = (("", Role.OPERAND), ("*", Role.PARTIAL), ("!", Role.RESULT))


@checks_arguments
def show(plan: Plan) -> str:
    """The plan as a grid; the inverse of parse.

    The header names the plan, its world and who holds each shard from the start.
    """
    require_type(Plan, "plan", plan)
    lines = [
        f"plan: {plan.name}",
        f"ranks: {plan.world_size}, head groups: {plan.num_head_groups}",
        *(f"{side.name.lower()} held by: {_held_by(plan.owners[side])}" for side in Side),
    ]
    if plan.cuts is not None:
        lines.append(f"cuts: {' '.join(f'{start}:{stop}' for start, stop in plan.cuts)}")
    lines.append(f"save: {plan.default_save}")
    if plan.replicated_queries:
        lines.append("queries: replicated")
    if plan.waiting_results is not None:
        lines.append(f"waiting results: {plan.waiting_results}")
    rows = ((number, step.cells()) for number, step in enumerate(plan.steps))
    return "\n".join([*lines, *grid(range(plan.world_size), rows)]) + "\n"


@checks_arguments
def parse(text: str) -> Plan:
    """The plan that show wrote.

    Raises:
        ValueError: naming the line that cannot be read; a PlanError if it names a rank, a shard or
            a head group that there is not.
    """
    lines = [line.rstrip() for line in text.strip().splitlines()]
    head: dict[str, str] = {}
    while lines and ": " in lines[0] and not lines[0].lstrip().startswith("step"):
        key, _, value = lines.pop(0).partition(": ")
        head[key] = value
    first_lines = f"a plan begins with the lines {', '.join(_HEAD)}"
    if missing := next((key for key in _HEAD if key not in head), None):
        raise ValueError(f"{first_lines}: there is no line {missing!r}")
    numbers = _RANKS.fullmatch(head["ranks"])
    if numbers is None:
        raise ValueError(
            f"{first_lines}: ranks ({head['ranks']!r}) must be as in '4, head groups: 1'"
        )
    try:
        world, groups = map(int, numbers.groups())
        owners: Owners = (_holders(head["q held by"]), _holders(head["kv held by"]))
        cuts = _rows(head["cuts"].replace(" ", ",")) if "cuts" in head else None
    except ValueError as error:
        raise ValueError(f"{first_lines}: {error}") from None
    steps = [_step(number, line, world) for number, line in enumerate(lines[1:])]
    save, waiting = head.get("save", "replay"), head.get("waiting results")
    if waiting is not None and not waiting.isdecimal():
        raise ValueError(f"waiting results ({waiting!r}) must be a whole number, at least 0")
    plan = Plan(
        head["plan"],
        world,
        groups,
        owners,
        steps,
        cuts=cuts,
        default_save=save,
        replicated_queries="queries" in head,
        waiting_results=None if waiting is None else int(waiting),
    )
    return checked(plan)


def _held_by(owners: Sequence[Sequence[int]]) -> str:
    return " ".join("+".join(map(str, holders)) for holders in owners)


def _step(number: int, line: str, world: int) -> Step:
    label, *cells = line.split("|")
    if label.strip() != str(number) or len(cells) != world:
        raise ValueError(
            f"line {line[:60]!r} must be step {number} with {world} cells, one per rank"
        )
    tiles: list[tuple[Tile, ...]] = []
    transfers: list[Transfer] = []
    for rank, cell in enumerate(cells):
        words = [] if cell.strip() == "." else cell.split()
        tiles.append(tuple(_read_tile(word) for word in words if _TILE.match(word)))
        transfers += [_read_transfer(word, rank, number) for word in words if not _TILE.match(word)]
    return Step(tuple(tiles), tuple(transfers))


def _read_tile(word: str) -> Tile:
    match = _TILE.match(word)
    assert match
    q, kv, heads = match.groups()
    return Tile(_numbers(q), _numbers(kv), int(heads or 0))


def _read_transfer(word: str, rank: int, number: int) -> Transfer:
    match = _TRANSFER.match(word)
    if not match:
        raise ValueError(
            f"step {number}, rank {rank}: {word!r} is neither a tile (q0xkv1) "
            "nor a transfer (kv0>1)"
        )
    side, shard, heads, mark, rows, dst = match.groups()
    item = Item(Side[side.upper()], dict(_ROLES)[mark], int(shard), int(heads or 0))
    return Transfer(item, rank, int(dst), _rows(rows) if rows else None)


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(int(word) for word in text.split(","))


def _rows(text: str) -> Rows:
    pairs = (word.split(":") for word in text.split(","))
    return tuple((int(a), int(b)) for a, b in pairs)


def _holders(text: str) -> tuple[tuple[int, ...], ...]:
    return tuple(tuple(int(rank) for rank in word.split("+")) for word in text.split())
