"""Which partials lie side by side: those of an arena's operands, each with its whole shard's rows.

It stands alone, without tensors, because the executor lays partials by it (execution/partials.py) and the
footprint counts by it (simulation/walked_totals.py).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import accumulate
from typing import TypeAlias

from tilewise.plan.items import Item, Role

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
