"""When the buffers of a pass are needed: lent, on their way to other ranks, given back.

It stands alone, without tensors, because the executor and the simulator both keep one: what the
first writes down while it runs is what the second counts ahead.
"""

from __future__ import annotations

from collections import defaultdict, deque

from tilewise.compiler.program import LAUNCHES_IN_FLIGHT

ALIGNMENT = 256
"""Bytes that every buffer's place in a slab is a multiple of."""

CALLERS = -1
"""Stands for buffers that are not the pass's: to count launches that send nothing else."""


class Ledger:
    """Buffers by number, in the order in which they are lent; a moment is how many were before.

    Buffers that lie side by side have numbers of their own.

    What was given back while it was on its way rests until it has left.
    """

    def __init__(self) -> None:
        self.now = 0
        self._ended: dict[int, int] = {}
        self._leaving: list[int] = []
        self._busy: defaultdict[int, set[int]] = defaultdict(set)  # launches that send a buffer
        self._resting: set[int] = set()
        self._under_way: defaultdict[int, deque[int]] = defaultdict(deque)  # launches, by lane

    def take(self, count: int = 1) -> int:
        """Lend the next buffers, side by side; the number of the first."""
        self.now += count
        return self.now - count

    def give(self, number: int) -> None:
        """Take a buffer back; where it was sent, once it is sure to have left."""
        if number in self._busy or number in self._leaving:
            self._resting.add(number)
        else:
            self._ended.setdefault(number, self.now)

    def sent(self, number: int) -> None:
        """The next launch sends a buffer."""
        self._leaving.append(number)

    def launched(self, handle: int, lane: int) -> None:
        """What is to be sent has been launched on a lane."""
        if not self._leaving:
            return
        under_way = self._under_way[lane]
        under_way.append(handle)
        for number in self._leaving:
            self._busy[number].add(handle)
        self._leaving.clear()
        if len(under_way) > LAUNCHES_IN_FLIGHT:
            self.left(under_way.popleft())

    def left(self, handle: int) -> None:
        """What a launch sent has left."""
        for number, handles in tuple(self._busy.items()):
            handles.discard(handle)
            if handles:
                continue
            del self._busy[number]
            if number in self._resting:
                self._resting.remove(number)
                self._ended.setdefault(number, self.now)

    def ends(self) -> list[int]:
        """The moment from which each buffer is no longer needed; one never given back: the end."""
        return [self._ended.get(number, self.now + 1) for number in range(self.now)]


def aligned(num_bytes: int) -> int:
    """Bytes that a buffer takes in a slab."""
    return -(-num_bytes // ALIGNMENT) * ALIGNMENT
