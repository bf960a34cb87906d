"""A strategy of one's own, a butterfly: rank and rank ^ 2**i swap all KV shards that they have."""

import tilewise as tw
from tilewise.plan import RankBuilder, Side, operand, partial
from tilewise.transport import Group


def butterfly(world_size: int) -> tw.Plan:
    def script(rank: int, levels: int = world_size.bit_length() - 1):  # of a power of two
        s, kv = RankBuilder(rank), Side.KV
        for i in range(levels + 1):
            s.tile([rank], [rank ^ x for x in range(2**i // 2, 2**i)])  # what the last swap brought
            for x in range(2**i) if i < levels else ():
                s.send(operand(kv, rank ^ x), rank ^ 2**i)
                s.recv(operand(kv, rank ^ x ^ 2**i), rank ^ 2**i)
            s.next()
        for i in reversed(range(levels)):
            for x in range(2**i):
                s.send(partial(kv, rank ^ x ^ 2**i), rank ^ 2**i)
                s.recv(partial(kv, rank ^ x), rank ^ 2**i)
            s.next()
        return s.done()

    return tw.Plan(f"butterfly({world_size})", world_size, script=script)


if __name__ == "__main__":
    plan, mask, layout = butterfly(4), tw.Causal(), tw.zigzag(64, 4)
    plan.check()
    print(plan)
    work = tw.Workload(65536, num_heads=32, num_kv_heads=8, head_dim=128, mask=mask)
    print(tw.simulate(plan, work, tw.Machine.preset("h100x8")).forward_seconds, "s forward")

    def attend(rank: int, group: Group, plan: tw.Plan = plan, layout: tw.Layout = layout):
        x = layout.positions(rank)[:, None, None].double().expand(-1, 2, 8)
        q, k, v = x.sin(), x.cos(), x.sqrt()  # [tokens, heads, head_dim]
        return tw.attention(q, k, v, plan=plan, layout=layout, mask=mask, group=group)

    alone = attend(0, None, tw.ring(1), tw.contiguous(64, 1))
    print("largest error", float((layout.unshard(tw.loopback(4, attend)) - alone).abs().max()))
