"""Mesh-Attention: each rank computes an a x b tile of the query x key table.

    q_tile = 2, 6 ranks        kv0 kv1 kv2 kv3 kv4 kv5
    rank 0: q0 q1 x kv0 kv2 kv4    the KV columns are reordered so that each rank's own
    rank 1: q0 q1 x kv1 kv3 kv5    query and KV shard lie in its own tile

Source: Mesh-Attention (arXiv 2512.20968): assignment matrix, local Q-KV property, neighbour
directions; section 4 for schedules. Departs from it: the owner's own partial never travels.
"""

from collections.abc import Sequence
from math import inf
from typing import get_args

from tilewise.arguments import Schedule, whole_number
from tilewise.plan.builder import RankBuilder, goes_home, operand, partial
from tilewise.plan.ir import Plan, RankStep, Side, Traits, own_shards
from tilewise.plan.shifts import Shift
from tilewise.strategies.mesh_schedules.greedy import (
    greedy_tile_steps,
    least_held,
    stepwise_tile_steps,
)
from tilewise.strategies.mesh_schedules.model import ShardWeights, TileStep

SCHEDULES: tuple[Schedule, ...] = get_args(Schedule)


def mesh(
    world_size: int,
    q_tile: int,
    schedule: Schedule | float = "greedy",
    *,
    kv_bytes: float = 2.0,
    backward: bool = False,
    held: int | None = None,
) -> Plan:
    """Tile the table by q_tile query shards x world_size / q_tile KV shards.

    Bytes: every rank sends q_tile - 1 query shards, world_size / q_tile - 1 KV shards, and as many
    partials of each. q_tile = 1 is ring; q_tile = world_size is ring(moves="q").

    Args:
        world_size: number of ranks.
        q_tile: query shards per tile, a divisor of world_size.
        schedule: "greedy", "eager", "kv_first" (see docs/schedules.md) or "gather": all transfers,
            one call, scatter. A number: greedy for machines on which all blocks of a tile take so
            many times as long as all its messages.
        kv_bytes: bytes of a KV shard per byte of a query shard, 2 * num_kv_heads / num_heads.
        backward: schedule for the backward pass, whose query shards are larger and whose KV
            partials travel too. Either plan serves either pass; only the overlap differs.
        held: query and KV shards that a rank may hold at once, its own and those under way to it
            included; None: all of its tile. The same bytes move. Only with "greedy" or a number.
    """
    owners, n, a = own_shards(world_size), world_size, whole_number("q_tile", q_tile)
    pace = None if isinstance(schedule, str | bool) else schedule
    if schedule not in SCHEDULES if pace is None else not 0 < pace < inf:
        raise ValueError(
            f"schedule ({schedule!r}) must be one of {', '.join(SCHEDULES)}, or a number above 0"
        )
    if n % a:
        divisors = [d for d in range(1, n + 1) if n % d == 0]
        raise ValueError(f"q_tile ({a}) must divide world_size ({n}): one of {divisors}")
    if not 0 < kv_bytes < inf:
        raise ValueError(
            f"kv_bytes ({kv_bytes}) must be a number above 0, 2 num_kv_heads / num_heads"
        )
    costs = ShardWeights(2, kv_bytes, 1, kv_bytes) if backward else ShardWeights(1, kv_bytes, 1, 0)
    if held is not None:
        _check_held(held, (a, n // a), schedule)
    if schedule == "gather":
        script = _gather_script(n, a)
    elif schedule in ("eager", "kv_first"):
        script = _tile_step_script(n, a, stepwise_tile_steps(a, n // a, str(schedule), costs))
    else:
        script = _tile_step_script(n, a, greedy_tile_steps((a, n // a), costs, held, pace))
    tuned = "" if kv_bytes == 2 else f", kv_bytes={kv_bytes}"
    tuned += ", backward=True" * backward + (f", held={held}" if held is not None else "")
    free = schedule == "gather"
    return Plan(
        f"mesh({n}, q_tile={a}, schedule={schedule!r}{tuned})",
        n,
        1,
        owners,
        script=script,
        traits=Traits((Shift(1, a, free=free), Shift(a, n // a, free=free)), proven=True),
    )


def _check_held(held: int, shape: tuple[int, int], schedule: Schedule | float) -> None:
    if schedule in ("eager", "kv_first", "gather"):
        raise ValueError(f"held ({held}) needs schedule='greedy'; {schedule!r} holds all shards")
    least = least_held(*shape)
    if held < least:
        raise ValueError(
            f"held ({held}) must be at least {least} for a tile of {shape[0]} x {shape[1]}: all "
            "shards of one side, a rank's own of the other, and one leaving while one arrives"
        )


def _shards(rank: int, n: int, a: int) -> tuple[list[int], list[int]]:
    """The rank's query and KV shards in local order; the first of each is its own."""
    first, local = rank // a * a, rank % a
    return [first + (local + k) % a for k in range(a)], [(rank + k * a) % n for k in range(n // a)]


def _tile_step_script(n: int, a: int, tile_steps: Sequence[TileStep]):
    def script(rank: int) -> tuple[RankStep, ...]:
        s, shards = RankBuilder(rank), _shards(rank, n, a)

        def pass_on(side: Side, arriving: int, leaving: int) -> None:
            """Move local indices to the left or upwards, as the other neighbour does to here."""
            own = shards[side]
            if arriving:
                s.send(operand(side, own[arriving - 1]), own[-1])
                s.recv(operand(side, own[arriving]), own[1])
            if leaving and goes_home(leaving, len(own) - 1):
                s.send(partial(side, own[leaving]), own[leaving])
                s.recv(partial(side, rank), own[-leaving])
            elif leaving:
                s.send(partial(side, own[leaving]), own[-1])
                s.recv(partial(side, own[leaving + 1]), own[1])

        for tile_step in tile_steps:
            for rows, columns in tile_step.tiles:
                s.tile([shards[0][k] for k in rows], [shards[1][c] for c in columns])
            pass_on(Side.Q, tile_step.q, tile_step.q_partial)
            pass_on(Side.KV, tile_step.kv, tile_step.kv_partial)
            s.next()
        return s.done()

    return script


def _gather_script(n: int, a: int):
    def script(rank: int) -> tuple[RankStep, ...]:
        s, shards = RankBuilder(rank), _shards(rank, n, a)
        others = [(side, other) for side in Side for other in shards[side][1:]]
        for side, other in others:
            s.send(operand(side, rank), other)
            s.recv(operand(side, other), other)
        s.next()
        s.tile(*shards)
        s.next()
        for side, other in others:
            s.send(partial(side, other), other)
            s.recv(partial(side, rank), other)
        return s.done()

    return script
