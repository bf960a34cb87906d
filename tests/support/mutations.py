"""The kinds of mutation that the checker's test draws from: each changes one thing in a plan.

A mutation is a function (plan, random) -> another plan, or None if the plan has no place for it.
Some do no harm (a transfer moved to where it is just as good): whether one does is the oracle's
to say, in plan_oracle.py.
"""

from __future__ import annotations

from collections.abc import Callable
from random import Random

from tilewise.plan.ir import Item, Owners, Plan, Role, Rows, Side, Step, Tile, Transfer

Mutation = Callable[[Plan, Random], Plan | None]
Steps = list[tuple[list[list[Tile]], list[Transfer]]]


def _steps(plan: Plan) -> Steps:
    return [([list(mine) for mine in s.tiles], list(s.transfers)) for s in plan.steps]


def _plan(plan: Plan, steps: Steps) -> Plan:
    return plan.replaced(
        "mutant", [Step(tuple(map(tuple, tiles)), tuple(transfers)) for tiles, transfers in steps]
    )


def _other(values: range, old: int, random: Random) -> int | None:
    return random.choice([x for x in values if x != old]) if len(values) > 1 else None


def _on_transfer(change: Callable[[Plan, Transfer, Random], list[Transfer] | None]) -> Mutation:
    """A mutation that replaces one transfer by others within its step."""

    def mutate(plan: Plan, random: Random) -> Plan | None:
        steps = _steps(plan)
        places = [(s, t) for s, (_, transfers) in enumerate(steps) for t in range(len(transfers))]
        if not places:
            return None
        step, place = random.choice(places)
        transfers = steps[step][1]
        changed = change(plan, transfers[place], random)
        if changed is None:
            return None
        transfers[place : place + 1] = changed
        return _plan(plan, steps)

    return mutate


def _on_tile(change: Callable[[Plan, Tile, Random], list[Tile] | None]) -> Mutation:
    """A mutation that replaces one tile by others on its rank."""

    def mutate(plan: Plan, random: Random) -> Plan | None:
        steps = _steps(plan)
        step, rank, place = _any_tile(steps, random)
        tiles = steps[step][0][rank]
        changed = change(plan, tiles[place], random)
        if changed is None:
            return None
        tiles[place : place + 1] = changed
        return _plan(plan, steps)

    return mutate


def _any_tile(steps: Steps, random: Random) -> tuple[int, int, int]:
    return random.choice(
        [
            (s, r, t)
            for s, (ranks, _) in enumerate(steps)
            for r, tiles in enumerate(ranks)
            for t in range(len(tiles))
        ]
    )


def _redirected(plan: Plan, transfer: Transfer, random: Random) -> list[Transfer] | None:
    dst = _other(range(plan.world_size), transfer.dst, random)
    return None if dst is None else [transfer._replace(dst=dst)]


def _from_elsewhere(plan: Plan, transfer: Transfer, random: Random) -> list[Transfer] | None:
    src = _other(range(plan.world_size), transfer.src, random)
    return None if src is None else [transfer._replace(src=src)]


def _to_nowhere(plan: Plan, transfer: Transfer, random: Random) -> list[Transfer]:
    return [transfer._replace(dst=random.choice([-1, plan.world_size]))]


def _other_shard(plan: Plan, transfer: Transfer, random: Random) -> list[Transfer] | None:
    shard = _other(range(plan.num_shards(transfer.item.side) + 1), transfer.item.shard, random)
    return None if shard is None else [transfer._replace(item=transfer.item._replace(shard=shard))]


def _other_heads(plan: Plan, transfer: Transfer, random: Random) -> list[Transfer] | None:
    heads = _other(range(plan.num_head_groups + 1), transfer.item.heads, random)
    return None if heads is None else [transfer._replace(item=transfer.item._replace(heads=heads))]


def _other_role(plan: Plan, transfer: Transfer, random: Random) -> list[Transfer]:
    role = random.choice([role for role in Role if role is not transfer.item.role])
    return [transfer._replace(item=transfer.item._replace(role=role))]


def _other_side(plan: Plan, transfer: Transfer, random: Random) -> list[Transfer]:
    return [transfer._replace(item=transfer.item._replace(side=Side(1 - transfer.item.side)))]


def _other_rows(plan: Plan, transfer: Transfer, random: Random) -> list[Transfer] | None:
    """Rows trimmed, widened, doubled, emptied, or none where all are needed."""
    rows: Rows = transfer.rows or ((0, 3),)
    (start, stop), *rest = rows
    changed = random.choice(
        [
            ((start + 1, stop), *rest),
            ((start, stop - 1), *rest),
            tuple(rest),
            (*rows, *rows),
            (*rows[:-1], (rows[-1][0], rows[-1][1] + random.choice([1, 100]))),
            ((stop, start), *rest),
            ((start - 1, stop), *rest),
        ]
    )
    return None if changed == transfer.rows else [transfer._replace(rows=changed)]


def _echoed(plan: Plan, transfer: Transfer, random: Random) -> list[Transfer] | None:
    """The same again from the same rank, to somebody else too."""
    dst = _other(range(plan.world_size), transfer.dst, random)
    return None if dst is None else [transfer, transfer._replace(dst=dst)]


def _moved(by: int) -> Mutation:
    """One transfer starts so many steps later (earlier if negative)."""

    def mutate(plan: Plan, random: Random) -> Plan | None:
        steps = _steps(plan)
        idle: list[list[Tile]] = [[] for _ in range(plan.world_size)]
        places = [(s, t) for s, (_, transfers) in enumerate(steps) for t in range(len(transfers))]
        places = [(s, t) for s, t in places if s + by >= 0]
        if not places:
            return None
        step, place = random.choice(places)
        while len(steps) <= step + by:
            steps.append((idle, []))
        steps[step + by][1].append(steps[step][1].pop(place))
        return _plan(plan, steps)

    return mutate


def _tile_later(plan: Plan, random: Random) -> Plan | None:
    """A tile moves to any other step of its rank."""
    steps = _steps(plan)
    step, rank, place = _any_tile(steps, random)
    other = _other(range(len(steps)), step, random)
    if other is None:
        return None
    steps[other][0][rank].append(steps[step][0][rank].pop(place))
    return _plan(plan, steps)


def _tile_elsewhere(plan: Plan, random: Random) -> Plan | None:
    """A tile moves to another rank."""
    steps = _steps(plan)
    step, rank, place = _any_tile(steps, random)
    other = _other(range(plan.world_size), rank, random)
    if other is None:
        return None
    steps[step][0][other].append(steps[step][0][rank].pop(place))
    return _plan(plan, steps)


def _other_operand(plan: Plan, tile: Tile, random: Random) -> list[Tile] | None:
    """One shard of a tile becomes another, of either side."""
    side = random.choice(list(Side))
    shards = list(tile[side])
    place = random.randrange(len(shards))
    new = _other(range(plan.num_shards(side)), shards[place], random)
    if new is None:
        return None
    shards[place] = new
    return [tile._replace(**{side.name.lower(): tuple(shards)})]


def _without_operand(plan: Plan, tile: Tile, random: Random) -> list[Tile]:
    side = random.choice(list(Side))
    shards = list(tile[side])
    shards.pop(random.randrange(len(shards)))
    return [tile._replace(**{side.name.lower(): tuple(shards)})] if shards else []


def _tile_heads(plan: Plan, tile: Tile, random: Random) -> list[Tile] | None:
    heads = _other(range(plan.num_head_groups + 1), tile.heads, random)
    return None if heads is None else [tile._replace(heads=heads)]


def _owners(plan: Plan, random: Random, change: Callable[[list[tuple[int, ...]]], None]) -> Plan:
    side = random.choice(list(Side))
    owners = [list(plan.owners[Side.Q]), list(plan.owners[Side.KV])]
    change(owners[side])
    changed: Owners = (tuple(owners[0]), tuple(owners[1]))
    return Plan(
        "mutant",
        plan.world_size,
        plan.num_head_groups,
        changed,
        plan.steps,
        replicated_queries=plan.replicated_queries,
    )


def _other_owner(plan: Plan, random: Random) -> Plan | None:
    def change(side: list[tuple[int, ...]]) -> None:
        shard = random.randrange(len(side))
        side[shard] = (random.randrange(plan.world_size + 1), *side[shard][1:])

    return _owners(plan, random, change)


def _swapped_owners(plan: Plan, random: Random) -> Plan | None:
    return _owners(plan, random, lambda side: random.shuffle(side))


def _one_more_holder(plan: Plan, random: Random) -> Plan | None:
    def change(side: list[tuple[int, ...]]) -> None:
        shard = random.randrange(len(side))
        others = [rank for rank in range(plan.world_size) if rank not in side[shard]]
        side[shard] = (*side[shard], *others[:1])

    return _owners(plan, random, change)


def _dropped_step(plan: Plan, random: Random) -> Plan:
    steps = _steps(plan)
    steps.pop(random.randrange(len(steps)))
    return _plan(plan, steps)


def _swapped_steps(plan: Plan, random: Random) -> Plan:
    steps = _steps(plan)
    place = random.randrange(len(steps))
    steps[place - 1], steps[place] = steps[place], steps[place - 1]
    return _plan(plan, steps)


def _new_transfer(plan: Plan, random: Random) -> Plan:
    """A transfer of anything from anyone to anyone."""
    steps = _steps(plan)
    side = random.choice(list(Side))
    item = Item(side, random.choice(list(Role)), random.randrange(plan.num_shards(side)))
    ranks = random.randrange(plan.world_size), random.randrange(plan.world_size)
    random.choice(steps)[1].append(Transfer(item, *ranks))
    return _plan(plan, steps)


def _missing_rank(plan: Plan, random: Random) -> Plan:
    steps = _steps(plan)
    random.choice(steps)[0].pop()
    return _plan(plan, steps)


MUTATIONS: dict[str, Mutation] = {
    "drop a transfer": _on_transfer(lambda plan, transfer, random: []),
    "duplicate a transfer": _on_transfer(lambda plan, transfer, random: [transfer, transfer]),
    "send to another rank": _on_transfer(_redirected),
    "send from another rank": _on_transfer(_from_elsewhere),
    "send to no rank": _on_transfer(_to_nowhere),
    "send to another rank too": _on_transfer(_echoed),
    "swap source and destination": _on_transfer(
        lambda plan, transfer, random: [transfer._replace(src=transfer.dst, dst=transfer.src)]
    ),
    "send to itself": _on_transfer(
        lambda plan, transfer, random: [transfer._replace(dst=transfer.src)]
    ),
    "send another shard": _on_transfer(_other_shard),
    "send another head group": _on_transfer(_other_heads),
    "send in another role": _on_transfer(_other_role),
    "send the other side": _on_transfer(_other_side),
    "send other rows": _on_transfer(_other_rows),
    "send a step later": _moved(1),
    "send a step earlier": _moved(-1),
    "send two steps earlier": _moved(-2),
    "send anything anywhere": _new_transfer,
    "drop a tile": _on_tile(lambda plan, tile, random: []),
    "duplicate a tile": _on_tile(lambda plan, tile, random: [tile, tile]),
    "compute another shard": _on_tile(_other_operand),
    "compute a shard less": _on_tile(_without_operand),
    "compute another head group": _on_tile(_tile_heads),
    "compute in another step": _tile_later,
    "compute on another rank": _tile_elsewhere,
    "change an owner": _other_owner,
    "shuffle owners": _swapped_owners,
    "add a holder": _one_more_holder,
    "drop a step": _dropped_step,
    "swap two steps": _swapped_steps,
    "leave out a rank's tiles": _missing_rank,
}
