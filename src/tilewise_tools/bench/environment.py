"""This machine, as rows of a benchmark name it, and its memory: what is free, what a run takes."""

import os
import platform
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from torch.autograd.profiler import profile


def versions(device: str) -> dict[str, str]:
    """Return the versions that must be the same for a finished row to be taken as it is."""
    return {
        "tilewise": installed("tilewise"),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "device": _gpu() if device == "cuda" else _cpu(),
    }


def environment(device: str) -> dict[str, Any]:
    """Fields of every row; what changes from row to row is asked anew each time."""
    versions_here, mhz = versions(device), _proc("cpuinfo", "cpu MHz")
    return {
        "started_at": datetime.now(UTC).isoformat(timespec="seconds"),
        "commit": _commit(),
        "tilewise_version": versions_here["tilewise"],
        "torch_version": versions_here["torch"],
        "python_version": versions_here["python"],
        "os": platform.platform(),
        "cpu": _cpu(),
        "gpu": versions_here["device"] if device == "cuda" else None,
        "cores": os.cpu_count(),
        "threads": 1,
        "mhz": float(mhz) if mhz else None,
        "load_average": round(os.getloadavg()[0], 2),
    }


def installed(package: str) -> str:
    """Return the version of a package, or "not installed" (also for sources that are only on the
    path).
    """
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "not installed"


def _gpu() -> str:
    return torch.cuda.get_device_name() if torch.cuda.is_available() else "no CUDA device"


@cache
def _cpu() -> str:
    return _proc("cpuinfo", "model name") or platform.processor() or platform.machine()


def _proc(file: str, field: str) -> str | None:
    """The first value of a field of a file in /proc; None where there is no such file."""
    try:
        lines = Path("/proc", file).read_text().splitlines()
    except OSError:
        return None
    values = (line.partition(":")[2].strip() for line in lines if line.startswith(field))
    return next(values, None)


@cache
def _commit() -> str | None:
    """Return the git commit of the source tree, with a + if files were changed.

    None outside a repository. The result is cached.
    """
    source_folder = Path(__file__).parent
    try:
        described = subprocess.run(
            ["git", "-C", str(source_folder), "describe", "--always", "--exclude=*", "--dirty=+"],
            capture_output=True,
            text=True,
            timeout=10,
            check=False,
        )
    except OSError:
        return None
    return described.stdout.strip() or None


SHARE = 0.9  # of what is free, that a case may be predicted to take
LEAST_CACHE, MOST_CACHE = 1 << 22, 1 << 26


def available_bytes(device: str) -> int:
    """Bytes that a benchmark may take: of the device, or of this machine and its control group."""
    if device == "cuda":
        return int(SHARE * torch.cuda.mem_get_info()[0])
    kilobytes = _proc("meminfo", "MemAvailable:")
    free = int(kilobytes.split()[0]) << 10 if kilobytes else 1 << 62
    group = Path("/sys/fs/cgroup")
    for limit, used in (
        (group / "memory.max", group / "memory.current"),
        (group / "memory/memory.limit_in_bytes", group / "memory/memory.usage_in_bytes"),
    ):
        if limit.exists() and used.exists() and (text := limit.read_text().strip()) != "max":
            free = min(free, int(text) - int(used.read_text()))
    return int(SHARE * free)


def cache_bytes(ranks: int) -> int:
    """A buffer that drives all else out of the last-level cache when all ranks write it."""
    sizes = [
        int(path.read_text().strip().removesuffix("K")) << 10
        for path in Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size")
        if path.read_text().strip().endswith("K")
    ]
    return min(max(max(sizes, default=0) // ranks, LEAST_CACHE), MOST_CACHE)


def peak_bytes(run: Callable[[], Any], device: str) -> int:
    """Bytes allocated at once during a run, above those held before it; results count."""
    if device == "cuda":
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        bytes_before = torch.cuda.memory_allocated()
        run()
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated() - bytes_before
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
    """Context in which nothing goes to stderr: some profilers print when they start and stop."""
    saved_stderr = os.dup(2)
    with open(os.devnull, "wb") as nowhere:
        os.dup2(nowhere.fileno(), 2)
    try:
        yield
    finally:
        os.dup2(saved_stderr, 2)
        os.close(saved_stderr)
