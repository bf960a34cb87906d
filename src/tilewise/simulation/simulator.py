"""The simulator: how long a plan takes on a machine, by pricing the operations that run it.

    tw.simulate(tw.mesh(64, q_tile=8), work, tw.Machine.preset("h100x8")).forward_seconds

Ranks that are alike are simulated once, unless the machine has slow ranks or jitter. Merging and
packing take time, and transfers slow kernels down, only where the machine says so.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

from tilewise.arguments import checks_arguments
from tilewise.compiler.lowering import lower
from tilewise.compiler.program import Await
from tilewise.compiler.pruning import all_alike, table_cells
from tilewise.compiler.resolved import ResolvedPass
from tilewise.plan.ir import Plan, find_symmetry
from tilewise.plan.payload import Payload
from tilewise.plan.shifts import Symmetry
from tilewise.simulation.disturbance import disturbed
from tilewise.simulation.engine import Deadlock, EventLoop
from tilewise.simulation.machine import Machine
from tilewise.simulation.network import LINKS, Network, blocks
from tilewise.simulation.peak_memory import PassMemory
from tilewise.simulation.priced_programs import EXACT_RANKS, Halves, halves_of, price_programs
from tilewise.simulation.prices import PassCosts
from tilewise.simulation.shared_rows import with_shared_rows
from tilewise.simulation.timeline import (
    RankUse,
    Recording,
    Timeline,
    rank_operations,
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
        plans, work: what was simulated; memory is counted of them when it is asked for.
    """

    forward: Timeline
    backward: Timeline
    symmetries: tuple[Symmetry, Symmetry]
    plans: tuple[Plan, Plan]
    work: Workload

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
        return max(sum(self._bytes(rank).values()) for rank in range(self.world_size))

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
        return PassMemory(passes, backward=False), PassMemory(passes, backward=True)

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
        prune: False: every transfer goes in full, as in libraries that send whole shards whatever
            the mask. Kernel calls still compute only what it allows.
    Raises:
        RuntimeError: if all ranks wait for messages that nobody sends.
        ValueError: if plan, workload and machine do not fit; above 1024 ranks also if none are
            alike, unless exact.
    """
    passes = (
        _simulated(resolved, plan, work, machine, exact, prune)
        for resolved in work.resolve(plan, backward_plan)
    )
    (forward, symmetry), (backward, backward_symmetry) = passes
    return Simulation(
        forward, backward, (symmetry, backward_symmetry), (plan, backward_plan or plan), work
    )


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
    return _simulated(work.resolve(plan)[backward], plan, work, machine, exact)


def _simulated(
    resolved: ResolvedPass,
    plan: Plan,
    work: Workload,
    machine: Machine,
    exact: bool | None,
    prune: bool = True,
) -> tuple[Timeline, Symmetry]:
    """The timeline of a pass, all of its parts, and which rank stands for which."""
    first, *others = resolved.parts
    run = _run(first, machine, exact, prune)
    timeline, symmetry = _joined(run, plan, work, machine, first.payload.backward)
    for part in others:
        following, its_symmetry = _run(part, machine, exact, prune, follows=True)
        if its_symmetry != symmetry:  # ranks that are alike in one part only
            return _simulated(resolved, plan, work, machine, True, prune)
        timeline = timeline.then(following)
    return timeline, symmetry


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
    if plan.replicated_queries or not len(layout.replicated):
        return timeline, symmetry
    return with_shared_rows(timeline, symmetry, layout, work, machine, backward), symmetry


def _run(
    resolved: ResolvedPass,
    machine: Machine,
    exact: bool | None,
    prune: bool = True,
    follows: bool = False,
) -> tuple[Timeline, Symmetry]:
    """A pass's timeline, and which rank stands for which.

    Args:
        follows: another part of the pass ran before.
    """
    plan, mask, layouts, _, payload, _ = resolved
    alike = all_alike(plan, mask, layouts)
    if not prune and not exact:
        exact = False
    symmetry, halves = _relabelled(plan, machine, alike, layouts[0].size(0), exact)
    costs = PassCosts(resolved, machine, None, bool(alike), follows)
    if halves is None and symmetry.members == 1:
        _check_affordable(plan, machine, exact)
        cells = None if alike is False else table_cells(plan, mask, *layouts)
        plan, costs = resolved.pruned if prune else plan, replace(costs, cells=cells)
    templates = sorted({symmetry.template(rank) for rank in symmetry.representatives()})
    programs = {rank: lower(plan, rank, carries=payload.carries) for rank in templates}
    network = Network(machine, symmetry)
    priced, flows = price_programs(plan, programs, costs, network, halves)
    if machine.is_disturbed:
        priced, flows = disturbed(priced, flows, machine)
    loop = EventLoop(priced, flows, network.routes, network.num_resources)
    deadlock = loop.run()
    run_plan = halves.pruned(plan) if halves else plan
    if deadlock:
        raise RuntimeError(_deadlock_text(deadlock, run_plan, payload, len(priced)))
    begins = tuple(map(tuple, loop.begins))
    recording = Recording(run_plan, payload, begins, tuple(loop.messages))
    seconds = max(loop.end_seconds, default=0.0)
    return Timeline(seconds, loop.uses(symmetry.members), recording), symmetry


def _deadlock_text(deadlock: Deadlock, plan: Plan, payload: Payload, num_ranks: int) -> str:
    rank, operation_index, arrived, num_ended = deadlock
    awaited = "its sends"
    if operation_index is not None:
        operation = list(rank_operations(plan, payload, rank))[operation_index]
        assert isinstance(operation, Await)
        transfer = operation.recvs[arrived.index(False)]
        awaited = f"step {operation.step}, {transfer.item} from rank {transfer.src}"
    return (
        f"no rank can go on: rank {rank} waits for {awaited}; {num_ended} of {num_ranks} ranks "
        "have ended"
    )


def _relabelled(
    plan: Plan, machine: Machine, alike: bool | None, size: int, exact: bool | None
) -> tuple[Symmetry, Halves | None]:
    """Return the symmetry to simulate with, and Halves if programs are relabelled for all ranks.

    Args:
        size: rows of a shard.
    """
    n, every_rank = plan.world_size, Symmetry(plan.world_size)
    if alike is None or exact or machine.is_disturbed:
        return every_rank, None
    symmetry = find_symmetry(plan, blocks(machine, n))
    if not alike or (
        symmetry.members > 1 and (exact is False or num_messages(plan) > MOST_MESSAGES)
    ):
        return symmetry, None
    shifts = symmetry.plan_shifts or find_symmetry(plan).plan_shifts
    if shifts:
        halves = halves_of(plan, shifts, size)
        if halves.complete:
            return halves.symmetry, halves
    return every_rank if n <= EXACT_RANKS else symmetry, None


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
