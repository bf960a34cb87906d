"""Processes as the launcher counts them, and which ranks of a group share a node or a host."""

import os
import platform
from collections.abc import Sequence
from hashlib import blake2b
from pathlib import Path
from uuid import getnode


def local_world_size() -> int | None:
    """Processes on this node, as torchrun tells each of them; None without torchrun."""
    return _number("LOCAL_WORLD_SIZE")


def launched_world_size() -> int | None:
    """Processes on all nodes, as torchrun tells each of them; None without torchrun."""
    return _number("WORLD_SIZE")


def host_digest() -> bytes:
    """Return 16 bytes that are equal in two processes if they reach each other without a network.

    Containers and network namespaces of one machine are hosts of their own.
    """
    facts = [platform.node(), str(getnode())]
    boot, network = Path("/proc/sys/kernel/random/boot_id"), Path("/proc/self/ns/net")
    if boot.exists() and network.exists():  # on Linux
        facts = [boot.read_text(), os.readlink(network)]
    return blake2b("\n".join(facts).encode(), digest_size=16).digest()


def _number(variable: str) -> int | None:
    """The value of an environment variable that holds a number above 0; None if it does not."""
    text = os.environ.get(variable, "")
    return int(text) if text.isdecimal() and int(text) else None


def node_size_of(ranks: Sequence[int], local: int | None) -> int | None:
    """Neighbours in a group that share a node, if that sets some of its ranks apart from others.

    Args:
        ranks: of the group, as numbered in the world.
        local: processes of every node; None: not known.
    Returns:
        None if it is not known, if all share one node, if none share one, or if nodes do not hold
        equally many neighbours.
    """
    if local is None or not ranks:
        return None
    nodes = [rank // local for rank in ranks]
    size = next((i for i, node in enumerate(nodes) if node != nodes[0]), len(nodes))
    blocks = [nodes[i : i + size] for i in range(0, len(nodes), size)]
    alike = all(len(set(block)) == 1 and len(block) == size for block in blocks)
    if not alike or len({block[0] for block in blocks}) != len(blocks):
        return None
    return size if 1 < size < len(ranks) else None
