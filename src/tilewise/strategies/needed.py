"""Only what is needed: every rank computes its own queries, each k, v range goes only to readers.

The gradients return the way the values came. A rank's sources are dealt to a few stages of equal
size, nearest first, so that what has arrived is computed while the rest is under way. Where nodes
are known, what several ranks of a node read crosses to it once: one of them passes it on.
Source: the group cast of MagiAttention (SandAI 2025), and its hierarchical form.
"""

from collections import defaultdict
from collections.abc import Mapping
from typing import NamedTuple

from tilewise.arguments import require_type, whole_number
from tilewise.layouts.cells import Cell, cells
from tilewise.layouts.layout import Layout
from tilewise.masks.base import Mask
from tilewise.plan.builder import RankBuilder, operand, partial
from tilewise.plan.ir import Plan, RankStep, Rows, Side, Traits, own_shards
from tilewise.plan.row_ranges import count_rows, union, whole_or

STAGES = 4
NODE_STAGES = 2  # of what comes from other nodes


class _Leg(NamedTuple):
    """A shard's keys and values on their way from rank to rank, and their gradients back."""

    step: int
    back: int
    src: int
    dst: int
    shard: int
    rows: Rows | None


class _Route(NamedTuple):
    """Ranks of one node that read a shard, and all that they read of it."""

    shard: int
    readers: list[int]
    rows: Rows


class _Share(NamedTuple):
    """What a rank does: its tiles are of its own queries."""

    legs: list[_Leg]
    tiles: dict[int, list[int]]  # step -> KV shards


def needed(mask: Mask, layout: Layout, node_size: int | None = None) -> Plan:
    """Send each rank the rows of k and v that its queries see, and nothing else.

    Bytes: the fewest of all plans in which no query travels.

    Args:
        mask, layout: the plan is for these only; ranks own rows as layout says.
        node_size: neighbouring ranks that share a node, to which rows then come once and are
            passed on; None: every reader is sent its rows by their owner.
    """
    require_type(Layout, "layout", layout)
    require_type(Mask, "mask", mask).check_tokens(layout.num_tokens)
    n = layout.world_size
    size = n if node_size is None else whole_number("node_size", node_size)
    table = cells(mask, layout, layout)
    shares = _direct(table, layout) if size >= n else _by_node(table, layout, size)

    def script(rank: int) -> tuple[RankStep, ...]:
        s = RankBuilder(rank)
        for step, sources in shares[rank].tiles.items():
            s.at(step).tile((rank,), sources)
        for step, back, src, dst, shard, rows in shares[rank].legs:
            value, gradient = operand(Side.KV, shard), partial(Side.KV, shard)
            if src == rank:
                s.at(step).send(value, dst, rows)
                s.at(back).recv(gradient, dst, rows)
            else:
                s.at(step).recv(value, src, rows)
                s.at(back).send(gradient, src, rows)
        return s.done()

    nodes = "" if size >= n else f", node_size={size}"
    name = f"needed({mask!r}, {layout!r}{nodes})"
    traits = Traits(made_for=(mask, layout), proven=True)
    return Plan(name, n, 1, own_shards(n), script=script, traits=traits)


Table = Mapping[tuple[int, int], Cell]


def _direct(table: Table, layout: Layout) -> list[_Share]:
    """From the owner to every reader."""
    n = layout.world_size
    shares = [_Share([], {0: [r]} if (r, r) in table else {}) for r in range(n)]
    for rank in range(n):
        sources = [(rank + d) % n for d in range(1, n) if (rank, (rank + d) % n) in table]
        sizes = [count_rows(table[rank, s].k_rows) for s in sources]
        for stage, some in enumerate(_dealt(sources, sizes, STAGES)):
            for source in some:
                route = _Route(source, [rank], table[rank, source].k_rows)
                _send(shares, table, layout, stage, route, rank)
    return shares


def _by_node(table: Table, layout: Layout, size: int) -> list[_Share]:
    """From the owner to one rank of each node, and from that to the readers.

    That is a reader, unless another rank of the node gets less by more than what it would pass on.
    """
    n = layout.world_size
    shares = [_Share([], {0: [r]} if (r, r) in table else {}) for r in range(n)]
    far: dict[int, dict[int, list[int]]] = defaultdict(lambda: defaultdict(list))
    for reader, source in table:  # node -> source elsewhere -> its readers
        if reader // size != source // size:
            far[reader // size][source].append(reader)
    for first in range(0, n, size):
        node, sources = range(first, min(first + size, n)), far[first // size]
        routes: dict[int, list[_Route]] = {rank: [] for rank in node}
        load = dict.fromkeys(node, 0)
        for source in sorted(sources, key=lambda source: (source - first) % n):
            readers = sources[source]
            route = _Route(source, readers, union(*(table[r, source].k_rows for r in readers)))
            rows = count_rows(route.rows)
            cost = {rank: load[rank] + rows * (rank not in readers) for rank in node}
            gateway = min(node, key=cost.__getitem__)
            load[gateway] += rows
            routes[gateway].append(route)
        for gateway, some in routes.items():
            stages = _dealt([*range(len(some))], [count_rows(r.rows) for r in some], NODE_STAGES)
            for stage, numbers in enumerate(stages):
                for i in numbers:
                    _send(shares, table, layout, stage, some[i], gateway)
        for reader in node:
            near = [s for s in node if s != reader and (reader, s) in table]
            # Some while rows come from other nodes, some while gradients go back to them.
            last = max(shares[reader].tiles, default=0)
            parts = _dealt(near, [count_rows(table[reader, s].k_rows) for s in near], 2)
            for sources, stage in zip(parts, (0, max(1, last)), strict=False):
                for source in sources:
                    route = _Route(source, [reader], table[reader, source].k_rows)
                    _send(shares, table, layout, stage, route, reader)
    return shares


def _send(
    shares: list[_Share], table: Table, layout: Layout, stage: int, route: _Route, gateway: int
) -> None:
    """Write legs and tiles: the gateway passes on what the readers read."""
    source, readers, rows = route
    size = layout.size(source)

    def leg(step: int, back: int, src: int, dst: int, rows: Rows) -> None:
        one = _Leg(step, back, src, dst, source, whole_or(rows, size))
        shares[src].legs.append(one)
        shares[dst].legs.append(one)

    relayed = readers != [gateway]
    leg(stage, stage + 2 + 2 * relayed, source, gateway, rows)
    for reader in readers:
        if reader != gateway:
            leg(stage + 1, stage + 3, gateway, reader, table[reader, source].k_rows)
        shares[reader].tiles.setdefault(stage + 1 + relayed, []).append(source)


def _dealt(sources: list[int], sizes: list[int], stages: int) -> list[list[int]]:
    """Sources in order, in at most so many parts of about equal size."""
    total, so_far = sum(sizes), 0
    parts: dict[int, list[int]] = {}
    for source, size in zip(sources, sizes, strict=True):
        parts.setdefault(so_far * stages // total, []).append(source)
        so_far += size
    return list(parts.values())
