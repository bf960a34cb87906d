"""Only what is needed: every rank computes its own queries, each k, v range goes only to readers.

The gradients return the way the values came. A rank's sources are dealt to a few stages of equal
size, nearest first, so that what has arrived is computed while the rest is under way. Where nodes
are known, what several ranks of a node read crosses to it once: one of them passes it on.
Source: the group cast of MagiAttention (SandAI 2025), and its hierarchical form.
"""

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


class _Leg(NamedTuple):
    """A shard's keys and values on their way from rank to rank, and their gradients back."""

    step: int
    back: int
    src: int
    dst: int
    shard: int
    rows: Rows | None


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
        for stage, some in enumerate(_dealt(sources, sizes)):
            for source in some:
                _send(shares, table, layout, stage, source, [rank])
    return shares


def _by_node(table: Table, layout: Layout, size: int) -> list[_Share]:
    """From the owner to one reader of each node, and from that to the others."""
    n = layout.world_size
    shares = [_Share([], {0: [r]} if (r, r) in table else {}) for r in range(n)]
    for first in range(0, n, size):
        node = range(first, min(first + size, n))
        fetched: dict[int, list[list[int]]] = {rank: [] for rank in node}
        for source in (s % n for s in range(first, first + n)):
            readers = [rank for rank in node if rank != source and (rank, source) in table]
            if source in node:
                for reader in readers:
                    _send(shares, table, layout, 0, source, [reader])
            elif readers:  # by turns, so that all of the node's links carry as much
                gateway = min(readers, key=lambda rank: len(fetched[rank]))
                fetched[gateway].append([source, gateway, *(r for r in readers if r != gateway)])
        for routes in fetched.values():
            rows = [union(*(table[r, route[0]].k_rows for r in route[1:])) for route in routes]
            numbers = _dealt([*range(len(routes))], [*map(count_rows, rows)])
            for stage, some in enumerate(numbers):
                for source, *readers in (routes[i] for i in some):
                    _send(shares, table, layout, stage, source, readers)
    return shares


def _send(
    shares: list[_Share], table: Table, layout: Layout, stage: int, source: int, readers: list[int]
) -> None:
    """Write legs and tiles: the first reader passes on what the others read."""

    def leg(step: int, back: int, src: int, dst: int, seen: list[int]) -> None:
        rows = union(*(table[reader, source].k_rows for reader in seen))
        one = _Leg(step, back, src, dst, source, whole_or(rows, layout.size(source)))
        shares[src].legs.append(one)
        shares[dst].legs.append(one)

    gateway, *others = readers
    relayed = bool(others)
    leg(stage, stage + 2 + 2 * relayed, source, gateway, readers)
    for reader in others:
        leg(stage + 1, stage + 3, gateway, reader, [reader])
    for reader in readers:
        shares[reader].tiles.setdefault(stage + 1 + relayed, []).append(source)


def _dealt(sources: list[int], sizes: list[int]) -> list[list[int]]:
    """Sources in order, in at most STAGES parts of about equal size."""
    total, so_far = sum(sizes), 0
    parts: dict[int, list[int]] = {}
    for source, size in zip(sources, sizes, strict=True):
        parts.setdefault(so_far * STAGES // total, []).append(source)
        so_far += size
    return list(parts.values())
