"""Liveness of a pass: until when its operands and its buffers are needed."""

from collections import Counter, defaultdict, deque
from collections.abc import Mapping
from typing import NamedTuple

from tilewise.compiler.lowering import tile_operands
from tilewise.compiler.program import LAUNCHES_IN_FLIGHT, Compute, Free, Launch, Program
from tilewise.plan.ir import Item, Role

ALIGNMENT = 256
"""Bytes that every buffer's place in a workspace is a multiple of."""

CALLERS = -1
"""Stands for buffers that are not the pass's: to count launches that send nothing else."""


class BufferLifetimes:
    """Buffers by number, in the order in which they are handed out; a moment counts those before.

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
        """Hand out the next buffers, side by side; the number of the first."""
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
    """Bytes that a buffer takes in a workspace."""
    return -(-num_bytes // ALIGNMENT) * ALIGNMENT


class Lifetimes(NamedTuple):
    """Ends of operands that a rank does not receive.

    Attributes:
        with_free: received operand -> own ones in arenas that nobody needs once it is freed.
    """

    sends: Mapping[Item, int]  # how often each is sent
    with_free: Mapping[Item, tuple[Item, ...]]


def lifetimes(program: Program) -> Lifetimes:
    """Look a program through."""
    sends: Counter[Item] = Counter()
    freed: dict[Item, int] = {}
    used: dict[Item, int] = {}
    for place, instruction in enumerate(program.instructions):
        if isinstance(instruction, Compute):
            used.update(dict.fromkeys(tile_operands(instruction.tile), place))
        elif isinstance(instruction, Free):
            freed[instruction.item] = place
        elif isinstance(instruction, Launch):
            items = [hop.item for hop in instruction.sends if hop.item.role is Role.OPERAND]
            sends.update(items)
            used.update(dict.fromkeys(items, place))
    with_free: dict[Item, tuple[Item, ...]] = {}
    for own in (item for arena in program.arenas for item in arena if item not in freed):
        later = (item for item, place in freed.items() if place > used.get(own, -1))
        first = next(later, None)  # frees are in order
        if first is not None:
            with_free[first] = *with_free.get(first, ()), own
    own_sends = {item: count for item, count in sends.items() if item not in freed}
    return Lifetimes(own_sends, with_free)
