"""Partials side by side, as their operands lie, so that one kernel call adds to several."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import accumulate
from typing import TypeAlias

from torch import Tensor

from tilewise.execution.gather import TensorPart, total_rows
from tilewise.execution.packing import Arena
from tilewise.plan.ir import Item, Role, Side

Group: TypeAlias = tuple[Item, ...]


class SideBySide:
    """A partial has its place once: from when it is first added to until it leaves.

    Args:
        sizes: rows of the shards, by side.
    Attributes:
        starts: a partial's first row among those of its group, until it leaves.
    """

    def __init__(self, sizes: Sequence[Sequence[int]]):
        self._sizes = sizes
        self.starts: dict[Item, int] = {}
        self._group: dict[Item, Group] = {}
        self._unused: set[Item] = set()

    def lie_as(self, operands: Iterable[Item]) -> None:
        """The partials of these operands lie side by side, in this order."""
        group = tuple(item._replace(role=Role.PARTIAL) for item in operands)
        self.starts.update(zip(group, accumulate(map(self._size, group), initial=0), strict=False))
        self._group.update(dict.fromkeys(group, group))
        self._unused.update(group)

    def __contains__(self, item: Item) -> bool:
        """Whether a partial that is not there yet is to lie in its place among others."""
        return bool(self._unused) and item in self._unused

    def leave(self, item: Item) -> None:
        """A partial is no longer in its place."""
        if self.starts:
            self.starts.pop(item, None)

    def _enter(self, item: Item) -> Group:
        """A partial takes its place; those that it lies among."""
        self._unused.remove(item)
        return self._group[item]

    def _size(self, item: Item) -> int:
        return self._sizes[item.side][item.shard]


Tensors: TypeAlias = tuple[Tensor, ...]


class PartialGroups(SideBySide):
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
