"""What a pass takes at least under a mask that leaves out other pairs for every rank.

Pruning leaves of each cell the rows that it needs. So of every plan that is not made for the mask
it is known which cells a rank computes in which calls, and what must reach it, and its node, first.
"""

from functools import cache, cached_property
from typing import NamedTuple

import numpy as np

from tilewise.layouts.cells import cells
from tilewise.plan.ir import Item, Plan, RankStep, Role, Side, Transfer
from tilewise.plan.row_ranges import count
from tilewise.planning.bounds import SAFE
from tilewise.planning.pass_model import PassModel
from tilewise.simulation.network import BETWEEN, INSIDE

Array = np.ndarray


LOOKED_AT = 16
"""About so many ranks of a plan are looked at: what holds for some is a bound for all."""


class _Tables(NamedTuple):
    """What cells need under a split by heads; one index counts shards, the other teams of them.

    A team is the shards that are traded for heads: one inner shard.

    Attributes:
        area: allowed pairs [query shard, KV team].
        rows: rows needed [query shard, KV team], and [query team, KV shard].
    """

    area: Array
    rows: tuple[Array, Array]


class _Need(NamedTuple):
    """What a rank of the inner plan computes and reads.

    Attributes:
        seconds: of its kernels, and of waiting for what they read before they begin.
        rows: [side, shard] that its cells read.
        last: the same of its last call.
    """

    seconds: float
    rows: Array
    last: Array


class MaskBounds:
    """Bounds by who computes which cells."""

    def __init__(self, model: PassModel):
        self.model = model
        self._tables = cache(self._make_tables)

    def seconds(self, plan: Plan) -> float:
        """Seconds of the slowest rank or node that is looked at."""
        degree, inner = plan.traits.head_split or (1, plan)
        some = range(0, inner.world_size, max(1, inner.world_size // LOOKED_AT))
        ranks = {rank: self._of_rank(degree, rank, inner) for rank in some}
        nodes = self._of_nodes(degree, {rank: rows for rank, (_, rows) in ranks.items()})
        return SAFE * max(nodes, *(seconds for seconds, _ in ranks.values()))

    @cached_property
    def _cells(self) -> tuple[Array, Array, Array]:
        """Areas, and the rows needed of queries and of keys, [query shard, KV shard]."""
        n, layout = self.model.world_size, self.model.layout
        tables = np.zeros((3, n, n))
        for (i, j), cell in cells(self.model.work.mask, layout, layout).items():
            tables[:, i, j] = cell.area, count(cell.q_rows, 0), count(cell.k_rows, 0)
        return tables[0], tables[1], tables[2]

    def _make_tables(self, degree: int) -> _Tables:
        area, q_rows, k_rows = self._cells
        n = len(area)
        wide, high = (n, n // degree, degree), (n // degree, degree, n)
        rows = q_rows.reshape(wide).max(2), k_rows.reshape(high).max(1)
        return _Tables(area.reshape(wide).sum(2), rows)

    def _need(self, degree: int, rank: int, steps: tuple[RankStep, ...]) -> _Need:
        tables, sizes = self._tables(degree), np.array(self.model.layout.sizes)
        busy = lead = 0.0
        rows = last = np.zeros((2, self.model.world_size))
        home = {(hop.item.side, hop.src) for step in steps for hop in step.recvs if _direct(hop)}
        lanes = self._lanes(degree, rank, home)
        for tile in (tile for step in steps for tile in step.tiles):
            q, kv = (_members(shards, degree) for shards in tile[:2])
            areas = tables.area[np.ix_(q, np.array(tile.kv))].sum(1)
            if areas.any():
                last = np.zeros_like(rows)
                last[0, q] = tables.rows[0][np.ix_(q, np.array(tile.kv))].max(1)
                last[1, kv] = tables.rows[1][np.ix_(np.array(tile.q), kv)].max(0)
                rows = np.maximum(rows, last)
                lead = max(lead, self._slowest(degree, rows, Role.OPERAND, lanes) - busy)
                queries = float(sizes[q][areas > 0].sum())
                busy += self._call(degree, queries, float(areas.sum()))
        return _Need(lead + busy, rows, last)

    def _lanes(self, degree: int, rank: int, home: set[tuple[Side, int]]) -> Array:
        """Seconds per byte, [lane, side, shard]; the lanes are inside the node, and between nodes.

        What comes straight from its owner comes by the link between them; else by any.
        """
        model, shards = self.model, np.arange(self.model.world_size)
        size = model.machine.node_size
        widths, any_link = model.bandwidths(), 1 / self._fastest
        inside, between = 1 / widths[INSIDE], 1 / widths[BETWEEN]
        exact = np.zeros((2, len(shards)), bool)
        team = shards // degree == rank
        if size % degree == 0 or degree % size == 0:
            for side, owner in home:
                exact[side] |= shards // degree == owner
            exact |= team
        sender = np.where(team, shards, shards // degree * degree)
        near = sender // size == rank * degree // size
        lanes = np.zeros((2, 2, len(shards)))
        lanes[0] = np.where(exact, near * inside, any_link)
        lanes[1] = np.where(exact & ~near, between, 0)
        neighbours = min(degree, size) if exact.any() else degree
        lanes[:, :, team & near] *= (neighbours - 1) / neighbours
        return lanes

    def _slowest(self, degree: int, rows: Array, role: Role, lanes: Array) -> float:
        payload = self.model.payload(degree)
        each = np.array([payload.row_bytes(Item(side, role, 0)) for side in Side], float)
        return float((lanes * rows * each[:, None]).sum((1, 2)).max())

    def _call(self, degree: int, queries: float, area: float) -> float:
        model = self.model
        launch = model.machine.launch_seconds + model.kernel.launch_seconds
        share = model.pair_flop / degree
        return launch + share * area / model.kernel.speed(queries, area / queries)

    def _bytes(self, degree: int, rows: Array, role: Role) -> float:
        """Of the rows of a head group of these shards."""
        payload = self.model.payload(degree)
        each = np.array([payload.row_bytes(Item(side, role, 0)) for side in Side], float)
        return float((rows * each[:, None]).sum())

    def _of_rank(self, degree: int, rank: int, plan: Plan) -> tuple[float, Array]:
        """Seconds of a rank, and the rows that it reads.

        First come the operands of its first calls, last go the partials of its last one; with a
        split by heads also those of all it computed for the ranks that it traded heads with. Of
        these one is taken who owns the mean of what they need.
        """
        steps = plan.rank_steps(rank)
        need = self._need(degree, rank, steps)
        straight = {(hop.item.side, hop.dst) for step in steps for hop in step.sends if _back(hop)}
        lanes = self._lanes(degree, rank, straight)
        team = np.zeros(self.model.world_size, bool)
        team[rank * degree : (rank + 1) * degree] = True
        after = self._slowest(degree, np.where(team, need.rows, need.last), Role.PARTIAL, lanes)
        others = need.rows * ~team
        moved = max(self._bytes(degree, others, role) for role in (Role.OPERAND, Role.PARTIAL))
        return max(need.seconds + after, moved / self._fastest), need.rows

    @cached_property
    def _fastest(self) -> float:
        model = self.model
        if model.world_size <= model.machine.node_size:
            return model.machine.inside.bandwidth
        return max(model.bandwidths().values())

    def _of_nodes(self, degree: int, needs: dict[int, Array]) -> float:
        """What must enter and leave nodes, once, whichever of their ranks need it."""
        model = self.model
        size = model.machine.node_size
        if (size % degree and degree % size) or model.world_size <= size:
            return 0.0
        width = model.bandwidths()[BETWEEN] * size / model.machine.nic_sharers / min(size, degree)
        of_nodes: dict[int, Array] = {}
        for rank, rows in needs.items():
            node = rank * degree // size
            of_nodes[node] = np.maximum(of_nodes.get(node, 0), rows)
        home = np.arange(model.world_size) // size
        return max(
            self._bytes(degree, rows * (home != node), role) / width
            for node, rows in of_nodes.items()
            for role in (Role.OPERAND, Role.PARTIAL)
        )


def _members(teams: tuple[int, ...], degree: int) -> Array:
    return (np.array(teams)[:, None] * degree + np.arange(degree)).ravel()


def _direct(hop: Transfer) -> bool:
    """Whether an operand comes from its owner."""
    return hop.item.role is Role.OPERAND and hop.src == hop.item.shard


def _back(hop: Transfer) -> bool:
    """Whether a partial goes to its owner."""
    return hop.item.role is not Role.OPERAND and hop.dst == hop.item.shard
