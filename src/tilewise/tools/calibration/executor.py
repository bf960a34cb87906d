"""What the library's own code takes beside kernels and links: calls, steps, merging, packing."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from tilewise.execution.allocator import FreshAllocator
from tilewise.execution.packing import Packing
from tilewise.functional import attention
from tilewise.kernels.merge import merge_into
from tilewise.layouts.layout import contiguous
from tilewise.masks.base import Full
from tilewise.plan.ir import Plan
from tilewise.plan.payload import Field
from tilewise.simulation.machine import KernelSpeed
from tilewise.strategies.all_gather import all_gather
from tilewise.strategies.ring import ring
from tilewise.tools.calibration.trial import SharedClock
from tilewise.transport.protocol import Message
from tilewise.transport.resolve import LocalTransport

STEPS = 32
ROWS, HEADS, WIDTH = 16, 4, 32


class Overheads(NamedTuple):
    """Seconds and bytes per second, named as in Machine; handling: of a message in memory."""

    launch_seconds: float
    handling_seconds: float
    call_seconds: tuple[float, float]
    merge_seconds: float
    merge_bandwidth: float
    pack_bandwidth: float

    @classmethod
    def nothing(cls) -> Overheads:
        """Of a rank that does not measure."""
        return cls(0.0, 0.0, (0.0, 0.0), 0.0, math.inf, math.inf)


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
    alone, chain, gather = (
        _forward_seconds(clock, plan, dtype) for plan in (ring(1), ring(STEPS), all_gather(STEPS))
    )
    per_message = max(gather - alone, 0.0) / (2 * (STEPS - 1))
    return max(chain - gather, 0.0) / (STEPS - 1), per_message


def _forward_seconds(clock: SharedClock, plan: Plan, dtype: str) -> float:
    """Of one rank's forward pass on shards of a few rows, messages arriving at once."""
    n = plan.world_size
    q, k, v = (x[:, 0] for x in _rows(ROWS, dtype, clock.device))
    layout, transport = contiguous(n * ROWS, n), Instant(n, 1)

    def once() -> object:
        words = {"plan": plan, "layout": layout, "mask": Full(), "group": transport}
        return attention(q, k, v, **words, validate="never")

    return clock.seconds(once, 7, 3)


def _rows(num: int, dtype: str, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    shape = 3, num, 1, HEADS, WIDTH
    q, k, v = torch.randn(shape, dtype=getattr(torch, dtype), device=device)
    return q, k, v


def _calls(clock: SharedClock, dtype: str) -> tuple[float, float]:
    """Of a forward and a backward pass of one tile of a few rows, with its kernel's launch."""
    q, k, v = (x[:, 0].clone().requires_grad_() for x in _rows(4, dtype, clock.device))
    plan, layout, alone = ring(1), contiguous(4, 1), LocalTransport()
    dout = torch.randn_like(q)
    forward, backward = [], []
    now = time.thread_time if clock.by_cpu else time.perf_counter
    for _ in range(60):
        start = now()
        out = attention(q, k, v, plan=plan, layout=layout, mask=Full(), group=alone)
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
    packing = Packing([Field(name, 64, "float32") for name in ("k", "v")], 8)
    lender = FreshAllocator(k.device)
    return 2 * k.nbytes / clock.seconds(lambda: packing.pack([k, v], lender), 5, 2)
