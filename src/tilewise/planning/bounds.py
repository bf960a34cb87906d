"""Lower bounds of the time that an option takes in a pass: by its shape, and by its plan's steps.

A rank computes in order: before a tile all that it reads must have arrived, and what the rank
sends later leaves after the tiles before. So for any tiles u < k

    seconds >= arrivals that tiles up to u read + tiles u .. k - 1 + departures after tile k - 1

with the copies and merges that cannot be spared among the tiles: of what leaves, and of results.

Under a split by heads these are the steps of the inner plan, between teams: the ranks that trade
their shards for heads. What is traded arrives before a team's own shards are read.
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping
from itertools import product
from typing import Any, NamedTuple

import numpy as np

from tilewise.arguments import item_bytes
from tilewise.compiler.facts import device_traits
from tilewise.layouts.cells import Cell
from tilewise.masks.tables import PerHead
from tilewise.plan.ir import Item, Plan, RankStep, Role, Side, Tile, Transfer
from tilewise.plan.kept import kept_with_plan
from tilewise.plan.payload import STATISTICS, Payload, accumulator
from tilewise.plan.row_ranges import count
from tilewise.planning.options import Option
from tilewise.planning.pass_model import PassModel, Reach
from tilewise.simulation.prices import PassPrices, copy_seconds, merge_seconds
from tilewise.simulation.simulator import MOST_APART, lower_queries
from tilewise.tiles.call_rows import LIBRARY_STYLE, TileCalls
from tilewise.tiles.calls import Kind

Array = np.ndarray

SAFE = 1 - 1e-9
"""Bounds are lowered by this much, so that rounding cannot lift one above a simulated time."""

SAMPLED_RANKS = 6
"""Number of ranks of a plan, about, that a bound looks at where not all nodes are alike."""

INSIDE, BETWEEN, EITHER = range(3)
"""Columns of bytes: by links inside a node, by NICs, by either."""

Columns = list[float]
"""Bytes by column."""

Shares = tuple[tuple[int, float], ...]
"""Shares of an item's bytes, by column."""


def shape_bound(model: PassModel, option: Option) -> float:
    """Return a bound by the shape of the ranks' tiles: bytes over each link, and kernels at their
    best with the copies and merges that cannot be spared. Where one call reads all shards, they
    follow each other.

    Where a mask leaves ranks different work, the bound is of kernels alone, the same for all
    options.
    """
    tokens = model.work.num_tokens
    if model.alike is None or not option.shape.q:
        return SAFE * _compute_seconds(model, tokens, tokens)
    rows = min(model.layout.sizes) * option.degree
    kernels = min(_compute_seconds(model, q * rows, kv * rows) for q, kv in option.shape.calls)
    own_seconds = kernels + _memory_seconds(model, option)
    payload = model.payload(option.degree)
    arriving, leaving = (
        [payload.row_bytes(Item(side, role, 0)) for side in Side]
        for role in (Role.OPERAND, Role.PARTIAL)
    )
    if option.shape.at_once:
        return SAFE * (
            own_seconds + sum(_link_seconds(model, option, x) for x in (arriving, leaving))
        )
    sent = [sum(of_both) for of_both in zip(arriving, leaving, strict=True)]
    return SAFE * max(own_seconds, _link_seconds(model, option, sent))


def _link_seconds(model: PassModel, option: Option, row_bytes: list[int]) -> float:
    """Least seconds in which a rank's tiles get, or return, so many bytes a row of each side."""
    degree, machine = option.degree, model.machine
    rows = min(model.layout.sizes) * degree * model.least_share
    shard_bytes = [rows * num_bytes for num_bytes in row_bytes]
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
    return max(sent_bytes / best_bandwidth, nic_seconds)


def _memory_seconds(model: PassModel, option: Option) -> float:
    """Return the least seconds that a rank copies and merges: results of calls, and what it sends.

    Args:
        option: of a known shape.
    """
    payload, degree, machine = model.payload(option.degree), option.degree, model.machine
    if payload.whole_rows or option.kind == "balanced_ring":  # of a pair either shard travels
        return 0.0
    if device_traits(machine.device).waiting_results:
        return _combining_seconds(model, option)
    rows = min(model.layout.sizes) * degree
    shards = option.shape[:2]
    added: list[int] = []  # bytes of adding a row of a call's results, by side
    merged = packed = 0.0
    for side in Side:
        made, held = _result_bytes(payload, side)
        added.append(made + 2 * held if held else 0)
        partial_bytes = rows * model.least_share * payload.row_bytes(Item(side, Role.PARTIAL, 0))
        others = shards[side] - 1
        packed += others * partial_bytes
        if held:
            first = made + held if made != held else 0
            merged += others * partial_bytes - shards[side] * rows * (added[-1] - first)
        if degree > 1:
            own_bytes = payload.row_bytes(Item(side, Role.OPERAND, 0))
            packed += rows * model.least_share * own_bytes + partial_bytes
    pairs = shards[0] * shards[1]  # a call of q x kv shards adds to q and to kv shards
    merged += pairs * rows * min(added[0] / kv + added[1] / q for q, kv in option.shape.calls)
    merged = max(0.0, merged) * (0.5 if model.alike else 1.0)
    return merge_seconds(machine, merged) + copy_seconds(machine, 2 * packed)


def _combining_seconds(model: PassModel, option: Option) -> float:
    """Return the bound of `_memory_seconds` for devices on which results wait to be combined.

    Each result and each arrival is read once, and only what leaves is written.

    Args:
        option: of a known shape.
    """
    payload, machine = model.payload(option.degree), model.machine
    rows = min(model.layout.sizes) * option.degree
    made = [_result_bytes(payload, side)[0] for side in Side]
    shards = option.shape[:2]
    pairs = shards[0] * shards[1]
    # a call of q x kv shards has results of q and of kv shards
    read = pairs * rows * min(made[0] / kv + made[1] / q for q, kv in option.shape.calls)
    moved = read * (0.5 if model.alike else 1.0)
    for side in Side:
        partial_bytes = rows * model.least_share * payload.row_bytes(Item(side, Role.PARTIAL, 0))
        moved += 2 * (shards[side] - 1) * partial_bytes
        if option.degree > 1:
            own_bytes = payload.row_bytes(Item(side, Role.OPERAND, 0))
            moved += 2 * rows * model.least_share * own_bytes + partial_bytes
    return min(merge_seconds(machine, moved), copy_seconds(machine, moved))


def _compute_seconds(model: PassModel, queries: float, keys: float) -> float:
    """Least seconds of all kernels of a rank, in calls of at most so many rows.

    Under a causal mask, of zigzag shards half the keys of all queries, or all keys of half of them.
    """
    sizes = [(queries, (keys + 1) / 2), (queries / 2, keys)] if model.alike else [(queries, keys)]
    speed = max(model.best_speed(max(q, 1), max(k, 1)) for q, k in sizes)
    launch = model.machine.launch_seconds + model.kernel.launch_seconds
    return model.flop / model.world_size / speed + launch


def _result_bytes(payload: Payload, side: Side) -> tuple[int, int]:
    """Bytes of a row of results, as a kernel makes them and as partials hold them."""
    numbers = [(name in STATISTICS, width) for name, width in payload.results(side)]
    held = item_bytes(accumulator(payload.dtype))
    made = sum(width * (held if kept else item_bytes(payload.dtype)) for kept, width in numbers)
    heads = payload.heads(side)
    return heads * made, heads * held * sum(width for _, width in numbers)


class StepsBound(NamedTuple):
    """A bound by a plan's steps, and the number of transfers that were looked at for it."""

    seconds: float
    num_transfers: int


def steps_bound(model: PassModel, option: Option) -> StepsBound:
    """Return a bound by the steps of the option's plan: the slowest of some ranks and nodes.

    Where a mask leaves ranks different work, only the rows that a rank's own tiles reach are taken
    to arrive and to leave. The plan is not pruned for this, because pruning takes longer.
    """
    unlike = model.alike is None
    if unlike and (model.world_size > MOST_APART or isinstance(model.work.mask, PerHead)):
        return StepsBound(0.0, 0)
    resolved = model.work.resolve(option.make())[model.backward]
    plan = resolved.plan
    degree, inner = plan.traits.head_split or (1, plan)
    layout = model.team_layout(degree)
    if plan.cuts is None:
        resolved = resolved._replace(layouts=(layout, layout))
    cells, reach = model.cells(degree, resolved) if unlike else (None, {})
    table = None
    if model.sampled and not unlike:  # trials run whole shards
        table = TileCalls(resolved.layouts, resolved.mask, resolved.groups, LIBRARY_STYLE)
    tiles = _TileBounds(PassPrices(resolved, model.machine), table, cells, bool(model.alike))
    walk = _StepWalk(model, degree, tiles, reach)
    teams = _some_teams(model, degree, inner)
    steps_of_teams = [_rank_steps(inner, team) for team in teams]
    slowest = max(map(walk.seconds, teams, steps_of_teams))
    transfers = sum(len(x.sends) + len(x.recvs) for steps in steps_of_teams for x in steps)
    return StepsBound(SAFE * max(slowest, walk.nic_seconds), transfers)


@kept_with_plan(4 * SAMPLED_RANKS)
def _rank_steps(plan: Plan, rank: int) -> tuple[RankStep, ...]:
    """The steps of a rank, kept with the plan: backward asks for those of forward, if they are."""
    return plan.rank_steps(rank)


def _some_teams(model: PassModel, degree: int, inner: Plan) -> list[int]:
    """All teams of a node where nodes are alike; else of some nodes, evenly spaced.

    Under a causal mask the first and the last team compute equal pairs in calls of other shapes, of
    which the node of the slower one is taken.
    """
    num_teams, size = inner.world_size, model.machine.node_size
    shares_nics = model.world_size > size and model.machine.nic_sharers > 1
    teams_per_block = max(1, size // degree) if shares_nics else 1
    nodes_are_full = num_teams % teams_per_block == 0 and model.world_size % size == 0
    last_start = num_teams - teams_per_block
    if nodes_are_full and model.alike is not None:
        first, last = (lower_queries(_rank_steps(inner, team)) for team in (0, num_teams - 1))
        starts = np.array([last_start if model.alike and last > first else 0])
    else:
        num_blocks = max(2, SAMPLED_RANKS // teams_per_block)
        starts = np.linspace(0, last_start, num_blocks).astype(int)
    starts = starts // teams_per_block * teams_per_block
    return [
        *dict.fromkeys(
            int(x) + i for x in starts for i in range(teams_per_block) if x + i < num_teams
        )
    ]


class _Call(NamedTuple):
    """The least work of one kernel call of a tile.

    Attributes:
        area: pairs, those at the edge of the mask that a kernel computes in vain among them.
        rows: by side, those that have results.
    """

    queries: int
    area: float
    rows: tuple[int, int]


class _TileBounds:
    """Lower bounds of the seconds of tiles, whose rows are read in place, and of what merges and
    packs partial results.

    Args:
        prices: of the inner plan's pass.
        table: the calls of tiles of which all rows are here; None: a tile is one call.
        cells: areas by (query shard, KV shard); None: all alike, but for the diagonal.
        halved: with cells None: whether a shard pair has half its cells, as zigzag under a causal
            mask has; a shard with itself has half a cell a row more.
    """

    def __init__(
        self,
        prices: PassPrices,
        table: TileCalls | None,
        cells: Mapping[tuple[int, int], Cell] | None,
        halved: bool,
    ):
        self._prices, self._table, self._cells, self._halved = prices, table, cells, halved
        self.payload, self.layouts = prices.resolved.payload, prices.resolved.layouts
        self._query_sizes = self.layouts[0].sizes
        self._result_bytes = tuple(_result_bytes(self.payload, side) for side in Side)
        self._known: dict[Any, list[_Call]] = {}
        self.waits = device_traits(prices.machine.device).waiting_results > 0

    def seconds(self, tile: Tile, begun: set[Item]) -> tuple[float, float]:
        """Return the least seconds of a tile's kernels and of adding its results to its partials;
        and, where results wait, of reading them at some later time.

        Args:
            begun: partials that have results of earlier tiles; this tile's are added.
        """
        moved, read, seconds = 0, 0, 0.0
        both = [
            [Item(side, Role.PARTIAL, shard) for shard in shards]
            for side, shards in zip(Side, tile[:2], strict=True)
        ]
        added = [begun.issuperset(items) for items in both]
        calls = self._calls(tile)
        for call in calls:
            seconds += self._prices.kernel_seconds(call.queries, call.area)
            for rows, adds, (made, held) in zip(call.rows, added, self._result_bytes, strict=True):
                if self.waits:
                    read += rows * made
                elif held and (adds or made != held):
                    moved += rows * (made + (2 if adds else 1) * held)
        if calls:
            begun.update(*both)
        if self.payload.whole_rows:  # nothing is added
            return seconds, 0.0
        return seconds + merge_seconds(self._prices.machine, moved), self.read_seconds(read)

    def _calls(self, tile: Tile) -> list[_Call]:
        """Return the kernel calls of a tile; without a table one call, which takes no longer."""
        edge_keys = self._prices.kernel.edge_keys
        if self._table is None:
            area = self._area(tile)
            queries = sum(self._query_sizes[shard] for shard in tile.q)
            area += int(edge_keys * self._edge_rows(tile))
            return [_Call(queries, area, self._result_rows(tile))] if area else []
        # Zigzag shards under a causal mask meet by their order alone.
        order = {shard: at for at, shard in enumerate(sorted({*tile.q, *tile.kv}))}
        key: Any = tuple(tuple(map(order.__getitem__, shards)) for shards in tile[:2])
        if key not in self._known:
            held = tuple(
                tuple(((0, layout.sizes[shard]),) for shard in shards)
                for layout, shards in zip(self.layouts, tile[:2], strict=True)
            )
            calls = self._table.kernel_calls(tile, (held[0], held[1]))
            self._known[key] = [
                _Call(
                    x.num_q,
                    x.area + (0 if x.kind is Kind.FULL else int(edge_keys * x.num_q)),
                    (x.num_q, x.num_k),
                )
                for x in calls
            ]
        return self._known[key]

    def _result_rows(self, tile: Tile) -> tuple[int, int]:
        """Rows of each side of which a tile has results, at least."""
        if self._cells is not None:
            return self._cell_rows(tile)
        (q, kv), sizes = tile[:2], (self._query_sizes[0], self.layouts[1].sizes[0])
        if not self._halved:
            return len(q) * sizes[0], len(kv) * sizes[1]
        # Of zigzag shards q < kv the second half of q sees all of kv, of q > kv all the first half.
        half_q, half_kv = sum(x < min(kv) for x in q), sum(x > max(q) for x in kv)
        return (2 * len(q) - half_q) * sizes[0] // 2, (2 * len(kv) - half_kv) * sizes[1] // 2

    def _cell_rows(self, tile: Tile) -> tuple[int, int]:
        """Return the least number of rows with results by side: of each shard its largest cell."""
        most: tuple[dict[int, int], dict[int, int]] = {}, {}
        for pair in product(tile.q, tile.kv):
            cell = self._cells.get(pair) if self._cells else None
            if cell is not None:
                for side, rows in zip(Side, (cell.q_rows, cell.k_rows), strict=True):
                    size = count(rows, self.layouts[side].sizes[pair[side]])
                    most[side][pair[side]] = max(size, most[side].get(pair[side], 0))
        return sum(most[0].values()), sum(most[1].values())

    def pack_seconds(self, num_bytes: float) -> float:
        """Return the least seconds of copying what travels."""
        return copy_seconds(self._prices.machine, 2 * num_bytes)

    def merge_seconds(self, num_bytes: float) -> float:
        """Return the least seconds of adding partials of so many bytes that have arrived."""
        return (
            0.0 if self.payload.whole_rows else merge_seconds(self._prices.machine, 3 * num_bytes)
        )

    def read_seconds(self, num_bytes: float) -> float:
        """Return the least seconds of reading what waits when it is combined."""
        machine = self._prices.machine
        return min(merge_seconds(machine, num_bytes), copy_seconds(machine, num_bytes))

    def _area(self, tile: Tile) -> int:
        """Allowed pairs of a tile."""
        if self._cells is not None:
            pairs = ((q, kv) for q in tile.q for kv in tile.kv)
            return sum(self._cells[pair].area for pair in pairs if pair in self._cells)
        rows = self._query_sizes[0], self.layouts[1].sizes[0]
        area = len(tile.q) * len(tile.kv) * rows[0] * rows[1]
        if not self._halved:
            return area
        return (area + len({*tile.q} & {*tile.kv}) * rows[0]) // 2

    def _edge_rows(self, tile: Tile) -> int:
        """Queries at an edge of the mask: those of shard pairs that are no full rectangle."""
        rows = self._query_sizes
        if self._cells is None:
            return sum(rows[s] for s in {*tile.q} & {*tile.kv}) if self._halved else 0
        cells = (self._cells.get((q, kv)) for q in tile.q for kv in tile.kv)
        return sum(
            count(cell.q_rows, 0)
            for cell in cells
            if cell and cell.area < count(cell.q_rows, 0) * count(cell.k_rows, 0)
        )


class _StepWalk:
    """A walk through the steps of teams, one rank of each, that adds up bytes and kernels.

    Args:
        degree: ranks of a team.
        tiles: bounds of the inner plan's tiles.
        reach: rows of each pair of shards that the mask reaches; empty: all rows.
    """

    def __init__(self, model: PassModel, degree: int, tiles: _TileBounds, reach: Reach):
        self._model, self._degree, self._tiles = model, degree, tiles
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
        payload = tiles.payload
        parts = ((side, role) for side in Side for role in Role)
        self._row_bytes = {part: payload.row_bytes(Item(*part, 0)) for part in parts}
        q_layout, kv_layout = tiles.layouts
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
        tiles, work = self._tiles, list[float]()  # seconds of one piece of work after the other
        reads = list[float]()  # seconds of reading, some time after each piece, what waits
        arriving, leaving = list[Columns](), [[0.0] * 3]  # bytes before each piece, and after it
        node = team * self._degree // self._model.machine.node_size
        crosses = self._nested and self._model.world_size > self._model.machine.node_size

        def do(seconds: float, read_later: float = 0.0) -> None:
            work.append(seconds)
            reads.append(read_later)
            arriving.append([0.0] * 3)
            leaving.append([0.0] * 3)

        def add(row: Columns, num_bytes: float, shares: Shares, sent: bool) -> None:
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
        begun: set[Item] = set()
        unmerged: dict[Item, float] = {}  # seconds of adding what has arrived to partials
        do(tiles.pack_seconds(sum(map(self._own_bytes, team_items))))
        for step in steps:
            partials = [x.item for x in step.sends if x.item.role is Role.PARTIAL]
            merging = sum(unmerged.pop(item, 0.0) for item in partials)
            do(merging + tiles.pack_seconds(sum(map(num_bytes, partials))))
            for transfer in step.sends:
                if not self._reach or transfer.item.role is Role.PARTIAL:
                    add(leaving[-1], num_bytes(transfer.item), self._link(transfer), True)
            for tile in step.tiles:
                do(*tiles.seconds(tile, begun))
                for side, shards in zip(Side, tile[:2], strict=True):
                    for shard in shards:
                        arrival = bytes_on_the_way.pop(Item(side, Role.OPERAND, shard), None)
                        if arrival:
                            add(arriving[-1], *arrival, False)
            for transfer in step.recvs:
                item = transfer.item
                if item.role is Role.OPERAND:
                    bytes_on_the_way[item] = num_bytes(item), self._link(transfer)
                elif item in begun and not self._reach and tiles.waits:
                    reads[-1] += tiles.read_seconds(num_bytes(item))
                elif item in begun and not self._reach:
                    merging = tiles.merge_seconds(num_bytes(item))
                    unmerged[item] = unmerged.get(item, 0.0) + merging
        own_partials = [item._replace(role=Role.PARTIAL) for item in team_items]
        do(sum(unmerged.values()) + tiles.pack_seconds(sum(map(self._own_bytes, own_partials))))
        for item in own_partials:  # they go back to the heads' own ranks
            add(leaving[-1], self._own_bytes(item), self._traded, True)
        done, read, arrived, left = map(np.array, (work, reads, arriving, leaving))
        # When what waits is read is not known, but at the end of the pass all of it has been.
        at_the_end = self._in_order(done + read, arrived, np.zeros_like(left))
        return max(at_the_end, self._in_order(done, arrived, left))

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

    def _in_order(self, seconds: Array, arriving_bytes: Array, leaving_bytes: Array) -> float:
        """Return a lower bound of the seconds: the formula of this module's docstring.

        Args:
            seconds: of the tiles of each step.
            arriving_bytes, leaving_bytes: of each step, by class of link.
        """
        start_seconds = np.concatenate([[0.0], np.cumsum(seconds)])
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
