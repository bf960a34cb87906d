"""NCCL without a device: communicators of many ranks, each with a stream of its own."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterable
from typing import Any

import torch
from cuda_model.played_cuda import Clock, PlayedDevice, PlayedStream
from torch import Tensor

from tilewise.transport.cooperative_threads import CooperativeScheduler


class Batch:
    """One group of sends and receives of one rank: a kernel, over as a whole."""

    def __init__(self, nccl: PlayedNccl, rank: int, stream: PlayedStream, before: Batch | None):
        self.nccl, self.rank, self.stream, self.before = nccl, rank, stream, before
        self.after: Clock = {}
        self.parts: list[Part] = []
        self.started: Clock | None = None
        self.ended: Clock | None = None

    def add(self, part: Part) -> None:
        self.parts.append(part)
        current = self.stream.device.current
        self.stream.capture = self.stream.capture or current.capture
        for number, time in current.clock.items():
            self.after[number] = max(time, self.after.get(number, 0))

    def wait(self) -> None:
        """Work.wait: the current stream waits."""
        self.nccl.settle(self)
        assert self.ended is not None
        self.stream.device.current.join(self.ended)
        self.parts = []

    def go_on(self) -> bool:
        """Start, or end, if that is possible; whether it was."""
        if self.started is None:
            if self.before is not None and self.before.ended is None:
                return False
            self.stream.join(self.after)
            sent = [part.x for part in self.parts if part.is_send]
            self.stream.device.launch("send", sent, [], self.stream)
            self.started, self.before = dict(self.stream.clock), None
            return True
        others = [part.other for part in self.parts]
        if not all(other and other.batch.started for other in others):
            return False
        for part in self.parts:
            part.copy()
            if not part.is_send:
                assert part.other and part.other.batch.started
                self.stream.join(part.other.batch.started)
        received = [part.x for part in self.parts if not part.is_send]
        self.stream.device.launch("receive", [], received, self.stream)
        self.ended = dict(self.stream.clock)
        return True


class Part:
    """One end of a message."""

    def __init__(self, batch: Batch, x: Tensor, is_send: bool) -> None:
        self.batch, self.x, self.is_send = batch, x, is_send
        self.other: Part | None = None
        self.copied = False

    def copy(self) -> None:
        """Let the bytes travel, when the first of both ends is over."""
        assert self.other is not None
        if not self.copied:
            source, target = (self, self.other) if self.is_send else (self.other, self)
            with torch._C._DisableTorchDispatch():
                target.x.view(-1).copy_(source.x.view(-1))
        self.copied = self.other.copied = True


class PlayedNccl:
    """Communicators of many ranks. A batch ends when all that it meets have begun.

    Args:
        blocking: the host waits there for a batch's end as it does when NCCL connects two ranks.
    """

    def __init__(
        self, device: PlayedDevice, scheduler: CooperativeScheduler, *, blocking: bool
    ) -> None:
        self.device, self._scheduler, self.blocking = device, scheduler, blocking
        self._routes: defaultdict[Any, deque[Part]] = defaultdict(deque)
        self._pending: list[Batch] = []
        self._waiting: dict[int, Batch] = {}

    def post(self, batch: Batch, route: Any, part: Part) -> None:
        box = self._routes[route]
        if box and box[0].is_send != part.is_send:
            part.other = box.popleft()
            part.other.other = part
        else:
            box.append(part)
        batch.add(part)

    def launched(self, batch: Batch) -> None:
        self._pending.append(batch)
        moved = True
        while moved:
            moved = sum(pending.go_on() for pending in self._pending) > 0
            self._pending = [pending for pending in self._pending if pending.ended is None]
        for rank, waited in tuple(self._waiting.items()):
            if waited.ended is not None:
                del self._waiting[rank]
                self._scheduler.wake(rank)

    def settle(self, batch: Batch) -> None:
        if batch.ended is None:
            self._waiting[batch.rank] = batch
            self._scheduler.wait(batch.rank, lambda: "for a batch of NCCL")


class PlayedGroup:
    """One rank's end of a communicator, as DistTransport uses a ProcessGroup."""

    supports_coalescing = True

    def __init__(self, nccl: PlayedNccl, name: str, rank: int, world_size: int) -> None:
        self._nccl, self._name, self._rank, self._size = nccl, name, rank, world_size
        self._stream = PlayedStream(nccl.device)
        self._last: Batch | None = None
        self._open: Batch | None = None

    def rank(self) -> int:
        return self._rank

    def size(self) -> int:
        return self._size

    def _get_backend(self, device: torch.device) -> PlayedGroup:
        return self

    def _start_coalescing(self, device: torch.device) -> None:
        self._open = Batch(self._nccl, self._rank, self._stream, self._last)

    def send(self, tensors: list[Tensor], peer: int, tag: int) -> None:
        self._post(tensors, (self._rank, peer), is_send=True)

    def recv(self, tensors: list[Tensor], peer: int, tag: int) -> None:
        self._post(tensors, (peer, self._rank), is_send=False)

    def _post(self, tensors: Iterable[Tensor], ends: tuple[int, int], *, is_send: bool) -> None:
        assert self._open is not None, "sends and receives come in batches"
        for x in tensors:
            self._nccl.post(self._open, (self._name, *ends), Part(self._open, x, is_send))

    def _end_coalescing(self, device: torch.device) -> Batch:
        batch, self._open = self._open, None
        assert batch is not None
        self._last = batch
        self._nccl.launched(batch)
        if self._nccl.blocking:
            self._nccl.settle(batch)
        return batch
