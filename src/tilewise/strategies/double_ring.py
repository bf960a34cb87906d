"""Double ring: rings of KV inside each node, while whole nodes' shards go round between nodes.

The volume is ring's; only 1 in node_size hops crosses nodes, and each has node_size steps to do so.
Source: LoongTrain (Gu et al. 2024, arXiv 2406.18485). Departs from it: dk and dv never revisit
their owner before the last hop.
"""

from __future__ import annotations

from tilewise.plan import Plan, RankStep, Side, own_shards
from tilewise.script import REACH, Script, goes_home, operand, partial


def double_ring(num_nodes: int, node_size: int) -> Plan:
    """Rotate KV inside nodes; rank = node * node_size + local.

    At outer step o, inner step i, rank (d, l) computes KV shard (d + o, l + i).
    Bytes: num_nodes * node_size - 1 KV shards and as many partials per rank.
    """
    if min(num_nodes, node_size) < 1:
        raise ValueError(f"num_nodes ({num_nodes}) and node_size ({node_size}) must be at least 1")
    n = num_nodes * node_size

    def at(node: int, local: int) -> int:
        return node % num_nodes * node_size + local % node_size

    def home_from(outer: int, inner: int) -> bool:
        """Along a node, then from node to node with all of that node's contributions."""
        if inner < node_size - 1:
            return goes_home(inner, node_size)
        gathered, before = (outer + 1) * node_size // REACH, outer * node_size // REACH
        return outer == num_nodes - 1 or gathered > before

    def script(rank: int) -> tuple[RankStep, ...]:
        s, (node, local) = Script(rank), divmod(rank, node_size)
        inner_left, inner_right = at(node, local - 1), at(node, local + 1)
        outer_left, outer_right = at(node - 1, local), at(node + 1, local)
        for t in range(n + 1):
            outer, inner = divmod(t, node_size)
            held = at(node + outer, local + inner)
            if t < n:
                s.tile((rank,), (held,))
            if t < n and inner < node_size - 1:
                s.send(operand(Side.KV, held), inner_left)
                s.recv(operand(Side.KV, at(node + outer, local + inner + 1)), inner_right)
            if inner == 0 and outer < num_nodes - 1:
                s.send(operand(Side.KV, held), outer_left)
                s.recv(operand(Side.KV, at(node + outer + 1, local)), outer_right)
            if t >= 2:  # what was computed one step ago moves on, or home
                outer, inner = divmod(t - 1, node_size)
                done = at(node + outer, local + inner)
                if home_from(outer, inner):
                    s.send(partial(Side.KV, done), done)
                    s.recv(partial(Side.KV, rank), at(node - outer, local - inner))
                elif inner < node_size - 1:
                    s.send(partial(Side.KV, done), inner_left)
                    s.recv(partial(Side.KV, at(node + outer, local + inner + 1)), inner_right)
                else:
                    s.send(partial(Side.KV, done), outer_left)
                    s.recv(partial(Side.KV, at(node + outer + 1, local + inner)), outer_right)
            s.next()
        return s.done()

    return Plan(f"double_ring({num_nodes}, {node_size})", n, 1, own_shards(n), script=script)
