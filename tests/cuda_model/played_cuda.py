"""CUDA without a device: streams, events and the allocator, played on CPU tensors.

Everything is done at once, in the order in which the host launches it. What a device may do is
another matter: each stream has a clock of all the work that surely comes before its next (a vector
clock, by stream). Two accesses to one byte, one of them a write, of which neither surely comes
first are a race. So is memory that goes back to the allocator while a stream may still use it:
the allocator gives it away in the order of the stream that it was made on, and of those named by
record_stream.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from tilewise.transport import streams

Clock = dict[int, int]


class Capture:
    """A graph that is being captured."""

    def __init__(self) -> None:
        self.over = False


class PlayedStream:
    def __init__(self, device: PlayedDevice) -> None:
        self.device, self.number = device, len(device.streams)
        self.clock: Clock = {}
        self.capture: Capture | None = None
        device.streams.append(self)

    def join(self, clock: Clock) -> None:
        for number, time in clock.items():
            if time > self.clock.get(number, 0):
                self.clock[number] = time

    def tick(self) -> int:
        self.clock[self.number] = time = self.clock.get(self.number, 0) + 1
        return time

    def wait_stream(self, other: PlayedStream) -> None:
        event = PlayedEvent(self.device)
        event.record(other)
        event.wait(self)


class PlayedEvent:
    def __init__(self, device: PlayedDevice) -> None:
        self._device = device
        self._clock: Clock = {}
        self._capture: Capture | None = None

    def record(self, stream: PlayedStream | None = None) -> None:
        stream = stream or self._device.current
        self._device.collect()
        self._clock, self._capture = dict(stream.clock), stream.capture

    def wait(self, stream: PlayedStream | None = None) -> None:
        stream = stream or self._device.current
        self._device.collect()
        if stream.capture is not None and self._capture is not stream.capture and self._clock:
            self._device.found("a captured stream waits for an event outside of its capture")
        if self._capture is not None and self._capture.over:
            self._device.found("a stream waits for an event of a capture that is over")
        stream.capture = stream.capture or self._capture
        stream.join(self._clock)


class Shadow:
    """Who has last read and written each byte of a storage, and which streams use it."""

    def __init__(self, x: Tensor, owner: PlayedStream | None) -> None:
        storage = x.untyped_storage()
        self.alive, num_bytes = StorageWeakRef(storage), storage.nbytes()
        self.owner, self.recorded = owner, set[int]()
        self.last: Clock = {}
        self.writer, self.written = np.zeros(num_bytes, np.int32), np.zeros(num_bytes, np.int64)
        self.reads: dict[int, np.ndarray] = {}

    def read(self, number: int) -> np.ndarray:
        return self.reads.setdefault(number, np.zeros(len(self.written), np.int64))


class PlayedDevice:
    """All streams, and what they have done to memory.

    Attributes:
        races: what was found, in words.
        operations: how many accesses were looked at.
        kept: what a test does not give back.
    """

    def __init__(self) -> None:
        self._local = threading.local()
        self._shadows: dict[int, Shadow] = {}
        self.streams: list[PlayedStream] = []
        self.races: list[str] = []
        self.operations = 0
        self.kept: list[object] = []
        self.default = PlayedStream(self)

    @property
    def current(self) -> PlayedStream:
        return getattr(self._local, "stream", self.default)

    @contextmanager
    def entered(self, stream: PlayedStream) -> Iterator[None]:
        before, self._local.stream = self.current, stream
        try:
            yield
        finally:
            self._local.stream = before

    @contextmanager
    def capturing(self) -> Iterator[None]:
        """As torch.cuda.graph: everything before is over, and the streams come together again."""
        for stream in self.streams:
            self.default.join(stream.clock)
        origin, capture = PlayedStream(self), Capture()
        origin.join(self.default.clock)
        origin.capture = capture
        with self.entered(origin):
            yield
        capture.over = True
        for stream in self.streams:
            if stream.capture is capture:
                stream.capture = None
                if stream.clock.get(stream.number, 0) > origin.clock.get(stream.number, 0):
                    self.found("a captured stream does not come back to the one it began on")
        self.default.join(origin.clock)

    def found(self, what: str) -> None:
        if what not in self.races:
            self.races.append(what)

    def launch(
        self,
        name: str,
        reads: Iterable[Tensor],
        writes: Iterable[Tensor],
        stream: PlayedStream | None = None,
    ) -> None:
        """One operation on a stream, by default the current one."""
        stream = stream or self.current
        self.collect()
        time = stream.tick()
        known = np.array([stream.clock.get(i, 0) for i in range(len(self.streams))])
        for x in reads:
            self._access(name, x, stream, time, known, write=False)
        for x in writes:
            self._access(name, x, stream, time, known, write=True)

    def take(self, tensors: Iterable[Tensor]) -> list[Tensor]:
        """Of these results those in new memory, which is the current stream's from now on."""
        new = [x for x in tensors if x.untyped_storage()._cdata not in self._shadows]
        for x in new:
            self._shadow(x, self.current)
        return new

    def record_stream(self, x: Tensor, stream: PlayedStream) -> None:
        self._shadow(x).recorded.add(stream.number)

    def collect(self) -> None:
        """Look at memory that has been given back since."""
        gone = [key for key, shadow in self._shadows.items() if shadow.alive.expired()]
        for key in gone:
            shadow = self._shadows.pop(key)
            if shadow.owner is None:
                continue
            users = [shadow.owner, *(self.streams[number] for number in shadow.recorded)]
            for number, time in shadow.last.items():
                if all(time > user.clock.get(number, 0) for user in users):
                    self.found(
                        f"memory of stream {shadow.owner.number} is given back while stream "
                        f"{number} may use it"
                    )

    def _shadow(self, x: Tensor, owner: PlayedStream | None = None) -> Shadow:
        key = x.untyped_storage()._cdata
        if key not in self._shadows:
            self._shadows[key] = Shadow(x, owner)
        return self._shadows[key]

    def _access(
        self,
        name: str,
        x: Tensor,
        stream: PlayedStream,
        time: int,
        known: np.ndarray,
        *,
        write: bool,
    ) -> None:
        if not x.numel():
            return
        self.operations += 1
        shadow, here = self._shadow(x), stream.number
        written, writer = _bytes(shadow.written, x), _bytes(shadow.writer, x)
        late = written > known[writer]
        if late.any():
            other = int(writer[late].ravel()[0])
            self.found(f"{name} on stream {here}, and a write on stream {other}")
        if write:
            for number, times in shadow.reads.items():
                if number != here and (_bytes(times, x) > known[number]).any():
                    self.found(f"{name} writes on stream {here}, and a read on stream {number}")
            written[...], writer[...] = time, here
        else:
            _bytes(shadow.read(here), x)[...] = time
        shadow.last[here] = time


def _bytes(table: np.ndarray, x: Tensor) -> np.ndarray:
    """A view of the entries, one a byte, that a tensor has of its storage's."""
    size, step = x.element_size(), table.itemsize
    first = table[x.storage_offset() * size :]
    strides = [stride * size * step for stride in x.stride()]
    return np.lib.stride_tricks.as_strided(first, (*x.shape, size), (*strides, step))


def play(monkeypatch: Any) -> PlayedDevice:
    """Let transport/streams.py, and all that goes through it, work on a played device."""
    device = PlayedDevice()
    monkeypatch.setattr(streams, "STREAMED", ("cpu", "cuda"))
    for name, played in {
        "Event": lambda: PlayedEvent(device),
        "Stream": lambda _=None: PlayedStream(device),
        "current_stream": lambda _=None: device.current,
        "stream": device.entered,
        "is_initialized": lambda: True,
        "current_device": lambda: 0,
        "is_current_stream_capturing": lambda: device.current.capture is not None,
    }.items():
        monkeypatch.setattr(torch.cuda, name, played)
    monkeypatch.setattr(Tensor, "record_stream", lambda x, stream: device.record_stream(x, stream))
    return device
