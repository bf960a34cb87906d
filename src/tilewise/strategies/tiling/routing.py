"""Transfers between the ranks that own rows and those that compute with them, as a plan."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from heapq import heapify, heappop
from typing import Any, NamedTuple

import numpy as np

from tilewise.layouts.cells import Cell
from tilewise.layouts.layout import Layout
from tilewise.masks.base import Mask
from tilewise.plan.builder import RankBuilder, operand, partial
from tilewise.plan.ir import Item, Plan, RankStep, Role, Rows, Side, Traits
from tilewise.plan.row_ranges import count, union, whole_or

LSE = 4 / 256  # bytes of lse beside those of one head of a row: bf16, head_dim 128
FAN = 2  # ranks that one rank passes a range on to, where more than CHAIN read it
CHAIN = 4  # so few readers form a chain: the most level, and not deeper than a tree of many


class RowReaders(NamedTuple):
    """Rows of a shard, their owner, and the other ranks that compute with q, and with k and v."""

    size: int  # how many rows
    owner: int
    q: tuple[int, ...]
    kv: tuple[int, ...]
    shard: int = 0
    rows: Rows | None = None  # None: all of the shard


class RoutedTransfer(NamedTuple):
    """One transfer; level: how many transfers of its tree have to be over before it."""

    item: Item
    rows: Rows | None
    src: int
    dst: int
    level: int


def received(flows: Sequence[RowReaders], n: int, kv_bytes: float) -> np.ndarray:
    """Units (a row of q) every rank receives in forward, with trees as `transfers` builds them."""
    load = _fixed(flows, n, kv_bytes)[0]
    for f in sorted(flows, key=lambda f: -f.size * len(f.q)):
        if f.q:
            _children(f.size * (1 + LSE), f.owner, f.q, load)
    return np.array(load)


def transfers(flows: Sequence[RowReaders], n: int, kv_bytes: float) -> list[RoutedTransfer]:
    """Every transfer of both passes: copies from the owner down a tree, partials up another."""
    received_load, sent_load, backward_load = _fixed(flows, n, kv_bytes)
    q, kv = Side.Q, Side.KV
    jobs = [(1 + LSE, partial(q, f.shard), f, f.q, received_load) for f in flows if f.q]
    jobs += [(1.0, operand(q, f.shard), f, f.q, sent_load) for f in flows if f.q]
    jobs += [(kv_bytes, operand(kv, f.shard), f, f.kv, sent_load) for f in flows if f.kv]
    jobs += [(kv_bytes, partial(kv, f.shard), f, f.kv, backward_load) for f in flows if f.kv]
    routed_transfers: list[RoutedTransfer] = []
    for unit, item, f, readers, load in sorted(jobs, key=lambda j: -j[0] * j[2].size * len(j[3])):
        tree = _tree(_children(f.size * unit, f.owner, readers, load), f.owner, readers)
        levels: dict[int, int] = defaultdict(int)
        if item.role is Role.PARTIAL:
            tree = [(child, parent) for parent, child in reversed(tree)]
        for src, dst in tree:
            routed_transfers.append(RoutedTransfer(item, f.rows, src, dst, levels[src]))
            levels[dst] = max(levels[dst], levels[src] + 1)
    return routed_transfers


def _fixed(flows: Sequence[RowReaders], n: int, kv_bytes: float) -> list[list[float]]:
    """Units that every rank receives and sends in any tree, and those it receives in backward.

    A reader gets q, k, v and returns out, dk, dv; an owner sends one copy and gets one partial.
    """
    rows: list[tuple[float, ...]] = []
    for size, owner, q, kv, _, _ in flows:
        rows += [(r, size, size * (1 + LSE), size * (2 + 2 * LSE)) for r in q]
        rows += [(r, size * kv_bytes, 0, size * kv_bytes) for r in kv]
        if q:
            rows.append((owner, size * (1 + LSE), size, size))
        if kv:
            rows.append((owner, 0, size * kv_bytes, size * kv_bytes))
    ranks, *loads = np.array(rows, float).reshape(-1, 4).T
    return [np.bincount(ranks.astype(np.int64), load, n).tolist() for load in loads]


def _children(
    size: float, owner: int, readers: tuple[int, ...], load: list[float]
) -> dict[int, int]:
    """Number of children of each rank in a tree: one of the owner, some of the least loaded."""
    counts = {owner: 1}
    num_left = len(readers) - 1
    heap = [(load[r], r) for r in readers] if num_left else []
    heapify(heap)
    while num_left:
        weight, r = heappop(heap)
        counts[r] = min(FAN, num_left) if len(readers) > CHAIN else 1
        load[r] = weight + size * counts[r]
        num_left -= counts[r]
    return counts


def _tree(counts: dict[int, int], owner: int, readers: tuple[int, ...]) -> list[tuple[int, int]]:
    """(parent, child) pairs, parents first, for these numbers of children."""
    order = sorted(readers, key=lambda r: -counts.get(r, 0))
    parents = [owner, *order]
    slots = [p for p in parents for _ in range(counts.get(p, 0))]
    return list(zip(slots, order, strict=True))


Cells = dict[int, set[int]]
"""Of one rank: query shard -> the KV shards it computes it against."""


class ShardOwners(NamedTuple):
    """The shards with their owners, and the pairs of shards that each rank computes."""

    homes: tuple[int, ...]  # the owner of every shard
    sizes: tuple[int, ...]  # and its number of rows
    cuts: Rows | None  # of every shard the local rows it is; None: shard r is all of rank r's
    cells: list[Cells]  # by rank, each pair of shards with an allowed pair of tokens once
    table: Mapping[tuple[int, int], Cell] | None = None  # rows read of a pair; None: all


def flows_of(work: ShardOwners) -> list[RowReaders]:
    """Return the rows that have to travel; readers of the same rows of a shard share an entry."""
    readers: dict[tuple[int, Rows | None], tuple[list[int], ...]]
    readers, sizes, homes = defaultdict(lambda: ([], [])), work.sizes, work.homes
    for rank, cells in enumerate(work.cells):
        for side, shards in zip(Side, _reads(work, cells), strict=True):
            for shard, rows in shards.items():
                if homes[shard] != rank:
                    readers[shard, rows][side].append(rank)
    return [
        RowReaders(count(rows, sizes[shard]), homes[shard], tuple(q), tuple(kv), shard, rows)
        for (shard, rows), (q, kv) in readers.items()
    ]


def _reads(work: ShardOwners, cells: Cells) -> tuple[dict[int, Rows | None], ...]:
    """The shards that a rank's cells read, of each side, and which rows of them."""
    if work.table is None:
        return dict.fromkeys(cells), dict.fromkeys(set().union(*cells.values()))
    parts: tuple[dict[int, list[Rows]], ...] = defaultdict(list), defaultdict(list)
    for q, kvs in cells.items():
        for kv in kvs:
            cell = work.table[q, kv]
            parts[0][q].append(cell.q_rows)
            parts[1][kv].append(cell.k_rows)
    sizes = work.sizes
    return tuple({s: whole_or(union(*x), sizes[s]) for s, x in side.items()} for side in parts)


def assemble(
    name: str,
    work: ShardOwners,
    flows: list[RowReaders],
    made_for: tuple[Mask, Layout],
    kv_bytes: float,
) -> Plan:
    """The plan that moves these flows; one rank's steps are written when asked for.

    Args:
        name: of the plan; it says all that the plan depends on.
        kv_bytes: bytes of a row's k and v beside those of its q.
    """
    n = made_for[1].world_size
    moves = transfers(flows, n, kv_bytes)
    transfers_by_rank = touching(moves, n)
    last_step = max(
        (transfer.level + 1 for transfer in moves if transfer.item.role is Role.OPERAND), default=0
    )

    def script(rank: int) -> tuple[RankStep, ...]:
        return _steps(rank, transfers_by_rank[rank], work.cells[rank], last_step)

    owners = tuple((home,) for home in work.homes)
    traits = Traits(made_for=made_for, proven=True)
    return Plan(name, n, 1, (owners, owners), script=script, cuts=work.cuts, traits=traits)


def touching(transfers: Sequence[Any], n: int) -> list[list[Any]]:
    """For each rank, the transfers that it sends or receives."""
    transfers_by_rank: list[list[Any]] = [[] for _ in range(n)]
    for transfer in transfers:
        transfers_by_rank[transfer.src].append(transfer)
        transfers_by_rank[transfer.dst].append(transfer)
    return transfers_by_rank


def _steps(rank: int, touching: list[RoutedTransfer], cells: Cells, last_step: int):
    """Return one rank's steps: its transfers and its tiles.

    Args:
        touching: transfers that the rank sends or receives.
        cells: pairs of shards that it computes.
        last_step: step by which all operands have arrived; partials leave after it.
    """
    s, arrived = RankBuilder(rank), ({}, {})
    for transfer in touching:
        side, role, shard, _ = transfer.item
        s.at(transfer.level if role is Role.OPERAND else last_step + 1 + side + transfer.level)
        if transfer.src == rank:
            s.send(transfer.item, transfer.dst, transfer.rows)
        else:
            s.recv(transfer.item, transfer.src, transfer.rows)
            if role is Role.OPERAND:
                arrived[side][shard] = transfer.level + 1
    for step, q, kv in _tiles(cells, arrived, last_step):
        s.at(step).tile(q, kv)
    return s.done()


def _tiles(cells: Cells, arrived: tuple[dict[int, int], dict[int, int]], last_step: int):
    """Return tiles as (step, q shards, KV shards), each cell in one of them.

    Cells whose operands are there at the same step, and that have the same KV shards, make one
    tile.

    Args:
        arrived: by side, the step from which each received shard can be read.
    """
    q_at, kv_at = arrived
    latest_arrival = max((*q_at.values(), *kv_at.values()), default=0)
    groups: dict[tuple[int, tuple[int, ...]], list[int]] = defaultdict(list)
    for q in sorted(cells):
        steps: dict[int, list[int]] = defaultdict(list)
        for kv in sorted(cells[q]):
            ready = max(q_at.get(q, 0), kv_at.get(kv, 0))
            if ready and q not in q_at and q_at:
                ready = last_step + 1
            steps[ready if ready in (0, 1, last_step + 1) else latest_arrival].append(kv)
        for step, kvs in steps.items():
            groups[step, tuple(kvs)].append(q)
    return [(step, tuple(qs), kvs) for (step, kvs), qs in sorted(groups.items())]
