"""Placement: how long each buffer of a code is needed, and where in the workspace it lies.

Buffers that are never needed at the same time share their place.
"""

from bisect import insort
from collections import Counter, defaultdict, deque
from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import NamedTuple

import numpy as np

from tilewise.arguments import item_bytes
from tilewise.compiler.code import Buffer, Home, Ref, Refs, TensorSpec, ref_shape
from tilewise.compiler.ops import Op, Post, Wait, reads, writes

ALIGNMENT = 256
"""Bytes that every buffer's place in a workspace is a multiple of."""

MOST_COMPARED = 512
"""Up to so many buffers are placed in order of their size, too: that takes a time that grows with
the square of their number."""


class Departures(NamedTuple):
    """The rule that says when what a rank sends has left its buffers.

    Attributes:
        in_flight: launches with sends on a lane after whose return those of an earlier one have
            left; None: only the end of the pass says so.
        with_receives: whether a launch's sends have left when a receive of it has been awaited.
    """

    in_flight: int | None
    with_receives: bool


class Lifetime(NamedTuple):
    """Blocks of bytes of a buffer, and the ops from the first to the last that needs them."""

    start: int
    stop: int
    begin: int
    end: int


def placed(
    tensors: Sequence[TensorSpec],
    buffers: Sequence[Buffer],
    ops: Sequence[Op[Refs]],
    departs: Departures,
) -> tuple[tuple[int, ...], int]:
    """The first byte of each buffer in the workspace (0 for others), and the workspace's bytes."""
    spans = buffer_spans(tensors, buffers, ops, departs)
    numbers = [number for number, of in enumerate(spans) if of]
    found, total = place([spans[number] for number in numbers])
    offsets = [0] * len(buffers)
    for number, offset in zip(numbers, found, strict=True):
        offsets[number] = offset
    return tuple(offsets), total


def buffer_spans(
    tensors: Sequence[TensorSpec],
    buffers: Sequence[Buffer],
    ops: Sequence[Op[Refs]],
    departs: Departures,
) -> list[list[Lifetime]]:
    """Return for each buffer how long its parts are needed; empty for buffers outside the
    workspace.

    All parts of a buffer begin with its first use, and each ends with its own last use.
    """
    begin: dict[int, int] = {}
    edges = [_edges(one) if one.home is Home.WORKSPACE else [] for one in buffers]
    ends = [[-1] * len(parts) for parts in edges]

    def touch(ref: Ref, moment: int) -> None:
        spec = tensors[ref.tensor]
        number = spec.buffer
        last = ends[number]
        if not last:
            return
        begin.setdefault(number, moment)
        for part in (0,) if len(last) == 1 else _parts(spec, ref, edges[number]):
            if last[part] < moment:
                last[part] = moment

    for moment, op in enumerate(ops):
        for refs in (*reads(op), *writes(op), *(op.touched if isinstance(op, Wait) else ())):
            for ref in refs:
                touch(ref, moment)
    for moment, ref in _departures(tensors, ops, departs):
        touch(ref, moment)
    spans: list[list[Lifetime]] = [[] for _ in buffers]
    for number, first in begin.items():
        for (start, stop), end in zip(edges[number], ends[number], strict=True):
            if start < stop:
                _add_span(spans[number], Lifetime(start, stop, first, max(first, end)))
    return spans


def _add_span(spans: list[Lifetime], span: Lifetime) -> None:
    """Add the next span of a buffer, in whole blocks; two spans share a block until both end."""
    start, stop = span.start // ALIGNMENT * ALIGNMENT, aligned(span.stop)
    if spans and spans[-1].stop > start:
        before = spans.pop()
        if before.start < start:
            spans.append(before._replace(stop=start))
        spans.append(Lifetime(start, before.stop, span.begin, max(before.end, span.end)))
        start = before.stop
    if start < stop:
        spans.append(Lifetime(start, stop, span.begin, span.end))


def _edges(buffer: Buffer) -> list[tuple[int, int]]:
    """Return the (first, stop) bytes of each part of a buffer; the whole if it has no parts."""
    if not buffer.part_rows or not sum(buffer.part_rows):
        return [(0, buffer.num_bytes)]
    row_bytes = buffer.num_bytes // sum(buffer.part_rows)
    stops = [*accumulate(rows * row_bytes for rows in buffer.part_rows)]
    return [*zip([0, *stops], stops, strict=False)]


def _parts(spec: TensorSpec, ref: Ref, edges: Sequence[tuple[int, int]]) -> Sequence[int]:
    """The parts, of several, that a reference touches."""
    if 0 in ref_shape(spec, ref):
        return ()
    start, stop, _ = (0, spec.shape[0], 1) if ref.rows is None else ref.rows
    row_bytes = spec.strides[0] * item_bytes(spec.dtype)
    first, last = spec.start + start * row_bytes, spec.start + (stop - 1) * row_bytes
    return [part for part, (low, high) in enumerate(edges) if low <= last and first < high]


def _departures(
    tensors: Sequence[TensorSpec], ops: Sequence[Op[Refs]], departs: Departures
) -> Iterator[tuple[int, Ref]]:
    """Yield each reference that is sent, after the number of the op at whose end it has left.

    Until then its bytes must not be overwritten.
    """
    last = len(ops) - 1
    under_way: defaultdict[int, deque[Post[Refs]]] = defaultdict(deque)
    left: dict[int, int] = {}
    arriving: set[int] = set()
    for moment, op in enumerate(ops):
        if isinstance(op, Post) and op.team is None:
            arriving.update(arrivals_with_bytes(tensors, op))
            if not sends_bytes(tensors, op):
                continue
            waiting = under_way[op.lane]
            waiting.append(op)
            if departs.in_flight is not None and len(waiting) > departs.in_flight:
                left.setdefault(waiting.popleft().handle, moment)
        elif isinstance(op, Wait) and departs.with_receives and arriving.intersection(op.arrivals):
            left.setdefault(op.handle, moment)
    for op in ops:
        if isinstance(op, Post):
            for (ref,) in op.leaving:
                yield (last if op.team is not None else left.get(op.handle, last)), ref


def sends_bytes(tensors: Sequence[TensorSpec], post: Post[Refs]) -> bool:
    """Return whether the transport sees a launch with sends: it skips empty messages."""
    return any(0 not in ref_shape(tensors[ref.tensor], ref) for (ref,) in post.leaving)


def arrivals_with_bytes(tensors: Sequence[TensorSpec], post: Post[Refs]) -> list[int]:
    """Return the arrivals that the transport waits for: it skips empty messages."""
    received = zip(post.arrivals, post.arriving, strict=True)
    return [n for n, (ref,) in received if 0 not in ref_shape(tensors[ref.tensor], ref)]


def place(buffers: Sequence[Sequence[Lifetime]]) -> tuple[list[int], int]:
    """The first byte of each buffer, such that bytes of one time do not overlap; bytes in all.

    A list of free ranges, of which the smallest that fits is taken; and, where that takes more than
    the most bytes that are needed at one time, the lowest free place of each in order of size.

    Source: Pisarchyk and Lee 2020 for the second, "greedy by size for offset calculation".
    """
    best = _by_free_ranges(buffers)
    if best[1] > _most_needed(buffers) and len(buffers) <= MOST_COMPARED:
        best = min(best, _by_size(buffers), key=lambda found: found[1])
    return best


def _most_needed(buffers: Sequence[Sequence[Lifetime]]) -> int:
    changes: Counter[int] = Counter()
    for span in (span for spans in buffers for span in spans):
        changes[span.begin] += span.stop - span.start
        changes[span.end + 1] -= span.stop - span.start
    return max(accumulate(changes[moment] for moment in sorted(changes)), default=0)


def _size(spans: Sequence[Lifetime]) -> int:
    return spans[-1].stop if spans else 0


def _by_free_ranges(buffers: Sequence[Sequence[Lifetime]]) -> tuple[list[int], int]:
    offsets, total = [0] * len(buffers), 0
    free: list[tuple[int, int]] = []  # in order of place, neighbours joined
    ending: list[tuple[int, int, int]] = []  # last op, first and last byte
    order = sorted(range(len(buffers)), key=lambda i: (buffers[i][0].begin, -_size(buffers[i])))
    for number in order:
        spans = buffers[number]
        ended = [one for one in ending if one[0] < spans[0].begin]
        if ended:
            ending = [one for one in ending if one[0] >= spans[0].begin]
            for _, start, stop in ended:
                _give_back(free, start, stop)
        size = _size(spans)
        fitting = [one for one in free if one[1] - one[0] >= size]
        if fitting:
            start, stop = min(fitting, key=lambda one: one[1] - one[0])
            free.remove((start, stop))
            if stop - start > size:
                insort(free, (start + size, stop))
        else:
            start = total
            if free and free[-1][1] == total:
                start = free.pop()[0]
            total = start + size
        offsets[number] = start
        ending += [(span.end, start + span.start, start + span.stop) for span in spans]
    return offsets, total


def _give_back(free: list[tuple[int, int]], start: int, stop: int) -> None:
    insort(free, (start, stop))
    at = free.index((start, stop))
    if at + 1 < len(free) and free[at + 1][0] == stop:
        stop = free.pop(at + 1)[1]
    if at and free[at - 1][1] == start:
        start = free.pop(at - 1)[0]
        at -= 1
    free[at] = start, stop


def _by_size(buffers: Sequence[Sequence[Lifetime]]) -> tuple[list[int], int]:
    offsets, total = [0] * len(buffers), 0
    # begin, end, first and last byte of what is placed
    lives, num_placed = np.empty((sum(map(len, buffers)), 4), np.int64), 0
    order = sorted(range(len(buffers)), key=lambda i: (-_size(buffers[i]), buffers[i][0].begin))
    for number in order:
        taken: list[np.ndarray] = []  # places strictly between which this buffer cannot begin
        before = lives[:num_placed]
        for span in buffers[number]:
            at_once = (before[:, 0] <= span.end) & (before[:, 1] >= span.begin)
            taken.append(before[at_once, 2:] - (span.stop, span.start))
        start = _lowest_free(np.concatenate(taken))
        offsets[number] = start
        total = max(total, start + _size(buffers[number]))
        for span in buffers[number]:
            lives[num_placed] = span.begin, span.end, start + span.start, start + span.stop
            num_placed += 1
    return offsets, total


def _lowest_free(taken: np.ndarray) -> int:
    """The lowest place from 0 on that is strictly inside none of these intervals [num, 2]."""
    low, high = taken[np.argsort(taken[:, 0])].T
    reach = np.maximum.accumulate(np.append(0, high))
    gaps = low >= reach[:-1]
    return int(reach[gaps.argmax()] if gaps.any() else reach[-1])


def aligned(num_bytes: int) -> int:
    """Bytes that a buffer takes in a workspace."""
    return -(-num_bytes // ALIGNMENT) * ALIGNMENT
