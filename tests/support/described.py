"""Machines and workloads to simulate: few, round figures."""

from __future__ import annotations

import tilewise as tw
from tilewise.simulation.machine import KernelSpeed, Link, Machine

FAST = 1e30  # FLOP per second, or bytes: takes no time


def machine(bandwidth: float = 1e6, flops: float = FAST, **fields) -> Machine:
    """One rank per node unless told otherwise, one speed for all tiles."""
    kernels = tuple(
        KernelSpeed(dtype, backward, (1.0,), (1.0,), ((flops,),))
        for dtype in ("float32", "bfloat16")
        for backward in (False, True)
    )
    good = {"node_size": 1, "inside": Link(bandwidth), "between": Link(bandwidth)}
    return Machine("described", kernels=kernels, **{**good, **fields})


def workload(n: int, rows: int = 16, **fields) -> tw.Workload:
    good = {"num_heads": 8, "num_kv_heads": 8, "head_dim": 16, "dtype": "float32"}
    return tw.Workload(n * rows, **{**good, "save": "replay", **fields})


U = 16 * 8 * 16 * 4  # bytes of a query shard of these workloads
L = 16 * 8 * 4


MACHINES: dict[str, Machine] = {
    "flat": machine(1e9, 1e12, between=Link(1e9, 1e-6)),
    "nodes": machine(1e9, 1e12, node_size=4, nics=4, inside=Link(8e9, 1e-7), launch_seconds=1e-6),
    "shared": machine(1e9, 1e12, node_size=4, nics=2, inside=Link(8e9), message_seconds=1e-7),
    "one NIC": machine(1e9, 1e12, node_size=4, nics=1, inside=Link(8e9)),
    "cores": machine(1e9, 1e12, node_size=2, cores=1.5, copy_cores=0.5, nics=2),
    "racks": machine(1e9, 1e12, node_size=2, rack_nodes=2, across=Link(3e8), inside=Link(4e9)),
    "odd": machine(1e9, 1e12, node_size=3, inside=Link(8e9)),
}
