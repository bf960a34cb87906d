"""Hierarchical: one plan between nodes, another inside each of them.

    outer = mesh(4, q_tile=2)           inner = ring(2)       cell ((I, i), (J, j)) is computed in
         kv0   kv1   kv2   kv3               kv0 kv1          the node that outer names for (I, J),
    q0  node0 node1 node0 node1         q0    r0  r0          by the rank that inner names for
    q1  node0 node1 node0 node1         q1    r1  r1          (i, j)
    q2  node2 node3 node2 node3
    q3  node2 node3 node2 node3

Between nodes a shard travels from a rank to the one in the same place of another node, so that
every NIC carries its own; from there it goes round the node, once. Partials go the way back: they
are summed inside the node before they leave it.
Source: a ring of rings is LoongTrain's double ring (arXiv 2406.18485); the tile of whole nodes is
Mesh-Attention's (arXiv 2512.20968) at the level of nodes.
"""

from __future__ import annotations

from collections.abc import Callable

from tilewise.plan.builder import Script
from tilewise.plan.ir import Plan, RankStep, Role, own_shards
from tilewise.strategies.nesting import (
    Clock,
    beats_of,
    check_alike,
    check_nests,
    check_reads_its_own,
    compute,
    joined,
    kinds_of,
    make_clock,
    post,
    rounds_of,
)


def hierarchical(outer: Plan, inner: Plan) -> Plan:
    """Run outer between nodes and inner in each of them; rank = node * inner.world_size + local.

    Bytes per rank: outer's hops, which alone cross nodes, and inner's hops once for every shard of
    outer that a node reads: a Q shards of an a x b tile, b KV shards.

    Args:
        outer: ring, all_gather, mesh, attention2d, double_ring or hierarchical.
        inner: any of these but attention2d.
    Raises:
        ValueError: if they do not nest. Heads are split outside, as in
            ulysses(degree, inner=hierarchical(...)).
    """
    check_nests(outer, inner)
    n = outer.world_size * inner.world_size
    name = f"hierarchical({outer.name}, {inner.name})"
    return Plan(name, n, 1, own_shards(n), script=_script(outer, inner))


def _script(outer: Plan, inner: Plan) -> Callable[[int], tuple[RankStep, ...]]:
    if outer.world_size == 1 or inner.world_size == 1:
        return (outer if inner.world_size == 1 else inner).rank_steps
    clock = make_clock(outer, inner)

    def script(rank: int) -> tuple[RankStep, ...]:
        return _written(rank, outer, inner, clock)

    for rank in (inner.world_size + 1, outer.world_size * inner.world_size - 1):
        script(rank)  # so that plans that do not nest are refused at once
    return script


def _written(rank: int, outer: Plan, inner: Plan, clock: Clock) -> tuple[RankStep, ...]:
    size = inner.world_size
    s, (node, local) = Script(rank), divmod(rank, size)
    across, inside = outer.rank_steps(node), inner.rank_steps(local)
    rounds = rounds_of(across)
    check_reads_its_own(inner, local, inside)
    check_alike(inner, beats_of(inside) == clock.beats)
    check_alike(outer, kinds_of(rounds, clock.beats) == clock.kinds)
    for number, step in enumerate(across):
        for hop in (*step.sends, *step.recvs):
            lag = clock.lags[hop.item.side] if hop.item.role is Role.PARTIAL else 0
            s.at(clock.begin(number) + lag)
            post(s, hop, hop.item.shard * size + local, (size, local))
    call = joined(inside)
    for begin, kind, work in zip(clock.starts, clock.kinds, rounds, strict=False):
        if kind == "call":
            s.at(begin + clock.first)
            compute(s, work.tiles, call, size)
        elif kind == "move":
            for now, step in enumerate(inside, begin):
                s.at(now)
                compute(s, work.tiles, step.tiles, size)
                for hop in (*step.sends, *step.recvs):
                    moved = work.read if hop.item.role is Role.OPERAND else work.filled
                    for shard in moved[hop.item.side]:
                        post(s, hop, shard * size + hop.item.shard, (1, node * size))
    return s.done()
