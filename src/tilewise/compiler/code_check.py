"""The check of a code: it is run on owners of bytes instead of numbers.

Every byte of the workspace remembers which buffer was written there last, and whether a message is
under way from or to it. So reads of what nobody wrote, buffers that overlap while both are needed,
and bytes that change before they have left are found without a tensor.
"""

from collections import defaultdict, deque

import numpy as np

from tilewise.compiler.code import Code, Home, Op, Post, Ref, Wait, item_bytes, ref_shape
from tilewise.compiler.placement import Departures


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


class _Checker:
    def __init__(self, code: Code, departs: Departures):
        self.code, self.departs = code, departs
        homes = [buffer.home for buffer in code.buffers]
        # Buffers outside the workspace have memory of their own, where their bytes are known.
        self.memory = [
            np.full(0 if home is Home.WORKSPACE else buffer.num_bytes, -1, np.int64)
            for home, buffer in zip(homes, code.buffers, strict=True)
        ]
        for number, home in enumerate(homes):
            if home is Home.SAVED:
                self.memory[number][:] = number
        self.workspace = np.full(code.num_bytes, -1, np.int64)
        self.workspace_busy = np.zeros(code.num_bytes, np.int32)
        self.busy = [np.zeros(len(memory), np.int32) for memory in self.memory]
        self.written: set[int] = set()  # tensors whose bytes are not known: given and made
        self.awaited: dict[int, tuple[Ref, ...]] = {}
        self.under_way: defaultdict[int, deque[Post]] = defaultdict(deque)
        self.sending: dict[int, Post] = {}

    def run(self) -> None:
        for number, op in enumerate(self.code.ops):
            match op:
                case Post():
                    self._post(op, number)
                case Wait():
                    self._wait(op, number)
                case _:
                    self._step(op, number)
        if self.awaited:
            last = len(self.code.ops) - 1
            raise CodeError(f"receives {sorted(self.awaited)} are never awaited", last)

    def _step(self, op: Op, number: int) -> None:
        for ref in op.reads:
            self._read(ref, number)
        for ref in op.writes:
            self._write(ref, number)

    def _places(self, ref: Ref) -> tuple[np.ndarray, np.ndarray, int] | None:
        """Owners and messages of the bytes that a reference means; None: they are not known."""
        spec = self.code.tensors[ref.tensor]
        buffer = self.code.buffers[spec.buffer]
        if buffer.home in (Home.GIVEN, Home.MADE):
            return None
        size, shape = item_bytes(spec.dtype), ref_shape(spec, ref)
        if 0 in shape:
            return None
        start, _, step = (0, 0, 1) if ref.rows is None else ref.rows
        first = spec.start + start * spec.strides[0] * size
        strides = [stride * size for stride in spec.strides]
        if ref.heads is not None:
            first += ref.heads[0] * strides[2]
        strides[0] *= step
        owners, busy = self.memory[spec.buffer], self.busy[spec.buffer]
        if buffer.home is Home.WORKSPACE:
            owners, busy = self.workspace, self.workspace_busy
            first += self.code.offsets[spec.buffer]
        last = first + sum((n - 1) * s for n, s in zip(shape, strides, strict=True)) + size
        if first < 0 or last > len(owners):
            name = self.code.named(ref)
            raise CodeError(f"{name} ends at byte {last} of {len(owners)}", -1)
        views = (
            np.lib.stride_tricks.as_strided(
                x[first:], (*shape, size), tuple(s * x.itemsize for s in (*strides, 1))
            )
            for x in (owners, busy)
        )
        mine, messages = views
        return mine, messages, spec.buffer

    def _read(self, ref: Ref, number: int) -> None:
        places = self._places(ref)
        if places is None:
            home = self.code.home(ref)
            if home is Home.MADE and ref.tensor not in self.written:
                raise CodeError(f"{self.code.named(ref)} is read before it is made", number)
            return
        owners, busy, buffer = places
        if self.code.tensors[ref.tensor].dtype == "uint8":  # packed rows may be padded
            owners = owners[..., (owners == buffer).any((0, 1, 3)), :]
        if (owners != buffer).any() or not owners.size:
            other = int(owners[owners != buffer][0]) if owners.size else -1
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
        owners, busy, buffer = places
        if busy.any():
            raise CodeError(f"{self.code.named(ref)} is written while a message uses it", number)
        owners[...] = buffer

    def _post(self, post: Post, number: int) -> None:
        for ref in post.reads:
            self._read(ref, number)
            places = self._places(ref)
            if places is not None:
                places[1][...] += 1
        for ref in post.writes:
            self._write(ref, number)
            places = self._places(ref)
            if places is not None:
                places[1][...] = -1
        if post.team is not None:
            self.awaited.update(dict.fromkeys(post.arrivals, post.writes))
            return
        for arrival, ref in zip(post.arrivals, post.writes, strict=True):
            self.awaited[arrival] = (ref,)
        if post.sends:
            self.sending[post.handle] = post
            waiting = self.under_way[post.lane]
            waiting.append(post)
            if self.departs.in_flight is not None and len(waiting) > self.departs.in_flight:
                self._left(waiting.popleft())

    def _wait(self, wait: Wait, number: int) -> None:
        for arrival in wait.arrivals:
            refs = self.awaited.pop(arrival, None)
            if refs is None:
                raise CodeError(f"receive {arrival} is awaited twice, or never posted", number)
            for ref in refs:
                places = self._places(ref)
                if places is not None:
                    np.maximum(places[1], 0, out=places[1])
        if self.departs.with_receives and wait.handle in self.sending:
            self._left(self.sending[wait.handle])

    def _left(self, post: Post) -> None:
        if self.sending.pop(post.handle, None) is None:
            return
        for ref in post.reads:
            places = self._places(ref)
            if places is not None:
                places[1][...] -= 1
