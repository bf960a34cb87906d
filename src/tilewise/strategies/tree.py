"""Tree attention for decoding: few queries on every rank, KV sharded, merged in log depth.

Every rank attends with its own keys; the partials are reduced to rank 0 along a binomial tree and
the result is handed back along it: at most 2 ceil(log2 n) transfers in sequence.
Source: Tree Attention (Shyam et al. 2024, arXiv 2408.04093), with (out, lse) in place of
(numerator, denominator, max), and with gradients.
"""

from tilewise.arguments import checks_arguments
from tilewise.plan.builder import RankBuilder, partial
from tilewise.plan.ir import Item, Plan, RankStep, Role, Side, Traits, own_shards


@checks_arguments
def tree(world_size: int) -> Plan:
    """Merge partial results of replicated queries; out and lse arrive on every rank.

    Bytes: in all world_size - 1 partials up and world_size - 1 results down, of q's few rows.
    """
    kv_owners = own_shards(world_size)[1]
    n = len(kv_owners)
    result = Item(Side.Q, Role.RESULT, 0)
    strides = [1 << k for k in range(max(n - 1, 0).bit_length())]

    def script(rank: int) -> tuple[RankStep, ...]:
        s = RankBuilder(rank)
        s.tile((0,), (rank,))
        for stride in strides:
            s.next()
            if rank % (2 * stride) == stride:
                s.send(partial(Side.Q, 0), rank - stride)
            elif rank % (2 * stride) == 0 and rank + stride < n:
                s.recv(partial(Side.Q, 0), rank + stride)
        for stride in reversed(strides):
            s.next()
            if rank % (2 * stride) == stride:
                s.recv(result, rank - stride)
            elif rank % (2 * stride) == 0 and rank + stride < n:
                s.send(result, rank + stride)
        return s.done()

    owners = ((tuple(range(n)),), kv_owners)
    plan_arguments = {"script": script, "replicated_queries": True, "traits": Traits(proven=True)}
    return Plan(f"tree({n})", n, 1, owners, **plan_arguments)
