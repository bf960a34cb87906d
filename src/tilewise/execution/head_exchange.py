"""The two exchanges of a split by heads among all ranks, packed and taken in as wholes.

The first gives every rank its heads of all rows, the second every rank all heads of its rows. A
buffer has a row of bytes for each token and peer, in which a token's operands or partials of both
sides lie one after the other. So a field is written and read by one strided copy for all peers,
and what arrives by the first lies as tiles read it: as one shard of all rows.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import chain
from typing import NamedTuple

import torch
from torch import Tensor

from tilewise.arguments import ITEM_BYTES
from tilewise.execution.packing import STATISTICS
from tilewise.kernels.protocol import accumulator_dtype
from tilewise.layouts.layout import Layout
from tilewise.plan.ir import Role, Side
from tilewise.plan.payload import HeadGroups, Payload
from tilewise.transport.protocol import TeamSizes


class ExchangedField(NamedTuple):
    """One tensor of a side in a buffer, as shapes and strides in numbers of its dtype.

    Attributes:
        start: where it begins in a row of bytes.
        whole: [rows, batch, heads of one rank(, width)] of all of a buffer's rows.
        by_rank: [rows, batch, ranks, heads of one rank(, width)] of one with equally many for each.
    """

    side: Side
    name: str
    dtype: torch.dtype
    start: int
    whole: tuple[tuple[int, ...], tuple[int, ...]]
    by_rank: tuple[tuple[int, ...], tuple[int, ...]]


class Exchange(NamedTuple):
    """A team's exchange: see TeamMessages.

    Attributes:
        take_in: is called when all has arrived.
    """

    leaving: Tensor
    arriving: Tensor
    sizes: TeamSizes
    take_in: Callable[[], None]


class HeadExchange:
    """One of the exchanges, in one pass of one rank.

    Attributes:
        is_first: of operands; else of partials.
        sizes: bytes that leave for and arrive from each rank, this one included.
    """

    def __init__(
        self,
        is_first: bool,
        fields: Sequence[ExchangedField],
        row_bytes: Sequence[int],
        rank: int,
        groups: HeadGroups,
    ):
        """row_bytes: of all rows of each rank."""
        self.is_first, self._fields, self._groups = is_first, fields, groups
        self._dtypes, n = {field.dtype for field in fields}, len(row_bytes)
        # The head of every rank, where several ranks have the same one; None: each has its own.
        heads = groups.num_heads, groups.num_kv_heads
        self._shared = [None if h >= n else torch.arange(n) * h // n for h in heads]
        alike, theirs = [row_bytes[rank]] * n, [*row_bytes]
        self.sizes: TeamSizes = (alike, theirs) if is_first else (theirs, alike)
        self._totals = sum(self.sizes[0]), sum(self.sizes[1])

    def buffers(self) -> tuple[Tensor, Tensor]:
        """What leaves and what arrives, of any content."""
        leaving, arriving = self._totals
        return torch.empty(leaving, dtype=torch.uint8), torch.empty(arriving, dtype=torch.uint8)

    def fields(self, buffer: Tensor) -> dict[Side, dict[str, Tensor]]:
        """Of all rows one rank's heads: what arrives by the first, what leaves by the second."""
        numbers = self._numbers(buffer)
        found: dict[Side, dict[str, Tensor]] = {}
        for side, name, dtype, start, whole, _ in self._fields:
            x = numbers[dtype]  # a buffer that a hook of autograd kept may begin anywhere
            found.setdefault(side, {})[name] = x.as_strided(*whole, x.storage_offset() + start)
        return found

    def scatter(self, own: Sequence[Mapping[str, Tensor]], buffer: Tensor) -> None:
        """Write this rank's rows, each head where its rank is to find it.

        Args:
            own: by side, tensors [rows, batch, all heads(, width)].
        """
        numbers = self._numbers(buffer)
        for side, name, dtype, start, _, by_rank in self._fields:
            x, heads = own[side][name], self._shared[side]
            if heads is not None:
                x = x.index_select(2, heads)
            numbers[dtype].as_strided(*by_rank, start).copy_(x.view(by_rank[0]))

    def gather(self, buffer: Tensor, of: Side, results: Sequence[Tensor]) -> None:
        """Read what all ranks computed of this rank's rows.

        Args:
            results: of this side, tensors [rows, batch, all heads(, width)] to write.
        """
        numbers, mine = self._numbers(buffer), [x for x in self._fields if x.side is of]
        for field, result in zip(mine, results, strict=True):
            x = numbers[field.dtype].as_strided(*field.by_rank, field.start)
            if self._shared[of] is not None:  # ranks of one KV head, whose gradients sum
                x = x.unflatten(2, (self._groups.num_kv_heads, -1)).sum(
                    3, dtype=accumulator_dtype(x.dtype)
                )
            result.view(x.shape).copy_(x)

    def _numbers(self, buffer: Tensor) -> dict[torch.dtype, Tensor]:
        return dict(zip(self._dtypes, map(buffer.view, self._dtypes), strict=True))


def head_exchange(
    role: Role,
    payload: Payload,
    layouts: tuple[Layout, Layout],
    groups: HeadGroups,
    rank: int,
    batch: int,
) -> HeadExchange | None:
    """None, on all ranks: sides do not have the same rows, or fields could not be used in place."""
    formats = {side: payload.row_format(side, role) for side in Side if payload.fields(side, role)}
    rows = {layouts[side].sizes for side in formats}
    unit = max((ITEM_BYTES(x.dtype) for row in formats.values() for x in row.fields), default=1)
    aligned = all(row.in_place and row.num_bytes % unit == 0 for row in formats.values())
    if not aligned or len(rows) != 1:
        return None
    (rows,), fields, begin = rows, [], 0
    row_bytes, n = sum(row.num_bytes for row in formats.values()), len(layouts[0].sizes)
    for side, row in formats.items():
        for field, start in zip(row.fields, row.starts, strict=True):
            size, statistic = ITEM_BYTES(field.dtype), field.name in STATISTICS
            heads = (payload.heads(side),) if statistic else (payload.heads(side), field.width)
            step, inner = row_bytes // size, (1,) if statistic else (field.width, 1)
            whole = (sum(rows), batch, *heads), (batch * step, step, *inner)
            apart = rows[rank] * batch * step
            by_rank = (rows[rank], batch, n, *heads), (batch * step, step, apart, *inner)
            named = side, field.name, getattr(torch, field.dtype)
            fields.append(ExchangedField(*named, (begin + start) // size, whole, by_rank))
        begin += row.num_bytes
    of_ranks = [count * batch * row_bytes for count in rows]
    return HeadExchange(role is Role.OPERAND, fields, of_ranks, rank, groups)


def as_one_shard(layout: Layout) -> Layout:
    """All shards' rows, one after the other."""
    return Layout(layout.num_tokens, [chain(*layout.runs)], layout.name)
