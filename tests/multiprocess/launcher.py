"""Run a function on a few real processes joined by gloo, each with a time limit.

A fork server that has imported torch forks the ranks: a fork of the test process itself could run
no backward pass (autograd's threads do not survive it).
"""

import multiprocessing
import pickle
import tempfile
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

TIMEOUT_SECONDS = 60.0


def run_processes(world_size: int, fn: Callable[..., Any], *args: Any) -> list[Any]:
    """Return fn(rank, *args) of every rank, each a process whose default group is gloo.

    Args:
        fn: a function of a module, not a nested one; what it returns must pickle.
    Raises:
        AssertionError: with the traceback of every rank that failed or ran out of time.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch", "torch.distributed", "tilewise"])
    with tempfile.TemporaryDirectory() as folder:
        store = str(Path(folder) / "store")
        pipes = [context.Pipe(duplex=False) for _ in range(world_size)]
        processes = []
        for rank, (_, sender) in enumerate(pipes):
            rank_args = (sender, store, rank, world_size, fn, args)
            processes.append(context.Process(target=_rank, args=rank_args, daemon=True))
            processes[-1].start()
            sender.close()
        outcomes = [_outcome(receiver) for receiver, _ in pipes]
        for process in processes:
            process.join(timeout=5)
            if process.is_alive():
                process.kill()
                process.join()
    failures = [f"rank {rank}: {text}" for rank, (good, text) in enumerate(outcomes) if not good]
    assert not failures, "\n".join(failures)
    return [result for _, result in outcomes]


def _outcome(receiver: Connection) -> tuple[bool, Any]:
    try:
        if not receiver.poll(TIMEOUT_SECONDS):
            return False, f"no answer within {TIMEOUT_SECONDS} s"
        return pickle.loads(receiver.recv_bytes())
    except EOFError:
        return False, "the process ended without an answer"
    finally:
        receiver.close()


def _rank(
    sender: Connection,
    store: str,
    rank: int,
    world_size: int,
    fn: Callable[..., Any],
    args: tuple[Any, ...],
) -> None:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{store}",
        rank=rank,
        world_size=world_size,
        timeout=timedelta(seconds=TIMEOUT_SECONDS / 2),
    )
    try:
        outcome = True, fn(rank, *args)
        dist.barrier()
    except BaseException:
        outcome = False, traceback.format_exc()
    # By value: torch's own pickling would pass shared memory that goes with this process.
    sender.send_bytes(pickle.dumps(outcome))
    dist.destroy_process_group()
