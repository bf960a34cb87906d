"""Checks that the numbers of a plan name what there is: ranks, shards, head groups and rows."""

from collections.abc import Sequence

from tilewise.plan.ir import Item, Plan, PlanError, Role, Rows, Side, Step, Tile, Transfer


def checked(plan: Plan) -> Plan:
    """A plan that was read.

    Raises:
        ValueError: if its name is no line of text.
        PlanError: as check_numbers, above the plan's grid.
    """
    if plan.name.strip().splitlines() != [plan.name]:
        raise ValueError(f"the plan's name ({plan.name!r:.60}) must be a line of text")
    try:
        check_numbers(plan, plan.steps)
    except PlanError as error:
        raise error.in_grid(plan.name, plan.steps, plan.world_size) from None
    return plan


def check_numbers(plan: Plan, steps: Sequence[Step]) -> None:
    """Return if every number of a plan with these steps is in its range.

    Raises:
        PlanError: with .step, .rank and .item of the first that is not.
    """
    _check_owners(plan)
    for number, step in enumerate(steps):
        if len(step.tiles) != plan.world_size:
            message = f"step {number} has tiles for {len(step.tiles)} ranks of {plan.world_size}"
            rank = min(len(step.tiles), plan.world_size - 1)
            raise PlanError(message, number, rank, _first(Side.Q))
        for transfer in step.transfers:
            _check_transfer(plan, number, transfer)
        for rank, tiles in enumerate(step.tiles):
            for tile in tiles:
                _check_tile(plan, number, rank, tile)


def _check_owners(plan: Plan) -> None:
    for side, owners in zip(Side, plan.owners, strict=True):
        if not owners:
            raise PlanError(f"there are no {_name(side)} shards", 0, 0, _first(side))
        for shard, holders in enumerate(owners):
            item = Item(side, Role.OPERAND, shard)
            if not holders:
                raise PlanError(f"{item} is owned by no rank; one is its home", 0, 0, item)
            for rank in holders:
                if not 0 <= rank < plan.world_size:
                    message = f"{item} is owned by rank {rank} of {plan.world_size}"
                    raise PlanError(message, 0, rank, item)
    if plan.replicated_queries and (plan.num_shards(Side.Q) > 1 or plan.cuts is not None):
        number, cuts = plan.num_shards(Side.Q), "no" if plan.cuts is None else len(plan.cuts)
        message = (
            f"queries that every rank has are one shard without cuts, not {number} with {cuts} cuts"
        )
        raise PlanError(message, 0, 0, _first(Side.Q))
    for side, owners in zip(Side, plan.owners, strict=True):
        if plan.cuts is not None and len(plan.cuts) != len(owners):
            message = f"{len(plan.cuts)} cuts for {len(owners)} {_name(side)} shards; give one each"
            raise PlanError(message, 0, 0, _first(side))


def _check_transfer(plan: Plan, number: int, transfer: Transfer) -> None:
    ends = f"from rank {transfer.src} to rank {transfer.dst}"
    sender_exists = 0 <= transfer.src < plan.world_size
    reason = _unknown(plan, transfer.item)
    if not (sender_exists and 0 <= transfer.dst < plan.world_size):
        reason = f"there are {plan.world_size} ranks"
    elif transfer.rows is not None and not _are_rows(transfer.rows):
        reason = f"rows {transfer.rows} are not ascending ranges of its own"
    if reason:
        rank = transfer.src if sender_exists else None
        raise PlanError(
            f"step {number}: {transfer.item} {ends}: {reason}", number, rank, transfer.item
        )


def _check_tile(plan: Plan, number: int, rank: int, tile: Tile) -> None:
    for side, shards in zip(Side, (tile.q, tile.kv), strict=True):
        if not shards:
            message = f"step {number}, rank {rank}: a tile has no {_name(side)} shards"
            raise PlanError(message, number, rank, _first(side))
        for item in (Item(side, Role.OPERAND, shard, tile.heads) for shard in shards):
            if reason := _unknown(plan, item):
                name = str(tile._replace(heads=0)).replace("xkv", " x kv")
                message = f"step {number}, rank {rank}: tile {name} reads {item}: {reason}"
                raise PlanError(message, number, rank, item)


def _unknown(plan: Plan, item: Item) -> str | None:
    """Why a plan has no such item, if it has none."""
    num_shards = plan.num_shards(item.side)
    if not 0 <= item.shard < num_shards:
        return f"there is no such shard; {_name(item.side)} shards are 0..{num_shards - 1}"
    if not 0 <= item.heads < plan.num_head_groups:
        return f"there is no such head group; they are 0..{plan.num_head_groups - 1}"
    return None


def _are_rows(rows: Rows) -> bool:
    """Return whether rows are ascending ranges, disjoint, and not empty."""
    ends = [0, *(end for pair in rows for end in pair)]
    return len(rows) > 0 and ends == sorted(ends) and all(start < stop for start, stop in rows)


def _first(side: Side) -> Item:
    return Item(side, Role.OPERAND, 0)


def _name(side: Side) -> str:
    return side.name.lower()
