"""Tiles as kernel calls of lists: rows are read where they lie, results added where they belong.

    operands   rows of a buffer in which shards lie side by side, in any order, some not there yet
    results    the same rows of the partials' buffer; aside, where those do not lie like that

Nothing is copied together and no call is cut: the kernel reads and writes the rows that the call
names. Tiles between which nothing is awaited are one call, which reads and writes a row once for
all of them. Which of the results are the first of their rows, `combine` finds out.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from tilewise.compiler.code import Home
from tilewise.compiler.draft import AttendTile, Draft, DraftOp, Held, View, narrow_fields
from tilewise.compiler.facts import Facts
from tilewise.compiler.ops import (
    Attend,
    Copy,
    Fill,
    Merge,
    Post,
    RowTables,
    Table,
    Wholes,
    reads,
    writes,
)
from tilewise.plan.row_ranges import Ranges, union
from tilewise.tiles.call_rows import CallParts, RowSelection
from tilewise.tiles.calls import KernelCall, Slice
from tilewise.tiles.lists import call_of_slices, moved_slices, pieces_of

MOST_PIECES = 1024
"""Rows in more pieces are copied together: the lists of work would be too long."""

Selections = Sequence[RowSelection[np.ndarray]]


class _Run(NamedTuple):
    """Rows that follow each other in the operands and in a partial.

    Attributes:
        place: the first one's number in the operands' buffer.
        local: its number in the partial.
    """

    place: int
    num_rows: int
    target: View
    local: int


class ListSide(NamedTuple):
    """One side of a call of lists.

    Attributes:
        views: what the kernel is handed some rows of, for one operand or several.
        starts: the number that the first row of the first view has in each.
        places: of each row of the call, its number in the first view.
        results: where partials lie as the operands do, their buffer, and which of its rows the
            operands' first one is; None where they do not.
        runs: of rows that have results.
    """

    views: tuple[View, ...]
    starts: tuple[int, ...]
    places: np.ndarray
    results: tuple[View, int] | None
    runs: tuple[_Run, ...]


class ListTile(NamedTuple):
    """Tiles of one call of lists: slices in rows of the buffers where their operands lie.

    Attributes:
        places: positions of rows and keys in the sequence, if the kernel is to know them.
    """

    label: str
    sides: tuple[ListSide, ListSide]
    slices: tuple[Slice, ...]
    places: RowTables | None

    @property
    def _memory(self) -> tuple[object, ...]:
        """The buffers of a tile; two tiles are one call only if these are the same."""
        return tuple((x.views, x.starts, x.results) for x in self.sides)

    @property
    def _is_aside(self) -> bool:
        return any(x.runs and x.results is None for x in self.sides)

    def joined(self, other: ListTile) -> ListTile | None:
        """Return both tiles as one, or None if they are of other buffers."""
        if self._memory != other._memory or self._is_aside:
            return None
        label = f"{self.label}, {other.label.removeprefix('compute ')}"
        sides: list[ListSide] = []
        for a, b in zip(self.sides, other.sides, strict=True):
            places = np.concatenate([a.places, b.places])
            sides.append(a._replace(places=places, runs=_union(a.runs + b.runs)))
        tables = None
        if self.places is not None and other.places is not None:
            if self.places[2:] != other.places[2:]:
                return None
            q, k = (
                Table(a.data + b.data)
                for a, b in zip(self.places[:2], other.places[:2], strict=True)
            )
            tables = self.places._replace(q_positions=q, k_positions=k)
        return ListTile(label, (sides[0], sides[1]), self.slices + other.slices, tables)


def _union(runs: Iterable[_Run]) -> tuple[_Run, ...]:
    """Return runs, ascending, that name each row once."""
    spans: defaultdict[tuple[View, int], list[tuple[int, int]]] = defaultdict(list)
    for run in runs:
        spans[run.target, run.place - run.local].append((run.place, run.place + run.num_rows))
    return tuple(
        sorted(
            (
                _Run(start, stop - start, target, start - by)
                for (target, by), mine in spans.items()
                for start, stop in union(mine)
            ),
            key=lambda run: run.place,
        )
    )


def list_side(
    draft: Draft,
    held: Sequence[Held],
    partials: Sequence[View],
    selections: Selections,
    heads: slice | None,
) -> ListSide | None:
    """Return one side of a call of lists; None if its rows must be copied together.

    Args:
        partials: of each shard; empty for a side without results.
        heads: those that the call is for.
    """
    roots = {x.shard: [draft.found(view) for view in held[x.shard].views] for x in selections}
    if any(x.rows is not None and x.rows[2] != 1 for views in roots.values() for x in views):
        return None
    starts = {shard: [x.rows[0] if x.rows else 0 for x in views] for shard, views in roots.items()}
    first, *others = roots
    for shard in others:
        pairs = zip(roots[first], roots[shard], strict=True)
        moved = {b - a for a, b in zip(starts[first], starts[shard], strict=True)}
        if any(a[0] != b[0] or a[2:] != b[2:] for a, b in pairs) or len(moved) > 1:
            return None
    rows = _rows_of(draft, held, selections, {shard: x[0] for shard, x in starts.items()})
    if len(pieces_of(rows.places)) > MOST_PIECES:
        return None
    views = tuple(draft.heads(x._replace(rows=None), heads) for x in roots[first])
    by = tuple(x - starts[first][0] for x in starts[first])
    return _with_results(draft, views, by, rows, partials, heads)


def copied_side(
    draft: Draft,
    views: Sequence[View],
    partials: Sequence[View],
    selections: Selections,
    heads: slice | None,
) -> ListSide:
    """Return one side of a call whose rows have been copied together, in the order of the call."""
    places = np.arange(draft.num_rows(views[0]))
    rows = _PlacedRows(places, np.empty_like(places), np.empty_like(places))
    for part in selections:
        where = slice(None) if part.call is None else part.call
        rows.shards[where] = part.shard
        rows.local[where] = _numbers(part.local, len(rows.local[where]))
    views = tuple(draft.heads(view, heads) for view in views)
    return _with_results(draft, views, (0,) * len(views), rows, partials, heads)


class _PlacedRows(NamedTuple):
    """The rows of a call, by column: where each lies, its shard, and its number in the shard."""

    places: np.ndarray
    shards: np.ndarray
    local: np.ndarray


def _rows_of(
    draft: Draft, held: Sequence[Held], selections: Selections, starts: dict[int, int]
) -> _PlacedRows:
    columns: list[tuple[np.ndarray, ...]] = []
    for part in selections:
        block = _numbers(part.block, draft.num_rows(held[part.shard].views[0]))
        call, local = (_numbers(x, len(block)) for x in (part.call, part.local))
        columns.append((call, block + starts[part.shard], np.full(len(block), part.shard), local))
    call, *rest = (np.concatenate(x) for x in zip(*columns, strict=True))
    order = np.argsort(call, kind="stable")
    return _PlacedRows(*(x[order] for x in rest))


def _numbers(index: slice | np.ndarray | None, size: int) -> np.ndarray:
    """The rows that an index selects; None: all of a size."""
    if isinstance(index, np.ndarray):
        return index
    if index is None:
        return np.arange(size)
    return np.arange(int(index.start), int(index.stop), int(index.step or 1))


def _with_results(
    draft: Draft,
    views: tuple[View, ...],
    starts: tuple[int, ...],
    rows: _PlacedRows,
    partials: Sequence[View],
    heads: slice | None,
) -> ListSide:
    runs: list[_Run] = []
    results: set[tuple[View, int] | None] = set()
    order = np.argsort(rows.places, kind="stable") if partials else rows.places[:0]
    places, shards, local = (x[order] for x in rows)
    breaks = (np.diff(places) != 1) | (np.diff(shards) != 0) | (np.diff(local) != 1)
    for a, b in pairwise([0, *(np.flatnonzero(breaks) + 1).tolist(), len(places)]):
        if a == b:
            continue
        target = draft.heads(partials[int(shards[a])], heads)
        run = _Run(int(places[a]), b - a, target, int(local[a]))
        root = draft.found(target)
        start, _, step = root.rows or (0, 0, 1)
        beside = root._replace(rows=None), start + run.local - run.place
        results.add(beside if step == 1 else None)
        runs.append(run)
    found = results.pop() if len(results) == 1 else None
    return ListSide(views, starts, rows.places, found, _union(runs))


def list_tile(
    tile: AttendTile,
    parts: CallParts[np.ndarray],
    sides: tuple[ListSide, ListSide],
    places: RowTables | None,
) -> ListTile:
    """Return one call of a tile, of which both sides are known, as a call of lists."""
    pieces = [pieces_of(side.places) for side in sides]
    slices = tuple(moved_slices(parts.call.as_slices, *pieces))
    return ListTile(tile.label, sides, slices, places)


class ListCalls:
    """Writes tiles as calls of lists; the last one waits for tiles that may be in it, too."""

    def __init__(self, draft: Draft, facts: Facts):
        self._draft, self._by_lse = draft, not facts.payload.backward
        self._dtype = facts.payload.dtype
        self._waiting: ListTile | None = None

    def add(self, tile: ListTile) -> None:
        if not tile.slices:
            return
        both = self._waiting.joined(tile) if self._waiting is not None else None
        if both is None:
            self.write()
        self._waiting = both or tile

    def before(self, op: DraftOp) -> None:
        """Write the call that waits, unless an operation may as well be done before it."""
        if self._waiting is None:
            return
        if not isinstance(op, Post | Fill | Copy) or self._meets(op):
            self.write()

    def _meets(self, op: Post[View] | Fill[View] | Copy[View]) -> bool:
        """Return whether an operation needs what the waiting call writes, or overwrites what it
        reads.
        """
        assert self._waiting is not None
        mine = {run.target.buffer for side in self._waiting.sides for run in side.runs}
        mine |= {side.results[0].buffer for side in self._waiting.sides if side.results is not None}
        found = self._draft.found
        if any(x.buffer in mine or found(x).buffer in mine for x in reads(op)):
            return True
        return any(self._reads(found(x)) or x.buffer in mine for x in writes(op))

    def _reads(self, root: View) -> bool:
        """Return whether the waiting call reads some rows of a buffer."""
        assert self._waiting is not None
        start, stop, _ = root.rows or (0, self._draft.buffers[root.buffer].num_rows, 1)
        for side in self._waiting.sides:
            for view, by in zip(side.views, side.starts, strict=True):
                places = side.places + by
                if view.buffer == root.buffer and ((places >= start) & (places < stop)).any():
                    return True
        return False

    def write(self) -> None:
        """Write the call that waits, and the merges of results that it puts aside."""
        if self._waiting is None:
            return
        label, sides, slices, places = self._waiting
        self._waiting = None
        call, lows = call_of_slices(slices)
        draft = self._draft
        handed: list[View] = []
        operands: list[View] = []
        results: list[View] = []
        added: list[View] = []
        written: list[View] = []
        merges: list[Merge[View]] = []
        for side, low, ranges in zip(sides, lows, call.sides, strict=True):
            size = ranges[-1][1]
            for view, by in zip(side.views, side.starts, strict=True):
                whole = draft.rows(view, (low + by, low + by + size))
                handed.append(whole)
                operands += (draft.rows(whole, rows) for rows in ranges)
            if not side.runs:
                continue
            if side.results is not None:
                root, by = side.results
                results.append(draft.rows(root, (low + by, low + by + size)))
                added += (target for _, target in _within(draft, side.runs, low, ranges))
                continue
            one = side.runs[0].target
            fields, num_heads = draft.buffers[one.buffer].fields, draft.num_heads(one)
            if fields[0].name != "dq":  # which is added up atomically
                fields = narrow_fields(fields, self._dtype)
            aside = draft.apart("results of a call", size, fields, num_heads, Home.WORKSPACE)
            results.append(aside)
            for rows, target in _within(draft, side.runs, low, ranges):
                source = draft.rows(aside, rows)
                written.append(source)
                name = label.replace("compute", "merge", 1)
                merges.append(Merge(name, source, target, self._by_lse))
        if places is not None:
            places = _places_of(places, sides, lows, call)
        adds = (True,) * len(added) + (False,) * len(written)
        ends = tuple(operands), tuple(added), tuple(written), adds, (0,) * len(adds)
        wholes = Wholes(tuple(handed), tuple(results))
        draft.ops.append(Attend(label, call, *ends, places, wholes))
        draft.ops += merges


def _places_of(
    tables: RowTables, sides: Sequence[ListSide], lows: Sequence[int], call: KernelCall
) -> RowTables:
    """Positions of a call's rows and keys, by their places in what the kernel is handed."""
    found: list[Table] = []
    for table, side, low, ranges in zip(tables[:2], sides, lows, call.sides, strict=True):
        positions, places = np.zeros(ranges[-1][1], np.int64), side.places - low
        here = (places >= 0) & (places < len(positions))
        positions[places[here]] = table.numbers[here]
        found.append(Table.of(positions))
    return tables._replace(q_positions=found[0], k_positions=found[1])


def _within(
    draft: Draft, runs: Sequence[_Run], low: int, ranges: Ranges
) -> Iterator[tuple[tuple[int, int], View]]:
    """Yield rows of ranges, counted from `low`, that lie in one run, and the partial's rows."""
    stops = [run.place + run.num_rows - low for run in runs]
    for start, stop in ranges:
        for run in runs[bisect_left(stops, start + 1) :]:
            first = run.place - low
            a, b = max(first, start), min(first + run.num_rows, stop)
            if a >= b:
                break
            yield (a, b), draft.rows(run.target, (run.local + a - first, run.local + b - first))
