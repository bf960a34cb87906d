"""The simulator: how long a plan takes on a machine, by pricing the operations that run it.

    tw.simulate(tw.mesh(64, q_tile=8), work, tw.Machine.preset("h100x8")).forward_seconds

Ranks that are alike are simulated once, unless the machine has slow ranks or jitter. Merging and
packing take time, and transfers slow kernels down, only where the machine says so.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np

from tilewise.arguments import checks_arguments
from tilewise.compiler.codegen import joined_draft
from tilewise.compiler.draft import Draft
from tilewise.compiler.facts import CallTraits, device_traits
from tilewise.compiler.pruning import all_alike
from tilewise.compiler.resolved import ResolvedPass
from tilewise.compiler.row_moves import share_moves
from tilewise.layouts.layout import Layout
from tilewise.masks.base import Mask
from tilewise.masks.tables import PerHead
from tilewise.plan.builder import gc_paused
from tilewise.plan.ir import Plan, RankStep, find_symmetry
from tilewise.plan.shifts import Symmetry, absolute, relabelled, relative
from tilewise.simulation.disturbance import disturbed
from tilewise.simulation.engine import Deadlock, EventLoop, PricedProgram
from tilewise.simulation.halves import EXACT_RANKS, halves_of
from tilewise.simulation.machine import Machine
from tilewise.simulation.network import LINKS, Network, blocks
from tilewise.simulation.peak_memory import PassMemory
from tilewise.simulation.priced_programs import Model, price_programs
from tilewise.simulation.prices import PassPrices
from tilewise.simulation.shared_rows import with_shared_rows
from tilewise.simulation.timeline import (
    RankUse,
    Recording,
    Timeline,
    trace_text,
)
from tilewise.workload import Workload

MOST_MESSAGES = 1 << 17
"""Up to this many messages of a pass, all ranks are simulated where their programs are few programs
relabelled. Ten thousand messages take about a second."""

MOST_APART = 1024
"""Up to this many ranks that are not alike are simulated without exact=True: more take minutes."""


@dataclass(frozen=True)
class Simulation:
    """Two passes of a plan on a machine.

    Attributes:
        forward, backward: timelines; a rank that stands for others is named alone.
        symmetries: of each pass: which rank stands for which.
        plans, work, device: what was simulated; memory is counted of them when it is asked for.
    """

    forward: Timeline
    backward: Timeline
    symmetries: tuple[Symmetry, Symmetry]
    plans: tuple[Plan, Plan]
    work: Workload
    device: str = "cpu"

    @property
    def forward_seconds(self) -> float:
        return self.forward.seconds

    @property
    def backward_seconds(self) -> float:
        return self.backward.seconds

    @property
    def seconds(self) -> float:
        """Both passes."""
        return self.forward_seconds + self.backward_seconds

    @property
    def exposed_seconds(self) -> float:
        """Seconds of waiting for messages of the rank that waits longest, both passes."""
        return sum(max(use.exposed_seconds for use in p.ranks) for p in self._passes)

    @property
    def overhead_seconds(self) -> float:
        """Seconds of copies, merges, posting and calls of the rank that has most, both passes."""
        return sum(max(use.overhead_seconds for use in p.ranks) for p in self._passes)

    @property
    def compute_seconds(self) -> float:
        """Seconds of kernels of the rank that computes longest, both passes."""
        return sum(max(use.compute_seconds for use in p.ranks) for p in self._passes)

    @property
    def idle_seconds(self) -> float:
        """Seconds after its last instruction of the rank that ends first, both passes."""
        return sum(max(use.idle_seconds for use in p.ranks) for p in self._passes)

    @property
    def bytes_by_link(self) -> dict[str, int]:
        """Bytes that a rank sends at most in both passes over each class of link.

        Another rank may send most inside its node than between nodes; sent_bytes is of one rank.
        """
        links = {
            link for timeline in self._passes for x in timeline.ranks for link in x.bytes_by_link
        }
        uses = [self._bytes(rank) for rank in range(self.world_size)]
        return {x: max(use.get(x, 0) for use in uses) for x in LINKS if x in links}

    @property
    def sent_bytes(self) -> int:
        """Bytes that the rank that sends most sends in both passes."""
        return sum(self.most_sent_by_link.values())

    @property
    def most_sent_by_link(self) -> dict[str, int]:
        """Bytes of the rank that sends most in both passes, by the class of the link."""
        uses = (self._bytes(rank) for rank in range(self.world_size))
        return max(uses, key=lambda use: sum(use.values()))

    @property
    def total_bytes_by_link(self) -> dict[str, int]:
        """Bytes that all ranks send in both passes, by the class of the link."""
        total: dict[str, int] = {}
        for timeline in self._passes:
            for use in timeline.ranks:
                for link, num_bytes in use.bytes_by_link.items():
                    total[link] = total.get(link, 0) + use.members * num_bytes
        return total

    @property
    def peak_bytes(self) -> int:
        """Memory of the rank that needs most, in the pass that needs most."""
        return max(self.pass_peak_bytes)

    @property
    def pass_peak_bytes(self) -> tuple[int, int]:
        """Memory of the rank that needs most, by pass."""
        return self._memory[0].peak_bytes, self._memory[1].peak_bytes

    def rank_peak_bytes(self, rank: int) -> int:
        """Memory of a rank in the pass in which it needs most."""
        return max(memory.of_rank(rank) for memory in self._memory)

    @property
    def world_size(self) -> int:
        return self.symmetries[0].world_size

    def use(self, rank: int) -> tuple[RankUse, RankUse]:
        """Return how a rank spends forward and backward."""
        forward_rank, backward_rank = (
            symmetry.representative(rank) for symmetry in self.symmetries
        )
        forward, backward = self._uses
        return forward[forward_rank], backward[backward_rank]

    def trace(self, path: str | Path) -> None:
        """Write the timeline as JSON that Chrome's tracing page and Perfetto read.

        One process per rank, or per rank that stands for others; backward follows forward.
        """
        Path(path).write_text(trace_text(self._passes), encoding="utf-8")

    @property
    def _passes(self) -> tuple[Timeline, Timeline]:
        return self.forward, self.backward

    @cached_property
    def _memory(self) -> tuple[PassMemory, PassMemory]:
        passes = self.work.resolve(*self.plans)
        forward, backward = (
            PassMemory(passes, backward=backward, device=self.device) for backward in (False, True)
        )
        return forward, backward

    @cached_property
    def _uses(self) -> tuple[dict[int, RankUse], dict[int, RankUse]]:
        forward, backward = ({use.rank: use for use in timeline.ranks} for timeline in self._passes)
        return forward, backward

    def _bytes(self, rank: int) -> dict[str, int]:
        links = [use.bytes_by_link for use in self.use(rank)]
        return {
            x: sum(part.get(x, 0) for part in links) for x in LINKS if any(x in p for p in links)
        }


@checks_arguments
def simulate(
    plan: Plan,
    work: Workload,
    machine: Machine,
    backward_plan: Plan | None = None,
    *,
    exact: bool | None = None,
    prune: bool = True,
) -> Simulation:
    """Run both passes of a plan on a machine that is described, rank r on its device r.

    Args:
        plan: of the forward pass, and of the backward pass if backward_plan is None.
        exact: True: lower and simulate every rank by itself, pruned. None: do so unless ranks are
            alike. Under a causal mask on equal zigzag shards ranks compute alike, but some send
            fewer rows than others. Then all are simulated, with few ranks' programs relabelled; if
            that would be more than 131072 messages in a pass, all are taken to send as much as
            the rank that sends most. False: they are taken to do so at any number of messages.
            Under other masks all are simulated; False: of ranks that trade their shards for heads
            the one with most tokens, in place of all. That is within 0.2 % for documents on
            zigzag_documents, within 2 % under windows.
        prune: False: every transfer goes in full, as in libraries that send whole shards whatever
            the mask. Kernel calls still compute only what it allows.
    Raises:
        RuntimeError: if all ranks wait for messages that nobody sends.
        ValueError: if plan, workload and machine do not fit; above 1024 ranks also if none are
            alike, unless exact.
    """
    passes = work.resolve(plan, backward_plan)
    (forward, symmetry), (backward, backward_symmetry) = (
        _joined(_run(passes, machine, back, exact, prune), plan, work, machine, back)
        for back in (False, True)
    )
    symmetries, plans = (symmetry, backward_symmetry), (plan, backward_plan or plan)
    return Simulation(forward, backward, symmetries, plans, work, machine.device)


def simulate_pass(
    plan: Plan,
    work: Workload,
    machine: Machine,
    backward: bool,
    exact: bool | None = None,
) -> tuple[Timeline, Symmetry]:
    """Simulate one pass alone; return also the symmetry: which rank stands for which.

    A planner chooses the plans of forward and backward apart.
    """
    timeline_and_symmetry = _run(work.resolve(plan), machine, backward, exact)
    return _joined(timeline_and_symmetry, plan, work, machine, backward)


def _joined(
    timeline_and_symmetry: tuple[Timeline, Symmetry],
    plan: Plan,
    work: Workload,
    machine: Machine,
    backward: bool,
) -> tuple[Timeline, Symmetry]:
    """Add to a pass the exchange of rows of a joint layout."""
    timeline, symmetry = timeline_and_symmetry
    layout = work.layout_for(plan.world_size)
    if share_moves(plan, layout) is None:
        return timeline, symmetry
    return with_shared_rows(timeline, symmetry, layout, work, machine, backward), symmetry


def _run(
    passes: tuple[ResolvedPass, ResolvedPass],
    machine: Machine,
    backward: bool,
    exact: bool | None,
    prune: bool = True,
) -> tuple[Timeline, Symmetry]:
    """A pass's timeline, and which rank stands for which."""
    resolved = passes[backward]
    if not prune and not exact:
        exact = False
    symmetry, run_plan, models = _simulated(resolved, machine, exact, prune)
    ours = passes
    call = CallTraits(prune=run_plan is None)
    if run_plan is not None:
        forward_pass, backward_pass = (one._replace(plan=run_plan) for one in passes)
        ours = forward_pass, backward_pass

    traits = device_traits(machine.device)

    def draft_of(rank: int) -> Draft:
        return joined_draft(ours, rank, backward=backward, call=call, traits=traits)

    network = Network(machine, symmetry)
    prices = PassPrices(resolved, machine)
    seconds = machine.call_seconds[backward]
    if not backward:
        seconds += machine.agree_seconds * (resolved.plan.world_size - 1)
    with gc_paused():
        programs, flows = price_programs(models, draft_of, prices, network, seconds)
    if machine.is_disturbed:
        programs, flows = disturbed(programs, flows, machine)
    loop = EventLoop(programs, flows, network.routes, network.num_resources)
    deadlock = loop.run()
    if deadlock:
        raise RuntimeError(_deadlock_text(deadlock, programs))
    operations = tuple(program.operations for program in programs)
    begins, messages = tuple(map(tuple, loop.begins)), tuple(loop.messages)
    others = frozenset(rank for rank, model in models.items() if model.rank != rank)
    labels = _labels(draft_of) if others else None
    recording = Recording(operations, begins, messages, others, labels)
    seconds = max(loop.end_seconds, default=0.0)
    return Timeline(seconds, loop.uses(symmetry.members), recording), symmetry


def _labels(draft_of: Callable[[int], Draft]) -> Callable[[int], list[str]]:
    """The labels of a rank's operations, for those that were priced by another rank's."""

    def labels(rank: int) -> list[str]:
        return [op.label for op in draft_of(rank).ops]

    return labels


def _deadlock_text(deadlock: Deadlock, programs: tuple[PricedProgram, ...]) -> str:
    rank, operation_index, _, num_ended = deadlock
    awaited = "for its sends"
    if operation_index is not None:
        (mine,) = [program for program in programs if program.rank == rank]
        label = mine.operations[operation_index].label
        awaited = label.replace("wait", "for", 1).replace("<", " from rank ")
    return (
        f"no rank can go on: rank {rank} waits {awaited}; {num_ended} of {len(programs)} ranks "
        "have ended"
    )


def _simulated(
    resolved: ResolvedPass, machine: Machine, exact: bool | None, prune: bool
) -> tuple[Symmetry, Plan | None, dict[int, Model]]:
    """Decide which ranks are simulated.

    Returns:
        the symmetry: each simulated rank stands for those that are like it; the plan that all run,
        or None if each part runs its own, pruned; and for each rank the model by which it is
        priced.
    """
    plan, mask, layouts, *_ = resolved
    n, alike = plan.world_size, all_alike(plan, mask, layouts)
    every_rank = Symmetry(n)
    if resolved.then is not None:
        _check_affordable(plan, machine, exact)
        return every_rank, None, _own(every_rank)
    if alike is not None and not exact and not machine.is_disturbed:
        symmetry = find_symmetry(plan, blocks(machine, n))
        several = symmetry.members > 1
        in_place_of_all = _busiest(symmetry, plan) if alike else _own(symmetry)
        if several and (not alike or exact is False or num_messages(plan) > MOST_MESSAGES):
            return symmetry, plan, in_place_of_all
        shifts = symmetry.plan_shifts or find_symmetry(plan).plan_shifts
        if alike and shifts and prune:
            halves = halves_of(plan, shifts, layouts[0].size(0))
            if halves.complete and n <= EXACT_RANKS:
                return every_rank, halves.pruned(plan), _own(every_rank)
            if halves.complete:
                model_ranks = halves.models(plan)
                symmetry = _among_models(symmetry, model_ranks)
                models = {
                    rank: Model(model_ranks[rank], relabelled(model_ranks[rank], rank, shifts))
                    for rank in symmetry.representatives()
                }
                return symmetry, halves.pruned(plan), models
        if n > EXACT_RANKS and several:
            return symmetry, plan, in_place_of_all
    if alike is None and exact is False and not machine.is_disturbed:
        teams = _head_teams(plan, mask, machine)
        if teams.members > 1:
            return teams, resolved.pruned if prune else plan, _largest(teams, layouts[0])
    _check_affordable(plan, machine, exact)
    return every_rank, resolved.pruned if prune else plan, _own(every_rank)


def _head_teams(plan: Plan, mask: Mask, machine: Machine) -> Symmetry:
    """Return the symmetry of ranks that trade their shards for heads.

    They compute the same tiles, whatever the mask, if all heads have the same one. What they send
    may differ a little: their shards are not equally long, and where only a part of one shard
    travels on, its owner can send it before the others have it.
    """
    if plan.traits.head_split is None or isinstance(mask, PerHead):
        return Symmetry(plan.world_size)
    degree, _ = plan.traits.head_split
    symmetry = find_symmetry(plan, blocks(machine, plan.world_size))
    plan_shifts, shifts = (
        tuple(shift for shift in of_all if shift.span <= degree)
        for of_all in (symmetry.plan_shifts, symmetry.shifts)
    )
    return symmetry._replace(plan_shifts=plan_shifts, shifts=shifts)


def _largest(teams: Symmetry, layout: Layout) -> dict[int, Model]:
    """Return the model by which each simulated rank is priced: of its team the one that owns most
    tokens, and so trades most.
    """
    team_ranks: dict[int, list[int]] = {}
    for rank in range(teams.world_size):
        team_ranks.setdefault(teams.representative(rank), []).append(rank)
    models: dict[int, Model] = {}
    for rank, ranks in team_ranks.items():
        largest = max(ranks, key=layout.size)
        models[rank] = Model(largest, relabelled(largest, rank, teams.plan_shifts))
    return models


def _among_models(symmetry: Symmetry, model_ranks: Mapping[int, int]) -> Symmetry:
    """Return the symmetry of the shifts whose ranks all have one model.

    Under a causal mask these are the ranks of a team that splits heads: they send the same rows.
    """
    ranks = np.arange(symmetry.world_size)
    models = np.array([model_ranks[rank] for rank in ranks.tolist()])
    kept = (x for x in symmetry.shifts if (models[relative(ranks, ranks, (x,))] == models).all())
    return symmetry._replace(shifts=tuple(kept))


def _own(symmetry: Symmetry) -> dict[int, Model]:
    """Return the model by which each simulated rank is priced.

    In small worlds it is the rank itself, in others the rank from which it is relabelled.
    """
    ranks, shifts = symmetry.representatives(), symmetry.plan_shifts
    if symmetry.world_size <= EXACT_RANKS or not shifts:
        return {rank: Model(rank) for rank in ranks}
    templates = {rank: symmetry.template(rank) for rank in ranks}
    return {rank: Model(x, relabelled(x, rank, shifts)) for rank, x in templates.items()}


def _busiest(symmetry: Symmetry, plan: Plan) -> dict[int, Model]:
    """Return the model by which each simulated rank is priced, under a causal mask on zigzag
    tokens.

    Of the first and the last rank that are relabelled from one template, it is the one whose
    kernels take longer.

    A shard pair is half its queries by all of its keys where the query shard is the lower one, and
    all of its queries by half its keys elsewhere. The same pairs take longer in the first form,
    whose queries fill less of a device.
    """
    shifts = symmetry.plan_shifts
    if not shifts:
        return _own(symmetry)
    shift_all = sum((shift.radix - 1) * shift.place for shift in shifts)
    busiest: dict[int, int] = {}
    for template in {symmetry.template(rank) for rank in symmetry.representatives()}:
        last = absolute(template, template + shift_all, shifts)
        pair = template, last
        busiest[template] = max(pair, key=lambda rank: lower_queries(plan.rank_steps(rank)))
    models = {rank: busiest[symmetry.template(rank)] for rank in symmetry.representatives()}
    return {rank: Model(x, relabelled(x, rank, shifts)) for rank, x in models.items()}


def lower_queries(steps: Iterable[RankStep]) -> int:
    """Count a rank's shard pairs whose query shard has a lower number than the KV shard."""
    tiles = (tile for step in steps for tile in step.tiles)
    return sum(q < kv for tile in tiles for q in tile.q for kv in tile.kv)


def num_messages(plan: Plan) -> int:
    """Messages of a pass, if all ranks send as many as the first."""
    first_rank_messages = sum(
        len({(x.dst, *x.item[:2]) for x in step.sends}) for step in plan.rank_steps(0)
    )
    return plan.world_size * first_rank_messages


def _check_affordable(plan: Plan, machine: Machine, exact: bool | None) -> None:
    if plan.world_size > MOST_APART and not exact:
        raise ValueError(
            f"no ranks of {plan.name} are alike on nodes of {machine.node_size}, and "
            f"{plan.world_size} are more than the {MOST_APART} that are simulated one by one "
            "unasked: take another shape, a full or causal mask on equal zigzag shards and whole "
            "nodes, or pass exact=True and wait"
        )
