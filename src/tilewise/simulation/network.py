"""The network: a machine's ports, NICs and cores as resources, and how messages share them.

Where ranks are alike, a resource stands for all that shifts map it to, and its load is that of
each. `Network` says which resources a message or a kernel uses, `FairShare` how long they take.

Every resource has capacity 1; a flow's amount is the seconds it takes alone at full speed, and its
weight on a resource the share of it that it uses at full speed. Rates are max-min fair and made by
progressive filling: all grow alike until a resource is full, whose flows then stay as they are.
"""

import heapq
from collections.abc import Hashable, Sequence
from functools import reduce
from typing import Any

import numpy as np

from tilewise.plan.shifts import Symmetry
from tilewise.simulation.machine import Link, Machine

Array = np.ndarray
Route = tuple[tuple[int, float], ...]
"""(resource, weight) pairs."""

SAME = 1e-9  # relative: flows of an island that end this close together end together
CLOSE = 1e-13  # relative: ends this close together are one moment
ROUNDING = 1e-12  # relative: shares this close together are equal
FEW = 16  # routes
MEMO = 4096  # sets of routes whose rates are remembered

INSIDE, BETWEEN, ACROSS = "inside", "between", "across"
LINKS = (INSIDE, BETWEEN, ACROSS)


def blocks(machine: Machine, world_size: int) -> tuple[int, ...]:
    """Return the sizes of groups of neighbouring ranks that share cores, NICs, a node or a rack."""
    sizes = {_sharers(machine)} if machine.cores is not None else set()
    if world_size > machine.node_size:
        sizes |= {machine.node_size, machine.nic_sharers}
        if machine.rack_nodes is not None:
            sizes.add(machine.node_size * machine.rack_nodes)
    return tuple(sorted(sizes - {1}))


def _sharers(machine: Machine) -> int:
    return machine.core_sharers or machine.node_size


class Network:
    """Table of a machine's resources and routes, numbered in the order of first use.

    Attributes:
        routes: all routes so far, by number.
        num_resources: number of resources so far.
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
        size = self.machine.node_size
        if src // size == dst // size:
            return INSIDE
        rack = size * (self.machine.rack_nodes or 0)
        return ACROSS if rack and src // rack != dst // rack else BETWEEN

    def latency(self, link: str) -> float:
        across = self.machine.across
        links: dict[str, Link | None] = {BETWEEN: self.machine.between, ACROSS: across}
        return (links.get(link) or self.machine.inside).latency

    def bandwidth(self, link: str) -> float:
        """Bytes per second of one message that has the network to itself."""
        return self.machine.inside.bandwidth if link == INSIDE else self.machine.nic_bandwidth

    def message(self, src: int, dst: int) -> int:
        """Return the number of the route between two ranks.

        A flow's amount on it is the seconds of the message at `bandwidth`.
        """
        route = self._between.get((src, dst))
        if route is None:
            route = self._between[src, dst] = self._route(self._uses(src, dst))
        return route

    def _uses(self, src: int, dst: int) -> list[tuple[int, float]]:
        link, machine = self.link(src, dst), self.machine
        ends = (("out", src), ("in", dst))
        uses = []
        for direction, rank in ends:
            if link == INSIDE:
                uses.append(self._use(f"port {direction}", rank, 1, 1.0))
            else:
                uses.append(self._use(f"nic {direction}", rank, machine.nic_sharers, 1.0))
            if link == ACROSS and machine.across and machine.rack_nodes:
                share = machine.nic_bandwidth / machine.across.bandwidth
                rack = machine.node_size * machine.rack_nodes
                uses.append(self._use(f"rack {direction}", rank, rack, share))
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
        own_core = self._use("own core", rank, 1, 1.0)
        return self._route([own_core, self._use("cores", rank, _sharers(self.machine), 1 / cores)])

    def _use(self, kind: str, rank: int, block: int, weight: float) -> tuple[int, float]:
        key = kind, self.symmetry.representative(rank) // block
        resource = self._resources.setdefault(key, len(self._resources))
        return resource, weight * self.symmetry.together(block)

    def _route(self, uses: list[tuple[int, float]]) -> int:
        weight_by_resource: dict[int, float] = {}
        for resource, weight in uses:
            weight_by_resource[resource] = weight_by_resource.get(resource, 0.0) + weight
        route = tuple(sorted(weight_by_resource.items()))
        number = self._known.setdefault(route, len(self.routes))
        if number == len(self.routes):
            self.routes.append(route)
        return number


class FairShare:
    """The flows under way, in islands that share no resource; each island has its own clock.

    Args:
        routes: the resources that each kind of flow uses, and with what weight.
        num_resources: resources are 0..num_resources - 1.
    """

    def __init__(self, routes: Sequence[Route], num_resources: int):
        self._island, self._place = np.zeros(len(routes), np.int64), np.zeros(len(routes), np.int64)
        self._islands: list[_Few | _Many] = []
        shapes: dict[tuple[Route, ...], _Rates] = {}
        for number, members in enumerate(_islands(routes, num_resources)):
            self._island[members], self._place[members] = number, np.arange(len(members))
            shape = _renumbered([routes[route] for route in members])
            rates = shapes.setdefault(shape, _Rates(shape))
            self._islands.append((_Few if len(members) <= FEW else _Many)(rates))
        self._ends = [np.inf] * len(self._islands)
        self._queue: list[tuple[float, int]] = []
        self.now = 0.0

    def add(self, ids: Sequence[int], routes: Array, counts: Array, amounts: Array) -> None:
        """Start flows now.

        Args:
            ids: the numbers that `advance` returns.
            routes: route of each flow.
            counts: number of equal flows that each stands for.
            amounts: seconds at full speed, above 0.
        """
        islands, places = self._island[routes].tolist(), self._place[routes].tolist()
        parts: dict[int, list[tuple[int, int, float, float]]] = {}
        flows = zip(ids, places, counts.tolist(), amounts.tolist(), strict=True)
        for island, flow in zip(islands, flows, strict=True):
            parts.setdefault(island, []).append(flow)
        for island, flows in parts.items():
            self._islands[island].add(self.now, flows)
            self._note(island)

    def _note(self, island: int) -> None:
        end = self._ends[island] = self._islands[island].next_end
        if end < np.inf:
            heapq.heappush(self._queue, (end, island))

    @property
    def next_end(self) -> float:
        """Return when the first flow ends if none is added; inf without flows."""
        queue = self._queue
        while queue and self._ends[queue[0][1]] != queue[0][0]:
            heapq.heappop(queue)
        return queue[0][0] if queue else np.inf

    def advance(self, now: float) -> list[int]:
        """Advance to a time, at most the next end; return the flows that have ended."""
        self.now = now
        ended_flows: list[int] = []
        while self.next_end <= now * (1 + CLOSE):
            _, island = heapq.heappop(self._queue)
            ended_flows += self._islands[island].advance(now)
            self._note(island)
        return ended_flows


def _islands(routes: Sequence[Route], num_resources: int) -> list[list[int]]:
    """The routes that share resources, directly or by way of others."""
    parent = list(range(num_resources))

    def root(resource: int) -> int:
        while parent[resource] != resource:
            parent[resource] = resource = parent[parent[resource]]
        return resource

    for route in routes:
        for resource, _ in route:
            parent[root(resource)] = root(route[0][0])
    routes_by_root: dict[int, list[int]] = {}
    for number, route in enumerate(routes):
        routes_by_root.setdefault(root(route[0][0]), []).append(number)
    return list(routes_by_root.values())


def _renumbered(routes: list[Route]) -> tuple[Route, ...]:
    """Return the routes with their resources numbered from 0, in the order in which they occur."""
    new_numbers: dict[int, int] = {}
    return tuple(
        tuple(
            (new_numbers.setdefault(resource, len(new_numbers)), weight)
            for resource, weight in route
        )
        for route in routes
    )


class _Rates:
    """Cache of the rates of an island's routes, by the number of flows on each.

    Islands with equal routes share it.
    """

    def __init__(self, routes: tuple[Route, ...]):
        width = max(len(route) for route in routes)
        self.num_resources = 1 + max(resource for route in routes for resource, _ in route)
        self.num_routes = len(routes)
        self._use = np.full((len(routes), width), self.num_resources)
        self._weight = np.zeros((len(routes), width))
        for index, route in enumerate(routes):
            for place, (resource, weight) in enumerate(route):
                self._use[index, place], self._weight[index, place] = resource, weight
        self._known: dict[Hashable, Any] = {}

    def of(self, counts: Array) -> Array:
        key = counts.tobytes()
        rates = self._known.get(key)
        if rates is None:
            rates = self._keep(key, self._found(counts))
        return rates

    def listed(self, counts: list[float]) -> list[float]:
        key = tuple(counts)
        rates = self._known.get(key)
        if rates is None:
            rates = self._keep(key, self._found(np.array(counts)).tolist())
        return rates

    def _found(self, counts: Array) -> Array:
        return fair_rates(self._use, self._weight, counts, self.num_resources + 1)

    def _keep(self, key: Hashable, rates: Any) -> Any:
        if len(self._known) >= MEMO:
            self._known.clear()
        self._known[key] = rates
        return rates


class _Many:
    """An island of many routes, as arrays."""

    def __init__(self, rates: _Rates):
        self._rates = rates
        self._ids, self._route = np.empty(0, np.int64), np.empty(0, np.int64)
        self._count, self._left = np.empty(0), np.empty(0)
        self._rate, self._now = np.empty(0), 0.0
        self.next_end = np.inf

    def add(self, now: float, flows: list[tuple[int, int, float, float]]) -> None:
        self._left = self._left - (now - self._now) * self._rate
        self._now = now
        ids, routes, counts, amounts = (np.array(column) for column in zip(*flows, strict=True))
        self._ids = np.concatenate([self._ids, ids])
        self._route = np.concatenate([self._route, routes])
        self._count = np.concatenate([self._count, counts])
        self._left = np.concatenate([self._left, amounts])
        self._refresh()

    def advance(self, now: float) -> list[int]:
        seconds, self._now = now - self._now, now
        self._left = self._left - seconds * self._rate
        ended = self._left <= (SAME * seconds + 2 * CLOSE * now) * self._rate
        ended_ids, remaining = self._ids[ended].tolist(), ~ended
        self._ids, self._route = self._ids[remaining], self._route[remaining]
        self._count, self._left = self._count[remaining], self._left[remaining]
        self._refresh()
        return ended_ids

    def _refresh(self) -> None:
        if not len(self._ids):
            self._rate, self.next_end = np.empty(0), np.inf
            return
        counts = np.bincount(self._route, self._count, self._rates.num_routes)
        self._rate = self._rates.of(counts)[self._route]
        self.next_end = self._now + max(float((self._left / self._rate).min()), 0.0)


class _Few:
    """An island of few routes, as lists: arrays take longer to make than it takes to count."""

    def __init__(self, rates: _Rates):
        self._rates = rates
        self._flows: list[tuple[int, int, float, float]] = []  # id, route, count, left
        self._rate: list[float] = []  # by route
        self._now = 0.0
        self.next_end = np.inf

    def add(self, now: float, flows: list[tuple[int, int, float, float]]) -> None:
        self._pass(now)
        self._flows += flows
        self._refresh()

    def advance(self, now: float) -> list[int]:
        tolerance = SAME * (now - self._now) + 2 * CLOSE * now
        self._pass(now)
        rate = self._rate
        ended_ids = [flow[0] for flow in self._flows if flow[3] <= tolerance * rate[flow[1]]]
        self._flows = [flow for flow in self._flows if flow[3] > tolerance * rate[flow[1]]]
        self._refresh()
        return ended_ids

    def _pass(self, now: float) -> None:
        seconds, self._now, rate = now - self._now, now, self._rate
        if seconds:
            self._flows = [(i, r, c, left - seconds * rate[r]) for i, r, c, left in self._flows]

    def _refresh(self) -> None:
        if not self._flows:
            self.next_end = np.inf
            return
        counts = [0.0] * self._rates.num_routes
        for _, route, count, _ in self._flows:
            counts[route] += count
        rate = self._rate = self._rates.listed(counts)
        first_end = min(left / rate[route] for _, route, _, left in self._flows)
        self.next_end = self._now + max(first_end, 0.0)


def fair_rates(use: Array, weight: Array, counts: Array, num_resources: int) -> Array:
    """Max-min fair rates, 1 at most where a flow uses a resource with weight 1.

    All resources that are the scarcest for everyone who uses them fill at once.

    Args:
        use: int [routes, width], resources; unused places name one of weight 0.
        weight: [routes, width].
        counts: flows per route.
    Returns:
        [routes]; 0 where there is no flow.
    """
    rate, free_capacity = np.zeros(len(counts)), np.ones(num_resources)
    open_routes = np.flatnonzero(counts)
    while len(open_routes):
        resources, demand = use[open_routes], weight[open_routes] * counts[open_routes, None]
        load = np.bincount(resources.ravel(), demand.ravel(), num_resources)
        share = np.full(num_resources, np.inf)
        np.divide(free_capacity, load, out=share, where=load > 0)
        # Column by column, because numpy is slow along an axis of 2 to 6.
        share_by_use, columns = share[resources], range(resources.shape[1])
        own_share = reduce(np.minimum, (share_by_use[:, column] for column in columns))
        least_share = np.full(num_resources, np.inf)
        for column in columns:
            np.minimum.at(least_share, resources[:, column], own_share)
        is_scarce = least_share >= share * (1 - ROUNDING)
        # Looser, so that whatever made a resource scarce is filled with it.
        filling = is_scarce[resources] & (share_by_use <= own_share[:, None] * (1 + 10 * ROUNDING))
        filled = reduce(np.logical_or, (filling[:, column] for column in columns))
        filled_routes = open_routes[filled]
        rate[filled_routes] = own_share[filled]
        used_capacity = (demand[filled] * own_share[filled, None]).ravel()
        free_capacity = np.maximum(
            free_capacity - np.bincount(resources[filled].ravel(), used_capacity, num_resources), 0
        )
        open_routes = open_routes[~filled]
    return rate
