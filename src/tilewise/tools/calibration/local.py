"""Calibrating this host: local processes joined by gloo, each with one thread."""

from __future__ import annotations

from collections.abc import Generator, Iterator

from tilewise.simulation.machine import Machine, read_machine
from tilewise.tools.calibration.cores import available
from tilewise.tools.calibration.measure import Settings, calibration
from tilewise.tools.processes import gather_yields

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
