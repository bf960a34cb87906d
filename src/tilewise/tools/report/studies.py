"""What the page compares a plan with: the strategies one would try by hand, on other clusters too.

Each family of strategies has a few members of every size; the fastest by simulation stands for it.
"""

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import NamedTuple

from tilewise.layouts.layout import Layout
from tilewise.masks.base import Causal, Full
from tilewise.plan.ir import Plan
from tilewise.simulation.machine import Machine
from tilewise.simulation.simulator import Simulation, simulate
from tilewise.strategies.all_gather import all_gather
from tilewise.strategies.catalog import degrees, tile_sizes
from tilewise.strategies.double_ring import double_ring
from tilewise.strategies.mesh import mesh
from tilewise.strategies.ring import ring
from tilewise.strategies.ulysses import ulysses
from tilewise.workload import Workload

FAMILIES = ("ring", "all-gather", "double ring", "ulysses", "mesh", "hybrid")
SMALLEST, LARGEST = 8, 4096
LONGEST_RING = 512  # ranks; longer ones take long to simulate and gain nothing
MOST_PRUNED = 32  # ranks; masks that prune ranks differently are simulated rank by rank
TRIED_EACH, LARGE = 2, 1024  # tile shapes and degrees tried of a size; of more ranks one each
BANDWIDTHS = (1 / 8, 1 / 2, 1.0, 2.0, 8.0)
SCALED = ("ring", "double ring", "ulysses", "mesh", "hybrid")  # on other numbers of devices
TRIED = ("ring", "mesh", "hybrid")  # on other bandwidths


class StudyEntry(NamedTuple):
    """A plan of a family and what the simulator says of it."""

    family: str
    plan: Plan
    simulation: Simulation


class Studies:
    """The best of each family for a workload on a machine; what was simulated once is kept."""

    def __init__(self, work: Workload, machine: Machine):
        self.work, self.machine = work, machine
        self._known: dict[tuple[str, int, float], StudyEntry | None] = {}
        self._plans: dict[tuple[str, int], list[Plan]] = {}

    def best(self, name: str, n: int, bandwidth: float = 1.0) -> StudyEntry | None:
        """The fastest member of a family; None if none exists of this size.

        Args:
            bandwidth: of every link, as a multiple of the machine's.
        """
        key = name, n, bandwidth
        if key not in self._known:
            machine = self.machine if bandwidth == 1 else self.machine.scaled(bandwidth)
            work = _work_on(self.work, n)
            plans = self._plans.get((name, n)) or list(_members(name, work, machine, n))
            self._plans[name, n] = plans
            entries = [StudyEntry(name, plan, simulate(plan, work, machine)) for plan in plans]
            fastest = min(entries, key=lambda entry: entry.simulation.seconds, default=None)
            self._known[key] = fastest
        return self._known[key]

    def compared(self, n: int) -> list[StudyEntry]:
        """The best of each family that exists of this size, in the families' order."""
        found = (self.best(name, n) for name in FAMILIES)
        return [entry for entry in found if entry]

    def sizes(self) -> list[int]:
        """Numbers of devices that the workload is simulated on soon: powers of two."""
        most = LARGEST if self.work.mask in (Full(), Causal()) else MOST_PRUNED
        last = min(most, self.work.num_tokens // 2)
        powers = range(int(math.log2(SMALLEST)), int(math.log2(LARGEST)) + 1)
        return [1 << power for power in powers if 1 << power <= last]

    def scaled(self) -> list[tuple[float, StudyEntry]]:
        """Each size with the best of the families that are tried on all."""
        found = [(n, self.best(name, n)) for n in self.sizes() for name in SCALED]
        return [(n, entry) for n, entry in found if entry]

    def rescaled(
        self, this: StudyEntry, backward_plan: Plan | None
    ) -> list[tuple[float, StudyEntry]]:
        """Each bandwidth with a plan, and the best of a few families of its size."""
        found: list[tuple[float, StudyEntry]] = []
        for factor in BANDWIDTHS:
            tried = [self.best(name, this.plan.world_size, factor) for name in TRIED]
            found += [(factor, entry) for entry in tried if entry]
            machine = self.machine.scaled(factor)
            again = simulate(this.plan, self.work, machine, backward_plan=backward_plan)
            found.append((factor, this._replace(simulation=again)))
        return found


def _work_on(work: Workload, n: int) -> Workload:
    """The same work on another number of devices: a layout of one number alone is left behind."""
    work = replace(work, save=None)
    if isinstance(work.layout, Layout) and work.layout.world_size != n:
        return replace(work, layout="zigzag" if work.mask != Full() else "contiguous")
    return work


def _members(name: str, work: Workload, machine: Machine, n: int) -> Iterator[Plan]:
    node = machine.node_size
    match name:
        case "ring" if n <= LONGEST_RING:
            yield ring(n)
        case "all-gather" if n <= LONGEST_RING:
            yield all_gather(n)
        case "double ring" if n > node and n % node == 0 and n <= LONGEST_RING:
            yield double_ring(n // node, node)
        case "ulysses" if n in _degrees(work, n):
            yield ulysses(n)
        case "mesh":
            yield from (mesh(n, q_tile=a) for a in _tiles(work, n)[: _tried(n)])
        case "hybrid":
            yield from _hybrids(work, machine, n)


def _hybrids(work: Workload, machine: Machine, n: int) -> Iterator[Plan]:
    """Heads inside the node, queries and keys across: the largest degrees that fit."""
    largest = min(n - 1, machine.node_size)
    fitting = [degree for degree in _degrees(work, n) if 1 < degree <= largest]
    for degree in reversed(fitting[-_tried(n) :]):
        inner = n // degree
        if inner <= 64:
            yield ulysses(degree, inner=ring(inner))
        if inner >= 4:
            yield ulysses(degree, inner=mesh(inner, q_tile=_tiles(work, inner)[0]))


def _tried(n: int) -> int:
    return TRIED_EACH if n <= LARGE else 1


def _degrees(work: Workload, n: int) -> list[int]:
    return degrees(n, work.num_heads, work.num_kv_heads)


def _tiles(work: Workload, n: int) -> list[int]:
    """Query shards per tile, those first that move the fewest bytes.

    Per shard 5 query-sized tensors travel in both passes (q, out; q, dout, dq) and 6 KV-sized.
    """

    def moved(a: int) -> float:
        return 5 * work.num_heads * (a - 1) + 6 * work.num_kv_heads * (n // a - 1)

    return sorted(tile_sizes(n), key=moved)
