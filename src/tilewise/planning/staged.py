"""Gathers in stages: a shard is sent once to each node, and passed on there from rank to rank.

This is how collective libraries gather over several nodes. Source: NCCL's all-gather, whose rings
and trees enter a node once.
"""

from tilewise.plan.ir import Plan
from tilewise.strategies.all_gather import all_gather
from tilewise.strategies.attention2d import attention2d
from tilewise.strategies.catalog import near_square
from tilewise.strategies.hierarchical import hierarchical
from tilewise.strategies.mesh import mesh


def staged_all_gather(world_size: int, node_size: int) -> Plan:
    """An all-gather between nodes, and one in each of them.

    Args:
        node_size: ranks of a node. Where it is 1, or not a proper divisor of world_size, the plan
            is all_gather(world_size).
    """
    if not _has_nodes(world_size, node_size):
        return all_gather(world_size)
    return hierarchical(all_gather(world_size // node_size), all_gather(node_size))


def staged_attention2d(world_size: int, node_size: int) -> Plan:
    """A grid of nodes, and a grid of ranks in each of them, both near-square.

    Its tiles have the sizes of those of one grid of all ranks, if both numbers are squares or twice
    a square.

    Args:
        node_size: as for staged_all_gather, with attention2d in place of all_gather.
    """
    if not _has_nodes(world_size, node_size):
        return attention2d(*near_square(world_size))
    between = attention2d(*near_square(world_size // node_size))
    return hierarchical(between, mesh(node_size, near_square(node_size)[0], "gather"))


def _has_nodes(world_size: int, node_size: int) -> bool:
    return 1 < node_size < world_size and world_size % node_size == 0
