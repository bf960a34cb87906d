"""Lower bounds of the time that an option takes in a pass: by its shape, and by its plan's steps.

A rank computes in order: before a tile all that it reads must have arrived, and what the rank
sends later leaves after the tiles before. So for any tiles u < k

    seconds >= arrivals that tiles up to u read + tiles u .. k - 1 + departures after tile k - 1

Under a split by heads these are the steps of the inner plan, between teams: the ranks that trade
their shards for heads. What is traded arrives before a team's own shards are read.
"""

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import replace

import numpy as np

from tilewise.masks.tables import PerHead
from tilewise.plan.ir import Item, Plan, RankStep, Role, Side, Transfer
from tilewise.plan.kept import kept_with_plan
from tilewise.planning.options import Option
from tilewise.planning.pass_model import PassModel, Reach
from tilewise.simulation.prices import PassCosts
from tilewise.simulation.simulator import MOST_APART

Array = np.ndarray

SAFE = 1 - 1e-9
"""Bounds are lowered by this much, so that rounding cannot lift one above a simulated time."""

SAMPLED_RANKS = 6
"""Number of ranks of a plan, about, that a bound looks at where not all nodes are alike."""

INSIDE, BETWEEN, EITHER = range(3)
"""Columns of bytes: by links inside a node, by NICs, by either."""

Shares = tuple[tuple[int, float], ...]
"""Shares of an item's bytes, by column."""


def shape_bound(model: PassModel, option: Option) -> float:
    """Return a bound by the shape of the ranks' tiles: kernels at their best, bytes over each link.

    Where a mask leaves ranks different work, the bound is of kernels alone, the same for all
    options.
    """
    tokens = model.work.num_tokens
    if model.alike is None or not option.shape.q:
        return SAFE * _compute_seconds(model, tokens, tokens)
    payload, degree, machine = model.payload(option.degree), option.degree, model.machine
    rows = min(model.layout.sizes) * degree * model.least_share
    shard_bytes = [
        rows * sum(payload.row_bytes(Item(side, role, 0)) for role in (Role.OPERAND, Role.PARTIAL))
        for side in Side
    ]
    if option.kind == "balanced_ring":  # of a pair either shard travels
        shard_bytes = [min(shard_bytes)] * 2
    tile, nodes = option.shape[:2], option.shape.nodes
    traded = (degree - 1) / degree
    sent_bytes = sum((n - 1 + traded) * size for n, size in zip(tile, shard_bytes, strict=True))
    one_node = model.world_size <= machine.node_size
    inside_bandwidth = machine.inside.bandwidth
    best_bandwidth = inside_bandwidth if one_node else max(inside_bandwidth, machine.nic_bandwidth)
    node_shards = machine.node_size // degree if machine.node_size % degree == 0 else 1
    entering_bytes = sum(
        max(0, n - node_shards) * size for n, size in zip(tile, shard_bytes, strict=True)
    )
    entering_bytes *= min(degree, machine.node_size) / machine.node_size
    crossing_bytes = sum((n - 1) * size for n, size in zip(nodes, shard_bytes, strict=True))
    nic_seconds = max(entering_bytes, crossing_bytes) * machine.nic_sharers / machine.nic_bandwidth
    kernels = _compute_seconds(model, *_largest_call(model, option))
    return SAFE * max(kernels, sent_bytes / best_bandwidth, nic_seconds)


def _largest_call(model: PassModel, option: Option) -> tuple[float, float]:
    """Queries, and keys per query, of the largest kernel call that a plan could make."""
    if 0 in option.shape.call:
        return model.work.num_tokens, model.work.num_tokens
    rows = max(model.layout.sizes) * option.degree
    keys = option.shape.call[1] * rows
    return option.shape.call[0] * rows, (keys + 1) / 2 if model.alike else keys


def _compute_seconds(model: PassModel, queries: float, keys: float) -> float:
    speed = model.best_speed(max(queries, 1), max(keys, 1))
    launch = model.machine.launch_seconds + model.kernel.launch_seconds
    return model.flop / model.world_size / speed + launch


def steps_bound(model: PassModel, option: Option) -> float:
    """Return a bound by the steps of the option's plan: the slowest of some ranks and nodes.

    Where a mask leaves ranks different work, only the rows that a rank's own tiles reach are taken
    to arrive and to leave. The plan is not pruned for this, because pruning takes longer.
    """
    unlike = model.alike is None
    if unlike and (model.world_size > MOST_APART or isinstance(model.work.mask, PerHead)):
        return 0.0
    plan = option.make()
    degree, inner = plan.traits.head_split or (1, plan)
    layout = model.team_layout(degree)
    resolved = model.work.resolve(plan)[model.backward]
    if plan.cuts is None:
        resolved = resolved._replace(layouts=(layout, layout))
    costs = PassCosts(resolved, model.machine, None, bool(model.alike))
    reach: Reach = {}
    if unlike:
        cells, reach = model.cells(degree, resolved)
        costs = replace(costs, cells=cells)
    walk = _StepWalk(model, degree, costs, reach)
    teams = _some_teams(model, degree, inner.world_size)
    slowest = max(walk.seconds(team, _rank_steps(inner, team)) for team in teams)
    return SAFE * max(slowest, walk.nic_seconds)


@kept_with_plan(4 * SAMPLED_RANKS)
def _rank_steps(plan: Plan, rank: int) -> tuple[RankStep, ...]:
    """The steps of a rank, kept with the plan: backward asks for those of forward."""
    return plan.rank_steps(rank)


def _some_teams(model: PassModel, degree: int, num_teams: int) -> list[int]:
    """All teams of a node where nodes are alike; else of some nodes, evenly spaced."""
    size = model.machine.node_size
    shares_nics = model.world_size > size and model.machine.nic_sharers > 1
    teams_per_block = max(1, size // degree) if shares_nics else 1
    nodes_are_full = num_teams % teams_per_block == 0 and model.world_size % size == 0
    all_alike = nodes_are_full and model.alike is not None
    num_blocks = 1 if all_alike else max(2, SAMPLED_RANKS // teams_per_block)
    starts = (
        np.linspace(0, num_teams - teams_per_block, num_blocks).astype(int)
        // teams_per_block
        * teams_per_block
    )
    return [
        *dict.fromkeys(
            int(x) + i for x in starts for i in range(teams_per_block) if x + i < num_teams
        )
    ]


class _StepWalk:
    """A walk through the steps of teams, one rank of each, that adds up bytes and kernels.

    Args:
        degree: ranks of a team.
        costs: prices of the inner plan's tiles and items.
        reach: rows of each pair of shards that the mask reaches; empty: all rows.
    """

    def __init__(self, model: PassModel, degree: int, costs: PassCosts, reach: Reach):
        self._model, self._degree, self._costs = model, degree, costs
        size = model.machine.node_size
        ranks_in_node = min(degree, size)
        self._nested = size % degree == 0 or degree % size == 0
        self._traded: Shares = (
            (INSIDE, (ranks_in_node - 1) / degree),
            (BETWEEN, (degree - ranks_in_node) / degree),
        )
        if not self._nested:
            self._traded = ((EITHER, (degree - 1) / degree),)
        self._reach = reach
        self._row_bytes = costs.row_bytes
        q_layout, kv_layout = costs.layouts
        self._all_rows = dict(enumerate(q_layout.sizes)), dict(enumerate(kv_layout.sizes))
        self._rows = self._reached(reach)
        self._crossing: defaultdict[tuple[int, bool], float] = defaultdict(float)

    @property
    def nic_seconds(self) -> float:
        """Seconds that the busiest node's NICs take for what enters or leaves it."""
        machine = self._model.machine
        width = machine.nic_bandwidth * machine.node_size / machine.nic_sharers
        load = max(self._crossing.values(), default=0.0)
        return load * min(self._degree, machine.node_size) / width

    def seconds(self, team: int, steps: tuple[RankStep, ...]) -> float:
        """Return the bound of one rank of a team, and add what crosses its node's border."""
        costs = self._costs
        tile_seconds = np.array([costs.tile_seconds(tile) for step in steps for tile in step.tiles])
        arriving_bytes = np.zeros((len(tile_seconds), 3))
        leaving_bytes = np.zeros((len(tile_seconds) + 1, 3))
        node = team * self._degree // self._model.machine.node_size
        crosses = self._nested and self._model.world_size > self._model.machine.node_size

        def add(row: Array, num_bytes: float, shares: Shares, sent: bool) -> None:
            for column, share in shares:
                row[column] += share * num_bytes
                if crosses and column == BETWEEN:
                    self._crossing[node, sent] += share * num_bytes

        pairs = ((q, kv) for step in steps for tile in step.tiles for q in tile.q for kv in tile.kv)
        rows = self._reached(pairs)
        share, row_bytes = self._model.least_share, self._row_bytes

        def num_bytes(item: Item) -> float:
            return share * rows[item.side].get(item.shard, 0) * row_bytes[item[:2]]

        team_items = [Item(side, Role.OPERAND, team) for side in Side] if self._degree > 1 else []
        bytes_on_the_way = {item: (self._own_bytes(item), self._traded) for item in team_items}
        num_tiles = 0
        for step in steps:
            for transfer in step.sends:
                if not self._reach or transfer.item.role is Role.PARTIAL:
                    add(
                        leaving_bytes[num_tiles],
                        num_bytes(transfer.item),
                        self._link(transfer),
                        True,
                    )
            for tile in step.tiles:
                for side, shards in zip(Side, tile[:2], strict=True):
                    for shard in shards:
                        arrival = bytes_on_the_way.pop(Item(side, Role.OPERAND, shard), None)
                        if arrival:
                            add(arriving_bytes[num_tiles], *arrival, False)
                num_tiles += 1
            for transfer in step.recvs:
                if transfer.item.role is Role.OPERAND:
                    bytes_on_the_way[transfer.item] = num_bytes(transfer.item), self._link(transfer)
        for item in team_items:  # its partial goes back to the heads' own ranks
            partial = item._replace(role=Role.PARTIAL)
            add(leaving_bytes[num_tiles], self._own_bytes(partial), self._traded, True)
        return self._in_order(tile_seconds, arriving_bytes, leaving_bytes)

    def _own_bytes(self, item: Item) -> float:
        """Bytes of an item of the team's own shard, without rows that the mask leaves out."""
        rows = self._rows[item.side].get(item.shard, 0)
        return self._model.least_share * rows * self._row_bytes[item[:2]]

    def _reached(self, pairs: Iterable[tuple[int, int]]) -> tuple[dict[int, int], dict[int, int]]:
        """Upper bounds of the rows of each shard that some pairs reach: of queries, and of keys."""
        if not self._reach:
            return self._all_rows
        queries: dict[int, int] = {}
        keys: dict[int, int] = {}
        for q, kv in pairs:
            q_rows, k_rows = self._reach.get((q, kv), (0, 0))
            queries[q] = max(queries.get(q, 0), q_rows)
            keys[kv] = max(keys.get(kv, 0), k_rows)
        return queries, keys

    def _link(self, transfer: Transfer) -> Shares:
        size, degree = self._model.machine.node_size, self._degree
        same_node = transfer.src * degree // size == transfer.dst * degree // size
        return ((INSIDE if same_node else BETWEEN, 1.0),)

    def _in_order(self, tile_seconds: Array, arriving_bytes: Array, leaving_bytes: Array) -> float:
        """The bound of the module's text."""
        start_seconds = np.concatenate([[0.0], np.cumsum(tile_seconds)])
        arrival_seconds = self._link_seconds(np.cumsum(arriving_bytes, axis=0))
        largest_delay = np.maximum.accumulate(
            np.concatenate([[0.0], arrival_seconds - start_seconds[:-1]])
        )
        departure_seconds = self._link_seconds(np.cumsum(leaving_bytes[::-1], axis=0)[::-1])
        return float((largest_delay + start_seconds + departure_seconds).max())

    def _link_seconds(self, columns: Array) -> Array:
        """The least seconds in which a rank's links carry these bytes, row by row."""
        machine = self._model.machine
        inside_bandwidth, nic_bandwidth = machine.inside.bandwidth, machine.nic_bandwidth
        total_bandwidth = inside_bandwidth + nic_bandwidth * (
            self._model.world_size > machine.node_size
        )
        by_link = columns[:, :EITHER] / np.array([inside_bandwidth, nic_bandwidth])
        return np.maximum(by_link.max(1), columns.sum(1) / total_bandwidth)
