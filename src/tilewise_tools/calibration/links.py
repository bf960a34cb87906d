"""Bandwidth and latency of the links between ranks, measured."""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from tilewise.kernels.registry import kernel_for
from tilewise.simulation.machine import Link
from tilewise.tiles.calls import KernelCall, Kind
from tilewise.transport.protocol import Message, Transport

ROWS, HEADS, WIDTH, TIMES = 512, 4, 64, 24
SLOWER = 1.2  # so much slower beside other nodes' ranks: they share its cores


class Cores(NamedTuple):
    """Cores that copy messages, as in Machine; sharers None: a node's devices."""

    cores: float
    sharers: int | None


def available() -> int:
    """Ranks that this host can run at full speed, each with as many threads as this process."""
    return max(1, len(os.sched_getaffinity(0)) // torch.get_num_threads())


def shared_cores(prober: Prober, node_size: int) -> Cores:
    """Measure the cores that CPU ranks share: one rank alone, then a node's together, then all."""
    n, local = prober.world_size, min(node_size, prober.world_size)
    alone, node, everybody = (_together(prober, count) for count in (1, local, n))
    if everybody > SLOWER * node:
        return Cores(n * alone / everybody, n)
    if node > SLOWER * alone:
        return Cores(local * alone / node, None)
    return Cores(float(max(available(), local)), None)


def _together(prober: Prober, ranks: int) -> float:
    """Seconds of the same kernels on several ranks at once, of the slowest rank."""
    q, k, v = torch.randn(3, ROWS, 1, HEADS, WIDTH)
    kernel = kernel_for("cpu", q.dtype, WIDTH)
    call = KernelCall(((0, ROWS),), ((0, ROWS),), Kind.FULL)

    def work() -> None:
        for _ in range(TIMES if prober.rank < ranks else 0):
            kernel.forward(q, k, v, call, 0.1)

    return prober.slowest(work, 1)


SMALL = 1024
FIRST, LARGEST = 1 << 17, 1 << 22
LONG = 0.02  # seconds: a message that takes longer is on a slow link
SLOW = 4  # a slow link's messages are this much longer again: NICs let short bursts pass faster
TURNS = 40


class Usage(NamedTuple):
    """Processor seconds of one rank per message, one sent and one received."""

    own: float  # of the thread that posts and waits
    whole: float  # of the process, its transport's threads included


class Prober:
    """Messages between the ranks of one transport; every rank calls the same methods alike.

    Args:
        device: whose memory travels.
    """

    def __init__(self, transport: Transport, device: torch.device):
        self.transport, self.device = transport, device
        self.rank, self.world_size = transport.rank, transport.world_size

    def everyone(self, value: float) -> list[float]:
        """Every rank's number, by rank."""
        record = torch.tensor([value], dtype=torch.float64).view(torch.uint8)
        records = self.transport.gather_records(record)
        return [float(x.view(torch.float64)) for x in records]

    def text(self, text: str) -> str:
        """Rank 0's text, on all ranks."""
        record = torch.tensor(list(text.encode()), dtype=torch.uint8)
        size = int(self.everyone(len(record))[0])
        if self.rank:
            record = torch.zeros(size, dtype=torch.uint8)
        return bytes(self.transport.gather_records(record)[0].tolist()).decode()

    def link(self, a: int, b: int) -> Link:
        """Bandwidth and one-way latency between two ranks.

        Of a slow link what twice the bytes take longer: a shaped NIC sends its first bytes at once.
        """
        latency, size = self._one_way(a, b, SMALL, TURNS), FIRST
        while size < LARGEST:
            if self._one_way(a, b, size, 3) > LONG:
                long = SLOW * size
                longer_seconds = self._one_way(a, b, 2 * long, 4) - self._one_way(a, b, long, 4)
                if longer_seconds > SLOW / 2 * LONG:  # else one message was held up
                    return Link(long / longer_seconds, latency)
            size *= 2
        seconds = self._one_way(a, b, size, 10)
        return Link(size / max(seconds - latency, seconds / 10), latency)

    def slowest(self, work: Callable[[], object], turns: int) -> float:
        """Median seconds of work that all ranks begin together, of the slowest rank, once warm."""
        seconds = []
        for _ in range(turns + 1):
            self.everyone(0.0)
            start = time.perf_counter()
            work()
            self.finish()
            seconds.append(max(self.everyone(time.perf_counter() - start)))
        return statistics.median(seconds[1:])

    def usage(self, size: int, rounds: int) -> Usage:
        """Measure the links while everybody sends messages of a size to all others at once."""
        peers = [peer for peer in range(self.world_size) if peer != self.rank]
        sends, recvs = ([self._message(size, peer) for peer in peers] for _ in range(2))

        def exchange() -> None:
            self.transport.exchange(sends, recvs).wait()
            self.transport.finish()

        return self._usage(exchange, rounds)

    def agreement(self, record_bytes: int) -> float:
        """Processor seconds of one rank per other rank, for comparing records."""
        record = torch.zeros(record_bytes, dtype=torch.uint8)
        return self._usage(lambda: self.transport.gather_records(record), TURNS).whole

    def _usage(self, work: Callable[[], object], rounds: int) -> Usage:
        """Return the processor seconds of work() per peer, after one warm-up run; the median over
        ranks.
        """
        work()
        times: list[tuple[float, float]] = []
        for _ in range(rounds):
            thread_start, process_start = time.thread_time(), time.process_time()
            work()
            times.append((time.thread_time() - thread_start, time.process_time() - process_start))
        typical = (statistics.median(x) / (self.world_size - 1) for x in zip(*times, strict=True))
        return Usage(*(statistics.median(self.everyone(x)) for x in typical))

    def _one_way(self, a: int, b: int, size: int, turns: int) -> float:
        """Half the median seconds of a message there and back, as rank a sees it."""
        seconds, peer = [0.0], a + b - self.rank
        out, back = (self._message(size, peer) for _ in range(2))
        for _ in range(turns + 2 if self.rank in (a, b) else 0):
            start = time.perf_counter()
            if self.rank < peer:
                self.transport.exchange((out,), ())
            self.transport.exchange((), (back,)).wait()
            if self.rank > peer:
                self.transport.exchange((out,), ())
            self.finish()
            seconds.append(time.perf_counter() - start)
        self.transport.finish()
        return self.everyone(statistics.median(seconds[3:] or seconds))[a] / 2

    def _message(self, size: int, peer: int) -> Message:
        content: Tensor = torch.zeros(size, dtype=torch.uint8, device=self.device)
        return Message(content, peer, "calibration")

    def finish(self) -> None:
        """Wait for the device."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
