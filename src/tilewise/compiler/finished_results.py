"""Canonical results that are finished before they travel, because they are complete by then.

Under a canonical reduction partials are binned sums, which take more bytes than the numbers that
they become. Where the home of a partial computes nothing of it and receives it once, what arrives
must be complete, because every contribution has to reach the home. Then the sender finishes it, and
it travels as a result. In the exchange that ends Ulysses these are all partials, but for KV heads
that several groups of heads share: their sum is still to be made.
"""

from collections import Counter
from functools import partial

from tilewise.plan.ir import (
    Item,
    Plan,
    RankStep,
    Role,
    Side,
    Step,
    TeamExchange,
    Transfer,
    find_symmetry,
    transfer_order,
)
from tilewise.plan.kept import kept_with_plan
from tilewise.plan.payload import HeadGroups

Sides = tuple[Side, ...]


def finished_early(plan: Plan, groups: HeadGroups) -> Plan:
    """The plan whose partials travel as results where they are complete when they leave.

    Args:
        plan: a checked one.
        groups: of the call's heads.
    """
    if plan.cuts is not None:
        return plan
    sides = (Side.Q,) if groups.shares_kv_heads else (Side.Q, Side.KV)
    return _finished_early(plan, sides) or plan


@kept_with_plan()
def _finished_early(plan: Plan, sides: Sides) -> Plan | None:
    """None: there are none. A plan that is kept with itself is never freed."""
    ranks = find_symmetry(plan).representatives()
    if not any(_complete_arrivals(plan, rank, sides) for rank in ranks):
        return None
    exchanges = plan.traits.exchanges
    if plan.scripted:
        before = plan.changed()  # not the plan by which the new one is kept
        script = partial(_finishing, before, sides)
        first = script(0)
        transfers = [first[one.step].sends for one in exchanges]
        changed = plan.changed(script=script)
    else:
        steps = tuple(
            Step(step.tiles, _all_finished(plan, sides, step.transfers)) for step in plan.steps
        )
        transfers = [steps[one.step].transfers for one in exchanges]
        changed = plan.changed(steps=steps)
    exchanges = tuple(map(_of_parts, exchanges, transfers))
    return changed.changed(traits=plan.traits._replace(exchanges=exchanges))


def _of_parts(exchange: TeamExchange, transfers: tuple[Transfer, ...]) -> TeamExchange:
    """The exchange, as one of what its transfers carry now."""
    parts = {transfer.item[:2] for transfer in transfers}
    return exchange._replace(parts=tuple(sorted(parts)) or exchange.parts)


def _finishing(plan: Plan, sides: Sides, rank: int) -> tuple[RankStep, ...]:
    """The script of the new plan."""
    return tuple(
        step._replace(
            sends=_all_finished(plan, sides, step.sends),
            recvs=_all_finished(plan, sides, step.recvs),
        )
        for step in plan.rank_steps(rank)
    )


def _all_finished(
    plan: Plan, sides: Sides, transfers: tuple[Transfer, ...]
) -> tuple[Transfer, ...]:
    found = (_finished(plan, sides, transfer) for transfer in transfers)
    return tuple(sorted(found, key=transfer_order))


def _finished(plan: Plan, sides: Sides, transfer: Transfer) -> Transfer:
    """The transfer, of a result if it is one of a complete partial to its home."""
    item = transfer.item
    if item.role is not Role.PARTIAL or item not in _complete_arrivals(plan, transfer.dst, sides):
        return transfer
    return transfer._replace(item=item._replace(role=Role.RESULT))


@kept_with_plan(each_rank=True)
def _complete_arrivals(plan: Plan, rank: int, sides: Sides) -> frozenset[Item]:
    """The partials of this rank's shards of which it computes nothing, and which arrive once."""
    steps = plan.rank_steps(rank)
    times = Counter(transfer.item for step in steps for transfer in step.recvs)
    found = {
        transfer.item
        for step in steps
        for transfer in step.recvs
        if times[transfer.item] == 1
        and transfer.item.role is Role.PARTIAL
        and transfer.item.side in sides
        and transfer.rows is None
        and plan.owners[transfer.item.side][transfer.item.shard] == (rank,)
    }
    for step in steps:
        found.difference_update(transfer.item for transfer in step.sends)
        for tile in step.tiles:
            for side, shards in zip(Side, tile[:2], strict=True):
                found.difference_update(
                    Item(side, Role.PARTIAL, shard, tile.heads) for shard in shards
                )
    return frozenset(found)
