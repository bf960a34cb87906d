"""Tiles become kernel calls: which rows each reads, which of them are gathered, what is merged.

This is the one place that decides it; what runs and what is priced are the operations that it
writes. Every result is put aside and merged here: `adopt` finds those that need not be.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from tilewise.compiler.code import Home
from tilewise.compiler.draft import AttendTile, Draft, Held, View
from tilewise.compiler.facts import Facts
from tilewise.compiler.ops import Attend, Copy, Merge, RowTables, Table
from tilewise.compiler.passes.lists import (
    ListCalls,
    ListSide,
    ListTile,
    copied_side,
    list_side,
    list_tile,
)
from tilewise.compiler.passes.split_calls import split_calls
from tilewise.layouts.layout import Layout
from tilewise.plan.ir import Plan, Side, Tile
from tilewise.plan.kept import kept_with_plan
from tilewise.plan.payload import STATISTICS, Field
from tilewise.plan.row_ranges import Ranges
from tilewise.tiles.call_rows import CallParts, RowSelection, TileCalls, is_range, num_rows

KnownCalls = dict[tuple[Tile, tuple[tuple[Ranges, ...], ...]], tuple[CallParts[np.ndarray], ...]]


@kept_with_plan(keep=1, each_rank=True)
def _known_calls(plan: Plan, rank: int, table: TileCalls) -> KnownCalls:
    """Return the cache of the kernel calls of a rank's tiles, which both passes share; empty at
    first.
    """
    return {}


def tiles(draft: Draft, facts: Facts) -> None:
    """Write the kernel calls of every tile, with the copies and merges around them."""
    table = facts.table(draft.by_head)
    known = _known_calls(facts.plan, facts.rank, table)
    old, draft.ops = draft.ops, []
    takes_lists, lists = facts.lists(draft.by_head), ListCalls(draft, facts)
    for op in old:
        if not isinstance(op, AttendTile):
            lists.before(op)
            draft.ops.append(op)
            continue
        held = tuple(tuple(x.rows for x in side) for side in op.operands)
        if (op.tile, held) not in known:
            known[op.tile, held] = tuple(table.calls(op.tile, held))  # pyright: ignore
        for whole in known[op.tile, held]:
            if takes_lists:
                lists.add(_where_rows_lie(draft, facts, op, whole))
                continue
            for parts in split_calls(draft, facts, op, whole):
                _attend(draft, facts, op, parts)
    lists.write()


def _attend(draft: Draft, facts: Facts, tile: AttendTile, parts: CallParts[np.ndarray]) -> None:
    """Gather what one kernel call reads, run it, and merge its results."""
    of = tile.label.removeprefix("compute ")
    # A latent is of all heads.
    selections, heads = (
        (parts.q, parts.k),
        (parts.q_heads, None if facts.latent else parts.kv_heads),
    )
    operands: list[View] = []
    rows: list[int] = []
    for side in Side:
        views = _gathered(draft, f"gather {of}", tile.operands[side], selections[side])
        operands += (draft.heads(view, heads[side]) for view in views)
        rows.append(draft.num_rows(views[0]))
    results: list[View] = []
    by_lse = not facts.payload.backward
    merges: list[Merge[View] | Copy[View]] = []
    for side in Side:
        targets = tile.partials[side]
        if targets:
            one = draft.buffers[targets[0].buffer]
            num_heads = one.heads if heads[side] is None else _length(heads[side])
            aside = results_aside(draft, facts, rows[side], one.fields, num_heads)
            results.append(aside)
            label = f"merge {of}"
            mine = [draft.heads(target, heads[side]) for target in targets]
            merges += _merges(draft, label, aside, mine, selections[side], by_lse)
    places = _places(draft, facts, tile.tile, parts) if facts.needs_places else None
    made = tuple(draft.made_bytes(view, facts.payload.dtype) for view in results)
    adds = (False,) * len(results)
    ends = tuple(operands), (), tuple(results), adds, made
    draft.ops.append(Attend(tile.label, parts.call, *ends, places))
    draft.ops += merges


def _where_rows_lie(
    draft: Draft, facts: Facts, tile: AttendTile, parts: CallParts[np.ndarray]
) -> ListTile:
    """A tile as a call of lists; a side of which rows lie in several buffers is copied."""
    sides: list[ListSide] = []
    for side, selections, heads in zip(Side, parts[1:3], parts[3:5], strict=True):
        held, partials = tile.operands[side], tile.partials[side]
        found = list_side(draft, held, partials, selections, heads)
        if found is None:
            label = f"gather {tile.label.removeprefix('compute ')}"
            views = _gathered(draft, label, held, selections)
            found = copied_side(draft, views, partials, selections, heads)
        sides.append(found)
    places = _places(draft, facts, tile.tile, parts) if facts.needs_places else None
    return list_tile(tile, parts, (sides[0], sides[1]), places)


def results_aside(
    draft: Draft, facts: Facts, num_rows: int, fields: Sequence[Field], num_heads: int
) -> View:
    """Return a new buffer for one side's results of a kernel call.

    It has the kernel's own dtype if results wait to be combined, else that of accumulators.
    """
    waits = facts.combines(draft)
    dtype = facts.payload.dtype if waits else facts.accumulator
    home = Home.MADE if waits else Home.WORKSPACE
    made = tuple(
        x._replace(dtype=facts.accumulator if x.name in STATISTICS else dtype) for x in fields
    )
    return draft.apart("results of a call", num_rows, made, num_heads, home)


def _length(heads: slice | None) -> int:
    assert heads is not None
    return heads.stop - heads.start


def _gathered(
    draft: Draft, label: str, held: Sequence[Held], parts: Sequence[RowSelection[np.ndarray]]
) -> list[View]:
    """The rows that a call reads of one side, in place where they lie side by side."""
    found: list[View] = []
    for place in range(len(held[0].views)):
        views = [held[part.shard].views[place] for part in parts]
        found.append(_joined(draft, label, views, parts))
    return found


def _joined(
    draft: Draft, label: str, views: Sequence[View], parts: Sequence[RowSelection[np.ndarray]]
) -> View:
    """Rows of several shards in the order of the call, copied together if they do not lie so."""
    if len(parts) == 1:
        return _picked(draft, label, views[0], parts[0].block)
    if all(is_range(part.call) and is_range(part.block) for part in parts):
        chosen = [draft.rows(x, part.block) for x, part in zip(views, parts, strict=True)]  # pyright: ignore
        beside = draft.side_by_side(chosen)
        if beside is not None:
            return beside
    counts = [num_rows(part.block, draft.num_rows(x)) for part, x in zip(parts, views, strict=True)]
    one = draft.buffers[views[0].buffer]
    fields = draft.fields_of(views[0])
    target = draft.apart(
        "rows of " + " ".join(x.name for x in fields), sum(counts), fields, one.heads
    )
    offset = 0
    for part, source, rows in zip(parts, views, counts, strict=True):
        if isinstance(part.call, np.ndarray):
            picked = _picked(draft, label, source, part.block)
            draft.ops.append(Copy(label, picked, target, Table.of(part.call), scatters=True))
            continue
        place = (offset, offset + rows) if part.call is None else part.call
        here = draft.rows(target, place)
        if isinstance(part.block, np.ndarray):
            draft.ops.append(Copy(label, source, here, Table.of(part.block)))
        else:
            draft.ops.append(Copy(label, draft.rows(source, part.block), here))
        offset += rows
    return target


def _picked(draft: Draft, label: str, view: View, rows: slice | np.ndarray | None) -> View:
    """The rows that an index selects: a part of the buffer, unless they are a table."""
    if not isinstance(rows, np.ndarray):
        return draft.rows(view, rows)
    fields, heads = draft.fields_of(view), draft.num_heads(view)
    target = draft.apart("rows of " + " ".join(x.name for x in fields), len(rows), fields, heads)
    draft.ops.append(Copy(label, view, target, Table.of(rows)))
    return target


def _merges(
    draft: Draft,
    label: str,
    aside: View,
    targets: Sequence[View],
    parts: Sequence[RowSelection[np.ndarray]],
    by_lse: bool,
) -> list[Merge[View] | Copy[View]]:
    """Add the results of a call to the partials that its rows belong to."""
    found: list[Merge[View] | Copy[View]] = []
    for part in parts:
        source = aside
        if isinstance(part.call, np.ndarray):
            buffer = draft.buffers[aside.buffer]
            rows_aside = buffer._replace(
                name="rows of results", num_rows=len(part.call), home=Home.WORKSPACE
            )
            source = draft.new(rows_aside)
            found.append(Copy(label, aside, source, Table.of(part.call)))
        else:
            source = draft.rows(aside, part.call)
        target = targets[part.shard]
        if not isinstance(part.local, np.ndarray):
            found.append(Merge(label, source, draft.rows(target, part.local), by_lse))
            continue
        scratch: tuple[View, ...] = ()
        if by_lse:
            one = draft.buffers[target.buffer]
            rows, num_heads = len(part.local), draft.num_heads(target)
            scratch = (draft.apart("rows to merge", rows, one.fields, num_heads),)
        found.append(Merge(label, source, target, by_lse, Table.of(part.local), scratch))
    return found


def _places(draft: Draft, facts: Facts, tile: Tile, parts: CallParts[np.ndarray]) -> RowTables:
    """Return the positions of a call's rows, keys and heads in the whole attention."""
    groups = facts.resolved.groups
    q, k = (
        _positions(layout, shards, of)
        for layout, shards, of in zip(
            facts.table(draft.by_head).layouts, (tile.q, tile.kv), (parts.q, parts.k), strict=True
        )
    )
    first = groups.slice(Side.Q, tile.heads).start
    first += parts.q_heads.start if parts.q_heads else 0
    heads = groups.slice(Side.KV, tile.heads)
    if parts.kv_heads is not None:
        start = heads.start + parts.kv_heads.start
        heads = slice(start, start + _length(parts.kv_heads))
    return RowTables(Table.of(q), Table.of(k), first, (heads.start, heads.stop))


def _positions(
    layout: Layout, shards: Sequence[int], parts: Sequence[RowSelection[np.ndarray]]
) -> np.ndarray:
    """Global positions of a call's rows of one side, in the order of the call."""
    whole = [layout.rows(shards[part.shard]) for part in parts]
    rows = [x if p.local is None else x[p.local] for x, p in zip(whole, parts, strict=True)]
    positions = np.concatenate(rows)
    if len(parts) > 1:
        for x, part in zip(rows, parts, strict=True):
            positions[part.call] = x
    return positions
