"""A machine description measured in a group of processes."""

from __future__ import annotations

import os
from collections.abc import Callable, Generator, Iterator
from dataclasses import replace
from typing import Any, NamedTuple

import torch

from tilewise.simulation.machine import KernelSpeed, Link, Machine, read_machine
from tilewise.tools.calibration.executor import Overheads, overheads
from tilewise.tools.calibration.kernel_speeds import Sizes, kernel_tables, sizes_for
from tilewise.tools.calibration.links import SMALL, Cores, Prober, Usage, available, shared_cores
from tilewise.tools.calibration.trial import SharedClock, fitted, run_trial, trials
from tilewise.tools.processes import gather_yields
from tilewise.transport.agreement import RECORD_BYTES
from tilewise.transport.resolve import transport_for

BULK = 1 << 20
HOST = 64
"""Ranks that a machine measured on one host may be asked about."""


class Settings(NamedTuple):
    """What is measured.

    Attributes:
        node_size: neighbouring ranks of a host; None: all ranks are on one.
        device: whose kernels and memory are measured.
        dtypes: of the kernel tables; the first one's overheads count for all.
        name: of the machine.
        sizes: of the tiles that are timed; None: those that suit the device.
    """

    node_size: int | None = None
    device: str = "cpu"
    dtypes: tuple[str, ...] = ("float32", "bfloat16", "float64")
    name: str = "calibrated"
    sizes: Sizes | None = None


def calibrate(
    group: Any = None, settings: Settings | None = None, tell: Callable[[str], None] | None = None
) -> Machine:
    """Measure this machine; every rank of the group calls it and gets the same Machine.

    Args:
        group: as for attention; two ranks at least, those of a host neighbours.
        tell: called on every rank with what is measured next.
    Raises:
        ValueError: if the group has one rank, or node_size does not divide it.
    """
    steps = calibration(group, settings)
    while True:
        try:
            what = next(steps)
        except StopIteration as end:
            return end.value
        if tell:
            tell(what)


def calibration(
    group: Any = None, settings: Settings | None = None
) -> Generator[str, None, Machine]:
    """As calibrate, step by step: yields what is measured next, returns the Machine."""
    settings, transport = settings or Settings(), transport_for(group)
    n, node_size = transport.world_size, settings.node_size or transport.world_size
    if n < 2:
        raise ValueError(f"a group of {n} rank has no links to measure; use at least 2 ranks")
    if n % node_size and node_size < n:
        raise ValueError(f"node_size ({node_size}) must divide the number of ranks ({n})")
    device = torch.device(settings.device)
    prober, clock = Prober(transport, device), SharedClock(device)
    tables, executor = yield from _own_work(prober, clock, settings)
    yield "cores"
    cores = shared_cores(prober, node_size) if device.type == "cpu" else None
    yield "links"
    inside = prober.link(0, 1) if node_size > 1 else None
    between = prober.link(0, node_size) if node_size < n else None
    yield "messages"
    usages = prober.usage(SMALL, 30), prober.usage(BULK, 6)
    agree = prober.agreement(RECORD_BYTES)
    machine = _machine(settings, tables, executor, (inside, between), cores)
    machine = _with_messages(machine, executor, usages, agree)
    if cores is not None and between is None:
        yield "whole calls"
        found = [(one, run_trial(prober, one)) for one in trials(n, settings.dtypes[0])]
        machine = fitted(machine, found) if prober.rank == 0 else machine
    return read_machine(prober.text(machine.to_toml()), settings.name)


def _own_work(
    prober: Prober, clock: SharedClock, settings: Settings
) -> Generator[str, None, tuple[tuple[KernelSpeed, ...], Overheads]]:
    """Kernels and the executor, on as many ranks as the cores of a host run undisturbed.

    All of those measure, so that caches and memory are as busy as they will be.
    """
    busy = available() if clock.device.type == "cpu" else prober.world_size
    measures, tables = prober.rank < busy, []
    sizes = settings.sizes or sizes_for(clock.device)
    for dtype in settings.dtypes:
        for head_dim in sizes.head_dims:
            yield f"kernels: {dtype}, head_dim {head_dim}"
            tables += kernel_tables(dtype, head_dim, clock, sizes) if measures else []
            prober.everyone(0.0)
    yield "executor"
    executor = overheads(clock, settings.dtypes[0], tables[0]) if measures else None
    prober.everyone(0.0)
    return tuple(tables), executor or Overheads.nothing()


def _machine(
    settings: Settings,
    tables: tuple[KernelSpeed, ...],
    executor: Overheads,
    links: tuple[Link | None, Link | None],
    cores: Cores | None,
) -> Machine:
    """All but what messages keep busy."""
    inside, between = links
    known = inside or between
    assert known is not None
    assumed = "" if between else " One host: between nodes is as inside."
    node_size = settings.node_size or HOST
    threads = torch.get_num_threads()
    launch = [k.launch_seconds for k in tables[:2]] or [0.0, 0.0]
    forward, backward = (
        max(call - own - executor.launch_seconds, 0.0)
        for call, own in zip(executor.call_seconds, launch, strict=True)
    )
    return Machine(
        settings.name,
        node_size,
        known if inside is None else inside,
        between or known,
        tables,
        launch_seconds=executor.launch_seconds,
        call_seconds=(forward, backward),
        merge_seconds=executor.merge_seconds,
        merge_bandwidth=executor.merge_bandwidth,
        pack_bandwidth=executor.pack_bandwidth,
        memory_bytes=_memory_bytes(settings),
        cores=cores and cores.cores,
        core_sharers=cores and cores.sharers,
        source=f"Measured by tilewise calibrate, {threads} thread(s) a rank.{assumed}",
    )


def _with_messages(
    machine: Machine, executor: Overheads, usages: tuple[Usage, Usage], agree: float
) -> Machine:
    """What messages keep busy: ranks that post them, and cores where those are shared."""
    small, bulk = usages
    machine = replace(machine, message_seconds=executor.handling_seconds + small.own / 2)
    if machine.cores is None:
        return replace(machine, agree_seconds=agree)
    per_byte = max(bulk.whole - small.whole, 0.0) / (BULK - SMALL)
    copy_cores = per_byte * machine.inside.bandwidth / 2
    carry = max(small.whole - small.own, 0.0) / (2 * copy_cores) if copy_cores else 0.0
    links = (
        replace(link, latency=max(link.latency - carry, 0.0))
        for link in (machine.inside, machine.between)
    )
    inside, between = links
    return replace(
        machine,
        inside=inside,
        between=between,
        copy_cores=copy_cores,
        carry_seconds=carry,
        agree_seconds=agree,
    )


def _memory_bytes(settings: Settings) -> int:
    if settings.device != "cpu":
        return torch.cuda.get_device_properties(settings.device).total_memory
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


MOST = 64
TIMEOUT_SECONDS = 180.0


def calibrate_here(
    world_size: int | None = None, settings: Settings | None = None
) -> Generator[str, None, Machine]:
    """Measure this host with processes of its own: yields what comes next, returns the Machine.

    Args:
        world_size: processes; None: twice as many as the host has cores, 8 at most, so that it
            is seen what sharing cores does.
    Raises:
        ValueError: if world_size is out of range or no multiple of the settings' node_size.
        RankError: if a process fails.
    """
    settings = settings or Settings()
    ranks = min(8, 2 * max(2, available())) if world_size is None else world_size
    if not 2 <= ranks <= MOST:
        raise ValueError(f"world_size ({ranks}) must be from 2 to {MOST}")
    node_size = settings.node_size
    if node_size is not None and (node_size < 1 or (node_size < ranks and ranks % node_size)):
        raise ValueError(f"node_size ({node_size}) must divide world_size ({ranks}), or be larger")
    rows = gather_yields(ranks, on_rank, (settings,), timeout_seconds=TIMEOUT_SECONDS)
    return (yield from measured(rows, settings.name))


def measured(
    rows: Iterator[tuple[tuple[bool, str], ...]], name: str
) -> Generator[str, None, Machine]:
    """What on_rank yielded on all ranks: yields what comes next, returns the Machine."""
    found = ""
    for is_last, text in (row[0] for row in rows):
        if is_last:
            found = text
        else:
            yield text
    return read_machine(found, name)


def on_rank(rank: int, settings: Settings) -> Iterator[tuple[bool, str]]:
    """(False, what comes next), and in the end (True, the machine's file)."""
    steps = calibration(None, settings)
    while True:
        try:
            what = next(steps)
        except StopIteration as end:
            yield True, end.value.to_toml()
            return
        yield False, what
