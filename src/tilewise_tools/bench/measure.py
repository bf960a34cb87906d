"""One rank's side of a case: every contender prepared, checked, counted, then timed in turn.

A generator: each step is announced before it is taken, so that the caller knows whom to blame for
a rank that dies or hangs.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from tilewise_tools.bench.case import BenchCase, Timing
from tilewise_tools.bench.contender import Contender, Facts, Traffic
from tilewise_tools.bench.environment import cache_bytes, peak_bytes
from tilewise_tools.bench.inputs import NAMES, Inputs, read_inputs
from tilewise_tools.bench.traffic import CountOperations
from tilewise_tools.lab.site import NicTraffic, Site

Seconds = tuple[float, float, float]  # of forward, of backward, of both


@dataclass(frozen=True)
class Job:
    """A job for the ranks: a case, who takes part, and the file with their inputs.

    Attributes:
        profiles: the file of each contender's profile, without rank and suffix; none: no profiles.
    """

    case: BenchCase
    timing: Timing
    contenders: tuple[Contender, ...]
    inputs: str
    profiles: tuple[str, ...] = ()


class Figures(NamedTuple):
    """Figures that one rank found about one contender.

    Attributes:
        waited: seconds of each timed run that were spent waiting; None if not known.
    """

    layout: str  # the name of its layout
    num_tokens: int
    errors: dict[str, float]  # of out, dq, dk, dv
    seconds: list[Seconds]  # of each timed run; a pass that is not run has 0
    waited: list[float] | None
    traffic: Traffic | None  # of one run; None if it could not be counted
    uncounted: tuple[str, ...]  # operations whose bytes are not known
    nics: tuple[NicTraffic, ...]  # of one run, by host of a lab, on rank 0
    facts: Facts
    peak_bytes: int
    build_seconds: dict[str, float]  # by what was built


def measure(
    rank: int, job: Job, group: Any = None, site: Site | None = None
) -> Generator[int, None, list[Figures]]:
    """Yields the index of the contender whose turn it is; returns the figures of all.

    Args:
        group: what contenders are prepared with; None: the default process group.
        site: of the network lab, whose switch counts bytes.
    """
    inputs = read_inputs(Path(job.inputs))
    entrants: list[_Entrant] = []
    for index, contender in enumerate(job.contenders):
        yield index
        entrants.append(_Entrant(contender, job.case, inputs, rank, group, site))
    share = cache_bytes(1 if job.case.device == "cuda" else job.case.ranks_here)
    flush = torch.empty(share, dtype=torch.uint8, device=job.case.device)
    for turn in range(job.timing.warmups + job.timing.repeats):
        numbered = list(enumerate(entrants))
        # There and back, so that none always follows the same other.
        for index, entrant in reversed(numbered) if turn % 2 else numbered:
            yield index
            flush.fill_(turn)
            entrant.run_timed(keep=turn >= job.timing.warmups)
    for index, path in enumerate(job.profiles):
        yield index
        entrants[index].run_profiled(Path(f"{path}-rank{rank}.json"))
    return [entrant.figures() for entrant in entrants]


class _Entrant:
    """A contender on this rank: prepared, checked and counted when made, then timed run by run."""

    def __init__(
        self,
        contender: Contender,
        case: BenchCase,
        inputs: Inputs,
        rank: int,
        group: Any,
        site: Site | None,
    ):
        self.case, self.rank = case, rank
        self.site = site if rank == 0 else None
        self.build_seconds: dict[str, float] = {}
        self._build("mask", case.make_mask)
        prepare = partial(contender.prepare, case, rank, group)
        self.running = self._build("prepare_first", prepare)
        self._build("prepare_cached", prepare)  # takes what caches do not save
        self.layout = self.running.layout
        q, k, v, dout = (self._mine(x) for x in (inputs.q, inputs.k, inputs.v, inputs.dout))
        self.operands, self.dout = (q, k, v), dout
        self.errors = self._checked(inputs)
        self.traffic, self.uncounted, self.nics, self.peak = self._counted()
        self.seconds: list[Seconds] = []
        self.waited: list[float | None] = []

    def run_timed(self, *, keep: bool) -> None:
        """One run, all ranks starting together."""
        run, traffic_before = self._ready(), self.running.traffic()
        seconds, traffic_after = run(), self.running.traffic()
        if keep:
            self.seconds.append(seconds)
            self.waited.append(
                traffic_before
                and traffic_after
                and traffic_after.since(traffic_before).waited_seconds
            )

    def run_profiled(self, path: Path) -> None:
        """One run under torch's profiler, whose trace is written here."""
        run = self._ready()
        with torch.profiler.profile() as profile:
            run()
        path.parent.mkdir(parents=True, exist_ok=True)  # on another host, say
        profile.export_chrome_trace(str(path))

    def figures(self) -> Figures:
        waited = [seconds for seconds in self.waited if seconds is not None]
        return Figures(
            self.layout.name,
            self.layout.size(self.rank),
            self.errors,
            self.seconds,
            waited if len(waited) == len(self.waited) else None,
            self.traffic,
            self.uncounted,
            self.nics,
            self.running.facts(),
            self.peak,
            self.build_seconds,
        )

    def _build(self, stage: str, run: Callable[[], Any]) -> Any:
        start = time.perf_counter()
        result = run()
        self._settle()
        self.build_seconds[stage] = time.perf_counter() - start
        return result

    def _mine(self, whole_tensor: Tensor) -> Tensor:
        return self.layout.shard(whole_tensor, self.rank).to(self.case.device).contiguous()

    def _checked(self, inputs: Inputs) -> dict[str, float]:
        """Errors of the first run, whose forward pass is timed as well."""
        leaves = self._leaves()
        self._level()
        results = [self._build("first_call", lambda: self.running.attend(*leaves))]
        if self.case.which != "forward":
            results += torch.autograd.grad(results[0], leaves, self._mine(inputs.checked_dout()))
        return inputs.errors(dict(zip(NAMES, results, strict=False)), self.layout, self.rank)

    def _counted(
        self,
    ) -> tuple[Traffic | None, tuple[str, ...], tuple[NicTraffic, ...], int]:
        """Count one run: what it sends, by its own account or by the operations it issues; which of
        those nobody could count; what each NIC sends; and how many bytes are held at most.
        """
        counter = CountOperations()
        counts_before: list[tuple[Traffic | None, tuple[NicTraffic, ...]]] = []

        def counted() -> None:
            run = self._ready()
            counter.clear()
            counts_before.append((self.running.traffic(), self._counters()))
            self._level()
            run()

        with counter:
            peak = peak_bytes(counted, self.case.device)
        self._level()
        ((traffic_before, nics),) = counts_before
        nic_traffic = tuple(b.since(a) for a, b in zip(nics, self._counters(), strict=True))
        traffic_after = self.running.traffic()
        if traffic_before is None or traffic_after is None:
            return counter.traffic(), tuple(counter.unknown), nic_traffic, peak
        return traffic_after.since(traffic_before), (), nic_traffic, peak

    def _ready(self) -> Callable[[], Seconds]:
        """The case's pass, to be run once; every rank is ready."""
        leaves, which = self._leaves(), self.case.which
        forward_result = self.running.attend(*leaves) if which == "backward" else None

        def run() -> Seconds:
            start, out = time.perf_counter(), forward_result
            if out is None:
                out = self.running.attend(*leaves)
                self._settle()
            middle = end = time.perf_counter()
            if which != "forward":
                torch.autograd.grad(out, leaves, self.dout)
                self._settle()
                end = time.perf_counter()
            return middle - start, end - middle, end - start

        self._level()
        return run

    def _leaves(self) -> tuple[Tensor, ...]:
        """q, k, v, with a graph to come where a gradient is wanted."""
        needs_gradient = self.case.which != "forward"
        return tuple(x.detach().requires_grad_(needs_gradient) for x in self.operands)

    def _counters(self) -> tuple[NicTraffic, ...]:
        """Return what each host's NIC has sent so far, if this rank can tell."""
        return self.site.counters() if self.site else ()

    def _settle(self) -> None:
        """Wait until the device has finished all its work."""
        if self.case.device == "cuda":
            torch.cuda.synchronize()

    def _level(self) -> None:
        """Return when every rank has got here."""
        self._settle()
        if self.case.world_size > 1:
            dist.barrier()
