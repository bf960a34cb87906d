"""How long something takes, in the time that counts for a device.

On a CPU with one thread per rank that is the thread's own processor time: what other processes do
meanwhile does not enter it, and the simulator shares the cores itself.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch


class Clock:
    """Measures work on one device.

    Args:
        device: where the work runs; on CUDA it is waited for.
    """

    def __init__(self, device: torch.device):
        self.device = device
        self._cuda = device.type == "cuda"
        self.by_cpu = not self._cuda and torch.get_num_threads() == 1

    def seconds(self, work: Callable[[], object], repeats: int = 5, times: int = 1) -> float:
        """Of one call: the median over repeats of so many calls each, once warm."""
        work()
        return statistics.median(self._once(work, times) for _ in range(repeats)) / times

    def _once(self, work: Callable[[], object], times: int) -> float:
        now = time.thread_time if self.by_cpu else time.perf_counter
        self._finish()
        start = now()
        for _ in range(times):
            work()
        self._finish()
        return now() - start

    def _finish(self) -> None:
        if self._cuda:
            torch.cuda.synchronize(self.device)
