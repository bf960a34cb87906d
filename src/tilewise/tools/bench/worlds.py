"""Worlds of rank processes that stay for many cases, and start anew when one of them dies."""

from __future__ import annotations

import multiprocessing
import re
from collections.abc import Generator, Iterator
from multiprocessing.connection import Connection
from typing import Any

from tilewise.tools.bench.measure import Announced, Figures, Job, RankPlacement, measure
from tilewise.transport.processes import PlacedProcesses, RankError, RankFailure, gather_yields

Answers = Generator[tuple[Any, ...], Any, None]


class Blamed(Exception):  # noqa: N818 - an outcome of one contender, not an error of this program
    """A contender ended the world: which one of the job's, its outcome and the message."""

    def __init__(self, contender: int, outcome: str, message: str):
        super().__init__(message)
        self.contender, self.outcome, self.message = contender, outcome, message


class World:
    """Ranks on this machine, joined by gloo. A context: leaving it ends them.

    Args:
        timeout_seconds: for each step of a job.
        place: loopback, a transport that keeps to NICs' speeds, or the hosts of a lab, which must
            be there for as long as the world is.
        device: "cuda": every rank has a GPU of its own.
    """

    def __init__(
        self, world_size: int, timeout_seconds: float, place: RankPlacement, device: str = "cpu"
    ):
        self.world_size, self.timeout_seconds = world_size, timeout_seconds
        self.device, self._place = device, place
        self._senders: list[Connection] = []
        self._answers: Answers | None = None

    def __enter__(self) -> World:
        return self

    def __exit__(self, *_: object) -> None:
        self._stop()

    def run(self, job: Job) -> list[tuple[Figures, ...]]:
        """Per contender the figures of every rank.

        Raises:
            Blamed: when a rank failed; the next run starts new processes.
        """
        at = 0
        try:
            if self._answers is None:
                self._start()
            assert self._answers is not None
            for sender in self._senders:
                sender.send(job)
            while True:
                answers = next(self._answers)
                if not isinstance(answers[0], Announced):
                    return list(zip(*answers, strict=True))
                at = answers[0].contender
        except RankError as error:
            self._stop()
            raise Blamed(at, *_judged(error.failures)) from None
        except BaseException:
            self._stop()
            raise

    def _start(self) -> None:
        share = self._share()
        pairs = [multiprocessing.Pipe(duplex=False) for _ in range(share.num_ranks)]
        self._senders = [sender for _, sender in pairs]
        receivers = [receiver for receiver, _ in pairs]
        site = self._place.site
        self._answers = self._gathered(
            gather_yields(
                share,
                _serve,
                (receivers, self._place),
                timeout_seconds=self.timeout_seconds,
                settle=site.enter if site else None,
            )
        )

    def _share(self) -> PlacedProcesses:
        """The ranks that this process starts."""
        n = self.world_size
        return PlacedProcesses(n, 0, n, gpus=n if self.device == "cuda" else 0)

    def _gathered(self, answers: Answers) -> Answers:
        """What all ranks of the world answer, from what these do."""
        return answers

    def _stop(self) -> None:
        for sender in self._senders:
            sender.close()
        answers, self._answers, self._senders = self._answers, None, []
        if answers is not None:
            answers.close()


def _serve(rank: int, receivers: list[Connection], place: RankPlacement) -> Iterator[Any]:
    """A rank's life: jobs until the caller hangs up."""
    joined = place.joined()
    while True:
        try:
            job = receivers[rank % len(receivers)].recv()
        except EOFError:
            return
        yield from measure(rank, job, joined)


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
    named = re.findall(
        r"^[A-Za-z_][\w.]*(?:Error|Exception|Exit|Interrupt)\b.*$", failure.text, re.M
    )
    return (named or failure.text.strip().splitlines() or [failure.kind])[-1][:500]
