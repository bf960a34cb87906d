"""What the GPU benchmark asks of CUDA, on tensors without numbers: it is all there."""

import time
from itertools import count

import pytest
import torch
from cuda_model.fake_cuda import FakeCuda

from benchmarks.gpu_first import MEMORY
from benchmarks.gpu_parts import bodies, executor, first, session
from benchmarks.gpu_parts.session import Session

NAMES = ("triton", *(pytest.param(x, marks=pytest.mark.slow) for x in ("cuda", "cudnn")))


class PlayedEvent:
    """A timing event of CUDA, by the host's clock."""

    def __init__(self, enable_timing: bool):
        assert enable_timing

    def record(self) -> None:
        self.at = time.perf_counter()

    def synchronize(self) -> None:
        pass

    def elapsed_time(self, end: "PlayedEvent") -> float:
        return 1e3 * (end.at - self.at)


@pytest.fixture
def cuda(monkeypatch):
    """CUDA tensors without numbers, and what is asked of CUDA besides."""
    pytest.importorskip("triton")
    allocations = count(step=2)
    played = {
        "Event": PlayedEvent,
        "synchronize": lambda: None,
        "empty_cache": lambda: None,
        "memory_allocated": lambda: 100,
        "max_memory_allocated": lambda: 1 << 40,
        "reset_peak_memory_stats": lambda: None,
        "memory_stats": lambda: {"allocation.all.allocated": next(allocations)},
        "set_sync_debug_mode": lambda mode: None,
    }
    for name, function in played.items():
        monkeypatch.setattr(torch.cuda, name, function)
    monkeypatch.setattr(torch.backends.cudnn, "is_available", lambda: True)
    monkeypatch.setattr(session, "FEWEST", 1)
    for module in (executor, first):
        monkeypatch.setattr(module, "captured", lambda run, device: run)
    return FakeCuda(monkeypatch)


def on_fake_cuda(cuda: FakeCuda, part: str, options: dict) -> dict:
    with cuda(), torch.no_grad():
        return bodies.PARTS[part](Session(torch.device("cuda:0"), tiny=True), options)


@pytest.mark.parametrize("name", NAMES)
def test_parts_ask_of_cuda_what_it_can_do(name, cuda):
    shape = {"mask": "causal", "heads": "4:2", "head_dim": 128}
    world = {"world_size": 4, "q_tile": 2, "num_tokens": 4 * 32}
    row = on_fake_cuda(cuda, "executor", {"kernel": name, **shape, **world})
    assert row["forward_allocations"] == 2 and row["backward_host_waits"] is None
    assert row["forward_share"] > 0 and row["backward_peak_bytes"] > 0
    row = on_fake_cuda(cuda, "graphs", {"kernel": name, **shape, **world})
    assert row["forward_gain"] > 0
    for which, into in (("forward", True), ("backward", True), ("backward", False)):
        on_fake_cuda(cuda, "ahead", {"kernel": name, **shape, "which": which, "into": into})
    for mask, beside in (("full", ["kernel"]), ("causal_document", [])):
        options = {**shape, "contender": name, "mask": mask, "num_tokens": 256, "beside": beside}
        row = on_fake_cuda(cuda, "kernels", options)
        assert row["forward_ms"] > 0 and row["backward_ms"] > 0
        assert ("forward_kernel_ms" in row) is bool(beside)


@pytest.mark.parametrize("what", MEMORY)
def test_memory_work_asks_of_cuda_what_it_can_do(what, cuda):
    row = on_fake_cuda(cuda, "bandwidth", {"what": what})
    assert row["work_ms"] > 0 and row["copy_ms"] > 0 and row["work_tbps"] >= 0


def test_a_short_call_and_a_ring_beside_a_graph_do_too(cuda):
    shape = {"kernel": "triton", "heads": "4:2", "head_dim": 128}
    row = on_fake_cuda(cuda, "short calls", {**shape, "rows": 64, "keys": 128})
    assert row["forward_tflops"] >= 0 and row["backward_ms"] > 0
    rank = {"mask": "causal", "world_size": 4, "num_tokens": 4 * 32, "beside": ["graph"]}
    row = on_fake_cuda(cuda, "executor", {**shape, **rank})
    assert row["forward_graph_ms"] > 0 and row["backward_traffic_bytes"] > 0
