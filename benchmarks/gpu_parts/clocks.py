"""Clocks, power and temperature of a GPU all through a run, as nvidia-smi samples them."""

from __future__ import annotations

import statistics
import subprocess
import threading
import time
from collections.abc import Sequence
from typing import NamedTuple

from benchmarks.gpu_parts.case import Row

FIELDS = {
    "clocks.sm": "sm_mhz",
    "clocks.mem": "mem_mhz",
    "power.draw": "watts",
    "temperature.gpu": "celsius",
}
COMMAND = (
    "nvidia-smi",
    f"--query-gpu={','.join(FIELDS)}",
    "--format=csv,noheader,nounits",
    "--loop-ms=500",
)


class Sample(NamedTuple):
    """At a time of time.monotonic; values in the order of the command's fields."""

    at: float
    values: tuple[float, ...]


class Clocks:
    """Samples from its making until it is closed; none where the command is missing."""

    def __init__(self, uuid: str | None = None, command: Sequence[str] = COMMAND):
        self._samples: list[Sample] = []
        which = [f"--id={uuid}"] if uuid else []
        try:
            self._process = subprocess.Popen(
                [*command, *which], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
            )
        except OSError:
            self._process = None
            return
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def during(self, start: float, end: float) -> Row:
        """Lowest, median and highest of each value from one time to another; {} without samples."""
        found = [s.values for s in self._samples if start <= s.at <= end]
        if not found:
            return {}
        columns = zip(FIELDS.values(), zip(*found, strict=True), strict=True)
        return {name: [min(x), statistics.median(x), max(x)] for name, x in columns}

    def close(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._reader.join()

    def _read(self) -> None:
        assert self._process is not None and self._process.stdout is not None
        with self._process.stdout as lines:
            for line in lines:
                try:
                    values = tuple(float(x) for x in line.split(","))
                except ValueError:  # "[N/A]", or a message
                    continue
                if len(values) == len(FIELDS):
                    self._samples.append(Sample(time.monotonic(), values))
