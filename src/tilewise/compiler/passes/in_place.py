"""Copies of operands that are needless go: what is copied is read, or sent, where it lies.

    own rows                    lie in the call's tensors
    what has arrived            lies in its message
    a message of one tensor     lies in the call's tensor, if its rows lie side by side there

None of these is written again once it is there.
"""

from __future__ import annotations

from tilewise.compiler.code import Home
from tilewise.compiler.draft import Draft, View
from tilewise.compiler.facts import Facts
from tilewise.compiler.ops import Copy
from tilewise.plan.payload import RowFormat


def in_place(draft: Draft, facts: Facts) -> None:
    """Let copies lie where their sources do, where they can be used there."""
    old, draft.ops = draft.ops, []
    for op in old:
        if isinstance(op, Copy) and op.rows is None and op.heads is None:
            if draft.found(op.source) == draft.found(op.target):
                continue
            number = op.target.buffer
            whole = op.target == View(number)
            if whole and draft.inside[number] is None and _can_lie(draft, facts, op):
                draft.place_in(number, op.source)
                continue
        draft.ops.append(op)


def _can_lie(draft: Draft, facts: Facts, copy: Copy[View]) -> bool:
    """Return whether a copy's target may lie where the source does."""
    target, source = draft.buffers[copy.target.buffer], draft.found(copy.source)
    outer = draft.buffers[source.buffer]
    if target.home is Home.GIVEN or target.within is not None:
        return False
    if isinstance(target.form, RowFormat):
        alone = facts.call.batch == 1 and facts.groups.groups == 1
        one = len(target.fields) == 1 and target.fields[0].wire is None
        return alone and one and outer.home is Home.GIVEN
    dtypes = [[x.dtype for x in draft.fields_of(view)] for view in (copy.source, copy.target)]
    return outer.usable and dtypes[0] == dtypes[1]
