"""How many kernels at once run at full speed, and among how many ranks."""

from __future__ import annotations

import os
import time
from typing import NamedTuple

import torch

from tilewise.kernels.registry import kernel_for
from tilewise.tiles.calls import Call, Kind
from tilewise.tools.calibration.links import Prober

ROWS, HEADS, WIDTH, TIMES = 512, 4, 64, 24
SLOWER = 1.2  # so much slower beside other nodes' ranks: they share its cores


class Cores(NamedTuple):
    """As in Machine; sharers None: a node's devices."""

    cores: float
    sharers: int | None


def available() -> int:
    """Ranks that this host can run at full speed, each with as many threads as this process."""
    return max(1, len(os.sched_getaffinity(0)) // torch.get_num_threads())


def shared_cores(prober: Prober, node_size: int) -> Cores:
    """Of CPU ranks: one alone, then a node's together, then all."""
    n, local = prober.world_size, min(node_size, prober.world_size)
    alone, node, everybody = (_together(prober, count) for count in (1, local, n))
    if everybody > SLOWER * node:
        return Cores(n * alone / everybody, n)
    if node > SLOWER * alone:
        return Cores(local * alone / node, None)
    return Cores(float(max(available(), local)), None)


def _together(prober: Prober, ranks: int) -> float:
    """Seconds of the same kernels on each of so many ranks at once, of the slowest."""
    q, k, v = torch.randn(3, ROWS, 1, HEADS, WIDTH)
    kernel, call = kernel_for("cpu", q.dtype, WIDTH), Call(((0, ROWS),), ((0, ROWS),), Kind.FULL)
    kernel.forward(q, k, v, call, 0.1)
    prober.everyone(0.0)
    start = time.perf_counter()
    if prober.rank < ranks:
        for _ in range(TIMES):
            kernel.forward(q, k, v, call, 0.1)
    taken = time.perf_counter() - start
    return max(prober.everyone(taken)[:ranks])
