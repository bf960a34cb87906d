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
from tilewise_verify import by_value, flash_attn_shim
from tilewise_verify.records import ModelRun, Record, copied, forget_runs, run_model

Split = Callable[[nn.Module, Mapping[str, Any], int, Any], Any]
BACKENDS = ("gloo", "loopback", "torchrun")
WAITING = ("torch/distributed/", "tilewise/transport/")  # code in which a rank waits for others


class Abandoned(BaseException):
    """Raised to end a rank whose answer nobody waits for; `except Exception` does not catch it."""


class RankShare(NamedTuple):
    """The model and input of which every rank runs a copy."""

    model: nn.Module
    inputs: Mapping[str, Any]
    split: Split

    def run(
        self, rank: int, group: Any, job: ModelRun, abandoned: threading.Event | None = None
    ) -> Record:
        """Run one rank's share.

        Args:
            abandoned: set when the time is over. From then on the rank leaves the process alone: it
                begins no model, hence sets no seed, and computes no backward pass.
        """

        def go_on() -> None:
            if abandoned is not None and abandoned.is_set():
                raise Abandoned

        def call() -> Any:
            result = self.split(model, inputs, rank, group)
            go_on()
            return result

        go_on()
        model, inputs = copied(self.model, self.inputs, job.dtype)
        return run_model(model, call, job)


class RankRunner:
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
        """Run jobs, by rank; return what every rank recorded.

        Raises:
            RankError: naming the ranks that raised, ended or gave no answer in time.
        """
        answers = getattr(self, f"_{self.backend}")(jobs)
        failures = [x for x in answers if isinstance(x, RankFailure)]
        if failures:  # of those that waited for others none says why, unless all waited
            first_failures = tuple(x for x in failures if x.kind != "waits") or tuple(failures)
            raise RankError("\n".join(failure.text for failure in first_failures), first_failures)
        return answers

    def close(self) -> None:
        """End the processes."""
        if self._processes is not None:
            self._processes.close()

    def _gloo(self, jobs: list[ModelRun]) -> list[Any]:
        if getattr(sys.modules["__main__"], "__file__", "") == "<stdin>":
            del sys.modules["__main__"].__file__  # or each process would look for that file
        message = by_value.dumps(jobs)
        if self._processes is None:
            modules = {type(module).__module__ for module in self.share.model.modules()}
            files = {name: getattr(sys.modules.get(name), "__file__", None) for name in modules}
            self._processes = gather_yields(
                self.size,
                _serve,
                (by_value.dumps(self.share), message, flash_attn_shim.is_provided()),
                timeout_seconds=max(self.seconds_left, 1.0),
                preload=sorted(x for x in modules if "site-packages" in (files[x] or "")),
            )
            message = None
        return [pickle.loads(answer) for answer in self._processes.send(message)]

    def _loopback(self, jobs: list[ModelRun]) -> list[Any]:
        return self._in_time(lambda on_rank: loopback(self.size, on_rank), jobs)

    def _torchrun(self, jobs: list[ModelRun]) -> list[Any]:
        rank = dist.get_rank()
        if rank == 0:
            self.broadcast(jobs)
        (answer,) = self._in_time(lambda on_rank: [on_rank(rank, dist.group.WORLD)], jobs)
        answers: list[Any] = [None] * self.size
        dist.all_gather_object(answers, answer, group=self._talk)
        return answers

    def broadcast(self, value: Any) -> Any:
        """In a torchrun world: broadcast a value of rank 0 to every rank."""
        box = [value]
        dist.broadcast_object_list(box, src=0, group=self._talk)
        return box[0]

    def serve(self) -> Any:
        """In a torchrun world on all ranks but 0: run jobs, until rank 0 sends its result."""
        while isinstance(received := self.broadcast(None), list):
            with suppress(RankError):
                self.run(received)
        return received

    def _in_time(self, call: Callable[[Any], list[Any]], jobs: list[ModelRun]) -> list[Any]:
        """Return what call gives, in a thread of its own; or which of its ranks failed or
        are late.
        """
        box, threads, abandoned = list[Any](), dict[int, int](), threading.Event()
        device = torch.cuda.current_device() if torch.cuda.is_initialized() else None

        def on_rank(rank: int, group: Any) -> Record:
            threads[rank] = threading.get_ident()
            return self.share.run(rank, group, jobs[rank], abandoned)

        def run() -> None:
            try:
                if device is not None:
                    torch.cuda.set_device(device)
                box.append(call(on_rank))
            except BaseException as error:
                box.append(error)

        thread = threading.Thread(target=run, daemon=True)
        thread.start()
        thread.join(max(self.seconds_left, 1.0))
        if not box:
            abandoned.set()
            forget_runs(threads.values())
            late_failures = [_late(rank, thread) for rank, thread in threads.items()]
            return late_failures or [RankFailure(-1, "late", "")]
        (answer,) = box
        if not isinstance(answer, BaseException):
            return answer
        notes = " ".join(vars(answer).pop("__notes__", ()))  # "raised on rank 2 of 4"
        numbers_in_notes = [int(x) for x in notes.split() if x.isdigit()]
        rank = (numbers_in_notes or ([*threads] if len(threads) == 1 else [-1]))[0]
        return [RankFailure(rank, "error", "".join(traceback.format_exception(answer)))]


def _late(rank: int, thread: int) -> RankFailure:
    """The failure of a rank that gave no answer: late itself, or waiting for others.

    The stack of its thread shows which: code that waits for others is in WAITING.
    """
    files = [f.filename for f in traceback.extract_stack(sys._current_frames().get(thread))]
    files_of_share = files[len(files) - files[::-1].index(__file__) :] if __file__ in files else []
    waits = any(part in file for file in files_of_share for part in WAITING)
    return RankFailure(rank, "waits" if waits else "late", "no answer within the time limit")


def _serve(
    rank: int, share: bytes, jobs: bytes, with_flash_attn_shim: bool
) -> Generator[bytes, bytes, None]:
    """A process: answer jobs until it is ended. Records go by value, as bytes."""
    if with_flash_attn_shim:
        flash_attn_shim.provide()
    rank_share: RankShare = pickle.loads(share)
    while True:
        jobs = yield pickle.dumps(rank_share.run(rank, dist.group.WORLD, pickle.loads(jobs)[rank]))
