"""From who computes what to a plan: flows, trees, and every rank's steps.

    step   0            1 .. S                    S + 1                   S + 2 ...
    moves  q, k, v ->   relays pass them on       out, dq go home         ... merged on the way
                                                                          dk, dv one step behind
    tiles  own x own    foreign queries           own queries x foreign keys

Foreign queries come first, so that their outputs travel while a rank computes the rest of its own.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from typing import NamedTuple

from tilewise.layouts.layout import Layout
from tilewise.layouts.support import Cell
from tilewise.masks.base import Mask
from tilewise.plan.builder import Script
from tilewise.plan.ir import Plan, RankStep, Role, Rows, Side
from tilewise.plan.row_ranges import count, union, whole_or
from tilewise.strategies.tiling.routing import Flow, Hop, hops

Cells = dict[int, set[int]]
"""Of one rank: query shard -> the KV shards it computes it against."""


class Work(NamedTuple):
    """Who computes what, on shards.

    Attributes:
        homes, sizes: of every shard its owner and its number of rows.
        cuts: of every shard the local rows it is; None: shard r is all of rank r's.
        cells: by rank, each pair of shards with an allowed pair of tokens once.
        table: which rows of a pair are read; None: all.
    """

    homes: tuple[int, ...]
    sizes: tuple[int, ...]
    cuts: Rows | None
    cells: list[Cells]
    table: Mapping[tuple[int, int], Cell] | None = None


def flows_of(work: Work) -> list[Flow]:
    """What has to travel; readers of the same rows of a shard share a flow."""
    readers: dict[tuple[int, Rows | None], tuple[list[int], list[int]]] = defaultdict(
        lambda: ([], [])
    )
    for rank, cells in enumerate(work.cells):
        reads = _reads(work, cells)
        for side, shards in zip(Side, reads, strict=True):
            for shard, rows in shards.items():
                if work.homes[shard] != rank:
                    readers[shard, rows][side].append(rank)
    return [
        Flow(count(rows, work.sizes[shard]), work.homes[shard], tuple(q), tuple(kv), shard, rows)
        for (shard, rows), (q, kv) in readers.items()
    ]


def _reads(work: Work, cells: Cells) -> tuple[dict[int, Rows | None], dict[int, Rows | None]]:
    """The shards that a rank's cells read, of each side, and which rows of them."""
    if work.table is None:
        keys = set().union(*cells.values()) if cells else set()
        return dict.fromkeys(cells), dict.fromkeys(keys)
    parts: tuple[dict[int, list[Rows]], ...] = defaultdict(list), defaultdict(list)
    for q, kvs in cells.items():
        for kv in kvs:
            cell = work.table[q, kv]
            parts[0][q].append(cell.q_rows)
            parts[1][kv].append(cell.k_rows)
    q_rows, k_rows = (
        {s: whole_or(union(*rows), work.sizes[s]) for s, rows in side.items()} for side in parts
    )
    return q_rows, k_rows


def assemble(
    name: str, work: Work, flows: list[Flow], made_for: tuple[Mask, Layout], kv_bytes: float
) -> Plan:
    """The plan that moves these flows; one rank's steps are written when asked for.

    Args:
        name: of the plan; it says all that the plan depends on.
        kv_bytes: bytes of a row's k and v beside those of its q.
    """
    n = made_for[1].world_size
    moves = hops(flows, n, kv_bytes)
    touching: list[list[Hop]] = [[] for _ in range(n)]
    for hop in moves:
        touching[hop.src].append(hop)
        touching[hop.dst].append(hop)
    last = max((hop.level + 1 for hop in moves if hop.item.role is Role.OPERAND), default=0)

    def script(rank: int) -> tuple[RankStep, ...]:
        return _steps(rank, touching[rank], work.cells[rank], last)

    owners = tuple((home,) for home in work.homes)
    return Plan(
        name,
        n,
        1,
        (owners, owners),
        script=script,
        cuts=work.cuts,
        made_for=made_for,
    )


def _steps(rank: int, touching: list[Hop], cells: Cells, last: int) -> tuple[RankStep, ...]:
    """One rank's part: its hops and its tiles; last: the step at which every operand is there."""
    s, arrived = Script(rank), ({}, {})
    for hop in touching:
        side, role, shard, _ = hop.item
        s.at(hop.level if role is Role.OPERAND else last + 1 + side + hop.level)
        if hop.src == rank:
            s.send(hop.item, hop.dst, hop.rows)
        else:
            s.recv(hop.item, hop.src, hop.rows)
            if role is Role.OPERAND:
                arrived[side][shard] = hop.level + 1
    for step, q, kv in _tiles(cells, arrived, last):
        s.at(step).tile(q, kv)
    return s.done()


def _tiles(cells: Cells, arrived: tuple[dict[int, int], dict[int, int]], last: int):
    """(step, q shards, kv shards): cells of like readiness together, each once."""
    q_at, kv_at = arrived
    top = max((*q_at.values(), *kv_at.values()), default=0)
    groups: dict[tuple[int, tuple[int, ...]], list[int]] = defaultdict(list)
    for q in sorted(cells):
        steps: dict[int, list[int]] = defaultdict(list)
        for kv in sorted(cells[q]):
            ready = max(q_at.get(q, 0), kv_at.get(kv, 0))
            if ready and q not in q_at and q_at:
                ready = last + 1
            steps[ready if ready in (0, 1, last + 1) else top].append(kv)
        for step, kvs in steps.items():
            groups[step, tuple(kvs)].append(q)
    return [(step, tuple(qs), kvs) for (step, kvs), qs in sorted(groups.items())]
