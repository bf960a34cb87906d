"""Double ring: rings of KV inside each node, while whole nodes' shards go round between nodes."""

from tilewise.arguments import checks_arguments, whole_number
from tilewise.plan.ir import Plan
from tilewise.strategies.hierarchical import hierarchical
from tilewise.strategies.ring import ring


@checks_arguments
def double_ring(num_nodes: int, node_size: int) -> Plan:
    """Rings of KV inside each node, while whole nodes' shards go round between nodes.

    The volume is ring's; only 1 in node_size transfers crosses nodes, and each has node_size steps
    to do so. rank = node * node_size + local.

    At outer step o, inner step i, rank (d, l) computes KV shard (d + o, l + i).
    Bytes: num_nodes * node_size - 1 KV shards and as many partials per rank.
    Source: LoongTrain (Gu et al. 2024, arXiv 2406.18485). Departs from it: dk and dv are summed in
    a node before they leave it, and never revisit their owner before the last transfer.
    """
    sizes = whole_number("num_nodes", num_nodes), whole_number("node_size", node_size)
    rings = hierarchical(*map(ring, sizes))
    return rings.changed(name=f"double_ring({num_nodes}, {node_size})")
