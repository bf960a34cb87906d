"""Buffers of a pass: bound ahead to one slab, so that a pass of known shapes allocates nothing.

What a pass asks for, in which order and for how long, follows from its program and shapes alone.
The first pass records that (a tape); every buffer of a later one is a view, made once, of one slab
in which buffers that are never needed together share their place. It stands alone because a pass
only takes and gives: whether that is bound or fresh is decided by who lends.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Sequence
from typing import Protocol
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from tilewise.messages import LAUNCHES_IN_FLIGHT
from tilewise.streams import Moment, current_moment, follow
from tilewise.tape import Request, Tape

# On the CPU views bound ahead save nothing worth the memory that they keep.
BOUND_DEVICES = ("cuda",)


class Source(Protocol):
    def take(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """A contiguous buffer of any content."""
        ...


class Lender(Source, Protocol):
    """Lends buffers for the length of a pass, of one device.

    Attributes:
        adopts: a result that nobody else uses may stay where a kernel put it.
    """

    adopts: bool

    def lasting(self, x: Tensor, dtype: torch.dtype) -> Tensor:
        """A value that nobody else uses, for the rest of the pass, in this dtype."""
        ...

    def give(self, x: Tensor) -> None:
        """Take a buffer back; where it was sent, once it is sure to have left."""
        ...

    def sent(self, x: Tensor) -> None:
        """The next launch sends a buffer."""
        ...

    def launched(self, handle: int, lane: int) -> None:
        """What is to be sent has been launched on a lane."""
        ...

    def left(self, handle: int) -> None:
        """What a launch sent has left."""
        ...

    def end(self) -> None:
        """Take back all that is left: the pass is over."""
        ...


class _Forgetful:
    """Needs not to know when a buffer is done with."""

    def give(self, x: Tensor) -> None:
        return

    def sent(self, x: Tensor) -> None:
        return

    def launched(self, handle: int, lane: int) -> None:
        return

    def left(self, handle: int) -> None:
        return


class Fresh(_Forgetful):
    """Lends new memory every time, which goes when nobody refers to it."""

    adopts = True

    def __init__(self, device: torch.device):
        self.device = device
        self._like = torch.empty(0, dtype=torch.uint8, device=device)

    def take(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        return self._like.new_empty(shape, dtype=dtype)

    def lasting(self, x: Tensor, dtype: torch.dtype) -> Tensor:
        return x.to(dtype)

    def end(self) -> None:
        return


class Scratch:
    """Lends for the length of one kernel call."""

    def __init__(self, lender: Lender):
        self._lender = lender
        self.lent: list[Tensor] = []

    def take(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        x = self._lender.take(shape, dtype)
        self.lent.append(x)
        return x

    def clear(self) -> None:
        while self.lent:
            self._lender.give(self.lent.pop())


class Slab:
    """Memory that one pass at a time uses, and what tapes see of it."""

    def __init__(self) -> None:
        self._buffer: Tensor | None = None
        self._views: WeakKeyDictionary[Tape, list[Tensor]] = WeakKeyDictionary()
        self._left: Moment | None = None

    @property
    def num_bytes(self) -> int:
        return 0 if self._buffer is None else self._buffer.numel()

    def enter(self, tape: Tape, device: torch.device) -> list[Tensor]:
        """The buffers of a tape, for a pass that begins now on the current stream."""
        if self._buffer is not None:
            follow(self._left, self._buffer)
        if self.num_bytes < tape.num_bytes:
            self._views.clear()
            self._buffer = None  # before the larger one is made
            self._buffer = torch.empty(tape.num_bytes, dtype=torch.uint8, device=device)
        views = self._views.get(tape)
        if views is None:
            whole = torch.empty(0, device=device) if self._buffer is None else self._buffer
            views = self._views[tape] = tape.views(whole.view(torch.uint8))
        return views

    def leave(self) -> None:
        """The pass has launched all that it does with the buffers."""
        if self._buffer is not None:
            self._left = current_moment(self._buffer.device)


class Shelf:
    """The slabs of one rank and device, as many as there were passes at once.

    A pass takes one from the shelf and puts it back when it ends, so no two ever share one, of
    whatever threads or layers they are. A pass that fails does not put its slab back.
    """

    def __init__(self) -> None:
        self.slabs: list[Slab] = []

    def take(self) -> Slab:
        try:
            return self.slabs.pop()
        except IndexError:
            return Slab()


class Binding:
    """The tape of one program and its shapes, once a pass has recorded it."""

    def __init__(self) -> None:
        self.tape: Tape | None = None

    def lender(self, shelf: Shelf, device: torch.device) -> Lender:
        """For one pass: records the first, plays later ones."""
        if self.tape is None:
            return Recorder(self, shelf, device)
        return Player(self.tape, shelf, device)


class Recorder(Fresh):
    """Lends new memory and writes down what is asked for, and when it is no longer needed."""

    adopts = False

    def __init__(self, binding: Binding, shelf: Shelf, device: torch.device):
        super().__init__(device)
        self._binding, self._shelf = binding, shelf
        self._asked: list[tuple[tuple[int, ...], torch.dtype, int]] = []
        self._ended: dict[int, int] = {}
        self._number: dict[int, int] = {}  # of the request, by the address of its memory
        self._leaving: list[int] = []
        self._busy: defaultdict[int, set[int]] = defaultdict(set)  # launches that send a request
        self._resting: set[int] = set()
        self._under_way: defaultdict[int, deque[int]] = defaultdict(deque)  # launches, by lane

    def take(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        x = super().take(shape, dtype)
        if x.numel():
            self._number[_address(x)] = len(self._asked)
        self._asked.append((tuple(shape), dtype, self._now()))
        return x

    def lasting(self, x: Tensor, dtype: torch.dtype) -> Tensor:
        return self.take(x.shape, dtype).copy_(x)

    def give(self, x: Tensor) -> None:
        number = self._number.get(_address(x)) if x.numel() else None
        if number is None:  # a caller's tensor
            return
        if number in self._busy or number in self._leaving:
            self._resting.add(number)
        else:
            self._ended.setdefault(number, self._now())

    def sent(self, x: Tensor) -> None:
        if x.numel():
            self._leaving.append(self._number.get(_address(x), -1))

    def launched(self, handle: int, lane: int) -> None:
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
        for number, handles in tuple(self._busy.items()):
            handles.discard(handle)
            if handles:
                continue
            del self._busy[number]
            if number in self._resting:
                self._resting.remove(number)
                self._ended.setdefault(number, self._now())

    def end(self) -> None:
        never = self._now() + 1
        requests = [
            Request(shape, dtype, begin, self._ended.get(i, never))
            for i, (shape, dtype, begin) in enumerate(self._asked)
        ]
        self._binding.tape = tape = Tape(requests)
        slab = self._shelf.take()
        slab.enter(tape, self.device)
        slab.leave()
        self._shelf.slabs.append(slab)

    def _now(self) -> int:
        return len(self._asked)


class Player(_Forgetful):
    """Lends what a tape says, in its order."""

    adopts = False

    def __init__(self, tape: Tape, shelf: Shelf, device: torch.device):
        self._shelf, self._slab = shelf, shelf.take()
        self._views = iter(self._slab.enter(tape, device))

    def take(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        x = next(self._views)
        assert x.shape == tuple(shape) and x.dtype == dtype, "a pass asks as its first one did"
        return x

    def lasting(self, x: Tensor, dtype: torch.dtype) -> Tensor:
        return self.take(x.shape, dtype).copy_(x)

    def end(self) -> None:
        self._slab.leave()
        self._shelf.slabs.append(self._slab)


def _address(x: Tensor) -> int:
    return x.untyped_storage().data_ptr()
