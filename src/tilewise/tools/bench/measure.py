"""One rank's side of a case: every contender prepared, checked, counted, then timed in turn.

A generator: each step is announced before it is taken, so that the caller knows whom to blame for
a rank that dies or hangs.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from tilewise.tools.bench.case import BenchCase, Timing
from tilewise.tools.bench.contender import Contender, Facts, Running, Traffic
from tilewise.tools.bench.environment import cache_bytes, peak_bytes
from tilewise.tools.bench.inputs import NAMES, Inputs, read_inputs
from tilewise.tools.bench.traffic import CountOperations
from tilewise.tools.lab.rate_limited import Nics, RateLimited
from tilewise.tools.lab.site import Site

Tensors = tuple[Tensor, ...]


@dataclass(frozen=True)
class Job:
    """What the ranks are sent: a case, who takes part, and the file with their inputs."""

    case: BenchCase
    timing: Timing
    contenders: tuple[Contender, ...]
    inputs: str


@dataclass(frozen=True)
class RankPlacement:
    """Where the ranks are."""

    group: Any = None  # what contenders are prepared with; None: the default process group
    nics: Nics | None = None  # where no lab can be made: what a transport then keeps to
    site: Site | None = None  # of the network lab, whose switch counts bytes

    def joined(self) -> RankPlacement:
        """As it is on a rank: with the transport that keeps to the NICs' speed."""
        if self.nics is None:
            return self
        assert dist.group.WORLD is not None
        return replace(self, group=RateLimited(dist.group.WORLD, self.nics))

    def nic_bytes(self, rank: int) -> tuple[int, ...]:
        """Sent so far by each host, read by rank 0."""
        if self.site is None or rank:
            return ()
        return tuple(traffic.sent_bytes for traffic in self.site.counters())


class Announced(NamedTuple):
    """The index of the contender whose turn it is."""

    contender: int


class Figures(NamedTuple):
    """What one rank found about one contender.

    Attributes:
        waited: seconds of each timed run that were spent waiting; None if not known.
    """

    layout: str  # the name of its layout
    num_tokens: int
    errors: dict[str, float]  # of out, dq, dk, dv
    seconds: list[tuple[float, float, float]]  # of each timed run: forward, backward, both
    waited: list[float] | None
    traffic: Traffic | None  # of one run; None if it could not be counted
    uncounted: tuple[str, ...]  # operations whose bytes are not known
    nic_bytes: tuple[int, ...]  # sent in one run by each host of a lab, on rank 0
    facts: Facts
    peak_bytes: int
    build_seconds: dict[str, float]  # by what was built


def measure(
    rank: int, job: Job, place: RankPlacement | None = None
) -> Iterator[Announced | list[Figures]]:
    """Yields each step's announcement, then the figures of all contenders."""
    inputs = read_inputs(Path(job.inputs))
    entrants: list[_Entrant] = []
    for index, contender in enumerate(job.contenders):
        yield Announced(index)
        entrants.append(_Entrant(contender, job, inputs, rank, place or RankPlacement()))
    flush = torch.empty(cache_bytes(), dtype=torch.uint8, device=job.case.device)
    for turn in range(job.timing.warmups + job.timing.repeats):
        for index, entrant in _back_and_forth(entrants, turn):
            yield Announced(index)
            flush.fill_(turn)
            entrant.run_timed(keep=turn >= job.timing.warmups)
    yield [entrant.figures() for entrant in entrants]


def _back_and_forth(entrants: list[_Entrant], turn: int) -> Iterable[tuple[int, _Entrant]]:
    """In order, then in reverse, so that none always follows the same other."""
    numbered = list(enumerate(entrants))
    return reversed(numbered) if turn % 2 else numbered


class _Entrant:
    """A contender on this rank: prepared, checked and counted when made, then timed run by run."""

    def __init__(
        self, contender: Contender, job: Job, inputs: Inputs, rank: int, place: RankPlacement
    ):
        self.case, self.rank, self.place = job.case, rank, place
        self.build_seconds: dict[str, float] = {}
        self.running = self._prepared(contender)
        self.layout = self.running.layout
        whole = inputs.q, inputs.k, inputs.v, inputs.dout
        self.operands: Tensors = tuple(self._mine(x) for x in whole)
        self.errors = self._checked(inputs)
        self.traffic, self.nic_bytes, self.peak = self._counted()
        self.seconds: list[tuple[float, float, float]] = []
        self.waited: list[float] = []

    def run_timed(self, *, keep: bool) -> None:
        """One run, all ranks starting together."""
        waited: list[float | None] = []

        def begin() -> None:
            self._level()
            waited.append(self._waited())

        seconds = self._run(begin)
        before, after = waited[0], self._waited()
        if keep:
            self.seconds.append(seconds)
            if before is not None and after is not None:
                self.waited.append(after - before)

    def figures(self) -> Figures:
        return Figures(
            self.layout.name,
            self.layout.size(self.rank),
            self.errors,
            self.seconds,
            self.waited if self._waited() is not None else None,
            self.traffic,
            self.uncounted,
            self.nic_bytes,
            self.running.facts(),
            self.peak,
            self.build_seconds,
        )

    def _prepared(self, contender: Contender) -> Running:
        """Prepared twice: what the second time still takes is what caches do not save."""

        def prepare() -> Running:
            return contender.prepare(self.case, self.rank, self.place.group)

        self._build("mask", self.case.make_mask)
        running = self._build("prepare_first", prepare)
        self._build("prepare_cached", prepare)
        return running

    def _build(self, what: str, run: Callable[[], Any]) -> Any:
        start = time.perf_counter()
        made = run()
        self._settle()
        self.build_seconds[what] = time.perf_counter() - start
        return made

    def _mine(self, whole: Tensor) -> Tensor:
        return self.layout.shard(whole, self.rank).to(self.case.device).contiguous()

    def _checked(self, inputs: Inputs) -> dict[str, float]:
        """Errors of the first run, whose forward pass is timed as well."""
        q, k, v = self._leaves()
        self._level()
        out = self._build("first_call", lambda: self.running.attend(q, k, v))
        if self.case.which == "forward":
            return inputs.errors({"out": out}, self.layout, self.rank)
        dout = self._mine(inputs.checked_dout())
        grads = torch.autograd.grad(out, (q, k, v), dout)
        found: dict[str, Tensor] = dict(zip(NAMES, (out, *grads), strict=True))
        return inputs.errors(found, self.layout, self.rank)

    def _counted(self) -> tuple[Traffic | None, tuple[int, ...], int]:
        """What one timed part sends, by its own account or by the operations it issues; what each
        NIC sends; and how many bytes are held at most."""
        before: list[tuple[Traffic | None, tuple[int, ...]]] = []
        counter = CountOperations()

        def begin() -> None:
            self._level()
            counter.clear()
            before.append((self.running.traffic(), self.place.nic_bytes(self.rank)))
            self._level()

        with counter:
            peak = peak_bytes(lambda: self._run(begin), self.case.device)
        self._level()
        mine, nics = before[0]
        sent = (b - a for a, b in zip(nics, self.place.nic_bytes(self.rank), strict=True))
        after = self.running.traffic()
        if mine is None or after is None:
            traffic, self.uncounted = counter.traffic(), tuple(counter.unknown)
        else:
            traffic, self.uncounted = after.since(mine), ()
        return traffic, tuple(sent), peak

    def _run(self, begin: Callable[[], None]) -> tuple[float, float, float]:
        """The case's pass: seconds of forward, of backward, of both; a pass not timed has 0.

        Args:
            begin: called right before what is timed.
        """
        which = self.case.which
        q, k, v = self._leaves()
        out = self.running.attend(q, k, v) if which == "backward" else None
        begin()
        start = time.perf_counter()
        if out is None:
            out = self.running.attend(q, k, v)
            self._settle()
        middle = time.perf_counter()
        if which == "forward":
            return middle - start, 0.0, middle - start
        torch.autograd.grad(out, (q, k, v), self.operands[3])
        self._settle()
        end = time.perf_counter()
        return middle - start, end - middle, end - start

    def _leaves(self) -> Tensors:
        """q, k, v, with a graph to come where a gradient is wanted."""
        wanted = self.case.which != "forward"
        return tuple(x.detach().requires_grad_(wanted) for x in self.operands[:3])

    def _waited(self) -> float | None:
        traffic = self.running.traffic()
        return None if traffic is None else traffic.waited_seconds

    def _settle(self) -> None:
        """Return when the device has done what it was given."""
        if self.case.device == "cuda":
            torch.cuda.synchronize()

    def _level(self) -> None:
        """Return when every rank has got here."""
        self._settle()
        if self.case.world_size > 1:
            dist.barrier()
