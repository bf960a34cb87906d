"""One rank's share of a model, run on all ranks, again and again: processes, threads, torchrun."""

from __future__ import annotations

import copy
import pickle
import threading
import time
import traceback
from collections.abc import Callable, Generator, Mapping
from typing import Any, NamedTuple

import torch.distributed as dist
from torch import nn

from tilewise.transport.loopback import loopback
from tilewise.transport.processes import RankError, RankFailure, gather_yields
from tilewise.verification import by_value
from tilewise.verification.records import Job, Record, run_model

Split = Callable[[nn.Module, Mapping[str, Any], int, Any], Any]
BACKENDS = ("gloo", "loopback", "torchrun")


class Share(NamedTuple):
    """What every rank runs a copy of."""

    model: nn.Module
    inputs: Mapping[str, Any]
    split: Split

    def run(self, rank: int, group: Any, job: Job) -> Record:
        model, inputs = copy.deepcopy(self.model), copy.deepcopy(dict(self.inputs))
        return run_model(model, lambda: self.split(model, inputs, rank, group), job)


class World:
    """Runs jobs on all ranks until its time is over.

    Args:
        backend: "gloo": local processes; "loopback": threads of this one; "torchrun": the ranks of
            the world that this process is in, of which rank 0 asks and the others serve.
    """

    def __init__(self, share: Share, world_size: int, backend: str, seconds: float):
        self.share, self.size, self.backend = share, world_size, backend
        self.deadline = time.monotonic() + seconds
        self._processes: Generator[tuple[Any, ...], Any, None] | None = None

    @property
    def seconds_left(self) -> float:
        return self.deadline - time.monotonic()

    def run(self, jobs: list[Job]) -> list[Record]:
        """What every rank recorded; jobs by rank.

        Raises:
            RankError: naming the ranks that raised, ended or gave no answer in time.
        """
        run = {"gloo": self._gloo, "loopback": self._loopback, "torchrun": self._torchrun}
        return run[self.backend](jobs)

    def close(self) -> None:
        """End the processes, or let the other ranks go on."""
        if self._processes is not None:
            self._processes.close()
        if self.backend == "torchrun":
            dist.broadcast_object_list([None], src=0)

    def _gloo(self, jobs: list[Job]) -> list[Record]:
        message = by_value.dumps(jobs)
        if self._processes is None:
            args = by_value.dumps(self.share), message
            seconds = max(self.seconds_left, 1.0)
            kinds = {type(module).__module__ for module in self.share.model.modules()}
            installed = sorted(kind for kind in kinds if by_value.is_installed(kind))
            self._processes = gather_yields(
                self.size, _serve, args, timeout_seconds=seconds, preload=installed
            )
            answers = next(self._processes)
        else:
            answers = self._processes.send(message)
        return [pickle.loads(answer) for answer in answers]

    def _loopback(self, jobs: list[Job]) -> list[Record]:
        found: list[Record] = []
        errors: list[BaseException] = []

        def run() -> None:
            try:
                found.extend(loopback(self.size, lambda r, g: self.share.run(r, g, jobs[r])))
            except BaseException as error:
                errors.append(error)

        thread = threading.Thread(target=run, daemon=True)
        thread.start()
        thread.join(max(self.seconds_left, 1.0))
        if thread.is_alive():
            text = "some rank gave no answer within the time limit"
            raise RankError(text, (RankFailure(-1, "late", text),))
        if errors:
            notes = " ".join(vars(errors[0]).pop("__notes__", ()))  # "raised on rank 2 of 4"
            rank = next((int(x) for x in notes.split() if x.isdigit()), -1)
            text = "".join(traceback.format_exception(errors[0]))
            raise RankError(text, (RankFailure(rank, "error", text),)) from errors[0]
        return found

    def _torchrun(self, jobs: list[Job]) -> list[Record]:
        dist.broadcast_object_list([jobs], src=0)
        answers = serve_one(self.share, jobs)
        failures = tuple(
            RankFailure(rank, "error", x) for rank, x in enumerate(answers) if isinstance(x, str)
        )
        if failures:
            raise RankError("\n".join(failure.text for failure in failures), failures)
        return answers


def serve_torchrun(share: Share) -> None:
    """On all ranks of a torchrun world but 0: run jobs until there are no more."""
    while True:
        box: list[Any] = [None]
        dist.broadcast_object_list(box, src=0)
        if box[0] is None:
            return
        serve_one(share, box[0])


def serve_one(share: Share, jobs: list[Job]) -> list[Any]:
    """Run this rank's job; every rank's record, or the text of what it raised."""
    try:
        answer: Any = share.run(dist.get_rank(), dist.group.WORLD, jobs[dist.get_rank()])
    except Exception:
        answer = traceback.format_exc()
    answers: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(answers, answer)
    return answers


def _serve(rank: int, share: bytes, jobs: bytes) -> Generator[bytes, bytes, None]:
    """A process: answer jobs until it is ended. Records go by value, as bytes."""
    mine: Share = pickle.loads(share)
    while True:
        record = mine.run(rank, dist.group.WORLD, pickle.loads(jobs)[rank])
        jobs = yield pickle.dumps(record)
