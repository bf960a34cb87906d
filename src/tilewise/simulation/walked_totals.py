"""Partials of a program that is followed with sizes for tensors, each by its buffers' numbers.

It stands alone as execution/partials.py does, whose rules it follows without tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from tilewise.execution.partials import Group, SideBySide
from tilewise.plan.ir import Item, Side


class WalkedTotals(SideBySide):
    """All partials of a pass; those of an arena's operands lie side by side.

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
        super().__init__(sizes)
        self._take_bytes, self._widths = take, widths
        self._here: dict[Item, tuple[int, ...]] = {}
        self._lying: dict[Item, tuple[int, ...]] = {}  # of groups whose memory has been taken

    def of(self, item: Item) -> tuple[int, ...]:
        """The buffers of a partial, taken if it is not there yet."""
        if item not in self._here:
            self._here[item] = self._take(item)
        return self._here[item]

    def leave(self, item: Item) -> None:
        super().leave(item)
        del self._here[item]

    def _take(self, item: Item) -> tuple[int, ...]:
        if item not in self:
            return self._lent((item,))
        group = self._enter(item)
        if item not in self._lying:
            firsts = self._lent(group)
            for i, one in enumerate(group):
                self._lying[one] = tuple(first + i for first in firsts)
        return self._lying[item]

    def _lent(self, group: Group) -> tuple[int, ...]:
        """New buffers of partials that lie side by side; the first one's."""
        sizes = [self._size(item) for item in group]
        widths = self._widths(group[0].side)
        return tuple(self._take_bytes(*(size * width for size in sizes)) for width in widths)
