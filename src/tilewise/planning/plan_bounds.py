"""What a plan takes at least in a pass, by the steps of some of its ranks.

A rank computes in order: before a tile all that it reads must have arrived, and what the rank
sends later leaves after the tiles before. So for any tiles u < k

    seconds >= arrivals that tiles up to u read + tiles u .. k - 1 + departures after tile k - 1

Under a split by heads these are the steps of the inner plan, between teams: the shards that are
traded for heads. Where a mask leaves ranks different work, only the rows count that a rank's own
tiles read or fill: what else pruning leaves is not known without doing it.
"""

from collections import defaultdict
from dataclasses import replace
from functools import cached_property
from typing import NamedTuple

import numpy as np

from tilewise.layouts.cells import cells
from tilewise.layouts.layout import contiguous
from tilewise.plan.ir import Item, Plan, RankStep, Role, Side, Transfer
from tilewise.plan.row_ranges import count
from tilewise.planning.bounds import SAFE
from tilewise.planning.options import Option
from tilewise.planning.pass_model import PassModel
from tilewise.simulation.costs import PassCosts

Array = np.ndarray

LOOKED_AT = 6
"""About so many ranks of a plan are looked at where they differ."""

INSIDE, BETWEEN, EITHER = ((0, 1.0),), ((1, 1.0),), ((2, 1.0),)
"""Shares of an item that come by links inside a node, by NICs, by whichever of the two."""


Crossing = dict[tuple[int, bool], dict[Item, list[float]]]
"""Bytes of items that enter (False) or leave (True) a node: of all hops known to, and of one."""


class _Teams(NamedTuple):
    """What depends on the degree of a split by heads alone.

    Attributes:
        costs: of the inner plan's tiles and items.
        area: where ranks differ, allowed pairs [query team, KV team, its query shard].
        rows: rows of a shard that a cell reads [query team, KV team, shard], by side.
        exchange: shares of a team's rows that a rank gets from the others of its team.
    """

    costs: PassCosts
    area: Array
    rows: tuple[Array, Array]
    exchange: tuple[tuple[int, float], ...]


class PlanBounds:
    """Bounds of the plans of one pass."""

    def __init__(self, model: PassModel):
        self.model, self.whole = model, model.alike is not None
        self._known: dict[int, _Teams] = {}

    def seconds(self, option: Option, plan: Plan) -> float:
        """Seconds of the slowest rank or node that is looked at; 0 where nothing is known."""
        model = self.model
        if plan.cuts is not None or (self.whole and not option.shape.q):
            return 0.0
        degree, inner = plan.traits.head_split or (1, plan)
        if degree not in self._known:
            self._known[degree] = self._teams(degree, plan)
        teams = self._known[degree]
        share = model.share(option) if self.whole else 1.0
        nodes: Crossing = defaultdict(dict)
        slowest = 0.0
        for rank in self._looked_at(degree, inner.world_size):
            steps = inner.memo("steps", rank, lambda r=rank: inner.rank_steps(r), LOOKED_AT)
            busy, rows = self._alike(teams, steps) if self.whole else self._unlike(teams, steps)
            slowest = max(slowest, self._of_rank(degree, rank, busy, share * rows, steps, nodes))
        machine = model.machine
        width = machine.nic_bandwidth * machine.node_size / machine.nic_sharers
        load = max((sum(map(max, of.values())) for of in nodes.values()), default=0.0)
        return SAFE * max(slowest, load * min(degree, machine.node_size) / width)

    def _looked_at(self, degree: int, teams: int) -> list[int]:
        """All of some nodes, evenly spaced; of one where all are alike."""
        model, size = self.model, self.model.machine.node_size
        crowded = model.world_size > size and model.machine.nic_sharers > 1
        block = max(1, size // degree) if crowded else 1
        even = self.whole and teams % block == 0 and model.world_size % size == 0
        blocks = 1 if even else max(2, LOOKED_AT // block)
        starts = np.linspace(0, teams - block, blocks).astype(int) // block * block
        return [*dict.fromkeys(int(x) + i for x in starts for i in range(block) if x + i < teams)]

    def _teams(self, degree: int, plan: Plan) -> _Teams:
        model, size = self.model, self.model.machine.node_size
        n, tokens = model.world_size, model.work.num_tokens
        costs = model.costs(plan)
        near = min(degree, size)
        exchange = ((0, (near - 1) / degree), (1, (degree - near) / degree))
        if size % degree and degree % size:
            exchange = ((2, (degree - 1) / degree),)
        if self.whole:
            joined = contiguous(tokens, n // degree)
            costs = replace(costs, resolved=costs.resolved._replace(layouts=(joined, joined)))
            return _Teams(costs, np.zeros(0), (np.zeros(0), np.zeros(0)), exchange)
        area, q_rows, k_rows = self._cells
        cut = n // degree, degree, n // degree, degree
        by_key = (0, 2, 1)
        return _Teams(
            costs,
            area.reshape(cut).sum(3).transpose(by_key),
            (q_rows.reshape(cut).max(3).transpose(by_key), k_rows.reshape(cut).max(1)),
            exchange,
        )

    @cached_property
    def _cells(self) -> Array:
        """Areas, and the rows needed of queries and of keys, [query shard, KV shard]."""
        n, layout = self.model.world_size, self.model.layout
        tables = np.zeros((3, n, n))
        for (i, j), cell in cells(self.model.work.mask, layout, layout).items():
            tables[:, i, j] = cell.area, count(cell.q_rows, 0), count(cell.k_rows, 0)
        return tables

    def _alike(self, teams: _Teams, steps: tuple[RankStep, ...]) -> tuple[Array, Array]:
        """Seconds of a rank's tiles, and rows of every item [side, team]."""
        layout = teams.costs.layouts[0]
        busy = [teams.costs.tile_seconds(tile) for step in steps for tile in step.tiles]
        return np.array(busy), np.full((2, layout.world_size), float(layout.size(0)))

    def _unlike(self, teams: _Teams, steps: tuple[RankStep, ...]) -> tuple[Array, Array]:
        """The same of what the mask leaves."""
        tiles = [tile for step in steps for tile in step.tiles]
        found = [(t, i, j) for t, tile in enumerate(tiles) for i in tile.q for j in tile.kv]
        of, q, kv = np.array(found, int).reshape(-1, 3).T
        num_teams, _, degree = teams.area.shape
        rows = np.zeros((2, num_teams, degree))
        for side, shards in enumerate((q, kv)):
            np.maximum.at(rows[side], shards, teams.rows[side][q, kv])
        pairs, row = np.unique(of * num_teams + q, return_inverse=True)
        areas = np.zeros((len(pairs), degree))
        np.add.at(areas, row, teams.area[q, kv])
        sizes = np.array(self.model.layout.sizes).reshape(-1, degree)[pairs % num_teams]
        of_tiles = [
            np.bincount(pairs // num_teams, x.sum(1), len(tiles)).tolist()
            for x in (areas, sizes * (areas > 0))
        ]
        seconds = teams.costs.kernel_seconds
        busy = [
            seconds(queries, area) if area else 0.0 for area, queries in zip(*of_tiles, strict=True)
        ]
        return np.array(busy), rows.sum(2)

    def _of_rank(
        self,
        degree: int,
        rank: int,
        busy: Array,
        rows: Array,
        steps: tuple[RankStep, ...],
        nodes: Crossing,
    ) -> float:
        """Seconds of a rank; adds what enters and leaves its node."""
        teams, size = self._known[degree], self.model.machine.node_size
        node = rank * degree // size
        row_bytes = teams.costs.payload.row_bytes
        weights = {(s, r): row_bytes(Item(s, r, 0)) for s in Side for r in Role}
        needed, leaving = np.zeros((len(busy), 3)), np.zeros((len(busy) + 1, 3))
        by_node = self.model.world_size > size and not (size % degree and degree % size)

        def add(to: Array, item: Item, lane: tuple[tuple[int, float], ...], sent: bool) -> None:
            num_bytes = weights[item.side, item.role] * rows[item.side, item.shard]
            for kind, part in lane:
                to[kind] += part * num_bytes
                if by_node and (kind == 1 or (kind == 2 and item.shard * degree // size != node)):
                    crossed = nodes[node, sent].setdefault(item, [0.0, 0.0])
                    crossed[0] += part * num_bytes * (kind == 1)
                    crossed[1] = max(crossed[1], part * num_bytes)

        own = [Item(side, Role.OPERAND, rank) for side in Side]
        arrived = dict.fromkeys(own, teams.exchange)
        done = 0
        for step in steps:
            for hop in step.sends:
                if self.whole or hop.item.role is not Role.OPERAND:
                    add(leaving[done], hop.item, self._lane(degree, hop, hop.dst), True)
            for tile in step.tiles:
                for side, shards in zip(Side, tile[:2], strict=True):
                    for item in (Item(side, Role.OPERAND, shard) for shard in shards):
                        if item in arrived:
                            add(needed[done], item, arrived.pop(item), False)
                done += 1
            for hop in step.recvs:
                if hop.item.role is Role.OPERAND:
                    arrived[hop.item] = self._lane(degree, hop, hop.src)
        for item in own:
            add(leaving[done], item._replace(role=Role.PARTIAL), teams.exchange, True)
        return self._in_order(busy, needed, leaving)

    def _lane(self, degree: int, hop: Transfer, other: int) -> tuple[tuple[int, float], ...]:
        """How an item comes or goes; who only passes it on is left out by pruning."""
        size = self.model.machine.node_size
        if self.whole or other == hop.item.shard or not degree % size:
            near = hop.src * degree // size == hop.dst * degree // size
            return INSIDE if near else BETWEEN
        return EITHER

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
