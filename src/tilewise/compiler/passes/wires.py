"""Copies to and from rows that cannot be used as they travel are encodings and decodings."""

from __future__ import annotations

from tilewise.compiler.draft import Draft, View
from tilewise.compiler.facts import Facts
from tilewise.compiler.ops import Copy, Decode, Encode
from tilewise.plan.ir import Role


def wires(draft: Draft, facts: Facts) -> None:
    """Write the encodings and decodings."""
    if all(row.in_place for row in facts.formats.values()) and not facts.payload.saved:
        return
    for place, op in enumerate(draft.ops):
        if not isinstance(op, Copy):
            continue
        source, target = (draft.buffers[view.buffer].usable for view in (op.source, op.target))
        if source and not target:
            draft.ops[place] = _encode(draft, facts, op)
        elif target and not source:
            label = op.label.replace("unpack", "decode")
            draft.ops[place] = Decode(label, op.source, op.target, draft.fields_of(op.source))


def _encode(draft: Draft, facts: Facts, copy: Copy[View]) -> Encode[View]:
    buffer = draft.buffers[copy.target.buffer]
    assert buffer.item is not None, "messages know whose rows they are"
    by = 0 if buffer.item.role is Role.OPERAND else facts.rank
    fields = draft.fields_of(copy.target)
    encodes = any(x.wire is not None for x in fields)
    label = copy.label.replace("pack", "encode") if encodes else copy.label
    return Encode(label, copy.source, copy.target, fields, (buffer.item, by))
