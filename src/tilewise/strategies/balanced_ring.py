"""Balanced ring: idle ranks of a causal ring take remote queries and return partial outputs.

Pairs up to half the ring below the diagonal are computed by the query's owner, as in a ring; those
farther below by the KV's owner, to whom the query is sent; those above the diagonal by a plain KV
ring, which pruning removes under a causal mask.
Source: DistFlashAttn (arXiv 2310.03294), section 3.2; extended to all pairs so that the plan is a
plan like any other. A KV shard skips the ranks that do not read it.
"""

from tilewise.arguments import checks_arguments
from tilewise.plan.builder import RankBuilder, goes_home, operand, partial
from tilewise.plan.ir import Plan, RankStep, Side, Traits, own_shards
from tilewise.plan.shifts import Shift


@checks_arguments
def balanced_ring(world_size: int) -> Plan:
    """Ring whose far lower pairs run where their KV is: for Causal on a contiguous layout.

    Pruned with Causal, no rank computes more than world_size // 2 + 1 tiles.
    """
    n, half = world_size, world_size // 2

    def read(kv: int, t: int) -> bool:
        """Return whether KV shard kv is read at step t by rank kv + t."""
        return 0 < t < n and (t <= half or kv + t >= n)

    def next_reader_step(kv: int, t: int) -> int | None:
        """The step of the next reader: 1, 2, ..., n // 2, then those round the corner."""
        next_step = t + 1 if read(kv, t + 1) or kv + t + 1 >= n else n - kv
        return next_step if next_step < n else None

    def previous_reader_step(kv: int, t: int) -> int:
        return t - 1 if t == 1 or read(kv, t - 1) else half

    def last_of_chain(kv: int, t: int) -> bool:
        return goes_home(t, n - 1 if kv else half)

    def script(rank: int) -> tuple[RankStep, ...]:
        s = RankBuilder(rank)
        s.tile((rank,), (rank,))
        for t in range(n):
            kv = (rank - t) % n
            following = next_reader_step(kv, t)
            onward = kv if following is None else (kv + following) % n
            if following is not None and (t == 0 or read(kv, t)):
                s.at(following - 1).send(operand(Side.KV, kv), onward)
            if read(kv, t):
                previous = previous_reader_step(kv, t)
                source = (kv + previous) % n
                s.at(t - 1).recv(operand(Side.KV, kv), source)
                s.at(t).tile((rank,), (kv,))
                s.at(t + 1).send(partial(Side.KV, kv), kv if last_of_chain(kv, t) else onward)
                if previous and not last_of_chain(kv, previous):
                    s.at(previous + 1).recv(partial(Side.KV, kv), source)
            if read(rank, t) and last_of_chain(rank, t):
                s.at(t + 1).recv(partial(Side.KV, rank), (rank + t) % n)
        for t in range(1, (n - 1) // 2 + 1):
            if rank < t:  # help: this rank's KV against the query n - t below
                q = rank + n - t
                s.at(t - 1).recv(operand(Side.Q, q), q)
                s.at(t).tile((q,), (rank,))
                s.at(t + 1).send(partial(Side.Q, q), q)
            if rank >= n - t:  # be helped
                helper = rank - n + t
                s.at(t - 1).send(operand(Side.Q, rank), helper)
                s.at(t + 1).recv(partial(Side.Q, rank), helper)
        return s.done()

    shifts = (Shift(1, n),) if n == 2 else ()  # two ranks are a ring; of more, those below help
    traits = Traits(shifts, proven=True)
    return Plan(f"balanced_ring({n})", n, 1, own_shards(n), script=script, traits=traits)
