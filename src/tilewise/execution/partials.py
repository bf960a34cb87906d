"""Partials of operands that lie side by side: side by side as well, so that one kernel call can
add to those of several shards in place.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import TypeAlias

from torch import Tensor

from tilewise.execution.gather import TensorPart, total_rows
from tilewise.execution.packing import Arena
from tilewise.plan.ir import Item, Role, Side

Tensors: TypeAlias = tuple[Tensor, ...]
Group: TypeAlias = tuple[Item, ...]


class PartialGroups:
    """The partials of every arena's operands, each with its whole shard's rows.

    A partial has its place once: from when it is first added to until it leaves.

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
        self._blank, self._sizes = blank, sizes
        self._starts: dict[Item, int] = {}  # first row among those of its group
        self._group: dict[Item, Group] = {}
        self._unused: set[Item] = set()
        self._whole: dict[Group, Tensors] = {}
        for arena in arenas:
            group = tuple(item._replace(role=Role.PARTIAL) for item in arena.starts)
            starts = accumulate(map(self._size, group), initial=0)
            self._starts.update(zip(group, starts, strict=False))
            self._group.update(dict.fromkeys(group, group))
            self._unused.update(group)

    def __contains__(self, item: Item) -> bool:
        """Whether a partial that is not there yet is to lie in its place among others."""
        return bool(self._unused) and item in self._unused

    def take(self, item: Item) -> Tensors:
        """A partial that nothing was added to."""
        self._unused.remove(item)
        group = self._group[item]
        if group not in self._whole:
            self._whole[group] = self._blank(item.side, [self._size(one) for one in group])
        start = self._starts[item]
        return self._rows(group, start, start + self._size(item))

    def leave(self, item: Item) -> None:
        """A partial is no longer in its place."""
        if self._starts:
            self._starts.pop(item, None)

    def beside(self, parts: Sequence[TensorPart]) -> tuple[Group, int, int] | None:
        """Where the results of a call's parts belong, if that is side by side and in order."""
        group = self._group.get(parts[0].item)
        if group is None or any(self._group.get(part.item) is not group for part in parts):
            return None
        rows = total_rows(parts, self._sizes[parts[0].item.side], self._starts)
        return None if rows is None else (group, *rows)

    def between(self, place: tuple[Group, int, int]) -> Tensors:
        """The partials' rows there, all of which have been taken."""
        return self._rows(*place)

    def _rows(self, group: Group, start: int, stop: int) -> Tensors:
        return tuple([x[start:stop] for x in self._whole[group]])

    def _size(self, item: Item) -> int:
        return self._sizes[item.side][item.shard]
