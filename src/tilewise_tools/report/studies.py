"""Strategies that one would try by hand; a report compares its plan with them, and scales both.

A family of strategies is represented by its fastest member, by simulation.
"""

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any, NamedTuple

import tilewise as tw
from tilewise.planning.candidate import PlanRow
from tilewise.planning.staged import staged_all_gather, staged_attention2d
from tilewise.simulation.simulator import Simulation, simulate
from tilewise.strategies.catalog import degrees, near_square

FAMILIES: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "ring": ("ring",),
        "all-gather": ("all_gather",),
        "double ring": ("double_ring",),
        "ulysses": ("ulysses",),
        "mesh": ("mesh",),
        "hybrid": ("ulysses_ring", "ulysses_double_ring", "ulysses_mesh"),
    }
)
"""The methods of each family."""
SMALLEST, LARGEST, FULLY = 8, 1024, 4096
LONGEST_RING = 512  # ranks
MOST_PRUNED = 32  # ranks; masks that prune ranks differently are simulated rank by rank
BANDWIDTHS = (1 / 8, 1 / 2, 1.0, 2.0, 8.0)
SCALED = ("ring", "ulysses", "mesh", "hybrid")  # on other numbers of devices
TRIED = ("ring", "mesh", "hybrid")  # on other bandwidths


class StudyEntry(NamedTuple):
    """A plan of a family and what the simulator says of it."""

    family: str
    plan: tw.Plan
    simulation: Simulation


Placed = tuple[float, StudyEntry]  # the number of devices, or the factor of the bandwidth


class Studies:
    """Cache of simulations: the fastest plan of each strategy family for a workload and a machine.

    On other numbers of devices than world_size, ranks that a causal mask lets send less than others
    are taken to send as much: the time is about 1 % off, and simulated in a hundredth of the time.

    Args:
        full: up to 4096 devices, not 1024.
        progress: called with what is simulated next.
        world_size: devices of the page's plan; every rank counts there, as in its table and card.
        rows: of that table, by their plans' names: these plans have the save and the time of there.
    """

    def __init__(
        self,
        work: tw.Workload,
        machine: tw.Machine,
        *,
        full: bool = False,
        progress: Callable[[str], object] = str,
        world_size: int = 0,
        rows: Mapping[str, PlanRow] = MappingProxyType({}),
    ):
        self.work, self.machine, self.progress = work, machine, progress
        self.largest = FULLY if full else LARGEST
        self.world_size, self.rows = world_size, rows
        self._known: dict[tuple[str, int], StudyEntry | None] = {}

    def best(self, name: str, n: int) -> StudyEntry | None:
        """The fastest member of a family; None if none exists of this size."""
        if (name, n) not in self._known:
            self.progress(f"{name} on {n} devices")
            entries = [
                StudyEntry(name, plan, self._simulated(plan))
                for plan in _members(name, self.work, self.machine, n)
            ]
            fastest = min(entries, key=lambda entry: entry.simulation.seconds, default=None)
            self._known[name, n] = fastest
        return self._known[name, n]

    def _simulated(self, plan: tw.Plan) -> Simulation:
        work = _work_on(self.work, plan.world_size)
        if plan.world_size != self.world_size:
            return simulate(plan, work, self.machine, exact=False)
        row = self.rows.get(plan.name)
        if row is None:
            return simulate(plan, work, self.machine)
        save: Any = row.save
        exact = False if row.sampled else None  # as the search: a page must not say another time
        return simulate(plan, replace(work, save=save), self.machine, exact=exact)

    def compared(self, n: int) -> list[StudyEntry]:
        """The best of each family that exists of this size, in the families' order."""
        names = FAMILIES if self._alike or n <= MOST_PRUNED else TRIED
        return [entry for name in names if (entry := self.best(name, n))]

    @property
    def _alike(self) -> bool:
        return self.work.mask in (tw.Full(), tw.Causal())

    def sizes(self) -> list[int]:
        """Numbers of devices that the workload is simulated on soon: powers of two.

        None where there are fewer than two tokens for each of SMALLEST devices.
        """
        last = min(self.largest if self._alike else MOST_PRUNED, self.work.num_tokens // 2)
        powers = range(int(math.log2(SMALLEST)), int(math.log2(FULLY)) + 1)
        return [1 << power for power in powers if 1 << power <= last]

    def scaled(self) -> list[Placed]:
        """Each size with the best of the families that are tried on all."""
        best_by_size = [(n, self.best(name, n)) for n in self.sizes() for name in SCALED]
        return [(n, entry) for n, entry in best_by_size if entry]

    def rescaled(self, this: StudyEntry, backward_plan: tw.Plan | None) -> list[Placed]:
        """Each bandwidth with a plan, and the best of a few families of its size."""
        tried = [self.best(name, this.plan.world_size) for name in TRIED]
        placed_entries: list[Placed] = []
        for entry in (this, *(entry for entry in tried if entry)):
            self.progress(f"{entry.family} on slower and faster links")
            back = backward_plan if entry is this else None
            for factor in BANDWIDTHS:
                simulation = entry.simulation
                if factor != 1:
                    machine = self.machine.scaled(factor)
                    simulation = simulate(entry.plan, simulation.work, machine, back, exact=False)
                placed_entries.append((factor, entry._replace(simulation=simulation)))
        return sorted(placed_entries, key=lambda simulation: simulation[0])


def _work_on(work: tw.Workload, n: int) -> tw.Workload:
    """Return the same work on another number of devices.

    A layout that is made for one number of devices is replaced by zigzag (Full: contiguous).
    """
    work = replace(work, save=None)
    if isinstance(work.layout, tw.Layout) and work.layout.world_size != n:
        return replace(work, layout="zigzag" if work.mask != tw.Full() else "contiguous")
    return work


def _members(name: str, work: tw.Workload, machine: tw.Machine, n: int) -> Iterator[tw.Plan]:
    if n > LONGEST_RING and name in ("ring", "all-gather", "double ring"):
        return
    ring_size = min(machine.node_size, n - 1) if name == "hybrid" else machine.node_size
    plan_makers = methods(n, work, ring_size)
    yield from (plan_makers[method]() for method in FAMILIES[name] if method in plan_makers)


def methods(
    n: int, work: tw.Workload, ring_size: int, node_size: int | None = None
) -> dict[str, Callable[[], tw.Plan]]:
    """Return the strategies of the papers on n devices by name; each makes its plan when called.

    Args:
        ring_size: devices of a node: the largest degree of heads of a hybrid, which splits heads
            inside a node.
        node_size: devices of the nodes to which gathers send each shard only once; None: ring_size.
    """
    node_size = ring_size if node_size is None else node_size
    square, allowed = near_square(n), degrees(n, work.num_heads, work.num_kv_heads)
    plan_makers: dict[str, Callable[[], tw.Plan]] = {
        "ring": lambda: tw.ring(n),
        "all_gather": lambda: staged_all_gather(n, node_size),
    }
    if n > ring_size and n % ring_size == 0:
        plan_makers["double_ring"] = lambda: tw.double_ring(n // ring_size, ring_size)
    plan_makers["mesh"] = lambda: tw.mesh(n)
    plan_makers["attention2d"] = lambda: staged_attention2d(n, node_size)
    plan_makers["attention2d_overlap"] = lambda: tw.attention2d(*square, overlap=True)
    if n in allowed:
        plan_makers["ulysses"] = lambda: tw.ulysses(n)
    degree = max(d for d in allowed if d <= ring_size)
    inner = n // degree
    if 1 < degree < n:
        plan_makers["ulysses_ring"] = lambda: tw.ulysses(degree, tw.ring(inner))
        if min(near_square(inner)) > 1:
            rings = near_square(inner)
            plan_makers["ulysses_double_ring"] = lambda: tw.ulysses(degree, tw.double_ring(*rings))
        plan_makers["ulysses_mesh"] = lambda: tw.ulysses(degree, tw.mesh(inner))
    return plan_makers
