"""Fills and merges of partials that are needless go, and whatever is done to no rows.

what is first of a partial      becomes the partial, where it is all of its rows
results that a kernel can add   go into the partial, not aside
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, TypeAlias

from tilewise.compiler.code import Home
from tilewise.compiler.draft import Draft, DraftOp, View
from tilewise.compiler.facts import Facts
from tilewise.compiler.ops import Attend, Copy, Fill, Merge, Op, reads, writes


class InPlace(NamedTuple):
    """Results go to rows of partials: they are added, or written as the first ones."""

    target: View
    adds: bool


class Copied(NamedTuple):
    """Results are the first of a partial, and all of its rows, in other order."""


class Aside(NamedTuple):
    """Results are merged, part by part."""


Place: TypeAlias = InPlace | Copied | Aside


def adopt(draft: Draft, facts: Facts) -> None:
    """Take out fills and merges that are needless, where results do not wait."""
    if not facts.combines(draft):
        _Adopter(draft, facts).rewrite()


class _Adopter:
    """Goes through the operations once; knows which partials are blank at each."""

    def __init__(self, draft: Draft, facts: Facts):
        self._draft, self._facts = draft, facts
        self._blank: dict[int, Fill[View]] = {}

    def rewrite(self) -> None:
        draft = self._draft
        old, draft.ops = draft.ops, []
        place = 0
        while place < len(old):
            op = old[place]
            place += 1
            match op:
                case Fill() | Copy() | Merge() if not draft.num_rows(op.target):
                    pass
                case Fill():
                    self._blank[op.target.buffer] = op
                case Copy():
                    self._copy(op)
                case Merge():
                    self._merge(op)
                case Attend():
                    place = self._attend(op, old, place)
                case _:
                    self._other(op)

    def _fill(self, view: View) -> None:
        """Write the fill of a partial that is about to be read or added to."""
        fill = self._blank.pop(view.buffer, None)
        if fill is not None:
            self._draft.ops.append(fill)

    def _other(self, op: DraftOp) -> None:
        for view in _operands(op):
            self._fill(view)
        self._draft.ops.append(op)

    def _copy(self, copy: Copy[View]) -> None:
        draft, source = self._draft, copy.source
        fill = self._blank.get(source.buffer)
        target = draft.buffers[copy.target.buffer]
        if fill is not None and target.home is Home.GIVEN and copy.rows is None:
            del self._blank[source.buffer]  # a result that nothing was added to
            draft.ops.append(fill._replace(target=copy.target))
            return
        self._fill(source)
        draft.ops.append(copy)

    def _merge(self, merge: Merge[View]) -> None:
        """Add to a partial, or let what is first and all of it become the partial."""
        draft, target = self._draft, merge.target
        if target.buffer not in self._blank or merge.rows or target != View(target.buffer):
            self._fill(target)
            draft.ops.append(merge)
            return
        del self._blank[target.buffer]
        source = draft.found(merge.source)
        one, other = draft.buffers[source.buffer], draft.buffers[target.buffer]
        same = [x.dtype for x in draft.fields_of(source)] == [x.dtype for x in other.fields]
        free = draft.inside[target.buffer] is None and one.home is not Home.MADE
        if same and free and one.usable:
            draft.place_in(target.buffer, merge.source)
        else:
            draft.ops.append(Copy(merge.label, merge.source, target))

    def _attend(self, attend: Attend[View], ops: Sequence[DraftOp], place: int) -> int:
        """Decide where the results of a call go; return the place of the next operation."""
        draft = self._draft
        asides = {view.buffer for view in attend.written}
        rest: list[Merge[View] | Copy[View]] = []
        while place < len(ops):
            op = ops[place]
            if (
                not isinstance(op, Merge | Copy)
                or draft.buffers[op.target.buffer].home is Home.GIVEN
            ):
                break
            if op.source.buffer not in asides and not _follows(op, rest):
                break
            rest.append(op)
            place += 1
        added: list[View] = []
        written: list[View] = []
        adds: list[bool] = []
        for aside in attend.written:
            mine = [op for op in rest if op.source.buffer == aside.buffer]
            merges = [op for op in mine if isinstance(op, Merge)]
            plain = bool(merges) and len(merges) == len(mine)
            where = self._place(merges) if plain else Aside()
            match where:
                case InPlace(target, add):
                    (added if add else written).append(target)
                    adds.append(add)
                    rest = [op for op in rest if op not in mine]
                case Copied():
                    written.append(aside)
                    adds.append(False)
                    copies = {id(op): Copy(op.label, op.source, op.target) for op in mine}
                    rest = [copies.get(id(op), op) for op in rest]
                    self._blank.pop(mine[0].target.buffer)
                case Aside():
                    written.append(aside)
                    adds.append(False)
        draft.ops.append(
            attend._replace(added=tuple(added), written=tuple(written), adds=tuple(adds))
        )
        for op in rest:
            if isinstance(op, Merge):
                self._merge(op)
            else:
                draft.ops.append(op)
        return place

    def _place(self, merges: Sequence[Merge[View]]) -> Place:
        """Decide where a side's results of a call go, from the merges that follow the call."""
        draft = self._draft
        heads = merges[0].target.heads
        plain = all(op.rows is None for op in merges)
        if not plain or heads is not None:
            return Aside()
        targets = [op.target for op in merges]
        in_order = draft.side_by_side([op.source for op in merges])
        whole = in_order is not None and in_order == View(in_order.buffer)
        beside = draft.side_by_side(targets) if whole else None
        if beside is not None:
            blank = [x.buffer in self._blank for x in targets]
            first = all(blank) and all(x == View(x.buffer) for x in targets)
            if first and beside == View(beside.buffer):
                for x in targets:
                    del self._blank[x.buffer]
                return InPlace(beside, False)
            if first:  # a kernel writes whole buffers alone
                return Aside()
            for x in targets:
                self._fill(x)
            return InPlace(beside, True)
        buffers = {x.buffer for x in targets}
        if len(buffers) == 1 and buffers <= self._blank.keys():
            ranges = all(op.source.rows is None or op.source.rows[2] == 1 for op in merges)
            ranges = ranges and all(x.rows is None or x.rows[2] == 1 for x in targets)
            size = draft.buffers[targets[0].buffer].num_rows
            # Rows of a call are of different tokens, so as many as there are means all of them.
            if ranges and sum(map(draft.num_rows, targets)) == size:
                return Copied()
        return Aside()


def _follows(op: Op[View], before: Sequence[Merge[View] | Copy[View]]) -> bool:
    """Return whether an operation reads what one before it has picked of a call's results."""
    return any(isinstance(x, Copy) and x.target.buffer == op.source.buffer for x in before)  # pyright: ignore


def _operands(op: DraftOp) -> list[View]:
    if isinstance(op, Attend | Fill | Copy | Merge):
        return []
    return [*reads(op), *writes(op)]  # pyright: ignore
