"""What the page compares a plan with: the strategies one would try by hand, on other clusters too.

Each family of strategies has a few members of every size; the fastest by simulation stands for it.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import NamedTuple

from tilewise.layouts.layout import Layout
from tilewise.masks.base import Causal, Full
from tilewise.plan.ir import Plan
from tilewise.simulation.machine import Machine
from tilewise.simulation.simulator import Simulation, simulate, simulate_links
from tilewise.strategies.all_gather import all_gather
from tilewise.strategies.catalog import degrees, tile_sizes
from tilewise.strategies.double_ring import double_ring
from tilewise.strategies.mesh import mesh
from tilewise.strategies.ring import ring
from tilewise.strategies.ulysses import ulysses
from tilewise.workload import Workload

FAMILIES = ("ring", "all-gather", "double ring", "ulysses", "mesh", "hybrid")
SMALLEST, LARGEST, FULLY = 8, 1024, 4096
LONGEST_RING = 512  # ranks
MOST_PRUNED = 32  # ranks; masks that prune ranks differently are simulated rank by rank
TRIED_EACH, LARGE = 2, 1024  # tile shapes and degrees tried of a size; of more ranks one each
BANDWIDTHS = (1 / 8, 1 / 2, 1.0, 2.0, 8.0)
SCALED = ("ring", "ulysses", "mesh", "hybrid")  # on other numbers of devices
TRIED = ("ring", "mesh", "hybrid")  # on other bandwidths


class StudyEntry(NamedTuple):
    """A plan of a family and what the simulator says of it."""

    family: str
    plan: Plan
    simulation: Simulation


class Studies:
    """The best of each family for a workload on a machine; what was simulated once is kept.

    Ranks that a causal mask lets send less than others are taken to send as much: plans then take
    up to 1 % longer, and a hundredth of the time to simulate.

    Args:
        full: up to 4096 devices, not 1024.
        tell: called with what is simulated next.
    """

    def __init__(
        self,
        work: Workload,
        machine: Machine,
        *,
        full: bool = False,
        tell: Callable[[str], object] = str,
    ):
        self.work, self.machine, self.tell = work, machine, tell
        self.largest = FULLY if full else LARGEST
        self._known: dict[tuple[str, int], StudyEntry | None] = {}

    def best(self, name: str, n: int) -> StudyEntry | None:
        """The fastest member of a family; None if none exists of this size."""
        if (name, n) not in self._known:
            self.tell(f"{name} on {n} devices")
            work = _work_on(self.work, n)
            entries = [
                StudyEntry(name, plan, simulate(plan, work, self.machine, exact=False))
                for plan in _members(name, work, self.machine, n)
            ]
            fastest = min(entries, key=lambda entry: entry.simulation.seconds, default=None)
            self._known[name, n] = fastest
        return self._known[name, n]

    def compared(self, n: int) -> list[StudyEntry]:
        """The best of each family that exists of this size, in the families' order."""
        names = FAMILIES if self._alike or n <= MOST_PRUNED else TRIED
        return [entry for name in names if (entry := self.best(name, n))]

    @property
    def _alike(self) -> bool:
        return self.work.mask in (Full(), Causal())

    def sizes(self) -> list[int]:
        """Numbers of devices that the workload is simulated on soon: powers of two."""
        last = min(self.largest if self._alike else MOST_PRUNED, self.work.num_tokens // 2)
        powers = range(int(math.log2(SMALLEST)), int(math.log2(FULLY)) + 1)
        return [1 << power for power in powers if 1 << power <= last]

    def scaled(self) -> list[tuple[float, StudyEntry]]:
        """Each size with the best of the families that are tried on all."""
        found = [(n, self.best(name, n)) for n in self.sizes() for name in SCALED]
        return [(n, entry) for n, entry in found if entry]

    def rescaled(
        self, this: StudyEntry, backward_plan: Plan | None
    ) -> list[tuple[float, StudyEntry]]:
        """Each bandwidth with a plan, and the best of a few families of its size."""
        tried = [self.best(name, this.plan.world_size) for name in TRIED]
        found: list[tuple[float, StudyEntry]] = []
        for entry in (this, *(entry for entry in tried if entry)):
            self.tell(f"{entry.family} on slower and faster links")
            own = entry is this
            work = self.work if own else _work_on(self.work, this.plan.world_size)
            plans = entry.plan, work, self.machine, BANDWIDTHS, backward_plan if own else None
            every = zip(BANDWIDTHS, simulate_links(*plans, exact=False), strict=True)
            found += [(factor, entry._replace(simulation=one)) for factor, one in every]
        return sorted(found, key=lambda one: one[0])


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
