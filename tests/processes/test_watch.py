"""Ranks in different calls, and what one of them refuses, are found by all; a late one is not."""

from __future__ import annotations

import re
import time
from datetime import timedelta
from io import StringIO
from threading import Thread
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

import tilewise as tw
from processes.launcher import run_processes
from tilewise.transport import watch
from tilewise.transport.agreement import agreement_of
from tilewise.transport.lost_rank import LostRankError
from tilewise.transport.process_group import DistTransport
from tilewise.transport.resolve import transport_for

N, TOKENS, PATIENCE = 3, 24, 0.3
KNOWN = {
    "ring": (tw.ring(N), tw.Full()),
    "window": (tw.ring(N), tw.Window(9, 9)),
    "exchange": (tw.ulysses(N), tw.Full()),
    "larger exchange": (tw.ulysses(N), tw.Full()),
}


def attend(group: Any, rank: int, name: str, wrong: bool = False, **options: Any) -> torch.Tensor:
    plan, mask = KNOWN[name]
    tokens = TOKENS * (1 + name.startswith("larger"))
    layout = tw.contiguous(tokens, N)
    q, k, v = (torch.ones(layout.size(rank) + wrong, 3, 4) for _ in range(3))
    return tw.attention(q, k, v, plan=plan, layout=layout, mask=mask, group=group, **options)


def heard(rank: int, order: list[list[str]], wrong: int | None) -> list[str]:
    """What a rank hears that makes its calls after all have made each, and again afterwards."""
    group = dist.new_group()
    with mock.patch.object(watch, "PATIENCE_SECONDS", PATIENCE):
        for name in KNOWN:
            attend(group, rank, name)
        told = []
        with pytest.raises(ValueError) as caught:
            for i, name in enumerate(order[rank]):
                attend(group, rank, name, wrong == rank and i == 0)
        told.append(str(caught.value))
        with pytest.raises(ValueError) as caught:
            attend(group, rank, "ring")
        told.append(str(caught.value))
    return told


ORDERS = {
    "swapped": [["ring", "window"], ["ring", "window"], ["window", "ring"]],
    "left out": [["window", "ring"], ["ring"], ["window", "ring"]],
    "an exchange": [["exchange"], ["ring"], ["exchange"]],
    "exchanges": [["exchange"], ["larger exchange"], ["exchange"]],
}


@pytest.mark.parametrize("name", ORDERS)
def test_known_calls_in_another_order_end_on_every_rank(name: str):
    first, *others = run_processes(N, heard, ORDERS[name], None)
    assert others == [first] * (N - 1)
    assert first[0].startswith("ranks are in different calls: rank ")
    assert first[0] == first[1] and "run the same calls in the same order" in first[0]


def heard_of_another_validate(rank: int, odd: int, mode: str) -> tuple[str, float]:
    """What a rank hears of a known call that one rank alone validates otherwise, and when."""
    group = dist.new_group()
    with mock.patch.object(watch, "PATIENCE_SECONDS", PATIENCE):
        attend(group, rank, "ring")
        dist.barrier()
        began = time.monotonic()
        with pytest.raises(ValueError) as caught:
            attend(group, rank, "ring", validate=mode if rank == odd else "first")
            attend(group, rank, "window")
        return str(caught.value), time.monotonic() - began


@pytest.mark.parametrize("odd", range(N))
def test_a_rank_that_alone_validates_always_is_named_in_seconds(odd: int):
    texts, seconds = zip(*run_processes(N, heard_of_another_validate, odd, "always"), strict=True)
    (text,) = set(texts)
    assert text.startswith(f"rank {odd} compares call 2 (pass forward, plan ring(3, ")
    assert text.endswith("does not; pass the same validate on every rank")
    assert max(seconds) < 20 * PATIENCE


def heard_of_another_order(rank: int, odd: int, name: str, known: bool) -> tuple[str, float]:
    """What a rank hears where one rank uses two groups of the same ranks in another order."""
    groups = [dist.new_group() for _ in range(2)]
    with mock.patch.object(watch, "PATIENCE_SECONDS", PATIENCE):
        for group in groups if known else ():
            attend(group, rank, name)
        dist.barrier()
        began = time.monotonic()
        with pytest.raises(ValueError) as caught:
            for group in groups[:: -1 if rank == odd else 1]:
                attend(group, rank, name)
        return str(caught.value), time.monotonic() - began


@pytest.mark.parametrize(
    "odd, name, known", [(0, "ring", True), (2, "ring", False), (1, "exchange", True)]
)
def test_two_groups_in_another_order_end_on_every_rank(odd: int, name: str, known: bool):
    texts, seconds = zip(*run_processes(N, heard_of_another_order, odd, name, known), strict=True)
    (text,) = set(texts)
    assert f"rank {odd} " in text and text.endswith("groups in the same order on every rank")
    assert max(seconds) < 20 * PATIENCE


def in_two_threads(rank: int, num_groups: int, names: list[str]) -> list[str]:
    """What two threads hear, each in a group of its own, the slower one of each rank another."""
    groups, told = [dist.new_group() for _ in range(num_groups)], [""] * 2

    def call(i: int) -> None:
        try:
            for turn in range(3):
                time.sleep(4 * PATIENCE * (num_groups == 2 and turn == 1 and (rank + i) % 2))
                attend(groups[i % num_groups], rank, names[i])
            told[i] = "right"
        except ValueError as error:
            told[i] = str(error)

    with mock.patch.object(watch, "PATIENCE_SECONDS", PATIENCE):
        threads = [Thread(target=call, args=(i,)) for i in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    return told


@pytest.mark.parametrize("names", [["ring", "ring"], ["ring", "larger exchange"]])
def test_two_threads_are_right_in_groups_of_their_own_and_refused_in_one(names: list[str]):
    assert run_processes(N, in_two_threads, 2, names) == [["right", "right"]] * N
    (text,) = {x for told in run_processes(N, in_two_threads, 1, names) for x in told} - {"right"}
    assert "two threads of this rank call in one group at once; make a group for each" in text


@pytest.mark.parametrize("name", ["window", "exchange"])
def test_what_one_rank_refuses_of_a_known_call_reaches_all(name: str):
    first, *others = run_processes(N, heard, [[name]] * N, 1)
    assert others == [first] * (N - 1)
    assert first[0].startswith("rank 1: q has ")


def refused_anew(rank: int) -> list[str]:
    """A new kind, which all compare: they go on afterwards."""
    told = []
    for _ in range(2):
        with pytest.raises(ValueError) as caught:
            attend(None, rank, "ring", rank == 2)
        told.append(str(caught.value))
    attend(None, rank, "ring")
    return told


def test_what_one_rank_refuses_of_a_new_call_is_compared():
    first, *others = run_processes(N, refused_anew)
    assert others == [first] * (N - 1)
    assert all(text.startswith("rank 2: q has ") for text in first)


def late(rank: int) -> bool:
    """One rank comes late, to a comparison and to messages; others say that they wait."""
    with mock.patch.object(watch, "PATIENCE_SECONDS", PATIENCE):
        for _ in range(2):
            for name in ("ring", "exchange"):
                time.sleep(4 * PATIENCE * (rank == 1))
                attend(None, rank, name)
        dist.barrier()
        time.sleep(PATIENCE)
    assert dist.group.WORLD is not None
    store = watch.group_store(dist.group.WORLD, "calls")
    assert not store.check(["verdict"])
    return store.check([str(rank)])


def test_a_late_rank_is_waited_for():
    said = run_processes(N, late)
    assert said[0] and said[2]


def alone(rank: int, what: str, comes: bool) -> tuple[str, str]:
    """What rank 0 writes on stderr and hears, in a call to which others come late or never."""
    group, written = dist.new_group(timeout=timedelta(seconds=3)), StringIO()
    cp = tw.ContextParallel(group, num_tokens=TOKENS, strategy=tw.ring(N))
    q = torch.ones(TOKENS // N, 3, 4, requires_grad=True)
    out = cp.attention(q, q, q)
    calls = {
        "attention": lambda: cp.attention(q, q, q),
        "unshard": lambda: cp.unshard(out.detach()),
        "backward": lambda: out.sum().backward(),
    }
    with (
        mock.patch.multiple(watch, PATIENCE_SECONDS=PATIENCE, NOTICE_SECONDS=2 * PATIENCE),
        mock.patch("sys.stderr", written),
    ):
        try:
            if rank and comes:
                time.sleep(4 * PATIENCE)
            if rank == 0 or comes:
                calls[what]()
            else:
                dist.barrier(group)
            heard = "right"
        except RuntimeError as error:
            heard = str(error)
    dist.barrier()
    return written.getvalue(), heard


@pytest.mark.parametrize("comes", [True, False])
@pytest.mark.parametrize("what", ["attention", "unshard", "backward"])
def test_a_long_wait_says_in_a_line_which_ranks_are_missing(what: str, comes: bool):
    (line, heard), *others = run_processes(N, alone, what, comes)
    names = {"attention": "pass forward", "unshard": "call gather", "backward": "pass backward of"}
    assert line.startswith("tilewise: rank 0 has waited ") and line.count("\n") == 1
    missing = "ranks 1, 2, late or busy, or without this call"
    if what == "attention":  # it waits for one of them, and cannot know what the other did
        missing = "rank [12], late or busy, or without this call; rank [12], too, unless past it"
    assert f" s in call 2 ({names[what]}" in line and re.search(f"Missing: {missing}. ", line)
    if comes:
        assert [heard, *others] == ["right", *[("", "right")] * (N - 1)]
    else:
        assert (
            re.search(f"Missing: {missing}. ", heard) and "The group's timeout has ended" in heard
        )
        assert "failed before" not in heard and "crashing" not in heard


def past_it(rank: int) -> tuple[str, int]:
    """What the last rank writes and hears: the first one needs nothing of others, and goes on."""
    group, written = dist.new_group(timeout=timedelta(seconds=3)), StringIO()
    layout = tw.contiguous(TOKENS, N)
    options = {"mask": tw.Causal(), "layout": layout, "strategy": tw.ring(N)}
    cp = tw.ContextParallel(group, num_tokens=TOKENS, **options)
    q = torch.ones(TOKENS // N, 3, 4)
    cp.attention(q, q, q)
    lost = -1
    with (
        mock.patch.multiple(watch, PATIENCE_SECONDS=PATIENCE, NOTICE_SECONDS=2 * PATIENCE),
        mock.patch("sys.stderr", written),
    ):
        try:
            if rank != 1:
                cp.attention(q, q, q)
            time.sleep(20 * PATIENCE)
        except LostRankError as error:
            lost = error.rank
    dist.barrier()
    return written.getvalue(), lost


def test_a_rank_that_has_made_the_call_and_gone_on_is_not_the_missing_one():
    first, second, (line, lost) = run_processes(N, past_it)
    assert (first, second) == (("", -1), ("", -1))
    assert (
        "Missing: rank 1, late or busy, or without this call; rank 0, too, unless past it" in line
    )
    assert lost == 1


def compared(rank: int, validate: str) -> tuple[int, int]:
    """How often ranks compare in 70 calls, and how many they have counted."""
    gathered, gather = 0, DistTransport.gather_records

    def counted(self: DistTransport, record: torch.Tensor) -> list[torch.Tensor]:
        nonlocal gathered
        gathered += 1
        return gather(self, record)

    with mock.patch.object(DistTransport, "gather_records", counted):
        for _ in range(70):
            attend(None, rank, "ring", validate=validate)
    return gathered, agreement_of(transport_for(None)).state().number


@pytest.mark.parametrize("validate, times", [("first", 2), ("always", 70), ("never", 0)])
def test_ranks_compare_a_kind_once_and_again_after_many_calls(validate: str, times: int):
    assert run_processes(N, compared, validate) == [(times, 70)] * N
