"""Symmetric memory: its heap, and when the transport is chosen or refused."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

import tilewise as tw
from tilewise.transport import resolve, symmetric, symmetric_memory
from tilewise.transport.process_group import DistTransport
from tilewise.transport.protocol import Message
from tilewise.transport.symmetric import SymmetricTransport
from tilewise.transport.symmetric_memory import SymmetricHeap


class Memory:
    def __init__(self, num_bytes: int) -> None:
        self.own, self.synchronized = torch.zeros(num_bytes, dtype=torch.uint8), 0

    def synchronize(self) -> None:
        self.synchronized += 1


def test_a_heap_hands_out_places_that_do_not_overlap_and_takes_them_back():
    memory: Any = Memory(8 * 512)
    heap = SymmetricHeap(memory)
    a, b, c = heap.take(512), heap.take(513), heap.take(100)
    assert a is not None and b is not None and c is not None
    assert [heap.place(x) for x in (a, b, c)] == [0, 512, 3 * 512] and len(b) == 513
    assert heap.place(b[7:]) == 519 and heap.place(torch.zeros(8)) is None
    assert heap.num_free == 4 * 512
    assert heap.take(5 * 512) is None and heap.take(2 * 512, spare=3 * 512) is None
    view = b[3:5]
    del b
    assert heap.take(4 * 512) is not None and not memory.synchronized  # there is room without
    again = heap.take(2 * 512)
    assert again is not None and heap.place(again) == 512 and memory.synchronized == 1
    assert heap.place(view) == 515  # a view keeps no place


@pytest.fixture
def group() -> Iterator[dist.ProcessGroup]:
    store = dist.HashStore()  # pyright: ignore[reportPrivateImportUsage]
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    assert isinstance(dist.group.WORLD, dist.ProcessGroup)
    yield dist.group.WORLD
    dist.destroy_process_group()


def test_a_group_without_cuda_is_refused_by_name_and_declined_by_rule(group):
    refused = r'transport "symmetric" cannot serve: no symmetric memory: torch sees no CUDA device'
    with pytest.raises(ValueError, match=refused):
        tw.transport_for(group, "symmetric")
    found = tw.transport_for(None, "auto")
    assert isinstance(found, DistTransport)
    assert str(found) == (
        "DistTransport(1 ranks, gloo for cpu, gloo for cuda; not symmetric memory: "
        "no symmetric memory: torch sees no CUDA device)"
    )
    assert "not symmetric" not in str(tw.transport_for(group))


def test_it_is_never_chosen_without_being_named(group, monkeypatch):
    monkeypatch.setattr(symmetric, "lacking", lambda: None)
    monkeypatch.setattr(resolve, "symmetric_transport", None)
    assert isinstance(tw.transport_for(group), DistTransport)
    assert isinstance(tw.transport_for(None), DistTransport)


def test_a_group_that_can_gets_it(group, monkeypatch):
    made: Any = SimpleNamespace(own=torch.zeros(4096, dtype=torch.uint8))
    monkeypatch.setattr(symmetric, "lacking", lambda: None)
    monkeypatch.setattr(symmetric, "SymmetricMemory", lambda *asked: made)
    for name in ("symmetric", "auto"):
        found = tw.transport_for(group, name, heap_bytes=4096)
        assert isinstance(found, SymmetricTransport) and isinstance(found, tw.Transport)
        assert "1 ranks of one node, 4096 bytes" in str(found)
        assert tw.transport_for(found) is found
    with pytest.raises(ValueError, match=r"heap_bytes \(0\) must be positive"):
        tw.transport_for(group, "symmetric", heap_bytes=0)


def test_what_is_no_process_group_is_refused():
    with pytest.raises(ValueError, match=r"transport \('nvlink'\) must be one of default, symm"):
        tw.transport_for(None, "nvlink")
    with pytest.raises(ValueError, match="it is for a process group, and group is NoneType"):
        tw.transport_for(None, "symmetric")

    def on_rank(rank: int, end: Any) -> None:
        assert tw.transport_for(end, "auto") is end
        with pytest.raises(ValueError, match="group is LoopbackGroup"):
            tw.transport_for(end, "symmetric")

    tw.loopback(2, on_rank)


def test_what_a_process_lacks_is_told(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(symmetric_memory, "find_spec", lambda name: None if name == "cuda" else 1)
    assert "pip install cuda-bindings" in (symmetric_memory.lacking() or "")
    monkeypatch.setattr(symmetric_memory, "find_spec", lambda name: 1)
    assert symmetric_memory.lacking() is None


def test_tensors_of_another_device_are_refused():
    memory: Any = Memory(4096)
    hosts: Any = SimpleNamespace(rank=0, world_size=2)
    end = SymmetricTransport(hosts, memory)
    message = Message(torch.zeros(8, dtype=torch.uint8, device="meta"), 1, "step 0, kv0")
    with pytest.raises(ValueError, match=r"step 0, kv0: a tensor on meta cannot be pushed.*cpu"):
        end.exchange((), [message])
