"""Static memory planning: what a pass asks for is recorded once, placed in one buffer, and reused."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from itertools import accumulate
from typing import NamedTuple
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import Tensor

from tilewise.compiler.liveness import ALIGNMENT, aligned
from tilewise.transport.streams import Moment, current_moment, follow

Array = np.ndarray
MOST_TRIES, MOST_PLACED = 32, 4096
"""Times that places are looked for anew, and requests placed in all of them, for each order."""


class BufferSpec(NamedTuple):
    """A buffer of a tape, needed from one moment on.

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
    """The buffers of one pass in the order in which it takes them, each with its place in a slab.

    Attributes:
        num_bytes: of the slab.
    """

    def __init__(self, requests: Sequence[BufferSpec]):
        self.requests = tuple(requests)
        self.offsets, self.num_bytes = places(self.requests)

    def views(self, slab: Tensor) -> list[Tensor]:
        return [
            slab[offset : offset + request.num_bytes].view(request.dtype).view(request.shape)
            for request, offset in zip(self.requests, self.offsets, strict=True)
        ]


class _Box(NamedTuple):
    """Rows of a request: bytes of it, from where to where, and moments."""

    start: int
    stop: int
    begin: int
    end: int


def places(requests: Sequence[BufferSpec]) -> tuple[list[int], int]:
    """The first byte of each request, such that rows of one time do not overlap; bytes in all.

    Each in turn at the lowest place that is free for as long as it is needed: largest first. Where
    that takes more than what is held at once, again with those that lie highest placed first, and
    in other orders.

    Source: Pisarchyk and Lee 2020, "greedy by size for offset calculation".
    """
    boxes = [_boxes(request) for request in requests]
    least, best = _most_held(boxes), ([0] * len(boxes), 0)
    tries = min(MOST_TRIES, MOST_PLACED // max(1, len(boxes)))
    for key in _ORDERS:
        order = sorted(range(len(boxes)), key=lambda i, key=key: key(boxes[i]))
        for _ in range(1 + tries):
            found = _placed(boxes, order)
            if not best[1] or found[1] < best[1]:
                best = found
            if best[1] <= least:
                return best
            high = [i for i in order if found[0][i] + _size(boxes[i]) == found[1]]
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


def _placed(requests: Sequence[Sequence[_Box]], order: Iterable[int]) -> tuple[list[int], int]:
    offsets, total = [0] * len(requests), 0
    taken = np.zeros((sum(map(len, requests)), 4), np.int64)
    count = 0
    for i in order:
        boxes = requests[i]
        low, high = [], []
        for start, stop, begin, end in boxes:
            placed = taken[:count]
            rivals = placed[(placed[:, 2] < end) & (begin < placed[:, 3])]
            low.append(rivals[:, 0] - stop)  # an offset in (low, high) would overlap
            high.append(rivals[:, 1] - start)
        offsets[i] = offset = _lowest(low, high)
        for start, stop, begin, end in boxes:
            taken[count] = offset + start, offset + stop, begin, end
            count += 1
        total = max(total, offset + _size(boxes))
    return offsets, total


def _lowest(low: Sequence[Array], high: Sequence[Array]) -> int:
    """The lowest offset, from 0 on, that lies in none of the open intervals (low, high)."""
    if not low:
        return 0
    lows, highs = np.concatenate(low), np.concatenate(high)
    lows, highs = lows[highs > 0], highs[highs > 0]
    order = np.argsort(lows, kind="stable")
    tops = np.maximum.accumulate(np.concatenate([[0], highs[order]]))
    nexts = np.append(lows[order], np.iinfo(np.int64).max)
    return int(tops[np.argmax(nexts >= tops)])


class Workspace:
    """Memory that one pass at a time uses, and what tapes see of it."""

    def __init__(self) -> None:
        self._buffer: Tensor | None = None
        self._views: WeakKeyDictionary[MemoryPlan, list[Tensor]] = WeakKeyDictionary()
        self._left: Moment | None = None

    @property
    def num_bytes(self) -> int:
        return 0 if self._buffer is None else self._buffer.numel()

    @torch.inference_mode(False)  # else later passes outside of it could not write
    def enter(self, tape: MemoryPlan, device: torch.device) -> list[Tensor]:
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


class WorkspacePool:
    """The slabs of one rank and device, as many as there were passes at once.

    A pass takes one from the shelf and puts it back when it ends, so no two ever share one, of
    whatever threads or layers they are. A pass that fails does not put its slab back.
    """

    def __init__(self) -> None:
        self.slabs: list[Workspace] = []

    def take(self) -> Workspace:
        try:
            return self.slabs.pop()
        except IndexError:
            return Workspace()
