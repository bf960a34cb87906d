"""All-gather: every rank receives all keys and values at once, then makes one large call.

Nothing is hidden behind compute, but there is one kernel call and one good collective; the
gradients of k and v go straight home. Source: Llama 3 (arXiv 2407.21783), section 3.3.2.
"""

from tilewise.arguments import Moves, checks_arguments
from tilewise.plan.builder import RankBuilder, operand, partial
from tilewise.plan.ir import (
    Plan,
    RankStep,
    Role,
    Side,
    TeamExchange,
    Traits,
    WholeRows,
    own_shards,
)
from tilewise.plan.shifts import Shift


@checks_arguments
def all_gather(world_size: int, moves: Moves = "kv") -> Plan:
    """Gather k and v on every rank, compute own queries, scatter dk and dv.

    Bytes: as ring, world_size - 1 shards of the moving side and as many partials per rank.

    Args:
        world_size: number of ranks.
        moves: the side that travels, "kv" or "q".
    """
    n, side = world_size, Side[moves.upper()]

    def script(rank: int) -> tuple[RankStep, ...]:
        s, other_ranks = RankBuilder(rank), [r for r in range(n) if r != rank]
        for peer in other_ranks:
            s.send(operand(side, rank), peer)
            s.recv(operand(side, peer), peer)
        s.next()
        s.tile(*(((rank,), range(n)) if side is Side.KV else (range(n), (rank,))))
        s.next()
        for peer in other_ranks:
            s.send(partial(side, peer), peer)
            s.recv(partial(side, rank), peer)
        return s.done()

    exchanges = tuple(
        TeamExchange(step, n, ((side, role),))
        for step, role in ((0, Role.OPERAND), (-1, Role.PARTIAL))
    )
    traits = Traits(
        (Shift(1, n, free=True),),
        exchanges=exchanges,
        whole_rows=WholeRows(_whole_rows, (n,)),
        proven=True,
    )
    name = f"all_gather({n})" if side is Side.KV else f"all_gather({n}, moves='q')"
    return Plan(name, n, 1, own_shards(n), script=script, traits=traits)


def _whole_rows(world_size: int, side: Side) -> Plan:
    return all_gather(world_size, "kv" if side is Side.Q else "q")
