"""Order between streams: loopback's copies, and what its users may count on, on a played device.

Of each launch the played device knows all that surely comes before it; see played_cuda.py.
"""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import pytest
import torch
from cuda_model.played_cuda import Clock, PlayedDevice, play
from cuda_model.watched import Watch

from tilewise.compiler.program import LAUNCHES_IN_FLIGHT
from tilewise.transport import streams
from tilewise.transport.loopback import LoopbackGroup, loopback
from tilewise.transport.protocol import Message


class Named:
    """Named work on the streams of a played device, and whether it comes before what is next."""

    def __init__(self, device: PlayedDevice) -> None:
        self._device = device
        self._done: dict[str, tuple[int, int]] = {}

    def work(self, name: str) -> None:
        stream = self._device.current
        self._device.launch(name, [], [])
        self._done[name] = stream.number, stream.clock[stream.number]

    def is_before(self, name: str, clock: Clock | None = None) -> bool:
        clock = self._device.current.clock if clock is None else clock
        number, time = self._done[name]
        return clock.get(number, 0) >= time


@pytest.fixture
def device(monkeypatch) -> PlayedDevice:
    return play(monkeypatch)


@pytest.fixture
def copies(device, monkeypatch) -> dict[int, list[Clock]]:
    """By stream, what comes before each copy."""
    seen: defaultdict[int, list[Clock]] = defaultdict(list)
    launch = device.launch

    def watched(name: str, *args: Any) -> None:
        launch(name, *args)
        if name == "aten::copy_":
            seen[device.current.number].append(dict(device.current.clock))

    monkeypatch.setattr(device, "launch", watched)
    return seen


def tensor() -> torch.Tensor:
    return torch.zeros(4, dtype=torch.uint8)


def test_a_copy_comes_after_both_ends_and_before_its_reader(device, copies):
    named = Named(device)

    def body(rank: int, group: LoopbackGroup) -> None:
        with Watch(device):
            named.work(f"wrote {rank}")
            handle = group.exchange(
                [Message(tensor(), 1 - rank, "sent")], [Message(tensor(), 1 - rank, "received")]
            )
            named.work(f"later {rank}")
            handle.wait()
            assert named.is_before("wrote 0") and named.is_before("wrote 1")
            group.finish()

    loopback(2, body)
    clocks = [clock for of_stream in copies.values() for clock in of_stream]
    assert len(clocks) == 2
    for clock in clocks:
        assert named.is_before("wrote 0", clock) and named.is_before("wrote 1", clock)
        # it does not wait for what its sender launched after it
        assert not (named.is_before("later 0", clock) and named.is_before("later 1", clock))


def test_lanes_and_receivers_copy_on_streams_of_their_own(device, copies):
    def body(rank: int, group: LoopbackGroup) -> None:
        peer = 1 - rank
        with Watch(device):
            for lane in (0, 1, 0):
                group.exchange(
                    [Message(tensor(), peer, "sent")], [Message(tensor(), peer, "got")], lane
                ).wait()
            group.finish()

    loopback(2, body)
    assert sorted(len(of_stream) for of_stream in copies.values()) == [1, 1, 2, 2]


def test_a_sender_waits_for_its_copies_before_it_goes_on(device):
    named = Named(device)

    def body(rank: int, group: LoopbackGroup) -> None:
        peer = 1 - rank
        if rank == 0:
            group.exchange([Message(tensor(), peer, "sent")], [])
            group.finish()
            assert named.is_before("reader")
        else:
            named.work("reader")
            group.exchange([], [Message(tensor(), peer, "sent")]).wait()

    loopback(2, body)


def test_the_first_sends_have_left_when_later_launches_return(device):
    """So that their buffers may be used again: LAUNCHES_IN_FLIGHT."""
    named = Named(device)

    def body(rank: int, group: LoopbackGroup) -> None:
        peer = 1 - rank
        for step in range(3):
            if rank == 0:
                group.exchange([Message(tensor(), peer, f"step {step}")], [])
                for past in range(step - LAUNCHES_IN_FLIGHT + 1):
                    assert named.is_before(f"reader {past}")
            else:
                named.work(f"reader {step}")
                group.exchange([], [Message(tensor(), peer, f"step {step}")]).wait()

    loopback(2, body)


def test_an_exchange_is_one_batch_where_cuda_is_in_use(device):
    def body(rank: int, group: LoopbackGroup) -> int:
        assert group.receives_ahead == 0
        source, target = tensor().fill_(rank + 1), tensor()
        group.exchange([Message(source, 1 - rank, "a")], [Message(target, 1 - rank, "a")]).wait()
        source.fill_(9)  # it has left
        group.finish()
        return int(target[0])

    assert loopback(2, body) == [2, 1]


def test_backward_runs_in_the_ranks_own_thread():
    """autograd's thread of a device would be one for all ranks."""
    before = torch._C._is_multithreading_enabled()
    assert loopback(2, lambda *_: torch._C._is_multithreading_enabled()) == [False, False]
    assert torch._C._is_multithreading_enabled() == before


def test_nothing_is_ordered_on_the_cpu():
    cpu = torch.device("cpu")
    assert streams.current_moment(cpu) is None and streams.new_stream(cpu) is None
    assert not streams.is_capturing(cpu)
    streams.follow(None)
    with streams.on_stream(None), streams.forked() as fork, fork():
        assert not torch.cuda.is_initialized()
