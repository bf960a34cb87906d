"""The demo's rows, its text, and the processes that it runs on."""

import os
import time
from collections.abc import Iterator

import numpy as np
import pytest
import torch

import tilewise as tw
from tilewise.expressions import STRATEGIES
from tilewise.transport.processes import START_SECONDS, RankError, gather_yields, run_ranks
from tilewise_tools import demo


@pytest.mark.parametrize("world_size", [1, 3, pytest.param(4, marks=pytest.mark.slow)])
def test_every_strategy_is_exact_and_sends_what_the_formula_says(world_size: int):
    settings = demo.Demo(world_size=world_size, num_tokens=300, head_dim=4)
    rows = list(demo.run_demo(settings))
    assert [row.strategy for row in rows] == [case.plan.name for case in demo.cases(settings)]
    assert not [row.fault for row in rows if row.fault]
    assert all(0 < row.seconds < 60 and len(row.counted) == world_size for row in rows)
    moves = {row.strategy for row in rows if max(row.counted) > 0}
    assert len(moves) == (0 if world_size == 1 else len({row.strategy for row in rows}))
    sent = {(row.strategy, row.mask): sum(row.counted) for row in rows}
    ring = tw.ring(world_size).name
    assert world_size == 1 or sent[ring, "documents"] < sent[ring, "causal"]


def test_the_demo_shows_every_strategy():
    shown = {case.plan.name.partition("(")[0] for case in demo.cases(demo.Demo())}
    assert shown == set(STRATEGIES)


@pytest.mark.parametrize("world_size", [1, 2, 3, 4, 6, 7, 12])
def test_the_demos_heads_suit_its_degrees(world_size: int):
    settings = demo.Demo(world_size=world_size, num_tokens=64)
    heads = settings.num_heads, settings.num_kv_heads, settings.head_dim
    plans = {case.plan.name: case for case in demo.cases(settings)}
    for case in plans.values():
        tw.volume(case.plan, tw.Workload(64, *heads, mask=tw.Causal(), layout=case.layout))


def row(**changes) -> demo.DemoRow:
    errors = dict.fromkeys(("out", "dq", "dk", "dv"), 1e-15)
    plain = demo.DemoRow("ring(2)", "causal", "zigzag", errors, (8, 8), (8, 8), (1, 1), 0.1)
    return plain._replace(**changes)


def test_a_row_tells_its_fault():
    assert row().fault is None
    errors = dict.fromkeys(("out", "dq", "dk"), 1e-15) | {"dv": 2e-12}
    assert row(errors=errors).fault == "ring(2), causal: error 2.0e-12 is over 1e-12"
    assert "sent (8, 9) bytes, but tw.volume says (8, 8)" in str(row(counted=(8, 9)).fault)


def test_nan_is_an_error_without_bound():
    nan, one = torch.tensor([1.0, torch.nan]), torch.ones(2)
    assert demo._error(nan, one) == torch.inf
    assert demo._error(one, one) == 0.0


@pytest.mark.parametrize("changes", [{"world_size": 0}, {"world_size": 17}, {"num_tokens": 0}])
def test_numbers_out_of_range_are_refused(changes: dict[str, int]):
    ((name, value),) = changes.items()
    with pytest.raises(ValueError, match=rf"{name} \({value}\) must be from 1 to"):
        demo.Demo(**changes).checked()


def test_documents_are_the_librarys_text_in_one_piece():
    texts = demo.documents()
    tokens, cu_seqlens = demo.pack(texts, 5000)
    assert tokens.dtype == np.uint8
    assert tokens.tobytes() == b"".join(texts)[:5000]
    assert cu_seqlens[0] == 0 and cu_seqlens[-1] == 5000
    assert all(
        len(texts[i]) == cu_seqlens[i + 1] - cu_seqlens[i] for i in range(len(cu_seqlens) - 2)
    )
    with pytest.raises(ValueError, match=r"num_tokens \(3\) must be at most 2"):
        demo.pack([b"a", b"b"], 3)


def count_up(rank: int, num_values: int) -> Iterator[tuple[int, int]]:
    for i in range(num_values):
        yield rank, i


def test_yields_of_all_ranks_arrive_in_turn():
    rows = list(gather_yields(2, count_up, (3,)))
    assert rows == [((0, i), (1, i)) for i in range(3)]


def fail_on_one(rank: int) -> int:
    if rank == 1:
        raise KeyError("this one")
    return rank


def test_a_rank_that_fails_is_told_by_its_traceback():
    with pytest.raises(RankError, match=r"rank 1: Traceback[\s\S]*KeyError: 'this one'"):
        run_ranks(2, fail_on_one)


def settle_wrongly(rank: int) -> None:
    if rank == 1:
        raise KeyError("no such host")


def test_a_rank_that_fails_before_it_connects_is_told_by_its_traceback_at_once():
    start = time.perf_counter()
    with pytest.raises(RankError, match=r"^rank 1: Traceback[\s\S]*KeyError: 'no such host'"):
        run_ranks(2, fail_on_one, settle=settle_wrongly)
    assert time.perf_counter() - start < START_SECONDS / 2


SLEEP_SECONDS = 500.0  # not waited for; what is waited for may take a minute on a busy machine


def die_or_sleep(rank: int) -> None:
    if rank == 0:
        os._exit(3)
    time.sleep(SLEEP_SECONDS)


def test_ranks_that_die_or_sleep_end_in_time():
    start = time.perf_counter()
    with pytest.raises(RankError) as caught:
        run_ranks(2, die_or_sleep, timeout_seconds=4)
    assert time.perf_counter() - start < SLEEP_SECONDS / 2
    assert "rank 0: the process ended without an answer" in str(caught.value)
    assert "rank 1: no answer within the time limit" in str(caught.value)
