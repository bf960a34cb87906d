"""A world of local processes joined by gloo: real messages between real ranks, on one machine.

A fork server that has imported torch forks the ranks: a fork of the calling process itself could
run no backward pass (autograd's threads do not survive it).
"""

from __future__ import annotations

import multiprocessing
import pickle
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from datetime import timedelta
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist


class RankFailure(NamedTuple):
    """How one rank failed.

    Attributes:
        kind: "error" (it raised), "died" (its process ended), or "late" (no answer in time).
        text: of an error, its traceback.
    """

    rank: int
    kind: str
    text: str


class RankError(RuntimeError):
    """Some ranks failed; the message holds the traceback of each."""

    def __init__(self, message: str, failures: tuple[RankFailure, ...] = ()):
        super().__init__(message)
        self.failures = failures


def run_ranks(
    world_size: int,
    fn: Callable[..., Any],
    *args: Any,
    timeout_seconds: float = 60.0,
    settle: Callable[[int], None] | None = None,
) -> list[Any]:
    """Return fn(rank, *args) of every rank, each a process whose default group is gloo.

    Args:
        fn: a function of a module, not a nested one; what it returns must pickle.
        timeout_seconds: for the whole of fn.
        settle: called with its rank in each process before the group is made; it pickles.
    Raises:
        RankError: with the traceback of every rank that failed or ran out of time.
    """
    (results,) = gather_yields(
        world_size, _returning, (fn, *args), timeout_seconds=timeout_seconds, settle=settle
    )
    return list(results)


def gather_yields(
    world_size: int,
    fn: Callable[..., Iterator[Any]],
    args: tuple[Any, ...] = (),
    *,
    timeout_seconds: float = 60.0,
    settle: Callable[[int], None] | None = None,
) -> Iterator[tuple[Any, ...]]:
    """Run the generator fn(rank, *args) on every rank; yield what all ranks yielded, in turn.

    Args:
        fn: all ranks yield equally often.
        timeout_seconds: from one yield to the next.
        settle: as for run_ranks.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch", "torch.distributed", "tilewise"])
    with tempfile.TemporaryDirectory() as folder:
        world = (world_size, str(Path(folder) / "store"), timeout_seconds, settle)
        processes: list[BaseProcess] = []
        receivers: list[Connection] = []
        try:
            for rank in range(world_size):
                receiver, sender = context.Pipe(duplex=False)
                receivers.append(receiver)
                start = (sender, rank, world, fn, args)
                processes.append(context.Process(target=_rank, args=start, daemon=True))
                processes[-1].start()
                sender.close()
            while rows := _next_row(receivers, timeout_seconds):
                yield rows
            for process in processes:
                process.join(timeout=5)
        finally:
            for process in processes:
                if process.is_alive():
                    process.kill()
                process.join()
            for receiver in receivers:
                receiver.close()


def _returning(rank: int, fn: Callable[..., Any], *args: Any) -> Iterator[Any]:
    yield fn(rank, *args)


def _next_row(receivers: list[Connection], timeout_seconds: float) -> tuple[Any, ...]:
    """What every rank sent next, empty when all have ended.

    A message is (kind, value): "value", "end", or a kind of RankFailure with its text.
    """
    deadline = time.monotonic() + timeout_seconds
    messages = [_receive(receiver, deadline) for receiver in receivers]
    failures = tuple(
        RankFailure(rank, kind, value)
        for rank, (kind, value) in enumerate(messages)
        if kind not in ("value", "end")
    )
    kinds = {kind for kind, _ in messages}
    if failures or len(kinds) > 1:
        lines = [f"rank {failure.rank}: {failure.text}" for failure in failures]
        raise RankError("\n".join(lines) or "some ranks ended before the others", failures)
    return tuple(value for _, value in messages) if kinds == {"value"} else ()


def _receive(receiver: Connection, deadline: float) -> tuple[str, Any]:
    try:
        if not receiver.poll(max(0.0, deadline - time.monotonic())):
            return "late", "no answer within the time limit"
        return pickle.loads(receiver.recv_bytes())
    except EOFError:
        return "died", "the process ended without an answer"


def _rank(
    sender: Connection,
    rank: int,
    world: tuple[int, str, float, Callable[[int], None] | None],
    fn: Callable[..., Iterator[Any]],
    args: tuple[Any, ...],
) -> None:
    def send(kind: str, value: Any = None) -> None:
        # By value: torch's own pickling would pass shared memory that goes with this process.
        sender.send_bytes(pickle.dumps((kind, value)))

    world_size, store, timeout_seconds, settle = world
    torch.set_num_threads(1)
    if settle is not None:
        settle(rank)
    # Half the time: a rank that waits for a lost one still answers before the caller gives up.
    dist.init_process_group(
        "gloo",
        init_method=f"file://{store}",
        rank=rank,
        world_size=world_size,
        timeout=timedelta(seconds=timeout_seconds / 2),
    )
    try:
        for value in fn(rank, *args):
            send("value", value)
        dist.barrier()
    except BaseException:
        send("error", traceback.format_exc())
    else:
        send("end")
    dist.destroy_process_group()
