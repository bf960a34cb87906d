"""How long verbs on tokens take on a machine: their messages share its links as attention's do."""

from __future__ import annotations

from collections.abc import Sequence

from tilewise.compiler.row_moves import Arriving, RowMoves
from tilewise.plan.shifts import Symmetry
from tilewise.simulation.engine import LOST, EventLoop, Flow, RankOperation, Track
from tilewise.simulation.machine import Machine
from tilewise.simulation.network import Network
from tilewise.simulation.timeline import Timeline


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
    sizes = sorted({one.world_size for one in moves})
    if len(sizes) != 1:
        raise ValueError(f"moves are for {sizes} ranks; give some, all for the same number")
    (n,) = sizes
    network = Network(machine, Symmetry(n))
    flows, last = list[Flow](), dict[tuple[int, int], int]()
    operations = [list[RankOperation]() for _ in range(n)]
    for one in reversed(moves) if backward else moves:
        ranks = [one.of_rank(rank) for rank in range(n)]
        arriving = [list[int]() for _ in range(n)]
        for rank, mine in enumerate(ranks):
            leaving, sends = list[int](), mine.recvs if backward else mine.sends
            for sent in sends:
                leaving.append(len(flows))
                arriving[sent.peer].append(len(flows))
                flows.append(
                    _flow(network, rank, sent, row_bytes, last.get((rank, sent.peer), LOST))
                )
                last[rank, sent.peer] = leaving[-1]
            posted = len(mine.sends) + len(mine.recvs)
            packed = _copy_seconds(machine, row_bytes, sends)
            operations[rank].append(RankOperation(own=packed))
            own = machine.message_seconds * posted
            operations[rank].append(RankOperation(own=own, leaving=tuple(leaving)))
        for rank, mine in enumerate(ranks):
            unpacked = _copy_seconds(machine, row_bytes, mine.sends if backward else mine.recvs)
            operations[rank].append(RankOperation(own=unpacked, awaited=tuple(arriving[rank])))
    tracks = tuple(
        Track(rank, network.compute(rank), 0.0, tuple(mine)) for rank, mine in enumerate(operations)
    )
    loop = EventLoop(tracks, tuple(flows), network.routes, network.num_resources)
    if loop.run():
        raise RuntimeError(f"ranks wait for rows that nobody sends: {moves[0].name}")
    return Timeline(max(loop.ended, default=0.0), loop.uses(1))


def _flow(network: Network, rank: int, sent: Arriving, row_bytes: int, after: int) -> Flow:
    link, num_bytes = network.link(rank, sent.peer), row_bytes * sent.num_rows
    seconds = num_bytes / network.bandwidth(link) + network.machine.carry_seconds
    route, name = network.message(rank, sent.peer), f"rows to {sent.peer}"
    return Flow(rank, route, link, seconds, num_bytes, 1, network.latency(link), after, name)


def _copy_seconds(machine: Machine, row_bytes: int, rows: Sequence[Arriving]) -> float:
    if not machine.pack_bandwidth:
        return 0.0
    return row_bytes * sum(one.num_rows for one in rows) / machine.pack_bandwidth
