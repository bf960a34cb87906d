"""Static memory planning: a pass's requests are recorded once, placed in one buffer, and reused."""

import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from itertools import accumulate
from operator import add
from typing import NamedTuple, TypeAlias
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import Tensor

from tilewise.compiler.liveness import ALIGNMENT, aligned
from tilewise.masks.strips import expand
from tilewise.transport.streams import Moment, current_moment, follow

MOST_TRIES, MOST_PLACED = 32, 4096
"""Times that places are looked for anew, and requests placed in all of them, for each order."""


FAR = 1 << 50
"""Bytes; beyond all workspaces."""


class BufferSpec(NamedTuple):
    """A buffer of a memory plan, needed from one moment on.

    Attributes:
        parts: (rows, moment before which these rows are needed), in order; all of its rows.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    begin: int
    parts: tuple[tuple[int, int], ...]

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


class MemoryPlan:
    """The buffers of one pass in the order in which it takes them, each placed in a workspace.

    Attributes:
        num_bytes: of the workspace.
    """

    def __init__(self, requests: Sequence[BufferSpec]):
        self.requests = tuple(requests)
        self.offsets, self.num_bytes = places(self.requests)

    def views(self, workspace: Tensor) -> list[Tensor]:
        return [
            workspace[offset : offset + request.num_bytes].view(request.dtype).view(request.shape)
            for request, offset in zip(self.requests, self.offsets, strict=True)
        ]


class _Box(NamedTuple):
    """Rows of a request: bytes of it, from where to where, and moments."""

    start: int
    stop: int
    begin: int
    end: int


def places(requests: Sequence[BufferSpec], enough: int = 0) -> tuple[list[int], int]:
    """The first byte of each request, such that rows of one time do not overlap; bytes in all.

    Each in turn at the lowest place that is free for as long as it is needed: largest first. Where
    that takes more than what is held at once, again with those that lie highest placed first, and
    in other orders.

    Args:
        enough: bytes in all that need not be bettered.

    Source: Pisarchyk and Lee 2020, "greedy by size for offset calculation".
    """
    boxes = [_boxes(request) for request in requests]
    rivals, sizes = _rivals(boxes), [*map(_size, boxes)]
    least, best = _most_held(boxes), ([0] * len(boxes), 0)
    tries = min(MOST_TRIES, MOST_PLACED // max(1, len(boxes)))
    for key in _ORDERS:
        order = sorted(range(len(boxes)), key=lambda i, key=key: key(boxes[i]))
        for _ in range(1 + tries):
            found = _placed(rivals, sizes, order)
            if not best[1] or found[1] < best[1]:
                best = found
            if best[1] <= max(least, enough):
                return best
            high = [i for i in order if found[0][i] + sizes[i] == found[1]]
            if order[: len(high)] == high:
                break
            order = high + [i for i in order if i not in high]
    return best


def _boxes(request: BufferSpec) -> list[_Box]:
    row_bytes = request.num_bytes // max(1, sum(rows for rows, _ in request.parts))
    stops = accumulate(rows * row_bytes for rows, _ in request.parts)
    boxes, start = [], 0
    for stop, (_, end) in zip(stops, request.parts, strict=True):
        if start < stop:
            low = start // ALIGNMENT * ALIGNMENT
            boxes.append(_Box(low, aligned(stop), request.begin, end))
        start = stop
    return boxes


def _size(boxes: Sequence[_Box]) -> int:
    return max((box.stop for box in boxes), default=0)


def _long(boxes: Sequence[_Box]) -> int:
    return sum((box.stop - box.start) * (box.end - box.begin) for box in boxes)


def _begin(boxes: Sequence[_Box]) -> int:
    return min((box.begin for box in boxes), default=0)


_ORDERS: tuple[Callable[[Sequence[_Box]], tuple[int, ...]], ...] = (
    lambda boxes: (-_size(boxes), _begin(boxes)),
    lambda boxes: (-_long(boxes), _begin(boxes)),
    lambda boxes: (_begin(boxes), -_long(boxes)),
    lambda boxes: (-max((box.end for box in boxes), default=0), -_size(boxes)),
)


def _most_held(requests: Sequence[Sequence[_Box]]) -> int:
    changes: Counter[int] = Counter()
    for box in (box for boxes in requests for box in boxes):
        changes[box.begin] += box.stop - box.start
        changes[box.end] -= box.stop - box.start
    return max(accumulate(changes[moment] for moment in sorted(changes)), default=0)


class _Rivals(NamedTuple):
    """Of a request: its offset minus that of request `others[n]` is not in (lows[n], highs[n])."""

    others: np.ndarray
    limits: np.ndarray  # lows and highs


def _rivals(requests: Sequence[Sequence[_Box]]) -> list[_Rivals]:
    """And two more each, at FLOOR below all and beyond all, which say that offsets begin at 0."""
    n = len(requests)
    numbers = np.repeat(np.arange(n), [*map(len, requests)])
    boxes = np.array([box for boxes in requests for box in boxes], np.int64).reshape(-1, 4)
    by_begin = boxes[:, 2].argsort(kind="stable")
    numbers, (starts, stops, begins, ends) = numbers[by_begin], boxes[by_begin].T
    first, later = expand(np.arange(len(ends)) + 1, np.searchsorted(begins, ends))
    one, other = np.concatenate([first, later]), np.concatenate([later, first])
    apart = numbers[one] != numbers[other]
    one, other = one[apart], other[apart]
    limits = np.stack([starts[other] - stops[one], stops[other] - starts[one]])
    every, ones = np.arange(n), np.ones(n, np.int64)
    owner = np.concatenate([numbers[one], every, every])
    others = np.concatenate([numbers[other], n * ones, n * ones])
    floors = np.stack([np.append(-FAR * ones, FAR * ones), np.append(0 * ones, FAR * ones)])
    limits = np.append(limits, floors, axis=1)
    by_owner = owner.argsort(kind="stable")
    cuts = np.searchsorted(owner[by_owner], np.arange(1, n))
    others, limits = others[by_owner], limits[:, by_owner]
    return [*map(_Rivals, np.split(others, cuts), np.split(limits, cuts, axis=1))]


def _placed(
    rivals: Sequence[_Rivals], sizes: Sequence[int], order: Iterable[int]
) -> tuple[list[int], int]:
    offsets = np.full(len(sizes) + 1, 2 * FAR)  # of those that are yet to be placed
    offsets[-1] = 0
    for i in order:
        limits = offsets[rivals[i].others] + rivals[i].limits
        lows, highs = limits[:, limits[0].argsort()]
        taken = np.maximum.accumulate(highs)
        offsets[i] = taken[(lows[1:] >= taken[:-1]).argmax()]
    found = offsets[:-1].tolist()
    return found, max(map(add, found, sizes), default=0)


Allocate: TypeAlias = Callable[[int], Tensor | None]
"""Makes flat bytes on the device; None: too many."""


class Workspace:
    """Memory that one pass at a time uses, and what memory plans see of it.

    Args:
        allocate: asked first for the memory.
    """

    def __init__(self, allocate: Allocate | None = None) -> None:
        self._allocate = allocate
        self._buffer: Tensor | None = None
        self._views: WeakKeyDictionary[MemoryPlan, list[Tensor]] = WeakKeyDictionary()
        self._left: Moment | None = None

    @property
    def num_bytes(self) -> int:
        return 0 if self._buffer is None else self._buffer.numel()

    @torch.inference_mode(False)  # else later passes outside of it could not write
    def enter(self, memory_plan: MemoryPlan, device: torch.device) -> list[Tensor]:
        """The buffers of a memory plan, for a pass that begins now on the current stream."""
        if self._buffer is not None:
            follow(self._left, self._buffer)
        if self.num_bytes < memory_plan.num_bytes:
            self._views.clear()
            self._buffer = None  # before the larger one is made
            if self._allocate is not None:
                self._buffer = self._allocate(memory_plan.num_bytes)
            if self._buffer is None:
                self._buffer = torch.empty(memory_plan.num_bytes, dtype=torch.uint8, device=device)
        views = self._views.get(memory_plan)
        if views is None:
            whole = torch.empty(0, device=device) if self._buffer is None else self._buffer
            views = self._views[memory_plan] = memory_plan.views(whole.view(torch.uint8))
        return views

    def leave(self) -> None:
        """The pass has launched all that it does with the buffers."""
        if self._buffer is not None:
            self._left = current_moment(self._buffer.device)


class WorkspacePool:
    """The workspaces of one rank and device, as many as there were passes at once.

    A pass takes one from the pool and puts it back when it ends, so no two ever share one, of
    whatever threads or layers they are. A pass that fails does not put its workspace back.
    """

    def __init__(self, allocate: Allocate | None = None) -> None:
        self._allocate = allocate
        self.workspaces: list[Workspace] = []

    def take(self) -> Workspace:
        try:
            return self.workspaces.pop()
        except IndexError:
            return Workspace(self._allocate)
