"""Flows over shared resources: max-min fair rates, and when each flow ends.

Every resource has capacity 1; a flow's amount is the seconds it takes alone at full speed, and its
weight on a resource the share of it that it uses at full speed. Rates are made by progressive
filling: all grow alike until a resource is full, whose flows then stay as they are.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

Array = np.ndarray
Route = tuple[tuple[int, float], ...]
"""(resource, weight) pairs."""

SAME = 1e-9  # relative: flows that end this close together end together
MEMO = 4096  # sets of routes whose rates are remembered


class Fluid:
    """The flows under way.

    Args:
        routes: the resources that each kind of flow uses, and with what weight.
        num_resources: resources are 0..num_resources - 1.
    """

    def __init__(self, routes: Sequence[Route], num_resources: int):
        width = max((len(route) for route in routes), default=1)
        self._use = np.full((len(routes), width), num_resources)
        self._weight = np.zeros((len(routes), width))
        for index, route in enumerate(routes):
            for place, (resource, weight) in enumerate(route):
                self._use[index, place], self._weight[index, place] = resource, weight
        self._num_resources = num_resources + 1
        self._known: dict[bytes, Array] = {}
        self._ids, self._route = np.empty(0, np.int64), np.empty(0, np.int64)
        self._count, self._left = np.empty(0, np.int64), np.empty(0)
        self._rate, self._next = np.empty(0), np.inf
        self.now = 0.0

    def add(self, ids: Sequence[int], routes: Array, counts: Array, amounts: Array) -> None:
        """Start flows now.

        Args:
            ids: what `advance` will call them.
            routes: each one's kind.
            counts: so many equal flows each stands for.
            amounts: seconds at full speed, above 0.
        """
        self._ids = np.concatenate([self._ids, ids])
        self._route = np.concatenate([self._route, routes])
        self._count = np.concatenate([self._count, counts])
        self._left = np.concatenate([self._left, amounts])
        self._refresh()

    @property
    def next_end(self) -> float:
        """When the first flow ends if none is added; inf without flows."""
        return self.now + self._next

    def advance(self, now: float) -> list[int]:
        """Let time pass, to the next end at most; return the flows that have ended."""
        seconds, self.now = now - self.now, now
        if not len(self._ids):
            return []
        self._left = self._left - seconds * self._rate
        near = SAME * max(seconds, 0.0) + 4e-16 * now
        ended = self._left <= near * self._rate
        if not ended.any():
            self._next -= seconds
            return []
        done, kept = self._ids[ended].tolist(), ~ended
        self._ids, self._route = self._ids[kept], self._route[kept]
        self._count, self._left = self._count[kept], self._left[kept]
        self._refresh()
        return done

    def _refresh(self) -> None:
        counts = np.bincount(self._route, self._count, len(self._use))
        key = counts.tobytes()
        rates = self._known.get(key)
        if rates is None:
            if len(self._known) >= MEMO:
                self._known.clear()
            rates = fair_rates(self._use, self._weight, counts, self._num_resources)
            self._known[key] = rates
        self._rate = rates[self._route]
        self._next = float((self._left / self._rate).min()) if len(self._ids) else np.inf


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
    rate, room = np.zeros(len(counts)), np.ones(num_resources)
    open_ = np.flatnonzero(counts)
    while len(open_):
        used, demand = use[open_], weight[open_] * counts[open_, None]
        load = np.bincount(used.ravel(), demand.ravel(), num_resources)
        share = np.full(num_resources, np.inf)
        np.divide(room, load, out=share, where=load > 0)
        of_flow = share[used]
        own = of_flow.min(1)
        least = np.full(num_resources, np.inf)
        np.minimum.at(least, used, own[:, None])
        scarce = least >= share * (1 - 1e-12)
        filled = (scarce[used] & (of_flow <= own[:, None] * (1 + 1e-11))).any(1)
        now = open_[filled]
        rate[now] = own[filled]
        spent = (demand[filled] * own[filled, None]).ravel()
        room = np.maximum(room - np.bincount(used[filled].ravel(), spent, num_resources), 0)
        open_ = open_[~filled]
    return rate
