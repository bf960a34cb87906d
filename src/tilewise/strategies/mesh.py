"""Mesh-Attention: each rank computes an a x b tile of the query x key table.

    q_tile = 2, 6 ranks        kv0 kv1 kv2 kv3 kv4 kv5
    rank 0: q0 q1 x kv0 kv2 kv4    the KV columns are reordered so that each rank's own
    rank 1: q0 q1 x kv1 kv3 kv5    query and KV shard lie in its own tile

Source: Mesh-Attention (arXiv 2512.20968): assignment matrix, local Q-KV property, neighbour
directions, greedy schedules. Departs from it: the owner's own partial never travels.
"""

from collections.abc import Iterable, Sequence
from math import inf
from typing import get_args

from tilewise.arguments import Schedule, checks_arguments, positive_number, whole_number
from tilewise.plan.builder import RankBuilder, goes_home, operand, partial
from tilewise.plan.ir import (
    MHA,
    BackwardOrder,
    HeadTuning,
    Plan,
    RankStep,
    Side,
    Traits,
    own_shards,
)
from tilewise.plan.payload import ShardWeights, shard_weights
from tilewise.plan.shifts import Shift
from tilewise.strategies.mesh_schedules.greedy import (
    greedy_tile_steps,
    least_held,
    stepwise_tile_steps,
)
from tilewise.strategies.mesh_schedules.model import TileStep
from tilewise.strategies.mesh_schedules.paper import paper_tile_steps

SCHEDULES: tuple[Schedule, ...] = get_args(Schedule)


@checks_arguments
def mesh(
    world_size: int,
    q_tile: int | None = None,
    schedule: Schedule | float = "greedy",
    *,
    kv_bytes: float | None = None,
    backward: bool = False,
    held: int | None = None,
) -> Plan:
    """Tile the table by q_tile query shards x world_size / q_tile KV shards.

    Bytes: every rank sends q_tile - 1 query shards, world_size / q_tile - 1 KV shards, and as many
    partials of each. q_tile = 1 is ring; q_tile = world_size is ring(moves="q").

    Args:
        world_size: number of ranks.
        q_tile: query shards per tile, a divisor of world_size. None: the one that sends least in
            both passes together, with backward=True in that pass, as least_tile counts.
        schedule: "greedy", "eager", "kv_first" (see docs/schedules.md), "paper": the rule of the
            source, to compare with, or "gather": all transfers, one call, scatter. A number: greedy
            for machines on which all blocks of a tile take so many times as long as all its
            messages; "paper" takes them to be equally long.
        kv_bytes: bytes of a KV shard per byte of a query shard, 2 * num_kv_heads / num_heads. None:
            2, of as many KV heads as query heads, until volume, attention or another finds heads
            and makes the plan anew for them.
        backward: the order of the backward pass, whose query shards are larger and whose KV
            partials travel too, in both passes. False: each pass has its own order, and both have
            forward's if save is "gathered". Only the overlap differs.
        held: query and KV shards that a rank may hold at once, its own and those under way to it
            included; None: all of its tile. The same bytes move. Only with "greedy" or a number.
    """
    owners, n = own_shards(world_size), world_size
    weighs_bytes = schedule not in ("kv_first", "gather")
    given, kv_bytes = kv_bytes, MHA if kv_bytes is None else kv_bytes
    positive_number("kv_bytes", kv_bytes, ": 2 num_kv_heads / num_heads, 2 for MHA")
    a = least_tile(n, kv_bytes, backward) if q_tile is None else whole_number("q_tile", q_tile)
    pace = None if isinstance(schedule, str | bool) else schedule
    if schedule not in SCHEDULES if pace is None else not 0 < pace < inf:
        raise ValueError(
            f"schedule ({schedule!r}) must be one of {', '.join(SCHEDULES)}, or a number above 0"
        )
    if n % a:
        raise ValueError(f"q_tile ({a}) must divide world_size ({n}): one of {divisors(n)}")
    costs = ShardWeights(2, kv_bytes, 1, kv_bytes) if backward else ShardWeights(1, kv_bytes, 1, 0)
    if held is not None:
        _check_held(held, (a, n // a), schedule)
    if schedule == "gather":
        script = _gather_script(n, a)
    elif schedule == "paper":
        script = _tile_step_script(n, a, paper_tile_steps((a, n // a), costs))
    elif schedule in ("eager", "kv_first"):
        script = _tile_step_script(n, a, stepwise_tile_steps(a, n // a, str(schedule), costs))
    else:
        script = _tile_step_script(n, a, greedy_tile_steps((a, n // a), costs, held, pace))
    suffix = "" if given is None else f", kv_bytes={given}"
    suffix += ", backward=True" * backward + (f", held={held}" if held is not None else "")
    free = schedule == "gather"
    tuning = order = None
    if given is None and (weighs_bytes or q_tile is None):
        tuning = HeadTuning(_for_heads, (n, q_tile, schedule, (backward, held)), MHA)
    if weighs_bytes and not backward:
        order = BackwardOrder(_in_backward, (n, a, schedule, given, held))
    return Plan(
        f"mesh({n}, q_tile={a}, schedule={schedule!r}{suffix})",
        n,
        1,
        owners,
        script=script,
        traits=Traits(
            (Shift(1, a, free=free), Shift(a, n // a, free=free)),
            tuning=tuning,
            backward_order=order,
            proven=True,
        ),
    )


def divisors(number: int) -> list[int]:
    return [d for d in range(1, number + 1) if number % d == 0]


def least_tile(world_size: int, kv_bytes: float, backward: bool = False) -> int:
    """Query shards of the tile with which a rank sends least in both passes together.

    Of x query and y KV shards: forward x (2 + l) + y kv_bytes, backward x (3 + 2 l) + 2 y kv_bytes,
    where l is lse beside q.

    Args:
        world_size, kv_bytes: as for mesh.
        backward: in the backward pass alone.
    """
    passes = [shard_weights(kv_bytes, x) for x in ((True,) if backward else (False, True))]
    per_q, per_kv = (sum(w[side] + w[2 + side] for w in passes) for side in Side)

    def sent_bytes(a: int) -> float:
        return per_q * (a - 1) + per_kv * (world_size // a - 1)

    return min(divisors(world_size), key=sent_bytes)


def _for_heads(
    n: int,
    q_tile: int | None,
    schedule: Schedule | float,
    order: tuple[bool, int | None],
    num_heads: int,
    num_kv_heads: int,
) -> Plan:
    (backward, held), kv_bytes = order, 2 * num_kv_heads / num_heads
    return mesh(n, q_tile, schedule, kv_bytes=kv_bytes, backward=backward, held=held)


def _in_backward(
    n: int, q_tile: int, schedule: Schedule | float, kv_bytes: float | None, held: int | None
) -> Plan:
    return mesh(n, q_tile, schedule, kv_bytes=kv_bytes, backward=True, held=held)


def _check_held(held: int, shape: tuple[int, int], schedule: Schedule | float) -> None:
    if schedule in ("eager", "kv_first", "paper", "gather"):
        raise ValueError(f"held ({held}) needs schedule='greedy'; {schedule!r} holds all shards")
    fewest = least_held(*shape)
    if held < fewest:
        raise ValueError(
            f"held ({held}) must be at least {fewest} for a tile of {shape[0]} x {shape[1]}: all "
            "shards of one side, a rank's own of the other, and one leaving while one arrives"
        )


def _shards(rank: int, n: int, a: int) -> tuple[list[int], list[int]]:
    """Return the rank's query and KV shards in the order of its tile, its own ones first."""
    first, local = rank // a * a, rank % a
    return [first + (local + k) % a for k in range(a)], [(rank + k * a) % n for k in range(n // a)]


def _tile_step_script(n: int, a: int, tile_steps: Sequence[TileStep]):
    def script(rank: int) -> tuple[RankStep, ...]:
        s, shards = RankBuilder(rank), _shards(rank, n, a)
        pass_round(s, tile_steps, shards, shards)
        return s.done()

    return script


def pass_round(
    s: RankBuilder,
    tile_steps: Sequence[TileStep],
    shards: Sequence[Sequence[int]],
    ranks: Sequence[Sequence[int]],
) -> None:
    """Write a rank's steps of a tile whose shards go round two groups of ranks.

    Args:
        shards: the tile's, by side in local order; the first is the one held here.
        ranks: that hold them. Operands and partials go to the last of a side, and come from the
            second; a partial ends where its shard is held.
    """

    def pass_on(side: Side, arriving: int, leaving: int) -> None:
        """Send a shard and a partial to one neighbour, and receive the same from the other
        neighbour.

        Args:
            arriving, leaving: local index of the operand and of the partial that move; 0: none.
        """
        shards_here, ranks_of_side = shards[side], ranks[side]
        if arriving:
            s.send(operand(side, shards_here[arriving - 1]), ranks_of_side[-1])
            s.recv(operand(side, shards_here[arriving]), ranks_of_side[1])
        if leaving and goes_home(leaving, len(shards_here) - 1):
            s.send(partial(side, shards_here[leaving]), ranks_of_side[leaving])
            s.recv(partial(side, shards_here[0]), ranks_of_side[-leaving])
        elif leaving:
            s.send(partial(side, shards_here[leaving]), ranks_of_side[-1])
            s.recv(partial(side, shards_here[leaving + 1]), ranks_of_side[1])

    for tile_step in tile_steps:
        for rows, columns in tile_step.tiles:
            s.tile([shards[0][k] for k in rows], [shards[1][c] for c in columns])
        pass_on(Side.Q, tile_step.q, tile_step.q_partial)
        pass_on(Side.KV, tile_step.kv, tile_step.kv_partial)
        s.next()


def _gather_script(n: int, a: int):
    def script(rank: int) -> tuple[RankStep, ...]:
        s, shards = RankBuilder(rank), _shards(rank, n, a)
        partners = [(side, rank, other, other) for side in Side for other in shards[side][1:]]
        gather_and_scatter(s, partners, *shards)
        return s.done()

    return script


def gather_and_scatter(
    s: RankBuilder, partners: list[tuple[Side, int, int, int]], q: Iterable[int], kv: Iterable[int]
) -> None:
    """Write a rank's steps of one tile between two exchanges.

    Args:
        partners: side, shard held here, shard held there, rank of every exchange.
    """
    for side, held_shard, shard, member in partners:
        s.send(operand(side, held_shard), member)
        s.recv(operand(side, shard), member)
    s.next()
    s.tile(q, kv)
    s.next()
    for side, held_shard, shard, member in partners:
        s.send(partial(side, shard), member)
        s.recv(partial(side, held_shard), member)
    s.next()
