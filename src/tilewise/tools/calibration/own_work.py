"""What one rank's own work takes: kernels by tile size, and calls, steps, merging and packing."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

import tilewise as tw
from tilewise.execution.allocator import FreshAllocator
from tilewise.execution.packing import Packing
from tilewise.kernels.merge import merge_into
from tilewise.kernels.protocol import accumulator_dtype
from tilewise.kernels.registry import kernel_for, use_of
from tilewise.plan.payload import Payload
from tilewise.simulation.machine import KernelSpeed
from tilewise.tiles.calls import KernelCall, Kind
from tilewise.transport.protocol import Message
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
        """Of one call: the median over repeats of so many calls each, once warm."""
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
    """What is tabled."""

    rows: tuple[int, ...]  # numbers of queries and of keys
    head_dims: tuple[int, ...]  # whose tables the time of others is interpolated between
    num_heads: int  # that run together
    most: int  # pairs of rows; larger tiles count as fast as the nearest within


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
        heads = sizes.num_heads
        flop = Payload(bool(backward), heads, heads, head_dim, head_dim, dtype, Wires()).flop
        speeds = {
            (m, n): flop * m * n / max(seconds[backward] - launch, seconds[backward] / 10)
            for (m, n), seconds in measured.items()
        }
        flops = tuple(tuple(speeds[_within(m, n, rows, sizes.most)] for n in rows) for m in rows)
        grid = tuple(map(float, rows))
        edge = edges[backward]
        tables.append(KernelSpeed(dtype, bool(backward), grid, grid, flops, head_dim, launch, edge))
    return tables


class _Bench:
    """Times one kernel on tiles of any size."""

    def __init__(self, dtype: str, head_dim: int, clock: SharedClock, num_heads: int):
        self.dtype, self.head_dim = getattr(torch, dtype), head_dim
        self.clock, self.num_heads = clock, num_heads
        use = use_of(clock.device, tw.Full(), 1 << 14)
        self.kernel: tw.Kernel = kernel_for(clock.device.type, self.dtype, head_dim, use)

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


STEPS = 32
ROWS, HEADS, WIDTH = 16, 4, 32


class Overheads(NamedTuple):
    """Seconds and bytes per second, named as in Machine; as given, of a rank that does not measure.

    Attributes:
        handling_seconds: of a message in memory.
    """

    launch_seconds: float = 0.0
    handling_seconds: float = 0.0
    call_seconds: tuple[float, float] = (0.0, 0.0)
    merge_seconds: float = 0.0
    merge_bandwidth: float = math.inf
    pack_bandwidth: float = math.inf


class Instant:
    """A transport on which every message has arrived already."""

    rank, node_size, bytes_sent, messages_sent = 0, None, 0, 0

    def __init__(self, world_size: int, receives_ahead: int):
        self.world_size, self.receives_ahead = world_size, receives_ahead

    def exchange(
        self, sends: Sequence[Message], recvs: Sequence[Message], lane: int = 0
    ) -> Instant:
        return self

    def gather_records(self, record: Tensor) -> list[Tensor]:
        return [record] * self.world_size

    def wait(self) -> None:
        return

    finish = wait


def overheads(clock: SharedClock, dtype: str, kernel: KernelSpeed) -> Overheads:
    """All of them, measured without a second rank.

    Args:
        kernel: the forward table of dtype, whose launch is not counted again.
    """
    merge_seconds, merge_bandwidth = _merging(clock)
    per_tile, per_message = _steps(clock, dtype)
    return Overheads(
        max(per_tile - kernel.launch_seconds - merge_seconds, 0.0),
        per_message,
        _calls(clock, dtype),
        merge_seconds,
        merge_bandwidth,
        _packing(clock),
    )


def _steps(clock: SharedClock, dtype: str) -> tuple[float, float]:
    """Of a tile, its merge and its kernel's launch included, and of a message sent or received."""
    plans = tw.ring(1), tw.ring(STEPS), tw.all_gather(STEPS)
    alone, chain, gather = (_forward_seconds(clock, plan, dtype) for plan in plans)
    per_message = max(gather - alone, 0.0) / (2 * (STEPS - 1))
    return max(chain - gather, 0.0) / (STEPS - 1), per_message


def _forward_seconds(clock: SharedClock, plan: tw.Plan, dtype: str) -> float:
    """Of one rank's forward pass on shards of a few rows, messages arriving at once."""
    n = plan.world_size
    q, k, v = (x[:, 0] for x in _rows(ROWS, dtype, clock.device))
    layout, transport = tw.contiguous(n * ROWS, n), Instant(n, 1)

    def once() -> object:
        words = {"plan": plan, "layout": layout, "mask": tw.Full(), "group": transport}
        return tw.attention(q, k, v, **words, validate="never")

    return clock.seconds(once, 7, 3)


def _rows(num: int, dtype: str, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    shape = 3, num, 1, HEADS, WIDTH
    q, k, v = torch.randn(shape, dtype=getattr(torch, dtype), device=device)
    return q, k, v


def _calls(clock: SharedClock, dtype: str) -> tuple[float, float]:
    """Of a forward and a backward pass of one tile of a few rows, with its kernel's launch."""
    q, k, v = (x[:, 0].clone().requires_grad_() for x in _rows(4, dtype, clock.device))
    plan, layout, alone = tw.ring(1), tw.contiguous(4, 1), LocalTransport()
    dout = torch.randn_like(q)
    forward, backward = [], []
    now = time.thread_time if clock.by_cpu else time.perf_counter
    for _ in range(60):
        start = now()
        out = tw.attention(q, k, v, plan=plan, layout=layout, mask=tw.Full(), group=alone)
        middle = now()
        out.backward(dout)
        forward.append(middle - start)
        backward.append(now() - middle)
    first, second = (sorted(x)[len(x) // 2] for x in (forward, backward))
    return first, second


def _merging(clock: SharedClock) -> tuple[float, float]:
    """Of one merge, and bytes per second of the partial that is merged into."""
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
    payload = Payload(False, 8, 8, 64, 64, "float32", Wires())
    packing = Packing(payload.row_format(tw.Side.KV, tw.Role.OPERAND), 8)
    allocator, item = FreshAllocator(k.device), tw.operand(tw.Side.KV, 0)
    return 2 * k.nbytes / clock.seconds(lambda: packing.pack([k, v], allocator, item), 5, 2)
