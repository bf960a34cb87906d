"""Cooperative threads: exactly one runs at a time, and yields when it waits.

Threads are kept from one run to the next: what libraries keep by thread, as cuDNN its compiled
graphs, is then made once.
"""

import os
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import copy_context
from functools import partial
from queue import SimpleQueue

# Enough for torch's deepest calls; 256 threads with the usual 8 MiB would reserve 2 GiB.
_STACK_BYTES = 4 * 2**20
_MOST_IDLE = 256  # threads that are kept
_WAITERS_SHOWN = 4


class Released(BaseException):
    """Ends a rank whose wait can never be over; no `except Exception` keeps it."""


class DeadlockError(RuntimeError):
    """Every rank waits."""


class CooperativeScheduler:
    """Lets one of n ranks run at a time, in the order in which they became able to.

    Ranks go on as long as they can, also after another has failed. When nobody can, those that
    wait are released: by Released after a failure; else they wait for each other, and that is
    the failure, unless it is explained.
    """

    def __init__(self, n: int) -> None:
        self._explain: Callable[[], Exception | None] = _not_known
        self._explained: dict[int, Exception] = {}
        self._turns = [threading.Semaphore(0) for _ in range(n)]
        self._ready = deque(range(1, n))
        self._waiting: dict[int, Callable[[], str]] = {}
        self._released: dict[int, BaseException] = {}
        self._failures: dict[int, BaseException] = {}
        self._cancelled = False
        self._turns[0].release()

    def run(
        self, body: Callable[[int], None], explain: Callable[[], Exception | None] | None = None
    ) -> None:
        """Run body(rank) on a thread per rank, once; raise what the lowest rank raised.

        Args:
            explain: says why those that wait for each other do so, as an error that each of them is
                to raise, after which they may wait again; None: it does not know.
        """
        self._explain = explain or _not_known
        jobs = [
            _Job(partial(copy_context().run, partial(self._turn, rank, body)))
            for rank in range(len(self._turns))
        ]
        threads = _POOL.take(len(jobs))
        try:
            for thread, job in zip(threads, jobs, strict=True):
                thread.jobs.put(job)
            for job in jobs:
                job.over.wait()
        except BaseException:
            self._cancel(jobs)
            raise
        finally:
            self._explain = _not_known  # its owner owns this scheduler
            over = (job.over.is_set() for job in jobs)
            _POOL.give([thread for thread, ended in zip(threads, over, strict=True) if ended])
        if self._failures:
            rank = min(self._failures)
            error = self._failures[rank]
            error.add_note(f"raised on rank {rank} of {len(jobs)}")
            raise error

    def wait(self, rank: int, reason: Callable[[], str]) -> None:
        """Yield until another rank wakes this one.

        Args:
            reason: completes "rank 3 waits ...".
        """
        self._waiting[rank] = reason
        self._pass_on()
        self._turns[rank].acquire()
        if rank in self._explained:
            raise self._explained.pop(rank)
        if rank in self._released:
            raise self._released[rank]

    def wake(self, rank: int) -> None:
        """Let a rank that waits go on when its turn comes."""
        if self._waiting.pop(rank, None) is not None:
            self._ready.append(rank)

    def _turn(self, rank: int, body: Callable[[int], None]) -> None:
        self._turns[rank].acquire()
        try:
            if not self._cancelled:
                body(rank)
        except BaseException as error:
            # What a released rank raises follows from a failure that is already known.
            if rank not in self._released:
                self._failures[rank] = error
        self._pass_on()

    def _pass_on(self) -> None:
        if self._waiting and (self._cancelled or not self._ready):
            self._release_all()
        if self._ready:
            self._turns[self._ready.popleft()].release()

    def _release_all(self) -> None:
        ranks = sorted(self._waiting)
        if not self._failures and not self._cancelled:
            error = self._explain()
            if error is not None:
                for rank in ranks:
                    self._explained[rank] = type(error)(*error.args)
                    self.wake(rank)
                return
            text = self._deadlock(ranks)
            self._released |= {rank: DeadlockError(text) for rank in ranks}
            self._failures[ranks[0]] = self._released[ranks[0]]
        for rank in ranks:
            self._released.setdefault(rank, Released())
            self.wake(rank)

    def _deadlock(self, ranks: Sequence[int]) -> str:
        waits = [f"rank {rank} waits {self._waiting[rank]()}" for rank in ranks[:_WAITERS_SHOWN]]
        if len(ranks) > _WAITERS_SHOWN:
            waits.append(f"{len(ranks) - _WAITERS_SHOWN} more ranks wait")
        ended = f"{len(self._turns) - len(ranks)} of {len(self._turns)} ranks have ended"
        return f"no rank can go on: {'; '.join(waits)}; {ended}"

    def _cancel(self, jobs: Sequence["_Job"]) -> None:
        """End all ranks at their next wait, after an interrupt."""
        self._cancelled = True
        for job in jobs:
            job.run()  # one that no thread was given
        for job in jobs:
            job.over.wait()


def _not_known() -> None:
    return None


class _Job:
    """Work of a thread for one rank; whoever comes first does it, and only once."""

    def __init__(self, work: Callable[[], object]) -> None:
        self._work: list[Callable[[], object]] = [work]
        self.over = threading.Event()

    def run(self) -> None:
        try:
            work = self._work.pop()
        except IndexError:
            return
        try:
            work()
        finally:
            del work  # it holds a rank's tensors
            self.over.set()


class _Thread:
    """A thread that does the jobs it is given, one after the other."""

    def __init__(self) -> None:
        self.jobs: SimpleQueue[_Job | None] = SimpleQueue()
        threading.Thread(target=self._run, daemon=True).start()

    def _run(self) -> None:
        while (job := self.jobs.get()) is not None:
            job.run()
            del job


class _Pool:
    """The threads that have nothing to do; the same ranks take the same ones again."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._idle: list[_Thread] = []
        os.register_at_fork(after_in_child=self.__init__)  # threads do not pass a fork

    def take(self, n: int) -> list[_Thread]:
        with self._lock:
            taken = self._idle[:n]
            del self._idle[:n]
        with _stack_size(_STACK_BYTES):
            return taken + [_Thread() for _ in range(n - len(taken))]

    def give(self, threads: Sequence[_Thread]) -> None:
        with self._lock:
            self._idle[:0] = threads
            spare = self._idle[_MOST_IDLE:]
            del self._idle[_MOST_IDLE:]
        for thread in spare:
            thread.jobs.put(None)


@contextmanager
def _stack_size(num_bytes: int) -> Iterator[None]:
    before = threading.stack_size(num_bytes)
    try:
        yield
    finally:
        threading.stack_size(before)


_POOL = _Pool()
