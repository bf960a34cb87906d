"""The check of a code: it is run on owners of bytes instead of numbers.

Every byte of the workspace remembers which buffer was written there last, and whether a message is
under way from or to it. So reads of what nobody wrote, buffers that overlap while both are needed,
and bytes that change before they have left are found without a tensor.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterable, Iterator
from math import prod
from typing import NamedTuple

import numpy as np

from tilewise.arguments import item_bytes
from tilewise.compiler.code import Code, Home, Ref, Refs, TensorSpec, extent
from tilewise.compiler.ops import Op, Post, Wait, reads, writes
from tilewise.compiler.placement import Departures, arrivals_with_bytes, sends_bytes


class CodeError(ValueError):
    """A code that does not keep to the rules of its memory, and the op at which it does not."""

    def __init__(self, message: str, op: int):
        super().__init__(f"op {op}: {message}")
        self.op = op


def check_code(code: Code, departs: Departures = Departures(1, True)) -> None:  # noqa: B008
    """Return None if every read was written, and nothing is overwritten that is still needed.

    Each receive is awaited exactly once before it is read, and no result is left unwritten.

    Args:
        departs: by when the transport has sent what it was handed.
    Raises:
        CodeError: with .op of the first op that breaks a rule.
    """
    _Checker(code, departs).run()


class _Bytes(NamedTuple):
    """Bytes that a reference means, [rows, batch, ..., bytes of a number].

    Attributes:
        owners: the buffer that was last written there.
        busy: messages that are sent from there, or -1 if one is to arrive there.
        buffer: the one that is meant.
        meant: which of them are no padding; None: all.
    """

    owners: np.ndarray
    busy: np.ndarray
    buffer: int
    meant: np.ndarray | None


class _Checker:
    def __init__(self, code: Code, departs: Departures):
        self.code, self.departs = code, departs
        homes = [buffer.home for buffer in code.buffers]
        given = {
            spec.buffer: code.num_bytes_of((Ref(number),))
            for number, spec in enumerate(code.tensors)
            if homes[spec.buffer] is Home.GIVEN
        }
        # Buffers outside the workspace have memory of their own.
        self.memory = [
            np.full(0 if home is Home.WORKSPACE else given.get(number, buffer.num_bytes), -1)
            for number, (home, buffer) in enumerate(zip(homes, code.buffers, strict=True))
        ]
        self.results = [number for number in given if _is_result(code, number)]
        for number, home in enumerate(homes):
            if home is Home.SAVED or (number in given and number not in self.results):
                self.memory[number][:] = number
        self.workspace = np.full(code.num_bytes, -1, np.int64)
        self.workspace_busy = np.zeros(code.num_bytes, np.int32)
        self.busy = [np.zeros(len(memory), np.int32) for memory in self.memory]
        self.written: set[int] = set()  # tensors whose bytes are not known: those that ops make
        self.meanings: dict[int, np.ndarray | None] = {}
        self.awaited: dict[int, tuple[Ref, ...]] = {}
        self.arriving: set[int] = set()
        self.under_way: defaultdict[int, deque[Post[Refs]]] = defaultdict(deque)
        self.sending: dict[int, Post[Refs]] = {}

    def run(self) -> None:
        for number, op in enumerate(self.code.ops):
            match op:
                case Post():
                    self._post(op, number)
                case Wait():
                    self._wait(op, number)
                case _:
                    self._step(op, number)
        last = len(self.code.ops) - 1
        for number in self.results:
            if (self.memory[number] != number).any():
                name = self.code.buffers[number].name
                raise CodeError(f"{name}, a result, is not written everywhere", last)
        if self.awaited:
            raise CodeError(f"receives {sorted(self.awaited)} are never awaited", last)

    def _step(self, op: Op[Refs], number: int) -> None:
        for ref in _each(reads(op)):
            self._read(ref, number)
        for ref in _each(writes(op)):
            self._write(ref, number)

    def _places(self, ref: Ref) -> _Bytes | None:
        """The bytes that a reference means; None: they are not known."""
        spec = self.code.tensors[ref.tensor]
        buffer = self.code.buffers[spec.buffer]
        if buffer.home is Home.MADE:
            return None
        span = extent(spec, ref)
        if 0 in span.shape:
            return None
        owners, busy, offset = self.memory[spec.buffer], self.busy[spec.buffer], 0
        if buffer.home is Home.WORKSPACE:
            owners, busy = self.workspace, self.workspace_busy
            offset = self.code.offsets[spec.buffer]
        if offset + span.stop > len(owners):
            name = self.code.named(ref)
            raise CodeError(f"{name} ends at byte {offset + span.stop} of {len(owners)}", -1)

        def view(x: np.ndarray, at: int) -> np.ndarray:
            steps = tuple(step * x.itemsize for step in (*span.strides, 1))
            shape = *span.shape, span.item_bytes
            return np.lib.stride_tricks.as_strided(x[at:], shape, steps)

        meant = None if spec.dtype != "uint8" else self._meaning(spec.buffer)
        mine = None if meant is None else view(meant, span.first)
        at = offset + span.first
        return _Bytes(view(owners, at), view(busy, at), spec.buffer, mine)

    def _meaning(self, buffer: int) -> np.ndarray | None:
        """Return which bytes of packed rows are numbers, and not padding; None: all of them."""
        return self.meanings[buffer] if buffer in self.meanings else self._found_meaning(buffer)

    def _found_meaning(self, buffer: int) -> np.ndarray | None:
        num_bytes = self.code.buffers[buffer].num_bytes
        found = [spec for spec in self.code.tensors if spec.buffer == buffer]
        inside = [spec for spec in found if not _is_all(spec, num_bytes)]
        meant = np.zeros(num_bytes, bool) if inside else None
        for spec in inside:
            size = item_bytes(spec.dtype)
            if meant is not None and 0 not in spec.shape:
                steps = tuple(stride * size for stride in spec.strides)
                shape = (*spec.shape, size)
                view = np.lib.stride_tricks.as_strided(meant[spec.start :], shape, (*steps, 1))
                view[...] = True
        self.meanings[buffer] = meant
        return meant

    def _read(self, ref: Ref, number: int) -> None:
        places = self._places(ref)
        if places is None:
            if self.code.home(ref) is Home.MADE and ref.tensor not in self.written:
                raise CodeError(f"{self.code.named(ref)} is read before it is made", number)
            return
        owners, busy, buffer, meant = places
        wrong = owners != buffer
        if meant is not None:
            wrong &= meant
        if wrong.any():
            other = int(owners[wrong][0])
            whose = (
                f"has bytes of {self.code.buffers[other].name}" if other >= 0 else "is unwritten"
            )
            raise CodeError(f"{self.code.named(ref)} {whose} where it is read", number)
        if (busy < 0).any():
            raise CodeError(f"{self.code.named(ref)} is read before it has arrived", number)

    def _write(self, ref: Ref, number: int) -> None:
        self.written.add(ref.tensor)
        places = self._places(ref)
        if places is None:
            return
        owners, busy, buffer, _ = places
        if busy.any():
            raise CodeError(f"{self.code.named(ref)} is written while a message uses it", number)
        owners[...] = buffer

    def _post(self, post: Post[Refs], number: int) -> None:
        for (ref,) in post.leaving:
            self._read(ref, number)
            places = self._places(ref)
            if places is not None:
                places.busy[...] += 1
        for (ref,) in post.arriving:
            self._write(ref, number)
            places = self._places(ref)
            if places is not None:
                places.busy[...] = -1
        if post.team is not None:
            self.awaited.update(dict.fromkeys(post.arrivals, post.arriving[0]))
            return
        for arrival, refs in zip(post.arrivals, post.arriving, strict=True):
            self.awaited[arrival] = refs
        self.arriving.update(arrivals_with_bytes(self.code.tensors, post))
        if sends_bytes(self.code.tensors, post):
            self.sending[post.handle] = post
            waiting = self.under_way[post.lane]
            waiting.append(post)
            if self.departs.in_flight is not None and len(waiting) > self.departs.in_flight:
                self._left(waiting.popleft())

    def _wait(self, wait: Wait[Refs], number: int) -> None:
        for arrival in wait.arrivals:
            refs = self.awaited.pop(arrival, None)
            if refs is None:
                raise CodeError(f"receive {arrival} is awaited twice, or never posted", number)
            for ref in refs:
                places = self._places(ref)
                if places is not None:
                    np.maximum(places.busy, 0, out=places.busy)
        received = self.arriving.intersection(wait.arrivals)
        if self.departs.with_receives and received and wait.handle in self.sending:
            self._left(self.sending[wait.handle])

    def _left(self, post: Post[Refs]) -> None:
        if self.sending.pop(post.handle, None) is None:
            return
        for (ref,) in post.leaving:
            places = self._places(ref)
            if places is not None:
                places.busy[...] -= 1


def _is_all(spec: TensorSpec, num_bytes: int) -> bool:
    """Return whether a tensor covers all bytes of its buffer, padding included."""
    return prod(spec.shape) * item_bytes(spec.dtype) == num_bytes


def _each(operands: Iterable[Refs]) -> Iterator[Ref]:
    for refs in operands:
        yield from refs


def _is_result(code: Code, buffer: int) -> bool:
    name = code.buffers[buffer].name
    return name in (
        ("dq", "dk", "dv", "dlatent", "dx") if code.backward else ("out", "lse", "largest")
    )
