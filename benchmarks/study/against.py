"""Methods on a number of devices, and the controls that each is compared with."""

from collections.abc import Mapping
from typing import NamedTuple

import tilewise as tw
from tilewise.simulation.machine import Machine
from tilewise.strategies.catalog import near_square
from tilewise_tools.report.studies import methods

METHODS = ("ring", "all_gather", "double_ring", "mesh", "attention2d", "attention2d_overlap",
           "ulysses", "ulysses_ring", "ulysses_double_ring", "ulysses_mesh")  # fmt: skip
OF_RINGS_BYTES = ("ring", "all_gather", "double_ring")
"""Methods that send a ring's bytes, over one link of a node, at once, or over all."""
UNITS = {"over ring": "x", "of which topology": "x", "of which bytes": "x"}
EXPLAINED = (
    "Over ring: a ring's time over this one. Of which topology: a ring's time over a double "
    "ring's, which sends a ring's bytes on more links. Of which bytes: the time of the fastest of "
    "ring, double ring and all-gather, which all send a ring's bytes, over this one."
)


class Gains(NamedTuple):
    """Times that a method is faster than its controls."""

    over_ring: float
    of_topology: float
    of_bytes: float


def gains(seconds: Mapping[str, float]) -> dict[str, Gains]:
    """Every method's, by its name.

    Args:
        seconds: by method, a ring's among them; where there is no double ring, a ring is one.
    """
    ring = seconds["ring"]
    topology = ring / seconds.get("double_ring", ring)
    alike = min(seconds[name] for name in OF_RINGS_BYTES if name in seconds)
    return {name: Gains(ring / x, topology, alike / x) for name, x in seconds.items()}


def control_of(n: int, machine: Machine) -> tw.Plan:
    """A double ring over nodes; where these have one device, or all, over two equal factors."""
    inside = machine.node_size if 1 < machine.node_size < n else near_square(n)[1]
    return tw.double_ring(n // inside, inside)


def every_method(
    n: int, work: tw.Workload, node: int, node_size: int | None = None
) -> dict[str, tw.Plan | str]:
    """All methods on n devices: their plans, or why there is none.

    Args:
        node: devices of a node, which split heads and are the inner ring of a double ring.
        node_size: of the machine, for gathers in stages, if it is another number.
    """
    made = methods(n, work, node, node_size)
    return {
        name: made[name]() if name in made else f"none: {_absence(name, n, work, node)}"
        for name in METHODS
    }


def _absence(name: str, n: int, work: tw.Workload, node: int) -> str:
    if name == "double_ring":
        return f"{n} devices in nodes of {node}"
    heads = f"{work.num_heads}:{work.num_kv_heads} heads"
    if name == "ulysses":
        return f"{heads} on {n} devices"
    left = ", a product of two left over" if name == "ulysses_double_ring" else ""
    return f"{heads} on {n} devices in nodes of {node}{left}"
