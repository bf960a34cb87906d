"""What a captured graph reads stays, whatever is dropped later; all else is bounded in bytes."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from cuda_model.played_cuda import PlayedDevice, play
from kernels.test_providers import cudnn, cudnn_backward
from support.kernel_cases import CALLS, SCALE, call_of, dense, draw
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

import tilewise as tw
from tilewise.execution.run import BoundCode
from tilewise.kernels import call_cache, torch_sdpa
from tilewise.kernels.call_cache import CallCache
from tilewise.kernels.torch_sdpa import CudnnSdpa
from tilewise.tiles.calls import KernelCall, Kind, Slice
from tilewise.transport import streams

CPU = torch.device("cpu")


@pytest.fixture
def device(monkeypatch) -> Iterator[PlayedDevice]:
    yield play(monkeypatch)


@pytest.fixture
def cache(monkeypatch) -> CallCache:
    made = CallCache(most_bytes=4000)
    for module in (call_cache, torch_sdpa):
        monkeypatch.setattr(module, "CALL_CACHE", made)
    return made


def masked(k: int) -> KernelCall:
    return call_of(8, 40, Kind.SLICES, (Slice(0, 8, 0, 0, k + 1, 0),))


class Graph:
    """Raw pointers, as a graph has them: where operators read masks, and what stood there."""

    def __init__(self) -> None:
        self.read: list[tuple[StorageWeakRef, Tensor]] = []

    def recorded(self, operator: Callable[..., Any], place: int) -> Callable[..., Any]:
        def run(*args: Any, **options: Any) -> Any:
            mask = args[place]
            if mask is not None:
                self.read.append((StorageWeakRef(mask.untyped_storage()), mask.clone()))
            return operator(*args, **options)

        return run

    def replays(self) -> list[bool]:
        """Whether each mask still lies where it did."""
        gc.collect()
        return [not where.expired() for where, _ in self.read]


def both_passes(call: KernelCall) -> None:
    case = draw(call, (2, 2), torch.bfloat16)
    answer = dense(case, call)
    CudnnSdpa().forward(*case[:3], call, SCALE)
    CudnnSdpa().backward(*case[:4], answer.lse.float(), answer.delta.float(), call, SCALE)


def test_a_graph_keeps_its_masks_when_others_drive_them_out(device, cache, monkeypatch):
    graph = Graph()
    monkeypatch.setattr(torch_sdpa, "_cudnn", graph.recorded(cudnn, 3))
    monkeypatch.setattr(torch_sdpa, "_cudnn_backward", graph.recorded(cudnn_backward, 8))
    seen, captured = masked(3), masked(4)
    both_passes(seen), both_passes(captured)  # warm-up
    assert graph.replays() == [True] * 4
    graph.read.clear()
    with device.capturing():
        both_passes(captured)
    num_captured = len(graph.read)
    assert num_captured == 2
    both_passes(seen)
    del captured  # its plan is gone too
    later = [masked(k) for k in range(5, 30)]
    for call in later:
        both_passes(call)
    assert graph.replays()[:num_captured] == [True, True]
    assert not all(graph.replays()) and cache.num_bytes <= cache.most_bytes
    assert not device.races


def test_what_a_graph_reads_goes_with_the_graph_where_torch_tells_which_it_is(
    device, cache, monkeypatch
):
    class Captured:
        """As torch 2.15's CUDAGraph."""

        capturing: Captured | None = None

        def __init__(self) -> None:
            self.kept: list[object] = []

        @classmethod
        def get_currently_capturing_graph(cls) -> Captured:
            if cls.capturing is None:
                raise RuntimeError("no graph is being captured")
            return cls.capturing

        def retain_object(self, x: object, *, synchronize_before_release: bool) -> None:
            assert synchronize_before_release
            self.kept.append(x)

    graph = Graph()
    monkeypatch.setattr(torch.cuda, "CUDAGraph", Captured)
    monkeypatch.setattr(torch_sdpa, "_cudnn", graph.recorded(cudnn, 3))
    monkeypatch.setattr(torch_sdpa, "_cudnn_backward", graph.recorded(cudnn_backward, 8))
    Captured.capturing, call = Captured(), masked(3)
    with device.capturing():
        both_passes(call)
    del call
    assert graph.replays() == [True, True]
    Captured.capturing = None
    assert graph.replays() == [False, False] and not cache.num_bytes
    call = masked(3)
    with device.capturing():  # by a graph that torch does not know
        both_passes(call)
    del call
    assert graph.replays()[2:] == [True, True]


def test_what_was_made_of_a_call_goes_with_it(cache, monkeypatch):
    graph = Graph()
    monkeypatch.setattr(torch_sdpa, "_cudnn", graph.recorded(cudnn, 3))
    monkeypatch.setattr(torch_sdpa, "_cudnn_backward", graph.recorded(cudnn_backward, 8))
    call = masked(3)
    both_passes(call)
    assert graph.replays() == [True, True] and cache.num_bytes
    del call
    assert graph.replays() == [False, False] and not cache.num_bytes


def test_memory_used_on_another_stream_is_not_given_back_early(device, cache):
    calls = [masked(3), CALLS["causal"]]
    for key, call in enumerate(calls):

        def make() -> tuple[Tensor, list[Tensor]]:
            x = device.take([torch.zeros(2500 // 8, dtype=torch.int64)])[0]
            device.launch("make", [], [x])
            return x, [x]

        x = cache.get(call, key, CPU, make)
        made = streams.current_moment(CPU)
        with streams.on_stream(streams.new_stream(CPU)):
            streams.follow(made)
            assert cache.get(call, key, CPU, make) is x
            device.launch("use", [x], [])
        del x
    gc.collect()
    device.collect()
    assert cache.num_bytes == 2496  # the second drove the first out
    assert not device.races


def test_a_capture_keeps_the_index_tables_of_its_calls(device, cache, monkeypatch):
    made: list[StorageWeakRef] = []
    table = BoundCode._table

    def on_device(self: Any, of: Any) -> Any:
        found = table(self, of)
        if found is not None:
            made.append(StorageWeakRef(found.untyped_storage()))
        return found

    monkeypatch.setattr(BoundCode, "_table", on_device)
    monkeypatch.setattr("tilewise.execution.run.CALL_CACHE", cache)
    q, k, v = torch.randn(3, 24, 2, 4)
    layout = tw.Layout(24, [[(i * 7 % 24, 1, 1) for i in range(24)]])

    def step() -> Tensor:
        rules = {"layout": layout, "mask": tw.Window(6, 1), "validate": "never"}
        return tw.attention(q, k, v, plan=tw.ring(1), kernel="cpu", **rules)

    step()
    gc.collect()
    num_warm = len(made)
    assert num_warm and all(where.expired() for where in made)  # they went with the plan
    with device.capturing():
        step()
    gc.collect()
    assert not any(where.expired() for where in made[num_warm:])
