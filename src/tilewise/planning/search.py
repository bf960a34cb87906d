"""The planner: the fastest way to run a workload on a cluster that one may not have.

    best = tw.search(work, tw.Machine.preset("h100x8"), world_size=256)[0]
    tw.attention(q, k, v, plan=best.plan, backward_plan=best.backward_plan, layout=best.layout, ...)

Forward and backward are searched apart, since they share nothing but who owns what.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import lru_cache, partial
from typing import NamedTuple

from tilewise.arguments import MOST_RANKS, checks_arguments, listed, require_range, whole_number
from tilewise.plan.builder import gc_paused
from tilewise.plan.ir import Plan
from tilewise.planning.candidate import Candidate, Distances, PlanRow, as_run
from tilewise.planning.candidate_format import with_save
from tilewise.planning.distances import least_bytes, least_seconds
from tilewise.planning.options import options
from tilewise.planning.pairs import Pair, PairSearch
from tilewise.planning.pass_model import PassModel, pad_to_equal_shards
from tilewise.planning.reasons import fewer_wait, reason
from tilewise.simulation.halves import EXACT_RANKS
from tilewise.simulation.machine import Machine
from tilewise.simulation.simulator import Simulation, simulate
from tilewise.wires.wire import AnyWire, wires_of
from tilewise.workload import Workload

QUICK_MESSAGES = 8000
"""Messages that `promising` simulates in each pass, because it must not take long."""


@checks_arguments
def search(
    work: Workload,
    machine: Machine,
    *,
    world_size: int,
    memory_bytes: int | None = None,
    wires: Sequence[AnyWire] = (),
    progress: Callable[[str], None] | None = None,
) -> list[Candidate]:
    """Rank the ways to run a workload, the fastest first; equally fast ones by simplicity.

    The first candidate is the fastest of all options, as simulated. If the budget ends the search
    before the bounds of the remaining options do, it is the fastest of the most promising ones (see
    docs/planner.md). The other candidates are the best plans of other strategies that were
    simulated.

    Args:
        work: its layout is kept, and its save if it has one; save None leaves that to the search.
            With reduction="canonical" all candidates are plans that keep that promise.
        memory_bytes: per rank; None: the machine's.
        wires: further wires to try beside the workload's own. A wire that rounds is never tried
            unless it is named here.
        progress: called with a few words when another part of the search begins.
    Raises:
        ValueError: if nothing fits the memory; it names what needs least, and how much that is.
    """
    wires = listed("wires", wires, "wires")
    report_progress = progress or (lambda text: None)
    candidates = _of_one_wire(work, machine, world_size, memory_bytes, report_progress)
    for wire in wires:
        other_work = replace(work, wire=wire, wire_dtype=None)
        suffix = f" with {wires_of(wire)}"
        candidates += [
            replace(candidate, strategy=candidate.strategy + suffix)
            for candidate in _of_one_wire(
                other_work, machine, world_size, memory_bytes, report_progress
            )
        ]
    if not wires:
        return candidates
    candidates.sort(key=lambda candidate: candidate.seconds)
    return [
        replace(found_candidate, make_rows=partial(_rows, candidates))
        for found_candidate in candidates
    ]


@gc_paused()
def _of_one_wire(
    work: Workload,
    machine: Machine,
    world_size: int,
    memory_bytes: int | None,
    progress: Callable[[str], None],
) -> list[Candidate]:
    """The candidates whose wire is the workload's."""
    whole_number("world_size", world_size, most=MOST_RANKS)
    memory = machine.memory_bytes if memory_bytes is None else memory_bytes
    require_range("memory_bytes", memory)
    layout = work.layout_for(world_size)
    if layout.world_size != world_size:
        raise ValueError(
            f"the workload's layout is for {layout.world_size} ranks, not for {world_size}; "
            "make it for these"
        )
    laid_out = replace(work, layout=layout)
    equal_shards = (
        pad_to_equal_shards(laid_out, world_size) if world_size > EXACT_RANKS else laid_out
    )
    model = PassModel(equal_shards, machine, world_size, backward=False)
    tried_options = options(equal_shards, world_size, machine.node_size)
    passes = PairSearch(model, tried_options, memory, progress=progress)
    pairs = passes.ranked()
    if passes.lacks_memory:
        tried_options = options(equal_shards, world_size, machine.node_size, hold_few=True)
        passes = PairSearch(model, tried_options, memory, progress=progress)
        pairs = passes.ranked()
    ring = passes.ring()
    distances = Distances(
        least_seconds(laid_out, world_size, machine), least_bytes(laid_out, world_size)
    )
    unlike = model.sampled and model.alike is None
    candidates = [
        _candidate(
            pair, laid_out, machine, distances, memory_sampled=unlike and pair is not pairs[0]
        )
        for pair in pairs
    ]
    rows = partial(_rows, candidates)
    padding_note = _padded(equal_shards, laid_out)
    return [
        replace(
            candidate,
            make_rows=rows,
            reason=reason(candidate, candidates, ring and ring.seconds)
            + padding_note
            + fewer_wait(candidate.plan, candidate.backward_plan, memory),
        )
        for candidate in candidates
    ]


def candidate_of(plan: Plan, work: Workload, machine: Machine) -> Candidate:
    """Simulate one plan for both passes, as a candidate beside those of a search.

    Args:
        work: its layout is kept, and its save if it has one; else the plan's own default counts.
    """
    n = plan.world_size
    work = replace(work, layout=work.layout_for(n), save=work.save or plan.default_save)
    found = simulate(plan, work, machine)
    return Candidate(
        work,
        machine,
        plan.name,
        *as_run(plan, work),
        work.layout_for(n),
        work.save or plan.default_save,
        wires_of(work.wire, work.wire_dtype),
        found.forward_seconds,
        found.backward_seconds,
        found.exposed_seconds,
        found.bytes_by_link,
        found.sent_bytes,
        lambda: found.peak_bytes,
        Distances(least_seconds(work, n, machine), least_bytes(work, n)),
        overhead_seconds=found.overhead_seconds,
    )


class PlanPair(NamedTuple):
    """Plans for the two passes, one object if they are equal, and their simulated seconds."""

    plan: Plan
    backward_plan: Plan
    seconds: float


@lru_cache(maxsize=64)
def promising(work: Workload, machine: Machine, world_size: int) -> PlanPair:
    """Choose plans for forward and backward in little time; they are likely among the fastest.

    A few options with the lowest bounds are simulated in each pass. Operands that forward gathered
    are not kept where that takes memory. The choice depends on the arguments alone.
    """
    layout = work.layout_for(world_size)
    padded = pad_to_equal_shards(replace(work, layout=layout), world_size)
    tried_options = options(padded, world_size, machine.node_size, usual_only=True)
    model = PassModel(padded, machine, world_size, backward=False)
    pair = PairSearch(model, tried_options, math.inf, QUICK_MESSAGES, keeping=False).fastest()
    return PlanPair(*_plans(pair), pair.seconds)


def _rows(candidates: list[Candidate]) -> tuple[PlanRow, ...]:
    return tuple(candidate.row for candidate in candidates)


def _padded(padded_work: Workload, work: Workload) -> str:
    if padded_work.num_tokens == work.num_tokens:
        return ""
    return (
        f" Times are those of {padded_work.num_tokens} tokens, the next number that all ranks "
        "share equally."
    )


def _plans(pair: Pair) -> tuple[Plan, Plan]:
    """The plans of the two passes as they run."""
    forward, backward = (
        as_run(x.plan, x.model.work)[x.model.backward] for x in (pair.forward, pair.backward)
    )
    plan = with_save(forward, pair.save)
    is_one = pair.one_plan and backward.name == forward.name
    return plan, plan if is_one else with_save(backward, pair.save)


def _candidate(
    pair: Pair, work: Workload, machine: Machine, distances: Distances, *, memory_sampled: bool
) -> Candidate:
    forward, backward = pair.forward, pair.backward
    plan, backward_plan = _plans(pair)
    simulation = Simulation(
        forward.timeline,
        backward.timeline,
        (forward.symmetry, backward.symmetry),
        (forward.plan, backward.plan),
        forward.model.work,
        machine.device,
    )
    return Candidate(
        work,
        machine,
        pair.strategy,
        plan,
        backward_plan,
        work.layout_for(plan.world_size),
        pair.save,
        wires_of(work.wire, work.wire_dtype),
        simulation.forward_seconds,
        simulation.backward_seconds,
        simulation.exposed_seconds,
        simulation.bytes_by_link,
        simulation.sent_bytes,
        pair.sampled_peak_bytes if memory_sampled else partial(getattr, pair, "peak_bytes"),
        distances,
        sampled=pair.sampled,
        memory_sampled=memory_sampled,
        overhead_seconds=simulation.overhead_seconds,
    )
