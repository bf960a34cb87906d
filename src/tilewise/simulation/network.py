"""A machine's ports, NICs and cores as resources, and which of them a message or kernel uses.

Where ranks are alike, a resource stands for all that shifts map it to, and its load is that of
each.
"""

from tilewise.plan.shifts import Symmetry
from tilewise.simulation.fair_share import Route
from tilewise.simulation.machine import Link, Machine

INSIDE, BETWEEN, ACROSS = "inside", "between", "across"
LINKS = (INSIDE, BETWEEN, ACROSS)


def blocks(machine: Machine, world_size: int) -> tuple[int, ...]:
    """Sizes of the groups of neighbouring ranks that share something."""
    sizes = {_sharers(machine)} if machine.cores is not None else set()
    if world_size > machine.node_size:
        sizes |= {machine.node_size, machine.nic_sharers}
        if machine.rack_nodes is not None:
            sizes.add(machine.node_size * machine.rack_nodes)
    return tuple(sorted(sizes - {1}))


def _sharers(machine: Machine) -> int:
    return machine.core_sharers or machine.node_size


class Network:
    """Numbers the resources of a machine as they are asked for.

    Attributes:
        routes: all that were handed out, by number.
        num_resources: so far.
    """

    def __init__(self, machine: Machine, symmetry: Symmetry):
        self.machine, self.symmetry = machine, symmetry
        self.routes: list[Route] = []
        self._known: dict[Route, int] = {}
        self._between: dict[tuple[int, int], int] = {}
        self._resources: dict[tuple[str, int], int] = {}

    @property
    def num_resources(self) -> int:
        return len(self._resources)

    def link(self, src: int, dst: int) -> str:
        """The class of the link between two ranks."""
        if self.machine.same_node(src, dst):
            return INSIDE
        rack = self.machine.node_size * (self.machine.rack_nodes or 0)
        return ACROSS if rack and src // rack != dst // rack else BETWEEN

    def latency(self, link: str) -> float:
        across = self.machine.across
        known: dict[str, Link | None] = {BETWEEN: self.machine.between, ACROSS: across}
        return (known.get(link) or self.machine.inside).latency

    def bandwidth(self, link: str) -> float:
        """Bytes per second of one message that has the network to itself."""
        return self.machine.inside.bandwidth if link == INSIDE else self.machine.nic_bandwidth

    def message(self, src: int, dst: int) -> int:
        """The route between two ranks; its amounts are in seconds at `bandwidth`."""
        route = self._between.get((src, dst))
        if route is None:
            route = self._between[src, dst] = self._route(self._uses(src, dst))
        return route

    def _uses(self, src: int, dst: int) -> list[tuple[int, float]]:
        link, machine = self.link(src, dst), self.machine
        ends = (("out", src), ("in", dst))
        uses = []
        for way, rank in ends:
            if link == INSIDE:
                uses.append(self._use(f"port {way}", rank, 1, 1.0))
            else:
                uses.append(self._use(f"nic {way}", rank, machine.nic_sharers, 1.0))
            if link == ACROSS and machine.across and machine.rack_nodes:
                share = machine.nic_bandwidth / machine.across.bandwidth
                rack = machine.node_size * machine.rack_nodes
                uses.append(self._use(f"rack {way}", rank, rack, share))
            if machine.cores is not None and machine.copy_cores:
                slower = self.bandwidth(link) / machine.inside.bandwidth
                share = machine.copy_cores * slower / machine.cores
                uses.append(self._use("cores", rank, _sharers(machine), share))
        return uses

    def compute(self, rank: int) -> int | None:
        """The route of a kernel; None where kernels share nothing."""
        cores = self.machine.cores
        if cores is None:
            return None
        own = self._use("own core", rank, 1, 1.0)
        return self._route([own, self._use("cores", rank, _sharers(self.machine), 1 / cores)])

    def _use(self, kind: str, rank: int, block: int, weight: float) -> tuple[int, float]:
        key = kind, self.symmetry.first(rank) // block
        resource = self._resources.setdefault(key, len(self._resources))
        return resource, weight * self.symmetry.together(block)

    def _route(self, uses: list[tuple[int, float]]) -> int:
        joined: dict[int, float] = {}
        for resource, weight in uses:
            joined[resource] = joined.get(resource, 0.0) + weight
        route = tuple(sorted(joined.items()))
        number = self._known.setdefault(route, len(self.routes))
        if number == len(self.routes):
            self.routes.append(route)
        return number
