"""The two exchanges of a split by heads among all ranks, packed and taken in as wholes.

The first gives every rank its heads of all rows, the second every rank all heads of its rows. A
buffer has a row of bytes for each token and peer, in which a token's operands or partials of both
sides lie one after the other. So a field is written and read by one strided copy for all peers,
and what arrives by the first lies as tiles read it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from tilewise.execution.packing import Arena, PackedRows, Packing
from tilewise.layouts.layout import Layout
from tilewise.plan.builder import operand
from tilewise.plan.ir import Item, Role, Side
from tilewise.plan.payload import HeadGroups

Fields = dict[str, Tensor]


class ExchangedField(NamedTuple):
    """What travels of one side: how it is packed, and where in a row of bytes it begins."""

    side: Side
    packing: Packing
    start: int


class HeadExchange:
    """One of the exchanges, in one pass of one rank.

    Attributes:
        is_first: of operands; else of partials.
        counts: rows for and from every rank: this rank's where it has all heads, else theirs.
    """

    def __init__(
        self,
        role: Role,
        parts: Sequence[ExchangedField],
        rows: Sequence[int],
        rank: int,
        groups: HeadGroups,
    ):
        self.is_first, self.parts, self._groups = role is Role.OPERAND, parts, groups
        self._shared = {part.side: self._heads(part.side, len(rows)) for part in parts}
        self._row_bytes = sum(part.packing.row_bytes for part in parts)
        self._rows = rows
        alike, by_rank = [rows[rank]] * len(rows), list(rows)
        self.counts = (alike, by_rank) if self.is_first else (by_rank, alike)

    def buffers(self, batch: int) -> tuple[Tensor, Tensor]:
        """What leaves and what arrives, of any content."""
        width = batch, self._row_bytes
        out, arrived = (torch.empty(sum(x), *width, dtype=torch.uint8) for x in self.counts)
        return out, arrived

    def sizes(self, batch: int) -> tuple[list[int], list[int]]:
        """Bytes that leave for and arrive from each rank, this one included."""
        leaving, arriving = ([x * batch * self._row_bytes for x in rows] for rows in self.counts)
        return leaving, arriving

    def fields(self, buffer: Tensor) -> Iterator[tuple[Side, Fields]]:
        """A buffer's tensors [rows, batch, heads of one rank(, width)], by side."""
        if not buffer.numel():
            return
        for side, packing, start in self.parts:
            columns = buffer[..., start : start + packing.row_bytes]
            yield side, packing.unpack(columns.unflatten(-1, packing.row_shape))

    def scatter(self, own: Sequence[Mapping[str, Tensor]], buffer: Tensor) -> None:
        """Write this rank's rows, each head where its rank is to find it.

        Args:
            own: by side, tensors [rows, batch, all heads(, width)].
        """
        for side, fields in self.fields(buffer):
            for name, place in fields.items():
                x, heads = own[side][name], self._shared[side]
                if heads is not None:
                    x = x.index_select(2, heads)
                split = x.unflatten(2, (len(self._rows), -1)).movedim(2, 0)
                place.unflatten(0, (len(self._rows), -1)).copy_(split)

    def gather(self, buffer: Tensor, of: Side, results: Sequence[Tensor]) -> None:
        """Read what all ranks computed of this rank's rows.

        Args:
            results: of this side, tensors [rows, batch, all heads(, width)] to write.
        """
        for fields in (fields for side, fields in self.fields(buffer) if side is of):
            for x, result in zip(fields.values(), results, strict=True):
                x, shared = x.unflatten(0, (len(self._rows), -1)), len(self._rows)
                if self._shared[of] is not None:  # ranks of one KV head, whose gradients sum
                    shared = self._groups.num_kv_heads
                    x = x.unflatten(0, (shared, -1)).sum(1, dtype=_wide(x.dtype))
                result.unflatten(2, (shared, -1)).copy_(x.movedim(0, 2))

    def _heads(self, side: Side, num_ranks: int) -> Tensor | None:
        """The head of every rank, where several ranks have the same one; None: each has its own."""
        num_heads = self._groups.num_heads if side is Side.Q else self._groups.num_kv_heads
        return None if num_heads >= num_ranks else torch.arange(num_ranks) * num_heads // num_ranks


def head_exchange(
    role: Role,
    packings: Mapping[tuple[Side, Role], Packing],
    layouts: tuple[Layout, Layout],
    groups: HeadGroups,
    rank: int,
) -> HeadExchange | None:
    """None, on all ranks: sides do not have the same rows, or fields could not be used in place."""
    parts, start = [], 0
    for side in Side:
        packing = packings[side, role]
        if packing.names:
            parts.append(ExchangedField(side, packing, start))
            start += packing.row_bytes
    unit = max((part.packing.unit for part in parts), default=1)
    aligned = all(p.packing.in_place and p.packing.row_bytes % unit == 0 for p in parts)
    rows = {layouts[part.side].sizes for part in parts}
    if not aligned or len(rows) != 1:
        return None
    return HeadExchange(role, parts, rows.pop(), rank, groups)


def whole_side(
    side: Side, layout: Layout, group: int, fields: Fields
) -> tuple[Arena, dict[Item, PackedRows]]:
    """The operands of all shards, one after the other in an arena of these fields."""
    items = [operand(side, shard, group) for shard in range(layout.world_size)]
    starts, start = {}, 0
    for item in items:
        starts[item], start = start, start + layout.size(item.shard)
    arena = Arena(starts, None, fields)
    return arena, {
        item: PackedRows(
            ((0, layout.size(item.shard)),),
            RowsOf(fields, starts[item], starts[item] + layout.size(item.shard)),
            None,
            (arena, starts[item]),
        )
        for item in items
    }


class RowsOf(Mapping[str, Tensor]):
    """Neighbouring rows of tensors by name."""

    def __init__(self, whole: Mapping[str, Tensor], start: int, stop: int):
        self._whole, self._rows = whole, slice(start, stop)

    def __getitem__(self, name: str) -> Tensor:
        return self._whole[name][self._rows]

    def __iter__(self) -> Iterator[str]:
        return iter(self._whole)

    def __len__(self) -> int:
        return len(self._whole)


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32
