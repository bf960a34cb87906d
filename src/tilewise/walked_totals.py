"""Partials of a program that is followed with sizes for tensors; what totals.py is to work.py."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate

from tilewise.items import Item, Role, Side


class Totals:
    """Partials by the numbers of their buffers; those of an arena's operands lie side by side.

    Args:
        take: lends buffers of these sizes, side by side; the number of the first.
        widths: of a side, bytes of a row of each of a partial's tensors.
        sizes: rows of the shards, by side.
    """

    def __init__(
        self,
        take: Callable[..., int],
        widths: Callable[[Side], Sequence[int]],
        sizes: Sequence[Sequence[int]],
    ):
        self._take_bytes, self._widths, self._sizes = take, widths, sizes
        self.starts: dict[Item, int] = {}  # first row among those that lie side by side
        self._here: dict[Item, tuple[int, ...]] = {}
        self._groups: dict[Item, tuple[Item, ...]] = {}
        self._taken: dict[Item, tuple[int, ...]] = {}
        self._unused: set[Item] = set()

    def lie_as(self, operands: Mapping[Item, tuple[int, int]]) -> None:
        """Partials lie as their operands do in these arenas, with the rows of whole shards."""
        arenas: dict[int, list[Item]] = {}
        for item, (number, _) in operands.items():
            arenas.setdefault(number, []).append(item._replace(role=Role.PARTIAL))
        for items in arenas.values():
            starts = accumulate((self._size(item) for item in items[:-1]), initial=0)
            self.starts.update(zip(items, starts, strict=True))
            self._groups.update(dict.fromkeys(items, tuple(items)))
            self._unused.update(items)

    def of(self, item: Item) -> tuple[int, ...]:
        """The buffers of a partial, taken if it is not there yet."""
        if item not in self._here:
            self._here[item] = self._take(item)
        return self._here[item]

    def leave(self, item: Item) -> None:
        del self._here[item]
        self.starts.pop(item, None)

    def _take(self, item: Item) -> tuple[int, ...]:
        widths, take = self._widths(item.side), self._take_bytes
        if item not in self._unused:
            return tuple(take(self._size(item) * width) for width in widths)
        self._unused.remove(item)
        if item not in self._taken:
            group = self._groups[item]
            sizes = [self._size(one) for one in group]
            firsts = [take(*(size * width for size in sizes)) for width in widths]
            for i, one in enumerate(group):
                self._taken[one] = tuple(first + i for first in firsts)
        return self._taken[item]

    def _size(self, item: Item) -> int:
        return self._sizes[item.side][item.shard]
