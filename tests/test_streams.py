"""Loopback on a device, without one: streams and events are played, and every copy's order checked.

A played event knows all that its stream had been given before it. So each test can ask of a copy
whether it surely comes after what wrote its source, and before what reads its target.
"""

import threading
from contextlib import nullcontext
from typing import Any

import pytest
import torch

from tilewise import streams, threads
from tilewise.messages import LAUNCHES_IN_FLIGHT, Message
from tilewise.threads import LoopbackGroup, loopback


class PlayedStream:
    def __init__(self) -> None:
        self.done: set[str] = set()


class Played:
    """The functions of streams.py; work is named, and known to every stream that comes after it."""

    def __init__(self) -> None:
        self._local = threading.local()
        self.copies: list[tuple[PlayedStream, set[str]]] = []

    @property
    def current(self) -> PlayedStream:
        if not hasattr(self._local, "stream"):
            self._local.stream = PlayedStream()
        return self._local.stream

    def work(self, name: str) -> None:
        self.current.done.add(name)

    def current_moment(self, device: torch.device) -> set[str]:
        return set(self.current.done)

    def follow(self, moment: set[str] | None, x: object = None) -> None:
        if moment is not None:
            self.current.done |= moment

    def new_stream(self, device: torch.device) -> PlayedStream:
        return PlayedStream()

    def on_stream(self, stream: PlayedStream) -> Any:
        played = self

        class Entered:
            def __enter__(self) -> None:
                self.before = played.current
                played._local.stream = stream

            def __exit__(self, *error: object) -> None:
                # the block held one copy, after all that the stream knows by now
                played.copies.append((stream, set(stream.done)))
                played._local.stream = self.before

        return Entered()


@pytest.fixture
def played(monkeypatch) -> Played:
    played = Played()
    for name in ("current_moment", "follow", "new_stream", "on_stream"):
        monkeypatch.setattr(threads, name, getattr(played, name))
    return played


def tensor() -> torch.Tensor:
    return torch.zeros(4, dtype=torch.uint8)


def test_a_copy_comes_after_both_ends_and_before_its_reader(played):
    def body(rank: int, group: LoopbackGroup) -> None:
        played.work(f"wrote {rank}")
        handle = group.exchange(
            [Message(tensor(), 1 - rank, "sent")], [Message(tensor(), 1 - rank, "received")]
        )
        played.work(f"later {rank}")
        handle.wait()
        assert {"wrote 0", "wrote 1"} <= played.current.done
        group.finish()

    loopback(2, body)
    assert len(played.copies) == 2
    for _, before in played.copies:
        assert {"wrote 0", "wrote 1"} <= before
        # it does not wait for what its sender launched after it
        assert len({"later 0", "later 1"} & before) <= 1


def test_a_sender_waits_for_its_copies_before_it_goes_on(played):
    def body(rank: int, group: LoopbackGroup) -> None:
        peer = 1 - rank
        if rank == 0:
            group.exchange([Message(tensor(), peer, "sent")], [])
            assert "reader" not in played.current.done
            group.finish()
            assert "reader" in played.current.done
        else:
            played.work("reader")
            group.exchange([], [Message(tensor(), peer, "sent")]).wait()

    loopback(2, body)


def test_lanes_and_receivers_copy_on_streams_of_their_own(played):
    def body(rank: int, group: LoopbackGroup) -> None:
        peer = 1 - rank
        for lane in (0, 1, 0):
            group.exchange(
                [Message(tensor(), peer, "sent")], [Message(tensor(), peer, "got")], lane
            ).wait()
        group.finish()

    loopback(2, body)
    assert len(played.copies) == 6 and len({id(stream) for stream, _ in played.copies}) == 4


def test_the_first_sends_have_left_when_later_launches_return(played):
    """So that their buffers may be used again: LAUNCHES_IN_FLIGHT."""

    def body(rank: int, group: LoopbackGroup) -> None:
        peer = 1 - rank
        if rank == 0:
            for step in range(3):
                group.exchange([Message(tensor(), peer, f"step {step}")], [])
                for past in range(step - LAUNCHES_IN_FLIGHT + 1):
                    assert f"reader {past}" in played.current.done
        else:
            for step in range(3):
                played.work(f"reader {step}")
                group.exchange([], [Message(tensor(), peer, f"step {step}")]).wait()

    loopback(2, body)


def test_an_exchange_is_one_batch_where_cuda_is_in_use(monkeypatch):
    monkeypatch.setattr(threads.torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(threads, "forked", lambda: nullcontext(nullcontext))

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
