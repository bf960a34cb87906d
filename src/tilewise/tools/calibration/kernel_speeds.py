"""The kernel table: what the library's own kernel for a device does per second, by tile size."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from tilewise.kernels.protocol import Kernel as LocalKernel
from tilewise.kernels.protocol import accumulator_dtype
from tilewise.kernels.registry import kernel_for
from tilewise.simulation.costs import MATMULS
from tilewise.simulation.machine import KernelSpeed
from tilewise.tiles.calls import KernelCall, Kind
from tilewise.tools.calibration.trial import SharedClock

SMALLEST = 4
REPEATS = 3


class Sizes(NamedTuple):
    """What is tabled.

    Attributes:
        rows: numbers of queries and of keys.
        head_dims: whose tables the time of others is interpolated between.
        num_heads: that run together.
        most: pairs of rows; larger tiles count as fast as the nearest within.
    """

    rows: tuple[int, ...]
    head_dims: tuple[int, ...]
    num_heads: int
    most: int


CPU = Sizes((16, 64, 256, 1024, 4096), (32, 128), 4, 1 << 20)
CUDA = Sizes((64, 256, 1024, 4096, 16384), (64, 128), 8, 1 << 28)


def kernel_tables(dtype: str, head_dim: int, clock: SharedClock, sizes: Sizes) -> list[KernelSpeed]:
    """The forward and the backward pass of a dtype and head_dim."""
    bench = _Bench(dtype, head_dim, clock, sizes.num_heads)
    launches = bench.seconds(SMALLEST, SMALLEST)
    rows, edges = sizes.rows, _edges(bench, sizes)
    measured = {(m, n): bench.seconds(m, n) for m in rows for n in rows if m * n <= sizes.most}
    tables = []
    for backward, launch in enumerate(launches):
        flop = 2 * MATMULS[backward] * sizes.num_heads * head_dim
        speeds = {
            (m, n): flop * m * n / max(seconds[backward] - launch, seconds[backward] / 10)
            for (m, n), seconds in measured.items()
        }
        flops = tuple(tuple(speeds[_within(m, n, rows, sizes.most)] for n in rows) for m in rows)
        grid = tuple(map(float, rows))
        edge = edges[backward]
        tables.append(KernelSpeed(dtype, bool(backward), grid, grid, flops, head_dim, launch, edge))
    return tables


def sizes_for(device: torch.device) -> Sizes:
    return CUDA if device.type == "cuda" else CPU


class _Bench:
    """Times one kernel on tiles of any size."""

    def __init__(self, dtype: str, head_dim: int, clock: SharedClock, num_heads: int):
        self.dtype, self.head_dim = getattr(torch, dtype), head_dim
        self.clock, self.num_heads = clock, num_heads
        self.kernel: LocalKernel = kernel_for(clock.device.type, self.dtype, head_dim)

    def seconds(
        self, num_queries: int, num_keys: int, kind: Kind = Kind.FULL
    ) -> tuple[float, float]:
        """Of forward and backward of one tile."""
        q, dout = self._random(num_queries), self._random(num_queries)
        k, v = self._random(num_keys), self._random(num_keys)
        call = KernelCall(((0, num_queries),), ((0, num_keys),), kind)
        scale = self.head_dim**-0.5
        _, lse = self.kernel.forward(q, k, v, call, scale)
        delta = torch.zeros_like(lse, dtype=accumulator_dtype(self.dtype))

        def forward() -> object:
            return self.kernel.forward(q, k, v, call, scale)

        def backward() -> object:
            return self.kernel.backward(q, k, v, dout, lse, delta, call, scale)

        area = num_queries * num_keys
        times = max(1, (1 << 18) // (area + (1 << 12)))
        return (
            self.clock.seconds(forward, REPEATS, times),
            self.clock.seconds(backward, REPEATS, times),
        )

    def _random(self, rows: int) -> Tensor:
        shape = rows, 1, self.num_heads, self.head_dim
        return torch.randn(shape, dtype=self.dtype, device=self.clock.device)


def _edges(bench: _Bench, sizes: Sizes) -> list[float]:
    """Keys per query that a causal square takes longer than half of a full one."""
    size = max(rows for rows in sizes.rows if rows * rows <= sizes.most)
    full, causal = bench.seconds(size, size), bench.seconds(size, size, Kind.CAUSAL)
    return [max(b / a - 0.5, 0.0) * size for a, b in zip(full, causal, strict=True)]


def _within(m: int, n: int, rows: tuple[int, ...], most: int) -> tuple[int, int]:
    """The measured tile that stands for one of any size: its longer side cut down."""
    while m * n > most:
        longer = max(m, n)
        shorter = rows[rows.index(longer) - 1]
        m, n = (shorter, n) if m == longer else (m, shorter)
    return m, n
