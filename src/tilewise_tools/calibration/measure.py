"""A machine description measured in a group of processes, and fitted to whole calls."""

import math
import os
from collections.abc import Callable, Generator, Iterable, Iterator
from dataclasses import replace
from typing import Any, NamedTuple

import torch

from tilewise.arguments import dtype_name, require_range
from tilewise.functional import attention
from tilewise.plan.ir import Plan
from tilewise.simulation.machine import KernelSpeed, Link, Machine, read_machine
from tilewise.simulation.simulator import simulate
from tilewise.strategies.ring import ring
from tilewise.transport.agreement import RECORD_BYTES
from tilewise.transport.processes import gather_yields
from tilewise.transport.resolve import transport_for
from tilewise.workload import Workload
from tilewise_tools.calibration.links import SMALL, Cores, Prober, Usage, available, shared_cores
from tilewise_tools.calibration.own_work import (
    CPU,
    CUDA,
    SharedClock,
    Sizes,
    kernel_tables,
    overheads,
)

BULK = 1 << 20
HOST = 64
"""Ranks that a machine measured on one host may be asked about."""


class Settings(NamedTuple):
    """Settings of a calibration: what is measured.

    Attributes:
        dtypes: of the kernel tables; the first one's overheads count for all.
    """

    node_size: int | None = None  # neighbouring ranks of a host; None: all ranks are on one
    device: str = "cpu"  # whose kernels and memory are measured
    dtypes: tuple[str, ...] = ("float32", "bfloat16", "float64")
    name: str = "calibrated"  # of the machine
    sizes: Sizes | None = None  # of the tiles that are timed; None: those that suit the device


def calibrate(
    group: Any = None,
    settings: Settings | None = None,
    progress: Callable[[str], None] | None = None,
) -> Machine:
    """Measure this machine; every rank of the group calls it and gets the same Machine.

    Args:
        group: as for attention; two ranks at least, those of a host neighbours.
        progress: called on every rank with what is measured next.
    Raises:
        ValueError: if the group has one rank, or node_size does not divide it.
    """
    return last(calibration(group, settings), progress or (lambda _: None))


def last(steps: Iterable[str | Machine], progress: Callable[[str], object]) -> Machine:
    """Run a calibration to its end and return the machine; progress gets each step's name."""
    for step in steps:
        if isinstance(step, Machine):
            return step
        progress(step)
    raise AssertionError("a calibration ends with its machine")


def calibration(group: Any = None, settings: Settings | None = None) -> Iterator[str | Machine]:
    """Calibrate step by step: yield what is measured next, and in the end the Machine."""
    settings, transport = settings or Settings(), transport_for(group)
    n, node_size = transport.world_size, settings.node_size or transport.world_size
    if n < 2:
        raise ValueError(f"a group of {n} rank has no links to measure; use at least 2 ranks")
    if n % node_size and node_size < n:
        raise ValueError(f"node_size ({node_size}) must divide the number of ranks ({n})")
    device = torch.device(settings.device)
    prober = Prober(transport, device)
    tables, executor = yield from _own_work(prober, SharedClock(device), settings)
    yield "cores"
    cores = shared_cores(prober, node_size) if device.type == "cpu" else None
    yield "links"
    inside = prober.link(0, 1) if node_size > 1 else None
    between = prober.link(0, node_size) if node_size < n else None
    yield "messages"
    usages = prober.usage(SMALL, 30), prober.usage(BULK, 6)
    agree = prober.agreement(RECORD_BYTES)
    timed_trials: list[tuple[TimedTrial, float]] = []
    if cores is not None and between is None:
        yield "whole calls"
        timed_trials = [
            (trial, run_trial(prober, trial)) for trial in trials(n, settings.dtypes[0])
        ]
    text = ""
    if prober.rank == 0:
        machine = _machine(settings, tables, executor, inside, between)
        machine = _with_messages(replace(machine, agree_seconds=agree), cores, *usages)
        text = fitted(machine, timed_trials).to_toml()
    yield read_machine(prober.text(text), settings.name)


def _own_work(
    prober: Prober, clock: SharedClock, settings: Settings
) -> Generator[str, None, tuple[list[KernelSpeed], dict[str, Any]]]:
    """Kernels and the executor, on as many ranks as the cores of a host run undisturbed.

    All of those measure, rank 0 among them, so that caches and memory are as busy as they will be.
    """
    busy = available() if clock.device.type == "cpu" else prober.world_size
    tables: list[KernelSpeed] = []
    sizes = settings.sizes or (CUDA if clock.device.type == "cuda" else CPU)
    for dtype in settings.dtypes:
        for head_dim in sizes.head_dims:
            yield f"kernels: {dtype}, head_dim {head_dim}"
            tables += kernel_tables(dtype, head_dim, clock, sizes) if prober.rank < busy else []
            prober.everyone(0.0)
    yield "executor"
    executor = overheads(clock, settings.dtypes[0], tables) if tables else {}
    prober.everyone(0.0)
    return tables, executor


def _machine(
    settings: Settings,
    tables: list[KernelSpeed],
    executor: dict[str, Any],
    inside: Link | None,
    between: Link | None,
) -> Machine:
    """Return the machine without what messages keep busy, which `_with_messages` adds."""
    any_link = inside or between
    assert any_link is not None
    assumed = "" if between else " One host: between nodes is as inside."
    memory_bytes = (
        os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        if settings.device == "cpu"
        else torch.cuda.get_device_properties(settings.device).total_memory
    )
    return Machine(
        settings.name,
        settings.node_size or HOST,
        any_link,
        between or any_link,
        tuple(tables),
        **executor,
        memory_bytes=memory_bytes,
        device="cpu" if settings.device == "cpu" else "cuda",
        source=f"Measured by tilewise calibrate, {torch.get_num_threads()} thread(s) a rank."
        + assumed,
    )


BUSY = 0.25
"""Share of the cores that other work may keep busy before a calibration says so."""


def other_work() -> str:
    """A sentence on other work that the machine does, by its load of the last minute, or ""."""
    load, cores = os.getloadavg()[0], os.cpu_count() or 1
    if load <= BUSY * cores:
        return ""
    return (
        f"Other work kept {load:.1f} of {cores} cores busy, so this is what it left: calibrate "
        "again on an idle machine."
    )


def _with_messages(machine: Machine, cores: Cores | None, small: Usage, bulk: Usage) -> Machine:
    """Return the machine with what messages keep busy: ranks that post them, and cores where those
    are shared.

    What a short message takes of the cores beside that keeps its link busy, for no longer than such
    a message was under way; the rest is the ranks' that post it.
    """
    posting, carry = small.own / 2, 0.0
    if cores is None:
        return replace(machine, message_seconds=machine.message_seconds + posting)
    per_byte = max(bulk.whole - small.whole, 0.0) / (BULK - SMALL)
    copy_cores = per_byte * machine.inside.bandwidth / 2
    beside, links = max(small.whole - small.own, 0.0), (machine.inside, machine.between)
    if copy_cores:
        carry = min(beside / (2 * copy_cores), *(link.latency for link in links))
        posting += beside / 2 - carry * copy_cores
    inside, between = (replace(link, latency=link.latency - carry) for link in links)
    return replace(
        machine,
        message_seconds=machine.message_seconds + posting,
        cores=cores.cores,
        core_sharers=cores.sharers,
        copy_cores=copy_cores,
        carry_seconds=carry,
        inside=inside,
        between=between,
    )


MOST_RANKS = 64
TIMEOUT_SECONDS = 180.0


def calibrate_here(
    world_size: int | None = None, settings: Settings | None = None
) -> Iterator[str | Machine]:
    """Measure this host with processes of its own, step by step as calibration.

    Args:
        world_size: processes; None: twice as many as the host has cores, 8 at most, so that it
            is seen what sharing cores does.
    Raises:
        ValueError: if world_size is out of range or no multiple of the settings' node_size.
        RankError: if a process fails.
    """
    settings = settings or Settings()
    ranks = min(8, 2 * max(2, available())) if world_size is None else world_size
    require_range("world_size", ranks, 2, MOST_RANKS)
    node_size = settings.node_size
    if node_size is not None and (node_size < 1 or (node_size < ranks and ranks % node_size)):
        raise ValueError(f"node_size ({node_size}) must divide world_size ({ranks}), or be larger")
    rows = gather_yields(ranks, on_rank, (settings,), timeout_seconds=TIMEOUT_SECONDS)
    return (steps[0] for steps in rows)


def on_rank(rank: int, settings: Settings) -> Iterator[str | Machine]:
    """calibration in the default group."""
    return calibration(None, settings)


REPEATS = 9
ROUNDS = 3  # of fits: each changes a little what the others explain
LEAST, MOST = 0.25, 16.0
HALVINGS = 12


class TimedTrial(NamedTuple):
    """A call that is timed to fit one factor of the machine."""

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
    operands = torch.randn(4, *shape, device=prober.device).to(getattr(torch, work.dtype))
    q, k, v = (x.detach().requires_grad_() for x in operands[:3])
    words = {"plan": plan, "layout": layout, "mask": work.mask, "group": prober.transport}
    return prober.slowest(lambda: attention(q, k, v, **words).backward(operands[3]), REPEATS)


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
    names = (f"{what}_seconds" for what in ("launch", "message", "carry", "agree"))
    slowed: dict[str, Any] = {name: getattr(machine, name) * times for name in names}
    forward, backward = machine.call_seconds
    return replace(machine, **slowed, call_seconds=(forward * times, backward * times))


def _kernels_slowed(machine: Machine, times: float) -> Machine:
    kernels = (
        replace(kernel, flops=tuple(tuple(x / times for x in row) for row in kernel.flops))
        for kernel in machine.kernels
    )
    return replace(machine, kernels=tuple(kernels))
