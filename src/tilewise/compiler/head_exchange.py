"""The two exchanges of a split by heads among all ranks, as whole buffers.

The first gives every rank its heads of all rows, the second every rank all heads of its rows. A
buffer has a row of bytes for each token and peer, in which a token's operands or partials of both
sides lie one after the other. So a field is written and read by one strided copy for all peers,
and what arrives by the first lies as tiles read it: as one shard of all rows.
"""

from itertools import chain
from typing import NamedTuple

import numpy as np

from tilewise.layouts.layout import Layout
from tilewise.plan.ir import Role, Side
from tilewise.plan.payload import STATISTICS, HeadGroups, Payload, row_shape


class ExchangedField(NamedTuple):
    """One tensor of a side in a buffer, as shapes and strides in numbers of its dtype.

    Attributes:
        start: the number at which it begins in a row of bytes.
        whole: [rows, batch, heads of one rank(, width)] of all of a buffer's rows.
        by_rank: [rows, batch, ranks, heads of one rank(, width)] of one with equally many for each.
    """

    side: Side
    name: str
    dtype: str
    start: int
    whole: tuple[tuple[int, ...], tuple[int, ...]]
    by_rank: tuple[tuple[int, ...], tuple[int, ...]]


class HeadExchange(NamedTuple):
    """One of the exchanges, in one pass of one rank.

    Attributes:
        sizes: bytes that leave for and arrive from each rank, this one included.
        shared: by side the head of every rank, where several ranks have the same one; None: each
            has its own.
    """

    fields: tuple[ExchangedField, ...]
    sizes: tuple[tuple[int, ...], tuple[int, ...]]
    shared: tuple[np.ndarray | None, np.ndarray | None]


def head_exchange(
    role: Role,
    payload: Payload,
    layouts: tuple[Layout, Layout],
    groups: HeadGroups,
    rank: int,
    batch: int,
) -> HeadExchange | None:
    """The exchange of operands, or of partials.

    Returns:
        None, on all ranks, if sides do not have the same rows, or fields could not be used in
        place.
    """
    formats = {side: payload.row_format(side, role) for side in Side if payload.fields(side, role)}
    rows_of_sides = {layouts[side].sizes for side in formats}
    unit = max((x.item_bytes for row in formats.values() for x in row.fields), default=1)
    aligned = all(row.in_place and row.num_bytes % unit == 0 for row in formats.values())
    if not aligned or len(rows_of_sides) != 1:
        return None
    (rows,) = rows_of_sides
    fields: list[ExchangedField] = []
    begin = 0
    row_bytes, n = sum(row.num_bytes for row in formats.values()), len(layouts[0].sizes)
    for side, row in formats.items():
        for field, start in zip(row.fields, row.starts, strict=True):
            size, statistic = field.item_bytes, field.name in STATISTICS
            heads = row_shape(field.name, payload.heads(side), field.width)
            step, inner = row_bytes // size, (1,) if statistic else (field.width, 1)
            whole = (sum(rows), batch, *heads), (batch * step, step, *inner)
            apart = rows[rank] * batch * step
            by_rank = (rows[rank], batch, n, *heads), (batch * step, step, apart, *inner)
            named = side, field.name, field.dtype
            fields.append(ExchangedField(*named, (begin + start) // size, whole, by_rank))
        begin += row.num_bytes
    theirs = tuple(count * batch * row_bytes for count in rows)
    alike = (theirs[rank],) * n
    heads_of = groups.num_heads, groups.num_kv_heads
    q_shared, kv_shared = (None if h >= n else np.arange(n) * h // n for h in heads_of)
    sizes = (alike, theirs) if role is Role.OPERAND else (theirs, alike)
    return HeadExchange(tuple(fields), sizes, (q_shared, kv_shared))


def as_one_shard(layout: Layout) -> Layout:
    """All shards' rows, one after the other."""
    return Layout(layout.num_tokens, [chain(*layout.runs)], layout.name)
