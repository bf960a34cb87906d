"""Operands that tiles read together lie side by side in one buffer, and so do their partials.

What arrives is received there, and this rank's own rows stay the copies that the first pass made.
A kernel call then reads neighbouring shards in place, and adds to their partials at once.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import NamedTuple

from tilewise.compiler.code import Home
from tilewise.compiler.draft import Draft, RowBuffer
from tilewise.compiler.facts import Facts, received_rows
from tilewise.plan.builder import partial
from tilewise.plan.ir import Item, Role, Rows


def side_by_side(draft: Draft, facts: Facts) -> None:
    """Place the buffers of items that tiles read together in one buffer each."""
    if draft.by_head:
        return
    of_item: defaultdict[Item, list[int]] = defaultdict(list)
    for number, buffer in enumerate(draft.buffers):
        if buffer.item is not None:
            of_item[buffer.item].append(number)
    for items in facts.arenas:
        _place_operands(draft, facts, items, of_item)
        partials = [partial(item.side, item.shard, item.heads) for item in items]
        if facts.payload.fields(items[0].side, Role.PARTIAL):
            _place_partials(draft, facts, partials, of_item)


def _place_operands(
    draft: Draft, facts: Facts, items: Sequence[Item], of_item: dict[Item, list[int]]
) -> None:
    side = items[0].side
    row = facts.formats[side, Role.OPERAND]
    if not row.fields:
        return
    names = {x.name for x in row.fields}
    mine = {
        item: [n for n in of_item[item] if names >= {x.name for x in draft.buffers[n].fields}]
        for item in items
    }
    sizes = [max((draft.buffers[n].num_rows for n in mine[item]), default=0) for item in items]
    # A kernel of lists adds to rows of partials that have the numbers of the operand's rows.
    whole = facts.lists(draft.by_head) and facts.payload.results(side)
    received = received_rows(facts) if whole else {}
    rooms = [
        _Room.of(facts.num_rows(x), received.get(x), size) if whole else _Room(0, size, 0)
        for x, size in zip(items, sizes, strict=True)
    ]
    parts = tuple(rows for room in rooms for rows in (room if whole else room[1:2]))
    name, heads = f"{side.name.lower()}s", facts.payload.heads(side)
    arena = draft.new(
        RowBuffer(name, sum(parts), row.fields, heads, Home.WORKSPACE, row, None, parts)
    )
    start = 0
    for item, room in zip(items, rooms, strict=True):
        start += room.before
        for number in mine[item]:
            rows = draft.buffers[number].num_rows
            if rows == room.rows:
                draft.place_in(number, draft.rows(arena, (start, start + rows)))
        start += room.rows + room.after


class _Room(NamedTuple):
    """Rows of an item in an arena, and how many more rows of its shard would be around them."""

    before: int
    rows: int
    after: int

    @classmethod
    def of(cls, size: int, received: Rows | None, rows: int) -> _Room:
        """The room of a whole shard, of which an operand has some rows."""
        start = received[0][0] if received and len(received) == 1 else 0
        return cls(start, rows, size - start - rows)


def _place_partials(
    draft: Draft, facts: Facts, items: Sequence[Item], of_item: dict[Item, list[int]]
) -> None:
    side = items[0].side
    first = {
        item: [n for n in of_item[item] if draft.buffers[n].form is None][:1] for item in items
    }
    sizes = [facts.num_rows(item) for item in items]
    name, heads = ", ".join(map(str, items)), facts.payload.heads(side)
    fields = facts.result_fields(side)
    group = draft.new(
        RowBuffer(name, sum(sizes), fields, heads, Home.WORKSPACE, None, None, tuple(sizes))
    )
    start = 0
    for item, size in zip(items, sizes, strict=True):
        for number in first[item]:
            draft.place_in(number, draft.rows(group, (start, start + size)))
        start += size
