"""Seconds of one rank's own work: kernels by tile size, and calls, steps, merging and packing."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

import tilewise as tw
from tilewise.kernels.merge import merge_into
from tilewise.kernels.protocol import accumulator_dtype
from tilewise.kernels.registry import kernel_for, use_of
from tilewise.plan.payload import Payload
from tilewise.simulation.machine import KernelSpeed
from tilewise.tiles.calls import KernelCall, Kind
from tilewise.transport.resolve import LocalTransport
from tilewise.wires.wire import Wires


class SharedClock:
    """Measures work on one device.

    Args:
        device: where the work runs; on CUDA it is waited for.
    """

    def __init__(self, device: torch.device):
        self.device = device
        self._cuda = device.type == "cuda"
        self.by_cpu = not self._cuda and torch.get_num_threads() == 1

    def seconds(self, work: Callable[[], object], repeats: int = 5, times: int = 1) -> float:
        """Return the seconds of one call: the median over repeats of so many calls each,
        once warm.
        """
        work()
        return statistics.median(self._once(work, times) for _ in range(repeats)) / times

    def _once(self, work: Callable[[], object], times: int) -> float:
        now = time.thread_time if self.by_cpu else time.perf_counter
        self._finish()
        start = now()
        for _ in range(times):
            work()
        self._finish()
        return now() - start

    def _finish(self) -> None:
        if self._cuda:
            torch.cuda.synchronize(self.device)


SMALLEST = 4
REPEATS = 3


class Sizes(NamedTuple):
    """Sizes of tiles that are measured."""

    rows: tuple[int, ...]  # numbers of queries and of keys
    head_dims: tuple[int, ...]  # whose tables the time of others is interpolated between
    num_heads: int  # that run together
    most: int  # pairs of rows; larger tiles count as fast as the nearest within


CPU = Sizes((16, 64, 256, 1024, 4096), (32, 128), 4, 1 << 20)
CUDA = Sizes((64, 256, 1024, 4096, 16384), (64, 128), 8, 1 << 28)


def kernel_tables(dtype: str, head_dim: int, clock: SharedClock, sizes: Sizes) -> list[KernelSpeed]:
    """The forward and the backward pass of a dtype and head_dim."""
    heads, rows, most_cells = sizes.num_heads, sizes.rows, sizes.most
    seconds = partial(_tile_seconds, clock, dtype, (heads, head_dim))
    launches = seconds((SMALLEST, SMALLEST))
    side = max(m for m in rows if m * m <= most_cells)
    squares = seconds((side, side)), seconds((side, side), Kind.CAUSAL)
    measured = {(m, n): seconds((m, n)) for m in rows for n in rows if m * n <= most_cells}
    tables = []
    for backward, launch in enumerate(launches):
        flop = Payload(bool(backward), heads, heads, head_dim, head_dim, dtype, Wires()).flop

        def speed(m: int, n: int, backward: int = backward, flop: float = flop) -> float:
            """Return the speed of the measured tile that stands for one of any size: its longer
            side is cut down.
            """
            while m * n > most_cells:
                shorter = rows[rows.index(max(m, n)) - 1]
                m, n = (shorter, n) if m >= n else (m, shorter)
            tile_seconds = measured[m, n][backward]
            return flop * m * n / max(tile_seconds - launches[backward], tile_seconds / 10)

        flops = tuple(tuple(speed(m, n) for n in rows) for m in rows)
        full, causal = (seconds_by_pass[backward] for seconds_by_pass in squares)
        edge = max(causal / full - 0.5, 0.0) * side
        grid = tuple(map(float, rows))
        tables.append(KernelSpeed(dtype, bool(backward), grid, grid, flops, head_dim, launch, edge))
    return tables


def _tile_seconds(
    clock: SharedClock,
    dtype: str,
    heads: tuple[int, int],
    rows: tuple[int, int],
    kind: Kind = Kind.FULL,
) -> tuple[float, float]:
    """Measure forward and backward of one tile.

    Args:
        heads: their number and head_dim.
        rows: queries and keys.
    """
    of, device = getattr(torch, dtype), clock.device

    def random(num: int) -> Tensor:
        return torch.randn(num, 1, *heads, dtype=of, device=device)

    kernel = kernel_for(device.type, of, heads[1], use_of(device, tw.Full(), 1 << 14))
    (m, n), scale = rows, heads[1] ** -0.5
    q, k, v, dout = random(m), random(n), random(n), random(m)
    call = KernelCall(((0, m),), ((0, n),), kind)
    _, lse = kernel.forward(q, k, v, call, scale)
    delta = torch.zeros_like(lse, dtype=accumulator_dtype(of))
    times = max(1, (1 << 18) // (m * n + (1 << 12)))
    return (
        clock.seconds(lambda: kernel.forward(q, k, v, call, scale), REPEATS, times),
        clock.seconds(
            lambda: kernel.backward(q, k, v, dout, lse, delta, call, scale), REPEATS, times
        ),
    )


STEPS = 32
ROWS, HEADS, WIDTH = 16, 4, 32


class Instant(LocalTransport):
    """Rank 0 of a world whose messages have all arrived already."""

    def __init__(self, world_size: int):
        self.world_size = world_size


def overheads(clock: SharedClock, dtype: str, kernels: Sequence[KernelSpeed]) -> dict[str, Any]:
    """Fields of a Machine that can be measured without a second rank; of message_seconds the part
    for handling a message in memory.

    Args:
        kernels: the forward and the backward table of dtype, whose launch is not counted again.
    """
    merge_seconds, merge_bandwidth = _merging(clock)
    per_tile, per_message = _steps(clock, dtype)
    launch = max(per_tile - kernels[0].launch_seconds - merge_seconds, 0.0)
    calls = zip(_calls(clock, dtype), kernels, strict=False)
    return {
        "launch_seconds": launch,
        "message_seconds": per_message,
        "call_seconds": tuple(max(call - k.launch_seconds - launch, 0.0) for call, k in calls),
        "merge_seconds": merge_seconds,
        "merge_bandwidth": merge_bandwidth,
        "pack_bandwidth": _packing(clock),
    }


def _steps(clock: SharedClock, dtype: str) -> tuple[float, float]:
    """Measure a tile, its merge and its kernel's launch included, and a message sent or
    received.
    """
    plans = tw.ring(1), tw.ring(STEPS), tw.all_gather(STEPS)
    alone, chain, gather = (_forward_seconds(clock, plan, dtype) for plan in plans)
    per_message = max(gather - alone, 0.0) / (2 * (STEPS - 1))
    return max(chain - gather, 0.0) / (STEPS - 1), per_message


def _forward_seconds(clock: SharedClock, plan: tw.Plan, dtype: str) -> float:
    """Measure one rank's forward pass on shards of a few rows; messages arrive at once."""
    n = plan.world_size
    q, k, v = _rows(ROWS, dtype, clock.device)
    words = {"plan": plan, "layout": tw.contiguous(n * ROWS, n), "mask": tw.Full()}
    words |= {"group": Instant(n), "validate": "never"}
    return clock.seconds(lambda: tw.attention(q, k, v, **words), 7, 3)


def _rows(num: int, dtype: str, device: torch.device) -> Tensor:
    return torch.randn(3, num, HEADS, WIDTH, dtype=getattr(torch, dtype), device=device)


def _calls(clock: SharedClock, dtype: str) -> tuple[float, float]:
    """Measure a forward and a backward pass of one tile of a few rows, with its kernel's launch."""
    q, k, v = (x.clone().requires_grad_() for x in _rows(4, dtype, clock.device))
    words = {"plan": tw.ring(1), "layout": tw.contiguous(4, 1), "mask": tw.Full()}

    def forward() -> Tensor:
        return tw.attention(q, k, v, **words, group=LocalTransport())

    alone = clock.seconds(forward, 60)
    return alone, max(clock.seconds(lambda: forward().backward(q.detach()), 60) - alone, 0.0)


def _merging(clock: SharedClock) -> tuple[float, float]:
    """Measure one merge, and the bytes per second of the partial that is merged into."""
    small, large = 4, 8192

    def merge(rows: int) -> float:
        a, b = torch.randn(2, rows, 1, 8, 64, device=clock.device)
        lse_a, lse_b = torch.randn(2, rows, 1, 8, device=clock.device)
        return clock.seconds(lambda: merge_into(a, lse_a, b, lse_b), 5, 4)

    seconds = merge(small), merge(large)
    return seconds[0], (large - small) * 8 * 65 * 4 / max(seconds[1] - seconds[0], 1e-9)


def _packing(clock: SharedClock) -> float:
    """Bytes per second of k and v put side by side."""
    k, v = torch.randn(2, 8192, 1, 8, 64, device=clock.device)
    packed = k.new_empty(8192, 1, 2, 8, 64)

    def pack() -> None:
        packed[:, :, 0].copy_(k)
        packed[:, :, 1].copy_(v)

    return 2 * k.nbytes / clock.seconds(pack, 5, 2)
