"""Only what is needed: every rank computes its own queries, each k, v range goes only to readers.

With moves="q" it computes its own keys, and each q range goes only to the ranks whose keys it sees.
Partial results return the way the operands came. A rank's sources are divided among a few stages of
equal size, nearest first, so that what has arrived is computed while the rest is under way. Where
nodes are known, rows that several ranks of a node read cross to it once and are passed on there.
Source: the group cast of MagiAttention (SandAI 2025), and its hierarchical form.
"""

from collections import defaultdict
from collections.abc import Iterator, Mapping
from itertools import chain
from typing import NamedTuple

from tilewise.arguments import Moves, checks_arguments, require_type, whole_number
from tilewise.layouts.cells import cells
from tilewise.layouts.layout import Layout
from tilewise.masks.base import Mask
from tilewise.plan.builder import RankBuilder, operand, partial
from tilewise.plan.ir import (
    Plan,
    RankStep,
    Rows,
    Side,
    Traits,
    WholeRows,
    own_shards,
)
from tilewise.plan.row_ranges import count_rows, union, whole_or

STAGES = 4
NODE_STAGES = 2  # of what comes from other nodes


class _Route(NamedTuple):
    """A shard's operands on their way to ranks of one node, and their partials back.

    The gateway gets all that the readers read of the shard, and passes on what others read of it.
    """

    shard: int
    readers: list[int]
    rows: Rows
    stage: int
    gateway: int

    @property
    def relayed(self) -> bool:
        return self.readers != [self.gateway]


class _Share(NamedTuple):
    """The tiles of a rank, all of its own rows, and the routes that it takes part in."""

    routes: list[_Route]  # that it takes part in
    tiles: dict[int, list[int]]  # step -> shards of the other side


@checks_arguments
def needed(mask: Mask, layout: Layout, node_size: int | None = None, moves: Moves = "kv") -> Plan:
    """Send each rank the rows of k and v that its queries see, and nothing else.

    Bytes: the fewest of all plans in which no query travels; with moves="q", no key.

    Args:
        mask, layout: the plan is for these only; ranks own rows as layout says.
        node_size: neighbouring ranks that share a node, to which rows then come once and are
            passed on; None: every reader is sent its rows by their owner.
        moves: the side that travels, "kv" or "q".
    """
    return _needed(mask, layout, node_size, Side[moves.upper()], whole=False)


def _needed(mask: Mask, layout: Layout, node_size: int | None, side: Side, *, whole: bool) -> Plan:
    """The plan in which a side travels.

    Args:
        whole: each rank computes one tile, when all has arrived; False: what is there, in stages.
    """
    layout = require_type(Layout, "layout", layout).owned
    require_type(Mask, "mask", mask).check_tokens(layout.num_tokens)
    n = layout.world_size
    size = n if node_size is None else whole_number("node_size", node_size)
    table: Table = {
        pair if side is Side.KV else pair[::-1]: cell.k_rows if side is Side.KV else cell.q_rows
        for pair, cell in cells(mask, layout, layout).items()
    }
    shares = _direct(table, n) if size >= n else _by_node(table, n, size)

    def script(rank: int) -> tuple[RankStep, ...]:
        s = RankBuilder(rank)
        tiles = shares[rank].tiles
        if whole and tiles:
            tiles = {max(tiles): sorted(chain(*tiles.values()))}
        for step, sources in tiles.items():
            s.at(step).tile(*(((rank,), sources) if side is Side.KV else (sources, (rank,))))
        for route in shares[rank].routes:
            value, gradient = operand(side, route.shard), partial(side, route.shard)
            for step, gradient_step, src, dst, rows in _legs(route, rank, table):
                rows = whole_or(rows, layout.size(route.shard))
                if src == rank:
                    s.at(step).send(value, dst, rows)
                    s.at(gradient_step).recv(gradient, dst, rows)
                else:
                    s.at(step).recv(value, src, rows)
                    s.at(gradient_step).send(gradient, src, rows)
        return s.done()

    moves = "" if side is Side.KV else ", moves='q'"
    nodes = "" if size >= n else f", node_size={size}"
    name = f"needed({mask!r}, {layout!r}{nodes}{moves})"
    traits = Traits(
        made_for=(mask, layout),
        whole_rows=WholeRows(_whole_rows, (mask, layout, node_size)),
        proven=True,
    )
    return Plan(name, n, 1, own_shards(n), script=script, traits=traits)


def _whole_rows(mask: Mask, layout: Layout, node_size: int | None, side: Side) -> Plan:
    return _needed(mask, layout, node_size, Side(1 - side), whole=True)


Table = Mapping[tuple[int, int], Rows]
"""(reader, source) -> the rows of the source's shard that the reader's rows meet."""


def _direct(table: Table, n: int) -> list[_Share]:
    """Routes from each owner straight to every reader."""
    shares = [_Share([], {0: [r]} if (r, r) in table else {}) for r in range(n)]
    for rank in range(n):
        sources = [(rank + d) % n for d in range(1, n) if (rank, (rank + d) % n) in table]
        sizes = [count_rows(table[rank, s]) for s in sources]
        for stage, stage_sources in enumerate(_in_stages(sources, sizes, STAGES)):
            for source in stage_sources:
                _send(shares, _Route(source, [rank], table[rank, source], stage, rank))
    return shares


def _by_node(table: Table, n: int, size: int) -> list[_Share]:
    """Routes from each owner to one rank of each node, the gateway, and from there to the readers.

    The gateway is a reader, unless the readers of the node already receive so much that another
    rank has less to receive even with these rows.
    """
    shares = [_Share([], {0: [r]} if (r, r) in table else {}) for r in range(n)]
    far_readers: dict[int, dict[int, list[int]]] = defaultdict(lambda: defaultdict(list))
    for reader, source in table:  # node -> source elsewhere -> its readers
        if reader // size != source // size:
            far_readers[reader // size][source].append(reader)
    for first_rank in range(0, n, size):
        node = range(first_rank, min(first_rank + size, n))
        sources = far_readers[first_rank // size]
        routes: dict[int, list[_Route]] = {rank: [] for rank in node}
        load = dict.fromkeys(node, 0)
        for source in sorted(sources, key=lambda source: (source - first_rank) % n):
            readers = sources[source]
            rows = union(*(table[reader, source] for reader in readers))
            num_rows = count_rows(rows)
            cost = {rank: load[rank] + num_rows * (rank not in readers) for rank in node}
            gateway = min(node, key=cost.__getitem__)
            load[gateway] += num_rows
            routes[gateway].append(_Route(source, readers, rows, 0, gateway))
        for gateway_routes in routes.values():
            stages = _in_stages(
                [*range(len(gateway_routes))],
                [count_rows(r.rows) for r in gateway_routes],
                NODE_STAGES,
            )
            for stage, numbers in enumerate(stages):
                for i in numbers:
                    _send(shares, gateway_routes[i]._replace(stage=stage))
        for reader in node:
            near_sources = [s for s in node if s != reader and (reader, s) in table]
            # Some while rows come from other nodes, some while gradients go back to them.
            last_step = max(shares[reader].tiles, default=0)
            source_parts = _in_stages(
                near_sources, [count_rows(table[reader, s]) for s in near_sources], 2
            )
            for sources, stage in zip(source_parts, (0, max(1, last_step)), strict=False):
                for source in sources:
                    rows = table[reader, source]
                    _send(shares, _Route(source, [reader], rows, stage, reader))
    return shares


def _send(shares: list[_Share], route: _Route) -> None:
    """Add a route to the shares of the ranks that take part in it."""
    for rank in {route.shard, route.gateway, *route.readers}:
        shares[rank].routes.append(route)
    for reader in route.readers:
        step = route.stage + 1 + route.relayed
        shares[reader].tiles.setdefault(step, []).append(route.shard)


def _legs(route: _Route, rank: int, table: Table) -> Iterator[tuple[int, int, int, int, Rows]]:
    """A rank's transfers of a route: (step, step of the gradient, source, destination, rows)."""
    shard, readers, rows, stage, gateway = route
    if rank in (shard, gateway):
        yield stage, stage + 2 + 2 * route.relayed, shard, gateway, rows
    for reader in readers if rank == gateway else {rank}.intersection(readers):
        if reader != gateway:
            yield stage + 1, stage + 3, gateway, reader, table[reader, shard]


def _in_stages(sources: list[int], sizes: list[int], stages: int) -> list[list[int]]:
    """Divide the sources, in order, into at most this many stages of about equal size."""
    total, rows_so_far = sum(sizes), 0
    parts: dict[int, list[int]] = {}
    for source, size in zip(sources, sizes, strict=True):
        parts.setdefault(rows_so_far * stages // total, []).append(source)
        rows_so_far += size
    return list(parts.values())
