"""One rank's share of a model, run on all ranks, again and again: processes, threads, torchrun."""

from __future__ import annotations

import pickle
import sys
import threading
import time
import traceback
from collections.abc import Callable, Generator, Mapping
from contextlib import suppress
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn

from tilewise.transport.loopback import loopback
from tilewise.transport.processes import RankError, RankFailure, gather_yields
from tilewise.verification import by_value
from tilewise.verification.records import ModelRun, Record, copied, run_model

Split = Callable[[nn.Module, Mapping[str, Any], int, Any], Any]
BACKENDS = ("gloo", "loopback", "torchrun")
LATE = "no answer within the time limit"
WAITING = ("torch/distributed/", "tilewise/transport/")  # code in which a rank waits for others


class RankShare(NamedTuple):
    """What every rank runs a copy of."""

    model: nn.Module
    inputs: Mapping[str, Any]
    split: Split

    def run(self, rank: int, group: Any, job: ModelRun) -> Record:
        model, inputs = copied(self.model, self.inputs, job.dtype)
        return run_model(model, lambda: self.split(model, inputs, rank, group), job)


class World:
    """Runs jobs on all ranks until its time is over.

    Args:
        backend: "gloo": local processes; "loopback": threads of this one; "torchrun": the ranks of
            the world that this process is in, of which rank 0 asks and the others serve.
    """

    def __init__(self, share: RankShare, world_size: int, backend: str, seconds: float):
        self.share, self.size, self.backend = share, world_size, backend
        self.deadline = time.monotonic() + seconds
        self._processes: Generator[tuple[Any, ...], Any, None] | None = None
        # Apart from what the split sends, which may never arrive.
        self._talk: Any = dist.new_group(backend="gloo") if backend == "torchrun" else None

    @property
    def seconds_left(self) -> float:
        return self.deadline - time.monotonic()

    def run(self, jobs: list[ModelRun]) -> list[Record]:
        """What every rank recorded; jobs by rank.

        Raises:
            RankError: naming the ranks that raised, ended or gave no answer in time.
        """
        run = {"gloo": self._gloo, "loopback": self._loopback, "torchrun": self._torchrun}
        return run[self.backend](jobs)

    def close(self) -> None:
        """End the processes."""
        if self._processes is not None:
            self._processes.close()

    def _gloo(self, jobs: list[ModelRun]) -> list[Record]:
        message = by_value.dumps(jobs)
        if self._processes is None:
            kinds = {type(module).__module__ for module in self.share.model.modules()}
            self._processes = gather_yields(
                self.size,
                _serve,
                (by_value.dumps(self.share), message),
                timeout_seconds=max(self.seconds_left, 1.0),
                preload=sorted(filter(by_value.is_installed, kinds)),
            )
            message = None
        return [pickle.loads(answer) for answer in self._processes.send(message)]

    def _loopback(self, jobs: list[ModelRun]) -> list[Record]:
        threads: dict[int, int] = {}

        def on_rank(rank: int, group: Any) -> Record:
            threads[rank] = threading.get_ident()
            return self.share.run(rank, group, jobs[rank])

        answer = self._in_time(lambda: loopback(self.size, on_rank))
        if answer is None:
            stuck = [rank for rank, thread in threads.items() if not _waits(thread)]
            raise _error([RankFailure(rank, "late", LATE) for rank in stuck or [-1]])
        if isinstance(answer, BaseException):
            notes = " ".join(vars(answer).pop("__notes__", ()))  # "raised on rank 2 of 4"
            rank = next((int(x) for x in notes.split() if x.isdigit()), -1)
            raise _error([RankFailure(rank, "error", _text(answer))]) from answer
        return answer

    def _torchrun(self, jobs: list[ModelRun]) -> list[Record]:
        rank, thread = dist.get_rank(), 0
        if rank == 0:
            self.tell(jobs)

        def on_rank() -> Record:
            nonlocal thread
            thread = threading.get_ident()
            return self.share.run(rank, dist.group.WORLD, jobs[rank])

        answer = self._in_time(on_rank)
        if answer is None:
            answer = RankFailure(rank, "waits" if _waits(thread) else "late", LATE)
        elif isinstance(answer, BaseException):
            answer = RankFailure(rank, "error", _text(answer))
        answers: list[Any] = [None] * self.size
        dist.all_gather_object(answers, answer, group=self._talk)
        failures = [x for x in answers if isinstance(x, RankFailure)]
        if failures:
            raise _error([x for x in failures if x.kind != "waits"] or failures)
        return answers

    def tell(self, value: Any) -> Any:
        """In a torchrun world: what rank 0 gives, on every rank."""
        box = [value]
        dist.broadcast_object_list(box, src=0, group=self._talk)
        return box[0]

    def serve(self) -> Any:
        """In a torchrun world on all ranks but 0: run jobs, until rank 0 tells its result."""
        while isinstance(asked := self.tell(None), list):
            with suppress(RankError):
                self._torchrun(asked)
        return asked

    def _in_time(self, call: Callable[[], Any]) -> Any:
        """What call gives or raises, in a thread of its own; None if it does not end in time."""
        box: list[Any] = []
        device = torch.cuda.current_device() if torch.cuda.is_initialized() else None

        def run() -> None:
            try:
                if device is not None:
                    torch.cuda.set_device(device)
                box.append(call())
            except BaseException as error:
                box.append(error)

        thread = threading.Thread(target=run, daemon=True)
        thread.start()
        thread.join(max(self.seconds_left, 1.0))
        return box[0] if box else None


def _error(failures: list[RankFailure]) -> RankError:
    return RankError("\n".join(failure.text for failure in failures), tuple(failures))


def _text(error: BaseException) -> str:
    return "".join(traceback.format_exception(error))


def _waits(thread: int) -> bool:
    """Whether a thread waits for other ranks, by where it stands."""
    frames = traceback.extract_stack(sys._current_frames().get(thread))
    return any(part in frame.filename for frame in frames for part in WAITING)


def _serve(rank: int, share: bytes, jobs: bytes) -> Generator[bytes, bytes, None]:
    """A process: answer jobs until it is ended. Records go by value, as bytes."""
    mine: RankShare = pickle.loads(share)
    while True:
        jobs = yield pickle.dumps(mine.run(rank, dist.group.WORLD, pickle.loads(jobs)[rank]))
