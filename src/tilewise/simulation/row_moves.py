"""Rows on their way from rank to rank, in seconds: verbs on tokens, and shared rows of attention.

Their messages share a machine's links as attention's do.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from tilewise.compiler.row_moves import RowMoves
from tilewise.plan.shifts import Symmetry
from tilewise.simulation.disturbance import disturbed
from tilewise.simulation.engine import LOST, EventLoop, Flow, PricedProgram, RankOperation
from tilewise.simulation.machine import Machine
from tilewise.simulation.network import Network
from tilewise.simulation.prices import copy_seconds
from tilewise.simulation.timeline import Timeline


class RankRows(NamedTuple):
    """Rows that one rank hands out and gets in one exchange.

    Attributes:
        sends: (peer, number of rows) of each message.
        num_recvs: messages that it gets.
        packed, unpacked: rows that it copies before it sends, and after all have arrived.
    """

    sends: tuple[tuple[int, int], ...]
    num_recvs: int
    packed: int
    unpacked: int


def simulate_moves(
    moves: Sequence[RowMoves], row_bytes: int, machine: Machine, *, backward: bool = False
) -> Timeline:
    """One pass of row moves that follow one another, such as the rounds of a scan.

        simulate_moves([relayout_moves(layout, to)], 2 * hidden_size, machine).seconds

    Every rank packs what it sends, posts it, waits for what it gets and unpacks it, move by move;
    rank r is device r.

    Args:
        row_bytes: of a row of the tensor.
        backward: gradients return the way the rows came, the last move first.
    Raises:
        ValueError: if there are no moves, or they are for different numbers of ranks.
    """
    sizes = sorted({move.world_size for move in moves})
    if len(sizes) != 1:
        raise ValueError(f"moves are for {sizes} ranks; give some, all for the same number")

    def rows(move: RowMoves, rank: int) -> RankRows:
        counts = move.num_rows.T if backward else move.num_rows
        out, received = counts[rank].tolist(), counts[:, rank].tolist()
        sends = tuple((peer, count) for peer, count in enumerate(out) if count)
        return RankRows(sends, sum(map(bool, received)), sum(out), sum(received))

    ordered = reversed(moves) if backward else moves
    rounds = [{rank: rows(move, rank) for rank in range(move.world_size)} for move in ordered]
    loop = run_exchanges(rounds, row_bytes, machine, Symmetry(sizes[0]), f"{moves[0].name}, rows")
    return Timeline(max(loop.end_seconds, default=0.0), loop.uses(1))


def run_exchanges(
    rounds: Sequence[dict[int, RankRows]],
    row_bytes: int,
    machine: Machine,
    symmetry: Symmetry,
    name: str,
    call_seconds: float = 0.0,
) -> EventLoop:
    """Return the event loop of exchanges that follow one another, after it has run.

    Args:
        rounds: of each exchange the rows of every rank that stands for itself or others.
        name: of the messages, in traces.
        call_seconds: of each rank before its first exchange.
    """
    network = Network(machine, symmetry)
    flows, last_flow = list[Flow](), dict[tuple[int, int], int]()
    operations = {rank: list[RankOperation]() for rank in symmetry.representatives()}
    for exchange in rounds:
        awaited = {rank: list[int]() for rank in operations}
        leaving_by_rank = dict[int, tuple[int, ...]]()
        for rank, rank_rows in exchange.items():
            leaving = range(len(flows), len(flows) + len(rank_rows.sends))
            for flow, (peer, num_rows) in zip(leaving, rank_rows.sends, strict=True):
                # Those of ranks that another stands for arrive with its own.
                waiting_ranks = (
                    [peer] if symmetry.members == 1 else [*{peer, rank} & operations.keys()]
                )
                for waiting_rank in waiting_ranks:
                    awaited[waiting_rank].append(flow)
                link, num_bytes = network.link(rank, peer), row_bytes * num_rows
                seconds = num_bytes / network.bandwidth(link) + machine.carry_seconds
                route, latency = network.message(rank, peer), network.latency(link)
                previous = last_flow.get((rank, peer), LOST)
                label = f"{name} to {peer}"
                flows.append(
                    Flow(rank, route, link, seconds, num_bytes, 1, latency, previous, label)
                )
                last_flow[rank, peer] = flow
            leaving_by_rank[rank] = tuple(leaving)
        for rank, rank_rows in exchange.items():
            posting = machine.message_seconds * (len(rank_rows.sends) + rank_rows.num_recvs)
            packing = copy_seconds(machine, 2 * row_bytes * rank_rows.packed)
            posted = tuple(awaited[rank])
            operations[rank].append(RankOperation(own=packing))
            operations[rank].append(
                RankOperation(own=posting, leaving=leaving_by_rank[rank], posted=posted)
            )
            unpacking = copy_seconds(machine, 2 * row_bytes * rank_rows.unpacked)
            operations[rank].append(RankOperation(own=unpacking, awaited=tuple(awaited[rank])))
    programs = tuple(
        PricedProgram(rank, network.compute(rank), call_seconds, tuple(rank_rows))
        for rank, rank_rows in operations.items()
    )
    all_flows = tuple(flows)
    if machine.is_disturbed:
        programs, all_flows = disturbed(programs, all_flows, machine)
    loop = EventLoop(programs, all_flows, network.routes, network.num_resources)
    stuck = loop.run()
    assert stuck is None, stuck
    return loop
