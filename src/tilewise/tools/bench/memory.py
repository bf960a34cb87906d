"""How much memory there is, and how much a run takes at once."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch.autograd.profiler import profile

SHARE = 0.9  # of what is free, that a case may be predicted to take
LEAST_CACHE, MOST_CACHE = 1 << 22, 1 << 26


def available_bytes(device: str) -> int:
    """Bytes that a benchmark may take: of the device, or of this machine and its control group."""
    if device == "cuda":
        return int(SHARE * torch.cuda.mem_get_info()[0])
    free = _meminfo("MemAvailable")
    group = Path("/sys/fs/cgroup")
    for limit, used in (
        (group / "memory.max", group / "memory.current"),
        (group / "memory/memory.limit_in_bytes", group / "memory/memory.usage_in_bytes"),
    ):
        if limit.exists() and used.exists() and (text := limit.read_text().strip()) != "max":
            free = min(free, int(text) - int(used.read_text()))
    return int(SHARE * free)


def cache_bytes() -> int:
    """A buffer that, written, drives everything else out of the last-level cache."""
    sizes = [
        int(path.read_text().strip().removesuffix("K")) << 10
        for path in Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size")
        if path.read_text().strip().endswith("K")
    ]
    return min(max([*sizes, LEAST_CACHE]), MOST_CACHE)


def peak_bytes(run: Callable[[], Any], device: str) -> int:
    """Bytes allocated at once during a run, above those held before it; results count."""
    if device == "cuda":
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        run()
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated() - before
    # The profiler sees every allocation of torch's CPU allocator, those inside kernels too.
    # This one, since torch.profiler imports all of the compiler.
    profiled: Any = profile(profile_memory=True)
    with _silent_stderr(), profiled:
        run()
    live = peak = 0
    for event in profiled.kineto_results.events():
        if event.name() == "[memory]":
            live += event.nbytes()
            peak = max(peak, live)
    return peak


@contextmanager
def _silent_stderr() -> Iterator[None]:
    """Some builds of the profiler write lines of their own when it starts and stops."""
    kept = os.dup(2)
    with open(os.devnull, "wb") as nowhere:
        os.dup2(nowhere.fileno(), 2)
    try:
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)


def _meminfo(field: str) -> int:
    """Bytes; all there can be where the system has no such file."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return 1 << 62
    kilobytes = next(line.split()[1] for line in lines if line.startswith(field + ":"))
    return int(kilobytes) << 10
