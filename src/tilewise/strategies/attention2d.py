"""Attention2D: a grid of ranks; queries gather along rows, keys and values along columns.

Rank = column * rows + row. Row r gathers the query shards = r mod rows, column c the KV shards
= c mod columns, so positions keep a regular stride under the striped layout and one causal call
covers a tile. Partials go straight to whoever they came from: one good collective each way. With
overlap, shards go round instead: KV under the rank's own queries, then Q, partials right behind.
Source: ATTENTION2D (arXiv 2503.15758), variants NO and O. Departs from it: any rows and columns; a
KV shard whose owner is in its column stays, and only the others are exchanged.
"""

import math
from itertools import pairwise

from tilewise.arguments import MOST_RANKS, checks_arguments, whole_number
from tilewise.plan.builder import RankBuilder, operand, partial
from tilewise.plan.ir import MHA, Plan, RankStep, Side, Traits, own_shards
from tilewise.plan.payload import ShardWeights
from tilewise.plan.shifts import Shift
from tilewise.strategies.mesh import gather_and_scatter, pass_round
from tilewise.strategies.mesh_schedules.greedy import stepwise_tile_steps


@checks_arguments
def attention2d(rows: int, columns: int, *, overlap: bool = False) -> Plan:
    """Gather queries in rows and KV in columns, one tile each, scatter the partials.

    Bytes per rank: columns - 1 query shards, rows - 1 KV shards (rows if the rank's own KV is not
    in its column), and as many partials.

    Args:
        rows, columns: their product is the number of ranks.
        overlap: nothing is gathered; a ring of KV in the column runs under the rank's own queries,
            then one of queries in the row, whose partials follow them. The same bytes move.
    """
    n = whole_number("rows", rows) * whole_number("columns", columns)
    whole_number("rows x columns", n, most=MOST_RANKS)
    tile_steps = ()
    if overlap:
        tile_steps = stepwise_tile_steps(columns, rows, "kv_first", ShardWeights(1, MHA, 1, 0))

    def holders(column: int) -> dict[int, int]:
        """KV shard -> the member of the column that holds it during the gather.

        A shard whose owner is in the column, columns * k + column = rows * column + row, has row =
        columns * k modulo rows - 1. Where that names one row for every k all follow it, so that
        ranks are alike as far as can be; rows = columns: the transpose.
        """
        column_shards, first_rank = range(column, n, columns), column * rows
        if math.gcd(columns, rows - 1) == 1:
            rows_of_shards = [k * columns % (rows - 1) for k in range(rows - 1)] if rows > 1 else []
            return {
                shard: first_rank + row
                for shard, row in zip(column_shards, [*rows_of_shards, rows - 1], strict=True)
            }
        members = range(first_rank, first_rank + rows)
        staying_shards = {shard: shard for shard in column_shards if shard in members}
        free_members = [member for member in members if member not in staying_shards]
        arriving = [shard for shard in column_shards if shard not in staying_shards]
        return staying_shards | dict(zip(arriving, free_members, strict=True))

    def script(rank: int) -> tuple[RankStep, ...]:
        s, (column, row) = RankBuilder(rank), divmod(rank, rows)
        q_team = range(row, n, rows)
        shard_holders = holders(column)
        held_shard = next(shard for shard, member in shard_holders.items() if member == rank)
        rank_with_own = holders(rank % columns)[rank]
        if held_shard != rank:
            s.send(operand(Side.KV, rank), rank_with_own)
            s.recv(operand(Side.KV, held_shard), held_shard)
        s.next()
        if tile_steps:
            shard_of_member = {member: shard for shard, member in shard_holders.items()}
            q_ranks = [q_team[(column + k) % columns] for k in range(columns)]
            kv_ranks = [column * rows + (row + k) % rows for k in range(rows)]
            shards = q_ranks, [shard_of_member[member] for member in kv_ranks]
            pass_round(s, tile_steps, shards, (q_ranks, kv_ranks))
        else:
            partners = [(Side.Q, rank, other, other) for other in q_team if other != rank]
            partners += [
                (Side.KV, held_shard, x, member)
                for x, member in shard_holders.items()
                if member != rank
            ]
            gather_and_scatter(s, partners, q_team, sorted(shard_holders))
        if held_shard != rank:
            s.send(partial(Side.KV, held_shard), held_shard)
            s.recv(partial(Side.KV, rank), rank_with_own)
        return s.done()

    name = f"attention2d({rows}, {columns}{', overlap=True' * overlap})"
    shifts = _shifts(rows, columns)
    if overlap:  # rings keep their order: only the highest digit of a row or a column is shifted
        kept_shifts = (s for s in shifts if all(p * s.radix in (rows, n) for p in s.places))
        shifts = tuple(shift._replace(free=False) for shift in kept_shifts)
    traits = Traits(shifts, proven=True)
    return Plan(name, n, 1, own_shards(n), script=script, traits=traits)


def _shifts(rows: int, columns: int) -> tuple[Shift, ...]:
    """A rank's column and its shard's remainder modulo columns are shifted alike.

    The first is rank // rows, the second rank % columns. So digits end where others end, rows times
    higher or lower, and go with these; where no such digits are left, no ranks are alike.
    """
    n = rows * columns
    if rows == 1:
        return (Shift(1, n, free=True),)
    if math.gcd(columns, rows - 1) > 1:  # two columns of odd length exchange every other shard
        return (Shift(rows, 2),) if columns == 2 else ()
    powers = [rows**k for k in range(n.bit_length()) if rows**k <= n]
    ends = sorted({*powers, *(n // power for power in powers if n % power == 0)})
    if any(high % low for low, high in pairwise(ends)):
        return ()
    return tuple(
        Shift(low, high // low, tuple(low // p for p in powers[1:] if low % p == 0), free=True)
        for low, high in pairwise(ends)
        if low >= columns
    )
