"""Partials of operands that lie side by side: side by side as well, so that one kernel call can
add to those of several shards in place.

It stands alone because what is added, and how, is the pass's business.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeAlias

from torch import Tensor

from tilewise.compiler.side_by_side import Group, SideBySide
from tilewise.execution.gather import TensorPart, total_rows
from tilewise.execution.packing import Arena
from tilewise.plan.items import Item, Side

Tensors: TypeAlias = tuple[Tensor, ...]


class Totals(SideBySide):
    """The partials of every arena's operands.

    Args:
        blank: side, rows of each partial -> partials, one after the other, nothing added yet.
        sizes: rows of the shards, by side.
    """

    def __init__(
        self,
        blank: Callable[[Side, Sequence[int]], Tensors],
        sizes: Sequence[Sequence[int]],
        arenas: Sequence[Arena],
    ):
        super().__init__(sizes)
        self._blank = blank
        self._whole: dict[Group, Tensors] = {}
        for arena in arenas:
            self.lie_as(arena.starts)

    def take(self, item: Item) -> Tensors:
        """A partial that nothing was added to."""
        group = self._enter(item)
        if group not in self._whole:
            self._whole[group] = self._blank(item.side, [self._size(one) for one in group])
        start = self.starts[item]
        return self._rows(group, start, start + self._size(item))

    def beside(self, parts: Sequence[TensorPart]) -> tuple[Group, int, int] | None:
        """Where the results of a call's parts belong, if that is side by side and in order."""
        group = self._group.get(parts[0].item)
        if group is None or any(self._group.get(part.item) is not group for part in parts):
            return None
        rows = total_rows(parts, self._sizes[parts[0].item.side], self.starts)
        return None if rows is None else (group, *rows)

    def between(self, place: tuple[Group, int, int]) -> Tensors:
        """The partials' rows there, all of which have been taken."""
        return self._rows(*place)

    def _rows(self, group: Group, start: int, stop: int) -> Tensors:
        return tuple([x[start:stop] for x in self._whole[group]])
