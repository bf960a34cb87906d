"""The two exchanges of a split by heads among all ranks, packed and taken in as wholes.

The first gives every rank its heads of all rows, the second every rank all heads of its rows. A
buffer has a row of bytes for each token and peer, in which a token's operands or partials of both
sides lie one after the other. So a field is written and read by one strided copy for all peers,
and what arrives by the first lies as tiles read it: as one shard of all rows.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import chain
from typing import NamedTuple

import torch
from torch import Tensor

from tilewise.arguments import ITEM_BYTES
from tilewise.execution.packing import STATISTICS
from tilewise.layouts.layout import Layout
from tilewise.plan.ir import Role, Side
from tilewise.plan.payload import HeadGroups, Payload
from tilewise.transport.protocol import TeamSizes


class ExchangedField(NamedTuple):
    """One tensor of a side in the buffers' rows.

    Attributes:
        shape: of what one rank has of a token: heads, and a width unless it is a statistic.
        start: where it begins in a row, and row: how long that is, in numbers of its dtype.
    """

    side: Side
    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int
    row: int

    def of(self, buffer: Tensor, batch: int) -> Tensor:
        """[rows, batch, heads of one rank(, width)] of all of a buffer's rows."""
        strides = batch * self.row, self.row, *self._inner
        numbers = buffer.view(self.dtype)
        rows = numbers.numel() // (batch * self.row)
        return numbers.as_strided((rows, batch, *self.shape), strides, self.start)

    def by_rank(self, buffer: Tensor, batch: int, num_ranks: int) -> Tensor:
        """[rows, batch, ranks, heads of one rank(, width)] of a buffer with equally many for
        each."""
        numbers = buffer.view(self.dtype)
        rows = numbers.numel() // (num_ranks * batch * self.row)
        strides = batch * self.row, self.row, rows * batch * self.row, *self._inner
        return numbers.as_strided((rows, batch, num_ranks, *self.shape), strides, self.start)

    @property
    def _inner(self) -> tuple[int, ...]:
        return (self.shape[1], 1) if len(self.shape) > 1 else (1,)


class HeadExchange:
    """One of the exchanges, in one pass of one rank.

    Args:
        rows: of all ranks.

    Attributes:
        is_first: of operands; else of partials.
        sizes: bytes that leave for and arrive from each rank, this one included.
    """

    def __init__(
        self,
        role: Role,
        fields: Sequence[ExchangedField],
        rows: Sequence[int],
        rank: int,
        groups: HeadGroups,
        batch: int,
    ):
        self.is_first, self._fields, self._groups = role is Role.OPERAND, fields, groups
        self._num_ranks, self._batch = len(rows), batch
        heads = groups.num_heads, groups.num_kv_heads
        # The head of every rank, where several ranks have the same one; None: each has its own.
        self._shared = [
            None if n >= len(rows) else torch.arange(len(rows)) * n // len(rows) for n in heads
        ]
        row_bytes = fields[0].row * fields[0].dtype.itemsize if fields else 0
        bytes_of = [count * batch * row_bytes for count in rows]
        alike = [bytes_of[rank]] * len(rows)  # this rank's rows where it has all heads
        self.sizes: TeamSizes = (alike, bytes_of) if self.is_first else (bytes_of, alike)
        self._totals = tuple(map(sum, self.sizes))

    def buffers(self) -> tuple[Tensor, Tensor]:
        """What leaves and what arrives, of any content."""
        leaving, arriving = self._totals
        return torch.empty(leaving, dtype=torch.uint8), torch.empty(arriving, dtype=torch.uint8)

    def fields(self, buffer: Tensor) -> dict[Side, dict[str, Tensor]]:
        """Of all rows one rank's heads: what arrives by the first, what leaves by the second."""
        found: dict[Side, dict[str, Tensor]] = {}
        for field in self._fields:
            found.setdefault(field.side, {})[field.name] = field.of(buffer, self._batch)
        return found

    def scatter(self, own: Sequence[Mapping[str, Tensor]], buffer: Tensor) -> None:
        """Write this rank's rows, each head where its rank is to find it.

        Args:
            own: by side, tensors [rows, batch, all heads(, width)].
        """
        for field in self._fields:
            place = field.by_rank(buffer, self._batch, self._num_ranks)
            x, heads = own[field.side][field.name], self._shared[field.side]
            if heads is not None:
                x = x.index_select(2, heads)
            place.copy_(x.view(place.shape))

    def gather(self, buffer: Tensor, of: Side, results: Sequence[Tensor]) -> None:
        """Read what all ranks computed of this rank's rows.

        Args:
            results: of this side, tensors [rows, batch, all heads(, width)] to write.
        """
        mine = (field for field in self._fields if field.side is of)
        for field, result in zip(mine, results, strict=True):
            x = field.by_rank(buffer, self._batch, self._num_ranks)
            if self._shared[of] is not None:  # ranks of one KV head, whose gradients sum
                x = x.unflatten(2, (self._groups.num_kv_heads, -1)).sum(3, dtype=_wide(x.dtype))
            result.view(x.shape).copy_(x)


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
    fields, begin = [], 0
    total = sum(row.num_bytes for row in formats.values())
    for side, row in formats.items():
        for field, start in zip(row.fields, row.starts, strict=True):
            size, heads = ITEM_BYTES(field.dtype), payload.heads(side)
            shape = (heads,) if field.name in STATISTICS else (heads, field.width)
            place = (begin + start) // size, total // size
            fields.append(
                ExchangedField(side, field.name, getattr(torch, field.dtype), shape, *place)
            )
        begin += row.num_bytes
    return HeadExchange(role, fields, rows.pop(), rank, groups, batch)


def as_one_shard(layout: Layout) -> Layout:
    """All shards' rows, one after the other."""
    return Layout(layout.num_tokens, [chain(*layout.runs)], layout.name)


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32
