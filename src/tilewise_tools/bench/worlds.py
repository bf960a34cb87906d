"""Worlds of rank processes that stay for many cases, and start anew when one of them dies."""

from __future__ import annotations

import re
from collections.abc import Callable, Generator, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch.distributed as dist

from tilewise.transport.processes import PlacedProcesses, RankError, RankFailure, gather_yields
from tilewise_tools.bench.case import LabNetwork
from tilewise_tools.bench.measure import Figures, Job, measure
from tilewise_tools.lab.lab import Lab
from tilewise_tools.lab.rate_limited import LINE_SHARE, Nics, RateLimited, nics
from tilewise_tools.lab.site import Site

Answers = Generator[tuple[Any, ...], Job | None, None]


class Blamed(Exception):  # noqa: N818 - an outcome of one contender, not an error of this program
    """A contender ended the world: which one of the job's, its outcome and the message."""

    def __init__(self, contender: int, outcome: str, message: str):
        super().__init__(message)
        self.contender, self.outcome, self.message = contender, outcome, message


@contextmanager
def world_on(network: LabNetwork, timeout_seconds: float, device: str = "cpu") -> Iterator[World]:
    """Ranks on a network of this machine, which is there for as long as they are.

    Raises:
        LabError: where the network lab is asked for and cannot be made.
    """
    sizes = network.hosts, network.ranks_per_host
    with ExitStack() as stack:
        site = speeds = None
        if network.name == "lab":
            site = stack.enter_context(Lab(*sizes, mbit=network.mbit)).site
        elif network.name == "limited":
            speeds = stack.enter_context(nics(*sizes, network.mbit * LINE_SHARE))
        world = World(network.world_size, timeout_seconds, device, site, speeds)
        stack.callback(world.close)
        yield world


class World:
    """Ranks that run jobs, joined by gloo.

    Args:
        timeout_seconds: for each step of a job.
        device: "cuda": every rank has a GPU of its own.
        site: the lab that the ranks are on; None: they are on this host.
        speeds: what their transport keeps to; None: nothing.
    """

    def __init__(
        self,
        world_size: int,
        timeout_seconds: float,
        device: str,
        site: Site | None = None,
        speeds: Nics | None = None,
    ):
        self.world_size, self.timeout_seconds = world_size, timeout_seconds
        self.device, self._site, self._speeds = device, site, speeds
        self._answers: Answers | None = None

    def run(
        self, job: Job, progress: Callable[[int], object] = lambda _: None
    ) -> list[tuple[Figures, ...]]:
        """Per contender the figures of every rank.

        Args:
            progress: called with the contender whose turn it is.
        Raises:
            Blamed: when a rank failed; the next run starts new processes.
        """
        at = 0
        try:
            if self._answers is None:
                self._answers = self._started()
                next(self._answers)
            answers = self._answers.send(job)
            while isinstance(answers[0], int):
                progress(at := answers[0])
                answers = next(self._answers)
            return list(zip(*answers, strict=True))
        except RankError as error:
            self.close()
            raise Blamed(at, *_judged(error.failures)) from None
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """End the ranks."""
        answers, self._answers = self._answers, None
        if answers is not None:
            answers.close()

    def _started(self) -> Answers:
        """Start all ranks; return their answers to jobs."""
        n = self.world_size
        return self._processes(PlacedProcesses(n, 0, n, gpus=n if self.device == "cuda" else 0))

    def _processes(self, share: PlacedProcesses) -> Answers:
        """Start the ranks of this process; return their answers."""
        return gather_yields(
            share,
            _serve,
            (self._site, self._speeds),
            timeout_seconds=self.timeout_seconds,
            settle=self._site.enter if self._site else None,
        )


def _serve(rank: int, site: Site | None, speeds: Nics | None) -> Generator[Any, Any, None]:
    """A rank's life: it is sent jobs and answers with each step, then with its figures."""
    world = dist.group.WORLD
    assert world is not None, "ranks have a default group"
    group = RateLimited(world, speeds) if speeds else None
    answer = None
    while True:
        job = yield answer
        answer = yield from measure(rank, job, group, site)


SECONDARY = ("LostRankError", "gloo", "Connection closed by peer", "Connection reset by peer")
"""Words of errors that a rank has because another one failed."""
OUT_OF_MEMORY = ("MemoryError", "OutOfMemoryError", "can't allocate memory", "out of memory")


def _judged(failures: tuple[RankFailure, ...]) -> tuple[str, str]:
    """Outcome and one line of the failure that came first, by all that the ranks say."""
    if not failures:
        return "failed", "some ranks ended before the others"

    def place(failure: RankFailure) -> int:
        if failure.kind == "late":
            return 2
        return (
            3 if any(word in _last_line(failure) for word in SECONDARY) else failure.kind != "died"
        )

    first = min(failures, key=place)
    line = f"rank {first.rank}: {_last_line(first)}"
    if first.kind == "late":
        return "timed_out", line
    if first.kind == "error" and any(word in first.text for word in OUT_OF_MEMORY):
        return "out_of_memory", line
    return "failed", line


def _last_line(failure: RankFailure) -> str:
    """The line that names the exception; of other failures, what is said of them."""
    exception_lines = re.findall(
        r"^[A-Za-z_][\w.]*(?:Error|Exception|Exit|Interrupt)\b.*$", failure.text, re.M
    )
    return (exception_lines or failure.text.strip().splitlines() or [failure.kind])[-1][:500]
