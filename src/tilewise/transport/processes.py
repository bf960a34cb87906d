"""A world of local processes joined by gloo: real messages between real ranks, on one machine.

A fork server that has imported torch forks the ranks: a fork of the calling process itself could
run no backward pass (autograd's threads do not survive it).
"""

import multiprocessing
import pickle
import tempfile
import time
import traceback
from collections.abc import Callable, Collection, Generator, Iterator
from contextlib import suppress
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, NamedTuple, cast

import torch
import torch.distributed as dist

START_SECONDS = 300.0
"""For all ranks to start and connect: each imports what fn needs, on a machine that may be busy."""
OTHERS_SECONDS = 5.0
"""For the other ranks to answer when one has failed."""


class PlacedProcesses(NamedTuple):
    """The ranks of a world that one call starts.

    Attributes:
        first: how many ranks of the world come before them.
        store: host and port of a TCPStore by which all meet, and the world's name in it; None: all
            ranks are here, and meet by a file.
        gpus: of this machine, each one rank's, joined by NCCL; 0: the world is gloo alone.
    """

    num_ranks: int
    first: int
    world_size: int
    store: tuple[str, int, str] | None = None
    gpus: int = 0


class RankFailure(NamedTuple):
    """Failure of one rank."""

    rank: int
    kind: str  # "error" (it raised), "died" (its process ended), or "late" (no answer in time)
    text: str  # of an error, its traceback


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
        timeout_seconds: for the whole of fn; it counts from when all ranks are connected.
        settle: called with its rank in each process before the group is made; it pickles.
    Raises:
        RankError: with the traceback of every rank that failed or ran out of time.
    """
    (results,) = gather_yields(
        world_size, _returning, (fn, *args), timeout_seconds=timeout_seconds, settle=settle
    )
    return list(results)


def gather_yields(
    world: int | PlacedProcesses,
    fn: Callable[..., Iterator[Any]],
    args: tuple[Any, ...] = (),
    *,
    timeout_seconds: float = 60.0,
    settle: Callable[[int], None] | None = None,
    preload: Collection[str] = (),
) -> Generator[tuple[Any, ...], Any, None]:
    """Run the generator fn(rank, *args) on every rank; yield what all of them yielded, in turn.

    What is sent to this generator is sent to those of all ranks; it pickles.

    Args:
        world: how many ranks; or those of a larger world, then the others are started elsewhere.
        fn: a generator function; all ranks yield equally often.
        timeout_seconds: from one yield to the next.
        settle: as for run_ranks.
        preload: modules that fn needs, which the fork server then imports once for all ranks; only
            when it starts, with the first world of this process.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch", "torch.distributed", "tilewise", *preload])
    share = world if isinstance(world, PlacedProcesses) else PlacedProcesses(world, 0, world)
    with tempfile.TemporaryDirectory() as folder:
        started = _Processes(share, str(Path(folder) / "store"), timeout_seconds, settle)
        processes: list[BaseProcess] = []
        receivers: list[Connection] = []
        try:
            for rank in range(share.first, share.first + share.num_ranks):
                receiver, sender = context.Pipe()
                receivers.append(receiver)
                start = (sender, rank, started, fn, args)
                processes.append(context.Process(target=_rank, args=start, daemon=True))
                processes[-1].start()
                sender.close()
            _await_connected(receivers, share.first)
            while rows := _next_row(receivers, timeout_seconds, share.first):
                reply = pickle.dumps((yield rows))
                for receiver in receivers:
                    with suppress(OSError):  # it has ended, which its next answer says
                        receiver.send_bytes(reply)
            for process in processes:
                process.join(timeout=5)
        finally:
            for process in processes:
                if process.is_alive():
                    process.kill()
                process.join()
            for receiver in receivers:
                receiver.close()


class _Processes(NamedTuple):
    """State that every rank starts with; file is that of a store."""

    share: PlacedProcesses
    file: str
    timeout_seconds: float
    settle: Callable[[int], None] | None


def _returning(rank: int, fn: Callable[..., Any], *args: Any) -> Generator[Any, Any, None]:
    yield fn(rank, *args)


def _await_connected(receivers: list[Connection], first: int) -> None:
    """Return when all ranks are connected; raise as soon as one fails: the others wait for it."""
    deadline = time.monotonic() + START_SECONDS
    waiting = list(receivers)
    while waiting:
        ready = wait(waiting, max(0.0, deadline - time.monotonic()))
        receiver = waiting[0] if not ready else next(r for r in waiting if r in ready)
        waiting.remove(receiver)
        kind, value = _receive(receiver, deadline)
        if kind != "connected":
            failure = RankFailure(first + receivers.index(receiver), kind, value)
            raise RankError(f"rank {failure.rank}: {failure.text}", (failure,))


def _next_row(receivers: list[Connection], timeout_seconds: float, first: int) -> tuple[Any, ...]:
    """Return what every rank sent next; it is empty when all have ended.

    A message is (kind, value): "value", "end", or a kind of RankFailure with its text.
    """
    deadline = time.monotonic() + timeout_seconds
    answers: dict[Connection, tuple[str, Any]] = {}
    while len(answers) < len(receivers):
        missing = [receiver for receiver in receivers if receiver not in answers]
        ready = wait(missing, max(0.0, deadline - time.monotonic())) or missing
        for receiver in missing:
            if receiver in ready:
                answers[receiver] = _receive(receiver, deadline)
                if answers[receiver][0] not in ("value", "end"):
                    deadline = min(deadline, time.monotonic() + OTHERS_SECONDS)
    messages = [answers[receiver] for receiver in receivers]
    failures = tuple(
        RankFailure(rank, kind, value)
        for rank, (kind, value) in enumerate(messages, first)
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
    world: _Processes,
    fn: Callable[..., Iterator[Any]],
    args: tuple[Any, ...],
) -> None:
    def send(kind: str, value: Any = None) -> None:
        # By value: torch's own pickling would pass shared memory that goes with this process.
        sender.send_bytes(pickle.dumps((kind, value)))

    torch.set_num_threads(1)
    try:
        if world.settle is not None:
            world.settle(rank)
        _connect(rank, world)
        send("connected")
        running, reply = cast(Generator[Any, Any, Any], fn(rank, *args)), None
        with suppress(StopIteration):
            while True:
                send("value", running.send(reply))
                reply = pickle.loads(sender.recv_bytes())
        dist.barrier()
    except BaseException:
        send("error", traceback.format_exc())
    else:
        send("end")
    if dist.is_initialized():
        dist.destroy_process_group()


def _connect(rank: int, world: _Processes) -> None:
    """Make the default group, and return when every rank has made it.

    The ranks meet by a store, which a rank that ends leaves behind. They meet before, because a
    rank that starts late is not a lost one; and after, because no rank's function may run, and end
    its process, while another rank still connects.
    """
    share = world.share
    # Half the time: a rank that waits for a lost one still answers before the caller gives up.
    timeout = timedelta(seconds=world.timeout_seconds / 2)
    store: Any
    if share.store is None:
        store = dist.FileStore(world.file, share.world_size)  # pyright: ignore[reportPrivateImportUsage]
    else:
        host, port, name = share.store
        store = dist.TCPStore(host, port, is_master=False)  # pyright: ignore[reportPrivateImportUsage]
        store = dist.PrefixStore(name, store)  # pyright: ignore[reportPrivateImportUsage]
    store.set_timeout(timeout)
    backend = "gloo"
    if share.gpus:
        torch.cuda.set_device(rank % share.gpus)
        backend = "cpu:gloo,cuda:nccl"

    def meet(where: str) -> None:
        store.set(f"{where} {rank}", "")
        names = [f"{where} {other}" for other in range(share.world_size)]
        store.wait(names, timedelta(seconds=START_SECONDS))

    meet("started")
    n = share.world_size
    dist.init_process_group(backend, store=store, rank=rank, world_size=n, timeout=timeout)
    meet("connected")
