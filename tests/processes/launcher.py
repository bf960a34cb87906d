"""Run a function on a few real processes joined by gloo, each with a time limit."""

from collections.abc import Callable
from typing import Any

from tilewise.transport.processes import RankError, run_ranks

TIMEOUT_SECONDS = 240.0
"""For what hangs; on a machine that does much else a test that takes a second may take a minute."""


def run_processes(world_size: int, fn: Callable[..., Any], *args: Any) -> list[Any]:
    """Return fn(rank, *args) of every rank, each a process whose default group is gloo.

    Args:
        fn: a function of a module, not a nested one; what it returns must pickle.
    Raises:
        AssertionError: with the traceback of every rank that failed or ran out of time.
    """
    try:
        return run_ranks(world_size, fn, *args, timeout_seconds=TIMEOUT_SECONDS)
    except RankError as error:
        raise AssertionError(str(error)) from error
