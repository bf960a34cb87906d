"""All-gather: every rank receives all keys and values at once, then makes one large call.

Nothing is hidden behind compute, but there is one kernel call and one good collective; the
gradients of k and v go straight home. Source: Llama 3 (arXiv 2407.21783), section 3.3.2.
"""

from tilewise.arguments import checks_arguments
from tilewise.plan.builder import RankBuilder, operand, partial
from tilewise.plan.ir import Plan, RankStep, Role, Side, TeamExchange, Traits, own_shards
from tilewise.plan.shifts import Shift


@checks_arguments
def all_gather(world_size: int) -> Plan:
    """Gather k and v on every rank, compute own queries, scatter dk and dv.

    Bytes: as ring, world_size - 1 KV shards and as many partials per rank.
    """
    n = world_size

    def script(rank: int) -> tuple[RankStep, ...]:
        s, other_ranks = RankBuilder(rank), [r for r in range(n) if r != rank]
        for peer in other_ranks:
            s.send(operand(Side.KV, rank), peer)
            s.recv(operand(Side.KV, peer), peer)
        s.next()
        s.tile((rank,), range(n))
        s.next()
        for peer in other_ranks:
            s.send(partial(Side.KV, peer), peer)
            s.recv(partial(Side.KV, rank), peer)
        return s.done()

    exchanges = tuple(
        TeamExchange(step, n, ((Side.KV, role),))
        for step, role in ((0, Role.OPERAND), (-1, Role.PARTIAL))
    )
    traits = Traits((Shift(1, n, free=True),), exchanges=exchanges, proven=True)
    return Plan(f"all_gather({n})", n, 1, own_shards(n), script=script, traits=traits)
