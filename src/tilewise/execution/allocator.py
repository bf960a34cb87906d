"""Buffers of a pass: placed ahead in one workspace, so that a pass of known shapes allocates none.

What a pass asks for, in which order and for how long, follows from its program and shapes alone.
The first pass records that as a memory plan; every buffer of a later one is a view, made once, of
one workspace, in which buffers that are never needed together share their place.
"""

from bisect import bisect_right
from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import NamedTuple, Protocol
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from tilewise.compiler.liveness import CALLERS, BufferLifetimes
from tilewise.execution.memory_plan import BufferSpec, MemoryPlan, WorkspacePool

# On the CPU views bound ahead save nothing worth the memory that they keep.
BOUND_DEVICES = ("cuda",)


class Source(Protocol):
    def take(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """A contiguous buffer of any content."""
        ...


class Allocator(Source, Protocol):
    """Hands out buffers for the length of a pass, of one device.

    Attributes:
        adopts: a result that nobody else uses may stay where a kernel put it.
    """

    adopts: bool

    def take_parts(self, shape: Sequence[int], dtype: torch.dtype, rows: Sequence[int]) -> Tensor:
        """A buffer whose rows, so many at a time, are given back each by themselves."""
        ...

    def lasting(self, x: Tensor, dtype: torch.dtype) -> Tensor:
        """A value that nobody else uses, for the rest of the pass, in this dtype."""
        ...

    def give(self, x: Tensor) -> None:
        """Take a buffer or a part of one back; where it was sent, once it is sure to have left."""
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


class _NoTracking:
    """Needs not to know when a buffer is done with."""

    def give(self, x: Tensor) -> None:
        return

    def sent(self, x: Tensor) -> None:
        return

    def launched(self, handle: int, lane: int) -> None:
        return

    def left(self, handle: int) -> None:
        return


class FreshAllocator(_NoTracking):
    """Hands out new memory every time, which goes when nobody refers to it."""

    adopts = True

    def __init__(self, device: torch.device):
        self.device = device
        self._like = torch.empty(0, dtype=torch.uint8, device=device)

    def take(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        if dtype is torch.uint8:  # to name it takes half of the time
            return self._like.new_empty(shape)
        return self._like.new_empty(shape, dtype=dtype)

    def take_parts(self, shape: Sequence[int], dtype: torch.dtype, rows: Sequence[int]) -> Tensor:
        return self.take(shape, dtype)

    def lasting(self, x: Tensor, dtype: torch.dtype) -> Tensor:
        return x if x.dtype is dtype else x.to(dtype)

    def end(self) -> None:
        return


class CaptureAllocator(FreshAllocator):
    """Fresh memory for a graph, used as a bound pass uses its own.

    So kernels are called in the ways that they were called in before: what they compile for a way
    is not for a capture.
    """

    adopts = False


class Scratch:
    """Hands out for the length of one kernel call."""

    def __init__(self, allocator: Allocator):
        self._allocator = allocator
        self.held: list[Tensor] = []

    def take(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        x = self._allocator.take(shape, dtype)
        self.held.append(x)
        return x

    def clear(self) -> None:
        while self.held:
            self._allocator.give(self.held.pop())


class MemoryPlanCache:
    """The memory plan of one program and its shapes, once a pass has recorded it.

    The first pass records nothing: most masks of packed training are seen once.
    """

    def __init__(self) -> None:
        self.memory_plan: MemoryPlan | None = None
        self._seen = False

    def allocator(self, pool: WorkspacePool, device: torch.device) -> Allocator:
        """For one pass: records the second, plays later ones."""
        if not self._seen:
            self._seen = True
            return FreshAllocator(device)
        if self.memory_plan is None:
            return RecordingAllocator(
                device, lambda requests: self._bind(MemoryPlan(requests), pool, device)
            )
        return PlannedAllocator(self.memory_plan, pool, device)

    def _bind(self, memory_plan: MemoryPlan, pool: WorkspacePool, device: torch.device) -> None:
        """Keep a memory plan, and make its buffers ahead of the next pass."""
        self.memory_plan, workspace = memory_plan, pool.take()
        workspace.enter(memory_plan, device)
        workspace.leave()
        pool.workspaces.append(workspace)


class _RecordedBuffer(NamedTuple):
    """A buffer that was asked for, and the numbers of its parts in the ledger."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    rows: tuple[int, ...]
    first: int
    starts: tuple[int, ...]  # bytes

    @property
    def last(self) -> int:
        return self.first + len(self.rows)


class RecordingAllocator(FreshAllocator):
    """Hands out new memory and writes down what is asked for, and when it is no longer needed.

    Args:
        recorded: is given all that was asked for, when the pass ends.
    """

    adopts = False

    def __init__(self, device: torch.device, recorded: Callable[[list[BufferSpec]], None]):
        super().__init__(device)
        self._recorded = recorded
        self._ledger = BufferLifetimes()
        self._asked: list[_RecordedBuffer] = []
        self._known: WeakKeyDictionary[torch.UntypedStorage, _RecordedBuffer] = WeakKeyDictionary()
        self.launched, self.left = self._ledger.launched, self._ledger.left

    def take(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        return self.take_parts(shape, dtype, (shape[0],))

    def take_parts(self, shape: Sequence[int], dtype: torch.dtype, rows: Sequence[int]) -> Tensor:
        x = torch.empty(tuple(shape), dtype=dtype, device=self.device)
        row_bytes = x.nbytes // max(1, len(x))
        starts = tuple(accumulate((count * row_bytes for count in rows[:-1]), initial=0))
        asked = _RecordedBuffer(
            tuple(shape), dtype, tuple(rows), self._ledger.take(len(rows)), starts
        )
        self._asked.append(asked)
        if x.numel():
            self._known[x.untyped_storage()] = asked
        return x

    def lasting(self, x: Tensor, dtype: torch.dtype) -> Tensor:
        return self.take(x.shape, dtype).copy_(x)

    def give(self, x: Tensor) -> None:
        if (number := self._number(x)) is not None:
            self._ledger.give(number)

    def sent(self, x: Tensor) -> None:
        if x.numel():
            number = self._number(x)
            self._ledger.sent(CALLERS if number is None else number)

    def _number(self, x: Tensor) -> int | None:
        """None: it is empty, or a caller's."""
        known = self._known.get(x.untyped_storage()) if x.numel() else None
        if known is None:
            return None
        start = x.storage_offset() * x.itemsize
        return known.first + bisect_right(known.starts, start) - 1

    def end(self) -> None:
        ends = self._ledger.ends()
        self._recorded(
            [
                BufferSpec(
                    asked.shape,
                    asked.dtype,
                    asked.first,
                    tuple(zip(asked.rows, ends[asked.first : asked.last], strict=True)),
                )
                for asked in self._asked
            ]
        )


class PlannedAllocator(_NoTracking):
    """Hands out what a memory plan says, in its order."""

    adopts = False

    def __init__(self, memory_plan: MemoryPlan, pool: WorkspacePool, device: torch.device):
        self._pool, self._workspace = pool, pool.take()
        self._views = iter(self._workspace.enter(memory_plan, device))

    def take(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        x = next(self._views)
        assert x.shape == tuple(shape) and x.dtype == dtype, "a pass asks as its first one did"
        return x

    def take_parts(self, shape: Sequence[int], dtype: torch.dtype, rows: Sequence[int]) -> Tensor:
        return self.take(shape, dtype)

    def lasting(self, x: Tensor, dtype: torch.dtype) -> Tensor:
        return self.take(x.shape, dtype).copy_(x)

    def end(self) -> None:
        self._workspace.leave()
        self._pool.workspaces.append(self._workspace)
