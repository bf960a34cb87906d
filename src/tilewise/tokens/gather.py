"""Gathering rows of all ranks in the stages of a plan: between nodes first, then inside each.

    stages = gather_stages(tw.hierarchical(tw.all_gather(4), tw.all_gather(8)), layout, None)
    simulate_moves([stage.moves for stage in stages], row_bytes, machine).seconds

A plan that gathers keys and values before it computes says which rank passes which shard on, and
when; rows of any tensor can travel so. Each stage is row moves over the copies that are sent.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby, takewhile
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from tilewise.compiler.row_moves import FILL, RowMoves, Rows
from tilewise.layouts.layout import Layout, runs_of_positions
from tilewise.masks.base import Mask
from tilewise.plan.ir import Plan, RankStep, Role, Side, Transfer, own_shards
from tilewise.plan.kept import kept_with_plan
from tilewise.tokens.moves import gather_moves
from tilewise.tokens.rows import move_rows
from tilewise.transport.protocol import Transport

Copies = dict[int, Rows]
"""Rows of each shard that a rank holds or gets: ascending positions of the sequence, by shard."""


class GatherStage(NamedTuple):
    """One round of messages.

    Attributes:
        moves: over the copies that leave in this stage, rank by rank, shard by shard.
        sent, received: of each rank, what these are.
    """

    moves: RowMoves
    sent: tuple[Copies, ...]
    received: tuple[Copies, ...]


@kept_with_plan()
def gathers_in_stages(plan: Plan) -> bool:
    """Return whether a plan brings every rank all keys and values before it computes anything, and
    does so in several steps.
    """
    n = plan.world_size
    if plan.num_head_groups > 1 or plan.made_for is not None or plan.cuts:
        return False
    if plan.owners != own_shards(n) or not _gathers(plan.rank_steps(0), n):  # rings stop here
        return False
    transfers = [x for step in _transfers(plan) for x in step]
    held = {(rank, rank) for rank in range(n)} | {(x.dst, x.item.shard) for x in transfers}
    return len(held) == n * n == n + len(transfers)


def _gathers(steps: Sequence[RankStep], n: int) -> bool:
    """Return whether one rank gets n - 1 shards in several steps before its first tile."""
    before = [*takewhile(lambda step: not step.tiles, steps)]
    counts = [sum(map(_is_kv_operand, step.recvs)) for step in before]
    return sum(counts) == n - 1 and sum(map(bool, counts)) > 1


def _transfers(plan: Plan) -> list[list[Transfer]]:
    """Transfers of keys and values in the steps before the first tile."""
    before = takewhile(lambda step: not any(step.tiles), plan.steps)
    return [[*filter(_is_kv_operand, step.transfers)] for step in before]


def _is_kv_operand(transfer: Transfer) -> bool:
    return (transfer.item.side, transfer.item.role) == (Side.KV, Role.OPERAND)


@kept_with_plan(16)
def gather_stages(plan: Plan, layout: Layout, mask: Mask | None) -> list[GatherStage]:
    """The rounds in which a plan that gathers in stages brings every rank the rows that it wants.

    Args:
        mask: rows that no query of a rank sees are left out, as gather_moves does.
    """
    owned, n = layout.owned, plan.world_size
    wanted = [_found(gather_moves(layout, mask).wanted_rows(rank)) for rank in range(n)]
    needs = {
        (rank, shard): np.intersect1d(wanted[rank], owned.rows(shard))
        for rank in range(n)
        for shard in range(n)
    }
    steps = list[list[tuple[Transfer, Rows]]]()
    for transfers in reversed(_transfers(plan)):  # a copy has what those want to whom it goes on
        steps.append([(x, needs[x.dst, x.item.shard]) for x in transfers])
        for x, rows in steps[-1]:
            key = x.src, x.item.shard
            needs[key] = np.union1d(needs[key], rows)
    stages = (
        _stage(step, n, plan=plan.name, mask=mask, stage=number)
        for number, step in enumerate(reversed(steps))
    )
    return [stage for stage in stages if stage is not None]


def _stage(step: list[tuple[Transfer, Rows]], n: int, **arguments: object) -> GatherStage | None:
    """Return the moves of one step, or None if nobody wants a row in it.

    Args:
        step: its transfers, each with the rows of the shard that travel.
        arguments: further fields of the stage's RowMoves.
    """
    source = lambda pair: (pair[0].src, pair[0].item.shard)  # noqa: E731
    sent, received = [Copies() for _ in range(n)], [Copies() for _ in range(n)]
    positions, wanted = [list[Rows]() for _ in range(n)], [dict[int, Rows]() for _ in range(n)]
    begin = 0
    for (src, shard), pairs in groupby(sorted(step, key=source), source):
        targets = [(x.dst, mine) for x, mine in pairs]
        rows = np.unique(np.concatenate([mine for _, mine in targets]))
        if not len(rows):  # nor did the source get any, if it is to pass them on
            continue
        sent[src][shard] = rows
        positions[src].append(np.arange(begin, begin + len(rows)))
        for dst, mine in targets:
            received[dst][shard] = mine
            wanted[dst][shard] = begin + np.searchsorted(rows, mine)
        begin += len(rows)
    if not begin:
        return None
    copies = Layout.from_positions(
        [np.concatenate([np.empty(0, np.int64), *mine]) for mine in positions], name="copies"
    )
    runs = [
        [run for shard in sorted(mine) for run in runs_of_positions(mine[shard])] for mine in wanted
    ]
    ordered = [dict(sorted(mine.items())) for mine in received]
    return GatherStage(RowMoves("gather", copies, runs, **arguments), tuple(sent), tuple(ordered))


def _found(positions: Rows) -> Rows:
    return positions[positions != FILL]


def gather_by(
    plan: Plan, x: Tensor, layout: Layout, mask: Mask | None, transport: Transport, dim: int
) -> Tensor:
    """All rows in the order of the sequence, moved in the stages of a plan; 0 where none is wanted.

    Args:
        x: this rank's rows along dim, under layout.owned.
    """
    stages = gather_stages(plan, layout, mask)
    if not stages:  # no row travels, but ranks compare the call
        return move_rows(x, gather_moves(layout, mask), transport, dim)
    rank, rows = transport.rank, x.movedim(dim, 0)
    verb = {"dim of tokens": str(dim % x.ndim)}
    held: dict[int, tuple[Rows, Tensor]] = {rank: (layout.owned.rows(rank), rows)}
    anchors = list[Tensor]()  # every rank takes part in each stage's backward pass
    for stage in stages:
        leaving = [_rows(*held[shard], wanted) for shard, wanted in stage.sent[rank].items()]
        moved = move_rows(torch.cat([rows[:0], *leaving]), stage.moves, transport, verb=verb)
        anchors.append(moved[:0])
        copies = stage.received[rank]
        parts = moved.split([len(mine) for mine in copies.values()]) if copies else ()
        for (shard, mine), part in zip(copies.items(), parts, strict=True):
            held[shard] = mine, part
    wanted = _found(gather_moves(layout, mask).wanted_rows(rank))
    places = np.concatenate([positions for positions, _ in held.values()])
    whole = rows.new_zeros((layout.owned.num_tokens, *rows.shape[1:]))
    index = torch.from_numpy(places).to(x.device)
    whole = whole.index_copy(0, index, torch.cat([*(part for _, part in held.values()), *anchors]))
    if len(wanted) < len(whole):  # rows that were only passed on
        seen = torch.zeros(len(whole), dtype=torch.bool)
        seen[torch.from_numpy(wanted)] = True
        hidden = ~seen.to(x.device).reshape(-1, *[1] * (rows.ndim - 1))
        whole = whole.masked_fill(hidden, 0)
    return whole.movedim(0, dim)


def _rows(positions: Rows, rows: Tensor, wanted: Rows) -> Tensor:
    """Return the rows at the wanted positions, of rows that stand at `positions` (in any order)."""
    order = np.argsort(positions)
    index = order[np.searchsorted(positions[order], wanted)]
    return rows.index_select(0, torch.from_numpy(index).to(rows.device))
