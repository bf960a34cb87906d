"""Results of kernel calls wait where the kernel put them, and are combined when they leave.

    a partial            what was added to it, result by result and arrival by arrival, and waits
    it leaves            what waits is combined into its message
    it is finished       ... into the call's result
    too much waits       ... into the partial's own memory, which is then one of those that wait

Each result is written once and read once. The other way, `adopt`, adds each to its partial at once:
then a partial is read and written again for every call, which a GPU's memory is too slow for.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from tilewise.compiler.draft import AttendTile, Draft, DraftOp, View, narrow_fields
from tilewise.compiler.facts import Facts
from tilewise.compiler.ops import Attend, Combine, Copy, Fill, Merge, Wholes, reads, writes
from tilewise.plan.row_ranges import Rows, union, without

Span = tuple[int, int]
"""Rows of a partial, from the first to the one after the last."""


class _Segment(NamedTuple):
    rows: Span
    sources: tuple[View, ...]


class Waiting(NamedTuple):
    """Rows of a partial, and the view whose values are still to be added to them."""

    rows: Span
    source: View


@dataclass
class PartialSum:
    """A partial that is added to.

    Attributes:
        blank: the fill that would make it one that nothing was added to.
        waiting: what was added, and is not combined yet.
        summed: rows whose sum lies in the partial's own memory.
        parts: of each row, how many results and sums it is the sum of.
    """

    blank: Fill[View]
    parts: np.ndarray
    waiting: list[Waiting] = field(default_factory=list[Waiting])
    summed: Rows = ()


def combine(draft: Draft, facts: Facts) -> None:
    """Let what is added to partials wait, and combine it when it is read."""
    if facts.combines(draft):
        _Combiner(draft, facts).rewrite()


class _Combiner:
    def __init__(self, draft: Draft, facts: Facts):
        self._draft = draft
        self._most = facts.traits.waiting_results
        self._by_lse = not facts.payload.backward
        self._lists, self._dtype = facts.lists(draft.by_head), facts.payload.dtype
        self._partials: dict[int, PartialSum] = {}
        self._reads_left: defaultdict[int, list[Span]] = defaultdict(list)  # by partial, last first

    def rewrite(self) -> None:
        draft = self._draft
        old, draft.ops = [op for op in draft.ops if not self._is_empty(op)], []
        self._find_reads(old)
        for op in old:
            match op:
                case Fill() if op.target == View(op.target.buffer):
                    rows = draft.num_rows(op.target)
                    self._partials[op.target.buffer] = PartialSum(op, np.zeros(rows, np.int32))
                case Merge() if op.target.buffer in self._partials:
                    self._merge(op)
                case Copy() if op.source.buffer in self._partials:
                    self._copy(op)
                case Attend() if op.wholes is not None:
                    self._attend(op, op.wholes)
                case _:
                    self._sum_all_that_are_read(op)
                    draft.ops.append(op)
        if self._lists:
            self._narrow()

    def _narrow(self) -> None:
        """Give partials that one call alone writes, and none adds to, the dtype of operands: as
        kernels of libraries leave theirs. Of dq none: it is added up atomically.
        """
        draft = self._draft
        roots = {number: draft.found(View(number)).buffer for number in self._partials}
        wide: set[int] = set()
        for op in draft.ops:
            once = op.written if isinstance(op, Attend) else ()
            changed = () if isinstance(op, Fill | AttendTile) else writes(op)
            wide |= {draft.found(x).buffer for x in changed if x not in once}
        for number, root in roots.items():
            names = {x.name for x in draft.buffers[number].fields}
            if root not in wide and "dq" not in names:
                for one in {number, root}:
                    fields = narrow_fields(draft.buffers[one].fields, self._dtype)
                    draft.buffers[one] = draft.buffers[one]._replace(fields=fields)

    def _is_empty(self, op: DraftOp) -> bool:
        """Return whether an operation is done to no rows."""
        return isinstance(op, Fill | Copy | Merge) and not self._draft.num_rows(op.target)

    def _find_reads(self, ops: Sequence[DraftOp]) -> None:
        """Note which rows of each buffer are read, so that the last reader of some is known."""
        for op in reversed(ops):
            for view in () if isinstance(op, AttendTile) else reads(op):
                self._reads_left[view.buffer].append(self._span(view))

    def _span(self, view: View) -> Span:
        """Return the (start, stop) of the rows of a view; with a stride the rows between are
        included.
        """
        if view.rows is None:
            return 0, self._draft.buffers[view.buffer].num_rows
        return view.rows[:2]

    def _sum_all_that_are_read(self, op: DraftOp) -> None:
        """Sum partials that an operation reads or writes into their own memory, before it runs."""
        assert not isinstance(op, AttendTile), "tiles have been cut"
        for view in reads(op):
            self._read(view)
        for view in (*reads(op), *writes(op)):
            if view.buffer in self._partials:
                self._sum(view)

    def _read(self, view: View) -> None:
        """Note that a view is read now."""
        self._reads_left[view.buffer].pop()

    def _is_read_again(self, view: View) -> bool:
        """Return whether some rows of a view will be read once more."""
        start, stop = self._span(view)
        return any(first < stop and last > start for first, last in self._reads_left[view.buffer])

    def _merge(self, merge: Merge[View]) -> None:
        """Let a partial's new summand wait; add it at once if its rows do not lie side by side."""
        number, source = merge.target.buffer, merge.source
        partial = self._partials[number]
        self._read(source)
        if source.buffer in self._partials:
            self._sum(source)
        self._read(merge.target)
        target = merge.target
        if merge.rows is not None or target.heads is not None or not _is_plain(target):
            self._sum(View(number))
            self._draft.ops.append(merge)
            return
        start, stop = self._span(target)
        partial.waiting.append(Waiting((start, stop), source))
        partial.parts[start:stop] += 1
        self._limit(number, (start, stop))

    def _limit(self, number: int, rows: Span) -> None:
        """Sum rows of a partial of which too much waits."""
        if self._partials[number].parts[slice(*rows)].max() > self._most:
            segments = self._segments(number, rows)
            self._sum_rows(number, [x for x in segments if len(x.sources) > self._most])

    def _attend(self, attend: Attend[View], wholes: Wholes[View]) -> None:
        """Let a kernel add to rows of partials that have a sum in their own memory already, and
        write the others, which then have one.
        """
        for view in reads(attend):
            self._read(view)
        added: list[View] = []
        written = [*attend.written]
        for view in attend.added:
            partial, rows = self._partials[view.buffer], self._span(view)
            if view.heads is not None:
                self._sum(view)
            new = without([rows], partial.summed)
            old = without([rows], new)
            own = View(view.buffer, None, view.heads)
            added += (self._draft.rows(own, x) for x in old)
            written += (self._draft.rows(own, x) for x in new)
            for start, stop in new:
                partial.parts[start:stop] += 1
            partial.summed = union(partial.summed, new)
        fresh: list[list[Span]] = [[], []]
        ends = [self._draft.found(view) for view in wholes.results]
        for view in map(self._draft.found, written):
            (side,) = (i for i, end in enumerate(ends) if end.buffer == view.buffer)
            first, (start, stop) = self._span(ends[side])[0], self._span(view)
            fresh[side].append((start - first, stop - first))
        adds = (True,) * len(added) + (False,) * len(written)
        call = attend.call._replace(fresh=(union(fresh[0]), union(fresh[1])))
        self._draft.ops.append(
            attend._replace(
                call=call,
                added=tuple(added),
                written=tuple(written),
                adds=adds,
                made_bytes=(0,) * len(adds),
            )
        )
        for view in attend.added:
            self._limit(view.buffer, self._span(view))

    def _copy(self, copy: Copy[View]) -> None:
        """Combine what waits into what reads it."""
        number = copy.source.buffer
        self._read(copy.source)
        usable = self._draft.buffers[copy.target.buffer].usable
        plain = copy.rows is None and copy.heads is None and copy.source.heads is None
        in_place = not plain or not usable or not _is_plain(copy.source)
        if in_place or self._is_read_again(copy.source):
            self._sum(View(number) if copy.rows else copy.source)
            self._draft.ops.append(copy)
            return
        read = self._span(copy.source)
        for (start, stop), sources in self._segments(number, read):
            target = self._draft.rows(copy.target, (start - read[0], stop - read[0]))
            self._write(copy.label, sources, target, self._partials[number])

    def _sum(self, view: View) -> None:
        """Sum the rows of a view into the partial's own memory; rows that nothing was added to are
        blank.
        """
        self._sum_rows(view.buffer, self._segments(view.buffer, self._span(view)))

    def _sum_rows(self, number: int, segments: Sequence[_Segment]) -> None:
        """Combine rows of a partial into its own memory; what was added to others still waits."""
        partial, gone = self._partials[number], tuple(rows for rows, _ in segments)
        if not segments:
            return
        label = partial.blank.label.replace("fill", "combine")
        for rows, sources in segments:
            own = self._draft.rows(partial.blank.target, rows)
            if sources != (own,):
                self._write(label, sources, own, partial)
            partial.parts[rows[0] : rows[1]] = 1
        low, high = gone[0][0], gone[-1][1]
        waiting: list[Waiting] = []
        for x in partial.waiting:  # most lie elsewhere, where calls are many
            if x.rows[1] <= low or high <= x.rows[0]:
                waiting.append(x)
            else:
                waiting += (self._part(x, rows) for rows in without([x.rows], gone))
        partial.waiting = waiting
        partial.summed = union(partial.summed, gone)

    def _part(self, waiting: Waiting, rows: Span) -> Waiting:
        """Return some of the rows of a waiting result, with the same rows of its source."""
        if rows == waiting.rows:
            return waiting
        start = waiting.rows[0]
        return Waiting(rows, self._draft.rows(waiting.source, (rows[0] - start, rows[1] - start)))

    def _segments(self, number: int, within: Span) -> list[_Segment]:
        """Cut rows of a partial where their summands change; return each run with the views to add
        up.
        """
        partial, (low, high) = self._partials[number], within
        summed = [x for x in partial.summed if x[0] < high and x[1] > low]
        waiting = [x for x in partial.waiting if x.rows[0] < high and x.rows[1] > low]
        edges = {edge for span in (*(x.rows for x in waiting), *summed) for edge in span}
        cuts = sorted({low, high, *(edge for edge in edges if low < edge < high)})
        place = {edge: number for number, edge in enumerate(cuts)}
        found: list[list[View]] = [[] for _ in cuts[1:]]
        segments = [*zip(pairwise(cuts), found, strict=True)]

        def covered(span: Span) -> list[tuple[Span, list[View]]]:
            return segments[place[max(low, span[0])] : place[min(high, span[1])]]

        for span in summed:
            for rows, sources in covered(span):
                sources.append(self._draft.rows(partial.blank.target, rows))
        for one in waiting:
            for rows, sources in covered(one.rows):
                sources.append(self._part(one, rows).source)
        return [_Segment(rows, tuple(sources)) for rows, sources in segments]

    def _write(
        self, label: str, sources: Sequence[View], target: View, partial: PartialSum
    ) -> None:
        ops = self._draft.ops
        if not sources:
            names = [x.name for x in self._draft.fields_of(partial.blank.target)]
            values = dict(zip(names, partial.blank.values, strict=True))
            own = tuple(values[x.name] for x in self._draft.fields_of(target))
            ops.append(Fill(partial.blank.label, target, own))
        elif len(sources) == 1:
            ops.append(Copy(label, sources[0], target))
        else:
            ops.append(Combine(label, tuple(sources), target, self._by_lse))


def _is_plain(view: View) -> bool:
    """Return whether the rows of a view lie side by side."""
    return view.rows is None or view.rows[2] == 1
