"""What a plan takes at least in a pass, by the steps of its ranks; for ranks that compute alike.

A rank computes in order: before a tile all that it reads must have arrived, and what the rank
sends later leaves after the tiles before. So for any tiles u < k

    seconds >= arrivals that tiles up to u read + tiles u .. k - 1 + departures after tile k - 1

Under a split by heads these are the steps of the inner plan, between teams: the shards that are
traded for heads.
"""

from collections import defaultdict
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from tilewise.layouts.layout import contiguous
from tilewise.plan.ir import Item, Plan, RankStep, Role, Side, Transfer
from tilewise.plan.kept import kept_with_plan
from tilewise.planning.bounds import SAFE
from tilewise.planning.options import Option
from tilewise.planning.pass_model import PassModel
from tilewise.simulation.prices import PassCosts

Array = np.ndarray

LOOKED_AT = 6
"""About so many ranks of a plan are looked at where nodes are not all full."""

INSIDE, BETWEEN = ((0, 1.0),), ((1, 1.0),)
"""Shares of an item that come by links inside a node, and by NICs."""

Crossing = dict[tuple[int, bool], dict[Item, float]]
"""Bytes of items that enter (False) or leave (True) a node."""


@kept_with_plan(LOOKED_AT)
def _rank_steps(plan: Plan, rank: int) -> tuple[RankStep, ...]:
    return plan.rank_steps(rank)


class _Teams(NamedTuple):
    """What depends on the degree of a split by heads alone.

    Attributes:
        costs: of the inner plan's tiles and items.
        exchange: shares of a team's rows that a rank gets from the others of its team.
    """

    costs: PassCosts
    exchange: tuple[tuple[int, float], ...]


class PlanBounds:
    """Bounds of the plans of one pass."""

    def __init__(self, model: PassModel):
        self.model = model
        self._known: dict[int, _Teams] = {}

    def seconds(self, option: Option, plan: Plan) -> float:
        """Seconds of the slowest rank or node that is looked at."""
        model = self.model
        degree, inner = plan.traits.head_split or (1, plan)
        if degree not in self._known:
            self._known[degree] = self._teams(degree, plan)
        teams = self._known[degree]
        rows = model.share(option) * teams.costs.layouts[0].size(0)
        nodes: Crossing = defaultdict(dict)
        slowest = 0.0
        for rank in self._looked_at(degree, inner.world_size):
            steps = _rank_steps(inner, rank)
            slowest = max(slowest, self._of_rank(degree, rank, rows, steps, nodes))
        machine = model.machine
        width = machine.nic_bandwidth * machine.node_size / machine.nic_sharers
        load = max((sum(of.values()) for of in nodes.values()), default=0.0)
        return SAFE * max(slowest, load * min(degree, machine.node_size) / width)

    def _looked_at(self, degree: int, teams: int) -> list[int]:
        """All of a node where all are alike; else of some, evenly spaced."""
        model, size = self.model, self.model.machine.node_size
        crowded = model.world_size > size and model.machine.nic_sharers > 1
        block = max(1, size // degree) if crowded else 1
        even = teams % block == 0 and model.world_size % size == 0
        blocks = 1 if even else max(2, LOOKED_AT // block)
        starts = np.linspace(0, teams - block, blocks).astype(int) // block * block
        return [*dict.fromkeys(int(x) + i for x in starts for i in range(block) if x + i < teams)]

    def _teams(self, degree: int, plan: Plan) -> _Teams:
        model, size = self.model, self.model.machine.node_size
        costs = model.costs(plan)
        near = min(degree, size)
        exchange = ((0, (near - 1) / degree), (1, (degree - near) / degree))
        if size % degree and degree % size:
            exchange = ((2, (degree - 1) / degree),)
        joined = contiguous(model.work.num_tokens, model.world_size // degree)
        resolved = costs.resolved._replace(layouts=(joined, joined))
        return _Teams(replace(costs, resolved=resolved), exchange)

    def _of_rank(
        self, degree: int, rank: int, rows: float, steps: tuple[RankStep, ...], nodes: Crossing
    ) -> float:
        """Seconds of a rank; adds what enters and leaves its node.

        Args:
            rows: of every item that travel.
        """
        teams, size = self._known[degree], self.model.machine.node_size
        node = rank * degree // size
        row_bytes = teams.costs.payload.row_bytes
        weights = {(s, r): rows * row_bytes(Item(s, r, 0)) for s in Side for r in Role}
        busy = np.array([teams.costs.tile_seconds(tile) for step in steps for tile in step.tiles])
        needed, leaving = np.zeros((len(busy), 3)), np.zeros((len(busy) + 1, 3))
        by_node = self.model.world_size > size and not (size % degree and degree % size)

        def add(to: Array, item: Item, lane: tuple[tuple[int, float], ...], sent: bool) -> None:
            num_bytes = weights[item.side, item.role]
            for kind, part in lane:
                to[kind] += part * num_bytes
                if by_node and kind == 1:
                    crossed = nodes[node, sent]
                    crossed[item] = crossed.get(item, 0.0) + part * num_bytes

        own = [Item(side, Role.OPERAND, rank) for side in Side]
        arrived = dict.fromkeys(own, teams.exchange)
        done = 0
        for step in steps:
            for hop in step.sends:
                add(leaving[done], hop.item, self._lane(degree, hop), True)
            for tile in step.tiles:
                for side, shards in zip(Side, tile[:2], strict=True):
                    for item in (Item(side, Role.OPERAND, shard) for shard in shards):
                        if item in arrived:
                            add(needed[done], item, arrived.pop(item), False)
                done += 1
            for hop in step.recvs:
                if hop.item.role is Role.OPERAND:
                    arrived[hop.item] = self._lane(degree, hop)
        for item in own:
            add(leaving[done], item._replace(role=Role.PARTIAL), teams.exchange, True)
        return self._in_order(busy, needed, leaving)

    def _lane(self, degree: int, hop: Transfer) -> tuple[tuple[int, float], ...]:
        size = self.model.machine.node_size
        return INSIDE if hop.src * degree // size == hop.dst * degree // size else BETWEEN

    def _in_order(self, busy: Array, needed: Array, leaving: Array) -> float:
        """The bound of the module's text."""
        before = np.concatenate([[0.0], np.cumsum(busy)])
        arrivals = self._slowest(np.cumsum(needed, axis=0))
        lead = np.maximum.accumulate(np.concatenate([[0.0], arrivals - before[:-1]]))
        return float((lead + before + self._slowest(np.cumsum(leaving[::-1], axis=0)[::-1])).max())

    def _slowest(self, lanes: Array) -> Array:
        machine = self.model.machine
        inside, nic = machine.inside.bandwidth, machine.nic_bandwidth
        every = inside + nic * (self.model.world_size > machine.node_size)
        by_lane = lanes[:, :2] / np.array([inside, nic])
        return np.maximum(by_lane.max(1), lanes.sum(1) / every)
