"""What the parts share: rows written as they come, time that is left, clocks and memory."""

from __future__ import annotations

import gc
import json
import statistics
import subprocess
import time
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from tilewise.bench.environment import environment

Row = dict[str, Any]
_SMI = "clocks.sm,clocks.mem,clocks.max.sm,power.draw,temperature.gpu"


class Session:
    """One run of the benchmark.

    Attributes:
        tiny: sizes that a CPU can do, to try the code out.
    """

    def __init__(self, device: torch.device, path: Path, seconds: float, tiny: bool):
        self.device, self.path, self.tiny = device, path, tiny
        self.rows: list[Row] = []
        self._began, self._seconds = time.monotonic(), seconds
        self._until = 0.0
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("")

    def begin(self, part: str, share: float) -> None:
        """Start a part, which may take this share of all the time that is left."""
        now = time.monotonic()
        self._until = now + share * (self._began + self._seconds - now)
        self.write({"part": part, "kind": "environment", **about(self.device)})

    def measure(self, part: str, case: Row, body: Callable[[], Row]) -> Row | None:
        """Write a case's row: figures, or what went wrong; None where there are no figures."""
        if time.monotonic() > self._until:
            self.write({"part": part, **case, "skipped": "no time left in this part"})
            return None
        gc.collect()  # what earlier cases held
        start = time.monotonic()
        try:
            row = {"part": part, **case, **body()}
        except Exception as error:  # one case's failure leaves the others
            text = f"{type(error).__name__}: {error}".partition("\n")[0][:300]
            self.write({"part": part, **case, "error": text})
            return None
        finally:
            if self.device.type == "cuda":
                torch.cuda.empty_cache()
        return self.write({**row, "took_seconds": round(time.monotonic() - start, 2)})

    def write(self, row: Row) -> Row:
        self.rows.append(row)
        with self.path.open("a") as file:
            file.write(json.dumps(row) + "\n")
        return row

    def seconds(self, run: Callable[[], object], budget: float = 0.4) -> float:
        """Median of as many runs as fit the budget, 1 to 20, after a warm-up of two."""
        run()
        first = self._timed(run)
        repeats = max(1, min(20, int(budget / max(first, 1e-6)), 2 if self.tiny else 20))
        return statistics.median(self._timed(run) for _ in range(repeats))

    def _timed(self, run: Callable[[], object]) -> float:
        if self.device.type != "cuda":
            start = time.perf_counter()
            run()
            return time.perf_counter() - start
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        run()
        end.record()
        end.synchronize()
        return begin.elapsed_time(end) / 1e3

    def host_seconds(self, run: Callable[[], object]) -> float:
        """What the host takes to launch it all."""
        run()
        taken = []
        for _ in range(5):
            self.settle()
            start = time.perf_counter()
            run()
            taken.append(time.perf_counter() - start)
        self.settle()
        return statistics.median(taken)

    def settle(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()

    def allocated(self) -> int:
        """Bytes of tensors on the device; on the CPU, where nobody counts them, 0."""
        return torch.cuda.memory_allocated() if self.device.type == "cuda" else 0

    def peak_bytes(self, run: Callable[[], object]) -> int:
        """The most that was allocated at once during a run, what was there before included."""
        if self.device.type == "cuda":
            self.settle()
            torch.cuda.reset_peak_memory_stats()
        run()
        self.settle()
        return torch.cuda.max_memory_allocated() if self.device.type == "cuda" else 0


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
    """Versions, commit, clocks."""
    row = environment(device.type)
    row["triton_version"] = _version("triton")
    row["cuda_version"] = torch.version.cuda
    row["cudnn_version"] = torch.backends.cudnn.version() if device.type == "cuda" else None
    if device.type == "cuda":
        command = ["nvidia-smi", f"--query-gpu={_SMI}", "--format=csv,noheader,nounits"]
        try:
            asked = subprocess.run(command, capture_output=True, text=True, timeout=20, check=False)
            answers = asked.stdout.strip().partition("\n")[0].split(", ")
        except (OSError, subprocess.TimeoutExpired):
            answers = []
        row |= dict(zip(_SMI.split(","), answers, strict=False))
    return row


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def normal(session: Session, *shape: int, dtype: torch.dtype | None = None) -> torch.Tensor:
    """Standard normal numbers, bf16 unless a dtype is named."""
    return torch.randn(shape, device=session.device).to(dtype or torch.bfloat16)
