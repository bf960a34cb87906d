"""Who runs in a loopback, who is released, and what is raised."""

import gc
import threading
import time
import traceback
import weakref
from types import SimpleNamespace

import pytest
import torch

from tilewise.transport.cooperative_threads import _Pool
from tilewise.transport.loopback import LoopbackGroup, loopback
from tilewise.transport.protocol import Message


def filled(num_bytes: int, value: int) -> torch.Tensor:
    return torch.full((num_bytes,), value, dtype=torch.uint8)


def swap(group: LoopbackGroup, tensor: torch.Tensor, label: str) -> torch.Tensor:
    """Send to the next rank, return what the one before sends."""
    n = group.world_size
    got = torch.empty_like(tensor)
    group.exchange(
        [Message(tensor, (group.rank + 1) % n, label)],
        [Message(got, (group.rank - 1) % n, label)],
    ).wait()
    return got


def test_deadlock_names_ranks_steps_and_items():
    def body(rank: int, group: LoopbackGroup) -> None:
        if rank == 3:
            return
        recv = Message(filled(1, 0), (rank + 1) % 3, f"step {rank}, kv{rank + 5}")
        group.exchange([], [recv]).wait()

    with pytest.raises(RuntimeError) as caught:
        loopback(4, body)
    assert str(caught.value) == (
        "no rank can go on: rank 0 waits for step 0, kv5 from rank 1; rank 1 waits for step 1, "
        "kv6 from rank 2; rank 2 waits for step 2, kv7 from rank 0; 1 of 4 ranks have ended"
    )


def test_deadlock_names_a_send_that_nobody_takes():
    def body(rank: int, group: LoopbackGroup) -> None:
        if rank == 1:
            group.exchange([Message(filled(1, 0), 0, "step 4, q1")], [])
            group.finish()

    with pytest.raises(RuntimeError, match="rank 1 waits until rank 0 takes step 4, q1"):
        loopback(2, body)


def test_deadlock_names_a_rank_that_does_not_come_to_the_agreement():
    def body(rank: int, group: LoopbackGroup) -> None:
        if rank != 2:
            group.gather_records(filled(4, rank))

    with pytest.raises(RuntimeError, match="rank 0 waits for the agreement record of rank 2"):
        loopback(8, body)


def test_deadlock_is_raised_even_if_a_rank_swallows_it():
    def body(rank: int, group: LoopbackGroup) -> str:
        try:
            group.exchange([], [Message(filled(1, 0), 1 - rank, "step 0")]).wait()
        except RuntimeError:
            return "swallowed"
        return "arrived"

    with pytest.raises(RuntimeError, match="no rank can go on"):
        loopback(2, body)


def test_a_failing_rank_releases_the_others():
    cleaned = []

    def body(rank: int, group: LoopbackGroup) -> None:
        if rank == 5:
            raise KeyError("broken here")
        try:
            swap(group, filled(1, 0), "step 0")
        except Exception:  # a release is no Exception
            cleaned.append("swallowed")
        finally:
            cleaned.append(rank)

    with pytest.raises(KeyError, match="broken here") as caught:
        loopback(8, body)
    # Rank 6 waits for rank 5; the others have their message and go on.
    assert sorted(cleaned) == [0, 1, 2, 3, 4, 6, 7]
    frames = [frame.name for frame in traceback.extract_tb(caught.value.__traceback__)]
    assert frames[-1] == "body"
    assert caught.value.__notes__ == ["raised on rank 5 of 8"]


def test_the_lowest_rank_that_fails_is_raised_also_if_it_fails_later():
    def body(rank: int, group: LoopbackGroup) -> None:
        if rank == 2:
            raise ValueError("rank 2, at once")
        # Ranks 0 and 1 wait for each other after that, and can go on.
        group.exchange(
            [Message(filled(1, 0), 1 - rank, "step 0")], [Message(filled(1, 0), 1 - rank, "step 0")]
        ).wait()
        raise ValueError(f"rank {rank}, later")

    with pytest.raises(ValueError, match="rank 0, later"):
        loopback(3, body)


def test_errors_that_follow_from_a_release_are_not_raised():
    def body(rank: int, group: LoopbackGroup) -> None:
        if rank == 1:
            raise ValueError("the cause")
        try:
            group.exchange([], [Message(filled(1, 0), 1, "step 0")]).wait()
        finally:
            raise RuntimeError("while unwinding")

    with pytest.raises(ValueError, match="the cause"):
        loopback(2, body)


def test_exactly_one_rank_runs_at_a_time_in_a_fixed_order():
    def trace() -> list[tuple[int, int]]:
        events: list[tuple[int, int]] = []
        running: set[int] = set()

        def body(rank: int, group: LoopbackGroup) -> None:
            for step in range(4):
                assert not running
                running.add(rank)
                events.append((rank, step))
                time.sleep(0.001)  # lets any other thread that may run do so
                running.remove(rank)
                swap(group, filled(1, rank), f"step {step}")

        loopback(7, body)
        return events

    first = trace()
    assert first == trace()
    assert [rank for rank, step in first if step == 0] == list(range(7))


def test_threads_are_kept_for_the_next_call_also_of_nested_ones():
    seen = threading.local()

    def body(rank: int, group: LoopbackGroup) -> tuple[object, int, list[object]]:
        if not hasattr(seen, "token"):
            seen.token = object()
        count = seen.count = getattr(seen, "count", 0) + 1
        inner = loopback(2, lambda *_: id(threading.current_thread())) if rank == 1 else []
        return seen.token, count, inner

    first, second = loopback(3, body), loopback(3, body)
    assert [token for token, _, _ in first] == [token for token, _, _ in second]
    assert [count for _, count, _ in second] == [2, 2, 2]
    assert first[1][2] == second[1][2] and len(set(second[1][2])) == 2


def test_kept_threads_hold_nothing_of_a_rank():
    class Value:
        pass

    value = Value()
    gone = weakref.ref(value)

    def body(rank: int, group: LoopbackGroup, value=value) -> None:
        if rank:
            raise ValueError(f"rank {rank}, {value}")

    with pytest.raises(ValueError, match="rank 1"):
        loopback(2, body)
    del body, value
    gc.collect()
    assert gone() is None


def test_a_group_of_an_earlier_call_is_refused_on_the_same_thread():
    groups = loopback(2, lambda rank, group: group)

    def stale(rank: int, group: LoopbackGroup) -> None:
        groups[rank].gather_records(filled(4, rank))

    with pytest.raises(RuntimeError, match="outside of its rank"):
        loopback(2, stale)


def test_an_interrupt_ends_all_ranks_and_the_next_call_runs(monkeypatch):
    puts, ended = [], []

    def body(rank: int, group: LoopbackGroup) -> None:
        try:
            swap(group, filled(1, 0), "step 0")
        finally:
            ended.append(rank)

    def interrupt(job) -> None:
        puts.append(job)
        if len(puts) == 3:
            raise KeyboardInterrupt
        threading.Thread(target=job.run).start()

    def take(self, n):
        return [SimpleNamespace(jobs=SimpleNamespace(put=interrupt)) for _ in range(n)]

    with monkeypatch.context() as patch:
        patch.setattr(_Pool, "take", take)
        patch.setattr(_Pool, "give", lambda self, threads: None)
        with pytest.raises(KeyboardInterrupt):
            loopback(4, body)
    assert set(ended) <= {0, 1, 2, 3} and len(puts) == 3
    assert loopback(4, lambda rank, group: int(swap(group, filled(1, rank), "x"))) == [3, 0, 1, 2]
