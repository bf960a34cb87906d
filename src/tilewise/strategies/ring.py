"""Ring Attention: one side stays, the other goes round, its gradients one transfer behind it.

    step     rank 0     rank 1     rank 2
       0     q0 x kv0   q1 x kv1   q2 x kv2
       1     q0 x kv1   q1 x kv2   q2 x kv0
       2     q0 x kv2   q1 x kv0   q2 x kv1

Source: Liu et al. 2023 (arXiv 2310.01889); moves="q" in backward is BurstAttention's (2403.09347).
Departs from them in that a partial never travels with its owner's own share, which waits at home,
and goes home every few transfers, so that rounding on the wire does not grow with the ring.
"""

from tilewise.arguments import Moves, checks_arguments
from tilewise.plan.builder import RankBuilder, goes_home, operand, partial
from tilewise.plan.ir import Plan, RankStep, Side, Traits, own_shards
from tilewise.plan.shifts import Shift


@checks_arguments
def ring(world_size: int, moves: Moves = "kv") -> Plan:
    """Rotate one side's shards through all ranks, each rank receiving from rank + 1.

    Bytes: every rank sends world_size - 1 shards of the moving side, and as many partials.

    Args:
        world_size: number of ranks.
        moves: the side that travels, "kv" or "q".
    """
    side, n = Side[moves.upper()], world_size

    def script(rank: int) -> tuple[RankStep, ...]:
        s, left, right = RankBuilder(rank), (rank - 1) % n, (rank + 1) % n
        for t in range(n + 1):
            shard = (rank + t) % n
            if t < n:
                s.tile((rank,), (shard,)) if side is Side.KV else s.tile((shard,), (rank,))
            if t < n - 1:
                s.send(operand(side, shard), left)
                s.recv(operand(side, (shard + 1) % n), right)
            if t >= 2 and goes_home(t - 1, n - 1):
                s.send(partial(side, (shard - 1) % n), (shard - 1) % n)
                s.recv(partial(side, rank), (rank - t + 1) % n)
            elif t >= 2:
                s.send(partial(side, (shard - 1) % n), left)
                s.recv(partial(side, shard), right)
            s.next()
        return s.done()

    name = f"ring({n}, moves={moves!r})"
    traits = Traits((Shift(1, n),), proven=True)
    return Plan(name, n, 1, own_shards(n), script=script, traits=traits)
