"""What the parts share: fair timing, memory, graphs, and where it was measured."""

from __future__ import annotations

import statistics
import subprocess
import time
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch

from benchmarks.gpu_parts.case import Row
from tilewise_tools.bench.environment import environment, installed

Run = Callable[[], object]
_SMI = "driver_version,clocks.sm,clocks.mem,clocks.max.sm,power.draw,power.limit,temperature.gpu"
FLUSH_BYTES = 256 << 20  # over any L2 cache
BUDGET = 0.35  # seconds of measuring for each of what is compared
FEWEST, MOST = 3, 15  # rounds
LONG = 0.2  # seconds of a run that one warm-up is enough for


class Times(NamedTuple):
    """Seconds of each round, and what the host took to launch it."""

    seconds: tuple[float, ...]
    host: tuple[float, ...] = ()

    @property
    def median(self) -> float:
        return statistics.median(self.seconds)

    def row(self, name: str) -> Row:
        low, middle, high = (round(1e3 * x, 4) for x in self._spread)
        return {f"{name}_ms": middle, f"{name}_ms_range": [low, high]}

    def tflops(self, flops: float) -> float:
        return round(flops / self.median / 1e12, 2)

    def share(self, name: str, ideal: Times) -> Row:
        """How much of an ideal's speed this is, by rounds: 1 is as fast."""
        found = Times(tuple(y / x for x, y in zip(self.seconds, ideal.seconds, strict=True)))
        low, middle, high = (round(x, 4) for x in found._spread)
        return {f"{name}_share": middle, f"{name}_share_range": [low, high]}

    @property
    def _spread(self) -> tuple[float, float, float]:
        return min(self.seconds), self.median, max(self.seconds)


class Session:
    """One process of the benchmark.

    Attributes:
        tiny: sizes that a CPU can do, to try the code out.
        warm_up_seconds: spent on runs before the timed ones.
    """

    def __init__(self, device: torch.device, tiny: bool):
        self.device, self.tiny = device, tiny
        self.warm_up_seconds = 0.0
        # made at once: memory figures are differences to what was there before
        self._flush = torch.zeros(FLUSH_BYTES if self.on_cuda else 0, dtype=torch.int8).to(device)

    @property
    def on_cuda(self) -> bool:
        return self.device.type == "cuda"

    def compare(
        self, runs: Mapping[str, Run], *, times: int = 1, cold: bool = True
    ) -> dict[str, Times]:
        """Times of runs that take turns, each warmed up before.

        Args:
            times: so many of a run in a row count as one, its mean.
            cold: empty the L2 cache before each.
        """
        start = time.monotonic()
        slowest = times * max(map(self._warmed, runs.values()))
        self.warm_up_seconds += time.monotonic() - start
        rounds = FEWEST if self.tiny else max(FEWEST, min(MOST, int(BUDGET / slowest)))
        taken: dict[str, list[tuple[float, float]]] = {name: [] for name in runs}
        for i in range(rounds):
            for name in list(runs)[:: 1 if i % 2 == 0 else -1]:
                taken[name].append(self._timed(runs[name], times, cold))
        return {name: Times(*zip(*both, strict=True)) for name, both in taken.items()}

    def seconds(self, run: Run, *, times: int = 1, cold: bool = True) -> Times:
        return self.compare({"it": run}, times=times, cold=cold)["it"]

    def _warmed(self, run: Run) -> float:
        """Seconds of the last of two runs; of one, where that is long."""
        first, _ = self._timed(run, 1, True)
        last, _ = (first, first) if first > LONG else self._timed(run, 1, True)
        return max(last, 1e-6)

    def _timed(self, run: Run, times: int, cold: bool) -> tuple[float, float]:
        """Seconds of a run, and what the host took to launch it."""
        self.settle()
        if not self.on_cuda:
            seconds = _launched(run, times)
            return seconds, seconds
        if cold:
            self._flush.zero_()
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        host = _launched(run, times)
        end.record()
        end.synchronize()
        return begin.elapsed_time(end) / 1e3 / times, host

    def settle(self) -> None:
        if self.on_cuda:
            torch.cuda.synchronize()

    def allocated(self) -> int:
        """Bytes of tensors on the device; on the CPU, where nobody counts them, 0."""
        return torch.cuda.memory_allocated() if self.on_cuda else 0

    def peak_bytes(self, run: Run) -> int:
        """The most that was allocated at once during a run, what was there before included."""
        self.settle()
        if self.on_cuda:
            torch.cuda.reset_peak_memory_stats()
        run()
        self.settle()
        return torch.cuda.max_memory_allocated() if self.on_cuda else 0

    def steadiness(self, name: str, run: Run) -> Row:
        """Allocations of a run, and where it makes the host wait, if it does; {} on the CPU."""
        if not self.on_cuda:
            return {}
        count, waits = "allocation.all.allocated", None
        before = torch.cuda.memory_stats()[count]
        torch.cuda.set_sync_debug_mode("error")
        try:
            run()
        except RuntimeError as error:
            waits = str(error).partition("\n")[0]
        finally:
            torch.cuda.set_sync_debug_mode("default")
        made = torch.cuda.memory_stats()[count] - before
        self.settle()
        return {f"{name}_allocations": made, f"{name}_host_waits": waits}

    def normal(self, *shape: int) -> torch.Tensor:
        """Standard normal numbers in bf16: a GPU that multiplies zeros runs faster."""
        return torch.randn(shape, device=self.device, dtype=torch.bfloat16)


def _launched(run: Run, times: int) -> float:
    start = time.perf_counter()
    for _ in range(times):
        run()
    return (time.perf_counter() - start) / times


def captured(run: Callable[[], Any], device: torch.device) -> Callable[[], Any]:
    """The run as a CUDA graph, after a warm-up; on the CPU itself.

    What it returned at capture is what every replay writes to.
    """
    run()
    if device.type != "cuda":
        return run
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        run()
    torch.cuda.current_stream().wait_stream(side)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    # Loopback's ranks are threads that launch into streams of the capture.
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        result = run()

    def replay() -> Any:
        graph.replay()
        return result

    return replay


def about(device: torch.device) -> Row:
    """Versions, commit, and the GPU's state just now."""
    row = environment(device.type)
    row["triton_version"] = installed("triton")
    row["cuda_version"] = torch.version.cuda
    row["device_name"] = "cpu"
    if device.type != "cuda":
        return row
    found = torch.cuda.get_device_properties(device)
    uuid = f"GPU-{found.uuid}"
    row |= {"device_name": found.name, "uuid": uuid, "memory_bytes": found.total_memory}
    row["cudnn_version"] = torch.backends.cudnn.version()
    command = ["nvidia-smi", f"--query-gpu={_SMI}", "--format=csv,noheader,nounits", f"--id={uuid}"]
    try:
        asked = subprocess.run(command, capture_output=True, text=True, timeout=20, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        return {**row, "nvidia_smi": f"{type(error).__name__}: {error}"}
    if asked.returncode:
        return {**row, "nvidia_smi": asked.stdout.strip() or asked.stderr.strip()}
    return row | dict(zip(_SMI.split(","), asked.stdout.strip().split(", "), strict=False))
