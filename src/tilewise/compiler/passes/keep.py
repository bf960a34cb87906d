"""Buffers of received operands that a forward pass keeps for its backward pass."""

from __future__ import annotations

from tilewise.compiler.code import Home
from tilewise.compiler.draft import Draft, Kept, View
from tilewise.compiler.facts import Facts, received_rows
from tilewise.plan.ir import Item, Role, Rows
from tilewise.plan.payload import RowFormat


def keep(draft: Draft, facts: Facts) -> None:
    """Let the buffers into which operands are received outlive the pass."""
    if not facts.keeps or draft.by_head:
        return
    items_of: dict[int, dict[Item, tuple[int, Rows]]] = {}
    received = received_rows(facts)
    for number, buffer in enumerate(draft.buffers):
        item = buffer.item
        if item is None or item.role is not Role.OPERAND:
            continue
        place = draft.found(View(number))
        outer = draft.buffers[place.buffer]
        travels = isinstance(outer.form, RowFormat) and outer.home is not Home.SAVED
        if travels and (item in received or outer.item is None):
            rows = received.get(item) or ((0, facts.num_rows(item)),)
            start = 0 if place.rows is None else place.rows[0]
            items_of.setdefault(place.buffer, {}).setdefault(item, (start, rows))
    for number, items in items_of.items():
        buffer = draft.buffers[number]
        draft.buffers[number] = buffer._replace(home=Home.KEPT, part_rows=())
        draft.kept.append(Kept(number, tuple((item, *where) for item, where in items.items())))
