"""Double ring: rings of KV inside each node, while whole nodes' shards go round between nodes."""

from tilewise.plan.ir import Plan
from tilewise.strategies.hierarchical import hierarchical
from tilewise.strategies.ring import ring


def double_ring(num_nodes: int, node_size: int) -> Plan:
    """Rings of KV inside each node, while whole nodes' shards go round between nodes.

    The volume is ring's; only 1 in node_size hops crosses nodes, and each has node_size steps to do
    so. rank = node * node_size + local.

    At outer step o, inner step i, rank (d, l) computes KV shard (d + o, l + i).
    Bytes: num_nodes * node_size - 1 KV shards and as many partials per rank.
    Source: LoongTrain (Gu et al. 2024, arXiv 2406.18485). Departs from it: dk and dv are summed in
    a node before they leave it, and never revisit their owner before the last hop.
    """
    if min(num_nodes, node_size) < 1:
        raise ValueError(f"num_nodes ({num_nodes}) and node_size ({node_size}) must be at least 1")
    rings = hierarchical(ring(num_nodes), ring(node_size))
    return rings.changed(name=f"double_ring({num_nodes}, {node_size})")
