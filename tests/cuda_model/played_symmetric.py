"""Symmetric memory without a device: every rank's bytes, and signals from stream to stream."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from typing import Any

import torch
from cuda_model.played_cuda import Clock, PlayedDevice
from torch import Tensor

from tilewise.transport.cooperative_threads import CooperativeScheduler
from tilewise.transport.loopback import LoopbackGroup
from tilewise.transport.protocol import Handle, Message
from tilewise.transport.symmetric import SymmetricTransport


class PlayedWorld:
    """What the ranks of one loopback share."""

    def __init__(self, device: PlayedDevice, scheduler: CooperativeScheduler, heap_bytes: int):
        self.device, self.scheduler = device, scheduler
        self.memory: defaultdict[int, Tensor] = defaultdict(
            lambda: torch.zeros(heap_bytes, dtype=torch.uint8)
        )
        self.words: defaultdict[tuple[int, int, int], list[tuple[int, Clock]]] = defaultdict(list)
        self.boxes: defaultdict[tuple[int, int], deque[bytes]] = defaultdict(deque)
        self._waiting: set[int] = set()

    def until(self, rank: int, holds: Callable[[], object], what: str) -> None:
        while not holds():
            self._waiting.add(rank)
            self.scheduler.wait(rank, lambda: what)

    def changed(self) -> None:
        while self._waiting:
            self.scheduler.wake(self._waiting.pop())


class PlayedMemory:
    """One rank's symmetric memory: a signal carries the clock of the stream that writes it."""

    def __init__(self, world: PlayedWorld, rank: int) -> None:
        self._world, self._rank = world, rank
        self.own, self.synchronized = world.memory[rank], 0

    def of(self, peer: int) -> Tensor:
        return self._world.memory[peer]

    def write_signal(self, peer: int, word: int, value: int) -> None:
        words = self._world.words[peer, self._rank, word]
        assert not words or words[-1][0] <= value, "counts only grow"
        words.append((value, dict(self._world.device.current.clock)))
        self._world.changed()

    def wait_signal(self, peer: int, word: int, value: int) -> None:
        """By the first write that will do: a device may go on as soon as that is there."""
        words = self._world.words[self._rank, peer, word]
        what = f"for signal {word} of rank {peer}"
        self._world.until(self._rank, lambda: words and words[-1][0] >= value, what)
        clock = next(clock for count, clock in words if count >= value)
        self._world.device.current.join(clock)

    def synchronize(self) -> None:
        self.synchronized += 1
        for stream in self._world.device.streams:
            self._world.device.current.join(stream.clock)


class PlayedHosts:
    """Messages from host to host, which order nothing on a device."""

    def __init__(self, world: PlayedWorld, group: LoopbackGroup) -> None:
        self._world, self.rank, self.world_size = world, group.rank, group.world_size

    def gather_records(self, record: Tensor) -> list[Tensor]:
        return [record] * self.world_size

    def exchange(self, sends: Sequence[Message], recvs: Sequence[Message], lane: int = 0) -> Handle:
        with torch._C._DisableTorchDispatch():
            for x, peer, _ in sends:
                self._world.boxes[self.rank, peer].append(x.numpy().tobytes())
        self._world.changed()
        return _Hearing(self._world, self.rank, recvs)


class _Hearing:
    def __init__(self, world: PlayedWorld, rank: int, recvs: Sequence[Message]) -> None:
        self._world, self._rank, self._recvs = world, rank, recvs

    def wait(self) -> None:
        for x, peer, label in self._recvs:
            box = self._world.boxes[peer, self._rank]
            self._world.until(self._rank, lambda box=box: box, f"for {label} of rank {peer}")
            with torch._C._DisableTorchDispatch():
                told = torch.frombuffer(bytearray(box.popleft()), dtype=torch.uint8)
                x.view(-1).copy_(told)
        self._recvs = ()


def over_symmetric(device: PlayedDevice, heap_bytes: int = 2**20) -> Any:
    """rank's end of loopback -> a SymmetricTransport whose memory is played."""
    worlds: dict[int, PlayedWorld] = {}

    def transport(rank: int, group: LoopbackGroup) -> SymmetricTransport:
        scheduler = group._world.scheduler
        world = worlds.setdefault(id(group._world), PlayedWorld(device, scheduler, heap_bytes))
        hosts: Any = PlayedHosts(world, group)
        return SymmetricTransport(hosts, PlayedMemory(world, rank))

    return transport
