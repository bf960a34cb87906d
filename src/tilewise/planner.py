"""The planner: the fastest way to run a workload on a cluster that one may not have.

    best = tw.search(work, tw.Machine.preset("h100x8"), world_size=256)[0]
    tw.attention(q, k, v, plan=best.plan, backward_plan=best.backward_plan, layout=best.layout, ...)

Forward and backward are searched apart, since they share nothing but who owns what.
"""

from __future__ import annotations

from dataclasses import replace

from tilewise.machine import Machine
from tilewise.planning.bounds import least_seconds
from tilewise.planning.candidate import Candidate, Distances
from tilewise.planning.least_bytes import least_bytes
from tilewise.planning.options import options
from tilewise.planning.pairs import Pair, Pairs
from tilewise.planning.reasons import reason
from tilewise.planning.stored import with_save
from tilewise.simulator import Simulation
from tilewise.workload import Workload


def search(
    work: Workload,
    machine: Machine,
    *,
    world_size: int,
    memory_bytes: int | None = None,
) -> list[Candidate]:
    """Rank the ways to run a workload, the fastest first; equally fast ones by simplicity.

    The first is the fastest of all options in both passes, simulated; the others are the best of
    the other strategies, as far as they were needed to know that.

    Args:
        work: its layout is kept, and its save if it has one; save None leaves that to the search.
        memory_bytes: per rank; None: the machine's.
    Raises:
        ValueError: if nothing fits the memory; it names what needs least, and how much that is.
    """
    if world_size < 1:
        raise ValueError(f"world_size ({world_size}) must be at least 1")
    memory = machine.memory_bytes if memory_bytes is None else memory_bytes
    if memory < 1:
        raise ValueError(f"memory_bytes ({memory}) must be at least 1")
    layout = work.layout_for(world_size)
    if layout.world_size != world_size:
        raise ValueError(
            f"the workload's layout is for {layout.world_size} ranks, not for {world_size}; "
            "make it for these"
        )
    fixed = replace(work, layout=layout)
    found = Pairs(fixed, machine, options(fixed, world_size, machine.node_size), memory)
    pairs, ring = found.ranked(), found.ring_seconds()
    distances = Distances(least_seconds(fixed, world_size, machine), least_bytes(fixed, world_size))
    candidates = [_candidate(pair, fixed, machine, distances) for pair in pairs]
    rows = tuple(candidate.row for candidate in candidates)
    return [
        replace(candidate, rows=rows, reason=reason(candidate.row, rows, ring))
        for candidate in candidates
    ]


def _candidate(pair: Pair, work: Workload, machine: Machine, distances: Distances) -> Candidate:
    forward, backward = pair.forward, pair.backward
    plan = with_save(forward.plan, pair.save)
    other = plan if backward.option == forward.option else with_save(backward.plan, pair.save)
    found = Simulation(forward.timeline, backward.timeline, (forward.symmetry, backward.symmetry))
    return Candidate(
        work,
        machine,
        pair.strategy,
        plan,
        other,
        work.layout_for(plan.world_size),
        pair.save,
        work.wire_dtype or work.dtype,
        found.forward_seconds,
        found.backward_seconds,
        found.exposed_seconds,
        found.bytes_by_link,
        found.peak_bytes,
        distances,
    )
