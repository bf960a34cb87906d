"""Times of repeated runs in a group: clocks agreed on, trials until they are steady."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

import torch

from tilewise.arguments import dtype_name
from tilewise.functional import attention
from tilewise.plan.ir import Plan
from tilewise.simulation.machine import Machine
from tilewise.simulation.simulator import simulate
from tilewise.strategies.ring import ring
from tilewise.tools.calibration.links import Prober
from tilewise.workload import Workload


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


REPEATS = 9
ROUNDS = 3  # of fits: each changes a little what the others explain
LEAST, MOST = 0.25, 16.0
HALVINGS = 12


class TimedTrial(NamedTuple):
    """A call whose time tells one factor."""

    plan: Plan
    work: Workload
    slowed: Callable[[Machine, float], Machine]


def trials(world_size: int, dtype: str) -> tuple[TimedTrial, ...]:
    def work(rows: int, heads: int, head_dim: int) -> Workload:
        num_tokens, name = rows * world_size, dtype_name(dtype)
        return Workload(num_tokens, heads, heads, head_dim, name, layout="contiguous")

    return (
        TimedTrial(ring(world_size), work(16, 4, 32), _overheads_slowed),
        TimedTrial(ring(world_size), work(512, 4, 64), _kernels_slowed),
    )


def run_trial(prober: Prober, trial: TimedTrial) -> float:
    """Median seconds of forward and backward, of the slowest rank; every rank calls it."""
    plan, work, _ = trial
    layout = work.layout_for(plan.world_size)
    shape = layout.size(prober.rank), work.num_heads, work.head_dim
    dtype = getattr(torch, work.dtype)
    q, k, v, dout = torch.randn(4, *shape, device=prober.device).to(dtype).unbind()
    q, k, v = (x.detach().requires_grad_() for x in (q, k, v))
    seconds = []
    for turn in range(REPEATS + 1):
        prober.everyone(0.0)
        start = time.perf_counter()
        out = attention(q, k, v, plan=plan, layout=layout, mask=work.mask, group=prober.transport)
        out.backward(dout)
        prober.finish()
        slowest = max(prober.everyone(time.perf_counter() - start))
        if turn:
            seconds.append(slowest)
    return statistics.median(seconds)


def fitted(machine: Machine, measured: list[tuple[TimedTrial, float]]) -> Machine:
    """The machine, slowed or sped up so that it predicts the trials."""
    for _ in range(ROUNDS):
        for trial, seconds in measured:
            machine = trial.slowed(machine, _factor(machine, trial, seconds))
    return machine


def _factor(machine: Machine, trial: TimedTrial, seconds: float) -> float:
    low, high = math.log(LEAST), math.log(MOST)
    for _ in range(HALVINGS):
        middle = (low + high) / 2
        slowed = trial.slowed(machine, math.exp(middle))
        if simulate(trial.plan, trial.work, slowed).seconds < seconds:
            low = middle
        else:
            high = middle
    return math.exp((low + high) / 2)


def _overheads_slowed(machine: Machine, times: float) -> Machine:
    forward, backward = machine.call_seconds
    return replace(
        machine,
        launch_seconds=machine.launch_seconds * times,
        message_seconds=machine.message_seconds * times,
        carry_seconds=machine.carry_seconds * times,
        agree_seconds=machine.agree_seconds * times,
        call_seconds=(forward * times, backward * times),
    )


def _kernels_slowed(machine: Machine, times: float) -> Machine:
    kernels = (
        replace(kernel, flops=tuple(tuple(x / times for x in row) for row in kernel.flops))
        for kernel in machine.kernels
    )
    return replace(machine, kernels=tuple(kernels))
