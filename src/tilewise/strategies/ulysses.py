"""Ulysses: an all-to-all trades sequence shards for heads, then any plan runs per head group.

Rank = inner_rank * degree + head_rank. The ranks of one inner rank exchange their shards so that
each holds all of theirs for its own heads; the inner plan then runs between equal head ranks.
Source: DeepSpeed-Ulysses (arXiv 2309.14509); with an inner ring it is USP (2405.07719), with an
inner mesh a three-dimensional split of heads x queries x keys.
"""

from collections.abc import Iterable, Iterator

from tilewise.arguments import checks_arguments, require_type, whole_number
from tilewise.plan.builder import RankBuilder, operand, partial
from tilewise.plan.ir import (
    BackwardOrder,
    HeadTuning,
    Item,
    Plan,
    RankStep,
    Role,
    Side,
    TeamExchange,
    Traits,
    Transfer,
    WholeRows,
    own_shards,
)
from tilewise.plan.payload import head_groups
from tilewise.plan.shifts import Shift
from tilewise.strategies.ring import ring


@checks_arguments
def ulysses(degree: int, inner: Plan | None = None) -> Plan:
    """Split heads by degree around an inner plan (None: one rank).

    Bytes per rank: (degree - 1) / degree of one shard of each side and partial, and inner's.

    Args:
        degree: must divide num_heads, and divide or be divided by num_kv_heads; that is checked
            where head counts are known.
        inner: a plan for any mask, over whole shards, each owned by one rank; its world size times
            degree is this plan's. Outer shard s belongs to inner shard s div degree.
    """
    inner = ring(1) if inner is None else require_type(Plan, "inner", inner)
    degree = whole_number("degree", degree)
    if inner.traits.head_split is not None:  # two exchanges in a row would send everything twice
        inner_degree, innermost = inner.traits.head_split
        innermost = innermost.with_waiting_results(inner.waiting_results)
        return ulysses(degree * inner_degree, inner=innermost)
    whole_shards = inner.owners == own_shards(inner.world_size) and not inner.cuts
    if not whole_shards or inner.num_head_groups > 1 or inner.made_for:
        raise ValueError(
            f"ulysses needs an inner plan of whole heads and for any mask, in which rank r owns "
            f"shard r, not {inner.name}"
        )
    n = degree * inner.world_size

    def widen(shards: Iterable[int]) -> tuple[int, ...]:
        return tuple(shard * degree + part for shard in shards for part in range(degree))

    def script(rank: int) -> tuple[RankStep, ...]:
        s, (inner_rank, heads) = RankBuilder(rank), divmod(rank, degree)
        team = [peer for peer in widen((inner_rank,)) if peer != rank]

        def copies(transfer: Transfer) -> Iterator[Item]:
            """The items of one inner transfer: the same for each outer shard of the inner shard."""
            if transfer.rows is not None:
                raise ValueError(
                    f"ulysses needs an inner plan that is not pruned, not {inner.name}"
                )
            side = transfer.item.side
            role = transfer.item.role
            first_shard = transfer.item.shard * degree
            return (Item(side, role, first_shard + part, heads) for part in range(degree))

        for peer in team:
            for side in Side:
                s.send(operand(side, rank, peer % degree), peer)
                s.recv(operand(side, peer, heads), peer)
        s.next()
        for step in inner.rank_steps(inner_rank):
            for tile in step.tiles:
                s.tile(widen(tile.q), widen(tile.kv), heads)
            for transfer in step.sends:
                for item in copies(transfer):
                    s.send(item, transfer.dst * degree + heads)
            for transfer in step.recvs:
                for item in copies(transfer):
                    s.recv(item, transfer.src * degree + heads)
            s.next()
        for peer in team:
            for side in Side:
                s.send(partial(side, peer, heads), peer)
                s.recv(partial(side, rank, peer % degree), peer)
        return s.done()

    one_inner_rank = inner.world_size == 1
    # Alone, what is gathered is as large as what was given away: keeping it takes no extra memory.
    save = "gathered" if one_inner_rank else inner.default_save
    name = f"ulysses({degree})" if one_inner_rank else f"ulysses({degree}, inner={inner.name})"
    inner_shifts = (shift.times(degree) for shift in inner.traits.shifts)
    exchanges = tuple(
        TeamExchange(step, degree, tuple((side, role) for side in Side), one_inner_rank)
        for step, role in ((0, Role.OPERAND), (-1, Role.PARTIAL))
        if degree > 1  # else these steps are inner's
    )
    shifts, proven = (Shift(1, degree, free=True), *inner_shifts), inner.traits.proven
    split = degree, inner
    tuning = inner.traits.tuning
    if tuning is not None:
        tuning = HeadTuning(_for_heads, (degree, tuning), tuning.kv_bytes)
    order = None
    if inner.traits.backward_order is not None:
        order = BackwardOrder(_in_backward, (degree, inner))
    whole_rows = None
    if one_inner_rank or inner.traits.whole_rows is not None:
        whole_rows = WholeRows(_whole_rows, (degree, inner.traits.whole_rows))
    traits = Traits(
        shifts,
        head_split=split,
        tuning=tuning,
        backward_order=order,
        proven=proven,
        exchanges=exchanges,
        whole_rows=whole_rows,
    )
    return Plan(
        name,
        n,
        degree,
        own_shards(n),
        script=script,
        default_save=save,
        waiting_results=inner.waiting_results,
        traits=traits,
    )


def _in_backward(degree: int, inner: Plan) -> Plan:
    return ulysses(degree, inner.in_backward())


def _whole_rows(degree: int, inner: WholeRows | None, side: Side) -> Plan:
    return ulysses(degree, None if inner is None else inner.plan(side))


def _for_heads(degree: int, tuning: HeadTuning, num_heads: int, num_kv_heads: int) -> Plan:
    """Make the plan anew, with the inner plan for the heads of a group."""
    return ulysses(degree, tuning.plan(*head_groups(num_heads, num_kv_heads, degree).size))
