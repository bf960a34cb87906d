"""Which of the caller's rows and heads are which operands, and results, of this rank."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import product
from typing import NamedTuple

from torch import Tensor

from tilewise.execution.packing import PackedRows
from tilewise.layouts.layout import Layout
from tilewise.plan.builder import operand, partial
from tilewise.plan.ir import Item, Rows, Side
from tilewise.plan.payload import HeadGroups


class _Own(NamedTuple):
    """An operand that is this rank's own: its rows and heads among the caller's; None: all."""

    item: Item
    local: Rows
    rows: slice | None
    heads: slice | None

    def fields(self, tensors: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        if self.rows is not None:
            tensors = {name: x[self.rows] for name, x in tensors.items()}
        if self.heads is not None:
            tensors = {name: x[:, :, self.heads] for name, x in tensors.items()}
        return tensors


class OwnRows:
    """This rank's shards and head groups, among the rows and heads of the caller's tensors.

    Args:
        owners: by side and shard, the ranks that own it.
        cuts: the local rows of each shard, where ranks own several; None: one each, whole.
        groups: the heads that travel.
    """

    def __init__(
        self,
        owners: Sequence[Sequence[Sequence[int]]],
        cuts: Sequence[tuple[int, int]] | None,
        layouts: Sequence[Layout],
        groups: HeadGroups,
        rank: int,
    ):
        self._groups = groups
        self._held: list[list[tuple[int, slice]]] = []  # shards by side, and their local rows
        self._own: list[list[_Own]] = []
        for side, layout in zip(Side, layouts, strict=True):
            held = [shard for shard, ranks in enumerate(owners[side]) if rank in ranks]
            rows = [slice(*cuts[s]) if cuts else slice(0, layout.sizes[s]) for s in held]
            self._held.append([*zip(held, rows, strict=True)])
            self._own.append([])
            for (shard, at), group in product(self._held[side], range(groups.groups)):
                local = ((0, at.stop - at.start),)
                heads = groups.slice(side, group) if groups.groups > 1 else None
                item = operand(side, shard, group)
                self._own[side].append(_Own(item, local, at if cuts else None, heads))

    def operands(self, named: Sequence[Mapping[str, Tensor]]) -> dict[Item, PackedRows]:
        """The operands that are this rank's own: views of its tensors."""
        return {
            one.item: PackedRows(one.local, one.fields(tensors))
            for tensors, own in zip(named, self._own, strict=True)
            for one in own
        }

    def collect(
        self, final: Callable[[Item], Sequence[Tensor]], side: Side, results: Sequence[Tensor]
    ) -> None:
        """As PassWork.collect; final: what a partial came to."""
        held = self._held[side]
        if len(held) == self._groups.groups == 1:
            for result, value in zip(results, final(partial(side, held[0][0])), strict=True):
                result.copy_(value)
            return
        for shard, rows in held:
            sums: dict[int, Sequence[Tensor]] = {}  # by first head
            for group in range(self._groups.groups):
                values = final(partial(side, shard, group))
                heads = self._groups.slice(side, group)
                # Groups may share a KV head, whose gradients sum.
                for total, value in zip(sums.setdefault(heads.start, values), values, strict=True):
                    if total is not value:
                        total.add_(value)
            width = self._groups.slice(side, 0).stop
            for first, values in sums.items():
                for result, value in zip(results, values, strict=True):
                    result[rows][:, :, first : first + width].copy_(value)
