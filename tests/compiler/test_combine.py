"""Results that wait until they are combined: the same answers, with fewer bytes through memory."""

from __future__ import annotations

import cProfile
import pickle
from collections.abc import Callable, Iterator
from itertools import count, product
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from conformance.oracle import assert_close, dense, draw, split
from conformance.table import STRATEGIES, plans
from support.gpu_codes import LARGE, LAYOUTS, LONG, MASKS, errors_in_bf16, plans_of_four_heads
from support.thinned import thinned

import tilewise as tw
from tilewise.compiler.code import Home
from tilewise.compiler.draft import AttendTile, Draft, Held
from tilewise.compiler.facts import WAITING_RESULTS
from tilewise.compiler.ops import Attend, Combine, Copy
from tilewise.compiler.passes import split_calls
from tilewise.compiler.passes.combine import _Combiner
from tilewise.execution import forward_backward, run
from tilewise.execution.prepare import prepare
from tilewise.plan.ir import Tile
from tilewise.plan.payload import Field
from tilewise.tiles.call_rows import CallParts, RowSelection
from tilewise.tiles.calls import KernelCall, Kind


@pytest.fixture
def wait(monkeypatch: Any) -> Callable[[int], Iterator[int]]:
    """Lets so many results wait on a CPU, and calls of any size be cut. What it returns counts the
    combinations of attentions and of gradients.
    """

    def waiting(most: int, cut: bool = False) -> Iterator[int]:
        combined = count()
        monkeypatch.setattr(forward_backward, "kernel_traits", lambda _, style: (style, most))
        for name in ("combine", "add_up"):
            function = getattr(run, name)
            monkeypatch.setattr(run, name, lambda *x, own=function: (next(combined), own(*x)))
        if cut:
            monkeypatch.setattr(split_calls, "CALL_BYTES", 0)
            monkeypatch.setattr(split_calls, "FULL_DEVICE", 0)
        return combined

    return waiting


@pytest.mark.parametrize(
    ("strategy", "mask"),
    thinned(product(STRATEGIES, MASKS), 2),
    ids=lambda x: getattr(x, "name", x),
)
def test_every_strategy_is_exact_however_many_results_wait(strategy, mask: str, wait):
    number = STRATEGIES.index(strategy) + [*MASKS].index(mask)
    for most, plan in zip((1, 2, 4, 8), plans_of(strategy, number), strict=False):
        wait(most, cut=most != 4)
        x = draw((13, 8, 4), (13, 4, 4), seed=number)
        layout = LAYOUTS[(number + most) % 3](13, 4)
        assert_close(split(x, plan, layout, MASKS[mask]), dense(x, MASKS[mask]))


def plans_of(strategy: Any, number: int) -> list[tw.Plan]:
    """Four plans of a strategy: some twice, if there are fewer."""
    chosen = plans_of_four_heads(strategy)
    return [chosen[(number + i) % len(chosen)] for i in range(4)] if chosen else []


@pytest.mark.parametrize("most", (0, 1))
@pytest.mark.parametrize("plan", (tw.ring(4), tw.mesh(4, q_tile=2), tw.attention2d(2, 2)), ids=repr)
def test_a_plan_may_let_fewer_results_wait(plan: tw.Plan, most: int, wait):
    x = draw((13, 8, 4), (13, 4, 4), seed=most)
    layout, expected = tw.zigzag(13, 4), dense(x, tw.Causal())
    wait(4, cut=True)
    lean = plan.changed(waiting_results=most)
    assert_close(split(x, lean, layout, tw.Causal()), expected)
    # of backward alone, and of forward alone
    for passes in ({"plan": plan, "backward_plan": lean}, {"plan": lean, "backward_plan": plan}):
        assert_close(split(x, layout=layout, mask=tw.Causal(), **passes), expected)


PEAK_GB = {  # of a rank, forward and backward, where at most 4, 2, 1 and 0 results of a row wait
    "mesh": ((4.08, 3.33, 3.02, 3.01), (7.50, 6.69, 5.87, 5.92)),
    "gather": ((2.70, 3.57, 3.12, 4.09), (6.33, 8.17, 7.49, 8.41)),
    "ulysses": ((1.12, 1.05, 1.09, 0.94), (2.48, 2.24, 2.09, 2.06)),
    "ring": ((1.82, 1.76, 1.62, 1.35), (3.36, 3.23, 3.16, 3.49)),
}


@pytest.mark.parametrize("name", PEAK_GB)
def test_as_many_results_wait_as_the_plan_says(name: str):
    plan = LARGE[name].plan
    for backward in (False, True):
        for most, peak in zip((4, 2, 1, 0), PEAK_GB[name][backward], strict=True):
            lean = LARGE[name]._replace(plan=plan.changed(waiting_results=most))
            code = lean.code(backward)
            waiting = [len(op.sources) for op in code.ops if isinstance(op, Combine)]
            assert max(waiting, default=0) <= most + 1 and bool(waiting) == (most > 0)
            assert code.peak_bytes == pytest.approx(peak * 1e9, abs=5.1e6)


@pytest.mark.parametrize("device", ("cpu", "cuda"))
def test_a_plan_lets_no_more_results_wait_than_the_device(device: Any):
    work, plan = tw.Workload(64, 4, 4, 16, mask=tw.Causal()), tw.ring(4)
    more = plan.changed(waiting_results=100)
    assert str(more.code(work, 0, device=device)) == str(plan.code(work, 0, device=device))


def test_a_plan_that_is_made_anew_lets_as_few_wait():
    lean = tw.mesh(8, q_tile=2, schedule="greedy").changed(waiting_results=1)
    assert lean.in_backward().waiting_results == lean.tuned(8, 2).waiting_results == 1
    work = tw.Workload(256, 8, 2, 16, mask=tw.Causal())
    forward, backward = work.resolve(lean)
    assert backward.plan.waiting_results == backward.pruned.waiting_results == 1
    assert forward.plan.waiting_results == 1
    share = prepare(work.resolve(tw.ring(2).changed(waiting_results=1)), 0)
    assert pickle.loads(pickle.dumps(share)).waiting_results == share.waiting_results == 1


def test_results_do_wait(wait):
    x = draw((16, 4, 4), (16, 4, 4), seed=0)
    combined = wait(4)
    split(x, tw.ring(4), tw.zigzag(16, 4), tw.Full())
    # Of each rank: a row's four results at once, its four dq; dk and dv with those that arrive.
    assert next(combined) == 4 * (1 + 1 + 2 * 3)


@pytest.mark.parametrize("plan", [tw.ring(4), tw.mesh(4, q_tile=2), tw.attention2d(2, 2)], ids=repr)
def test_bf16_is_as_near_as_where_nothing_waits(plan: tw.Plan, wait):
    def error(most: int) -> dict[str, float]:
        wait(most, cut=True)
        return errors_in_bf16(plan)

    before = error(0)
    for most in (1, 2, 4, 8):
        now = error(most)
        for name in ("out", "dq", "dk", "dv"):
            assert now[name] <= 1.03 * before[name], (name, most)


MOST_GB = {  # forward and backward
    "mesh": (13, 60),
    "mesh of 8 KV heads": (15.8, 33),
    "gather": (6.5, 17),
    "ulysses": (5.5, 12),
    "long ring": (18, 80),
    "ring": (3, 12),
}


@pytest.mark.parametrize("name", LARGE)
def test_a_rank_moves_few_bytes_beside_its_kernels(name: str):
    """Causal, bf16: what 0.95 of a kernel's own speed allows at 4.2 TB/s, or comes near to it."""
    for backward in (False, True):
        code = LARGE[name].code(backward)
        assert code.traffic_bytes <= MOST_GB[name][backward] * 1e9
        waiting = {len(op.sources) for op in code.ops if isinstance(op, Combine)}
        assert waiting and max(waiting) <= WAITING_RESULTS + 1
        assert not any(adds for op in code.ops if isinstance(op, Attend) for adds in op.adds)


def test_a_call_is_cut_only_where_copies_move_more():
    work = tw.Workload(LONG, 32, 32, 128, mask=tw.Causal())
    small = tw.Workload(1 << 14, 32, 32, 128, mask=tw.Causal())
    plan = tw.mesh(256, q_tile=16)
    for one, cut in ((work, True), (small, False)):
        codes = [plan.code(one, 85, device=device) for device in ("cpu", "cuda")]
        gathered = [sum(x.label.startswith("gather") for x in copies(code)) for code in codes]
        assert (gathered[1] < gathered[0]) == (codes[1].num_calls > codes[0].num_calls) == cut


def copies(code: Any) -> list[Copy[Any]]:
    return [op for op in code.ops if isinstance(op, Copy)]


def test_what_waits_is_memory_until_it_is_combined():
    work = tw.Workload(1 << 14, 8, 8, 64, mask=tw.Full())
    before, now = (tw.ring(4).code(work, 0, device=device) for device in ("cpu", "cuda"))
    result = (1 << 12) * 8 * (64 * 2 + 4)
    assert before.made_bytes == 0
    assert now.made_bytes == 4 * result  # all four wait, and are combined into the call's result


def test_twice_as_many_documents_are_twice_as_much_work(monkeypatch: pytest.MonkeyPatch):
    """Where each has pieces on all ranks, thousands of results are added to a partial."""
    profile = cProfile.Profile()
    rewrite = _Combiner.rewrite
    monkeypatch.setattr(_Combiner, "rewrite", lambda self: profile.runcall(rewrite, self))

    def calls(documents: int) -> int:
        profile.clear()
        cu_seqlens = range(0, 64 * documents + 1, 64)
        mask, layout = tw.masks.causal_document(cu_seqlens), tw.zigzag_documents(cu_seqlens, 4)
        work = tw.Workload(64 * documents, 4, 4, 16, mask=mask, layout=layout)
        tw.ulysses(4).code(work, 0, device="cuda")
        return sum(row.callcount for row in profile.getstats())

    assert calls(64) < 2.5 * calls(32)


@pytest.mark.parametrize("plan", [x for x in plans(4) if not x.replicated_queries][::7], ids=repr)
def test_the_simulator_prices_the_code_of_its_machine(plan: tw.Plan):
    work = tw.Workload(4096, 8, 8, 64, mask=tw.Causal())
    for name, device in (("h100x8", "cuda"), ("cpu", "cpu")):
        machine = tw.Machine.preset("h100x8")
        if name == "cpu":
            machine = tw.Machine(
                "cpu", 8, machine.inside, machine.between, machine.kernels, device="cpu"
            )
        simulation = tw.simulate(plan, work, machine)
        for backward, timeline in enumerate((simulation.forward, simulation.backward)):
            spans = (x for x in timeline.rank_spans(0))
            code = plan.code(work, 0, bool(backward), device=device)
            assert sum(x.traffic_bytes for x in spans) == code.traffic_bytes


def test_one_side_is_cut_while_the_other_is_a_table(monkeypatch):
    """Keys picked one by one are copied as they are; queries in two pieces are two calls."""
    monkeypatch.setattr(split_calls, "CALL_BYTES", 0)
    monkeypatch.setattr(split_calls, "FULL_DEVICE", 0)
    draft = Draft(batch=1)
    q, k = (draft.apart(name, 8, (Field(name, 4, "bfloat16"),), 1, Home.WORKSPACE) for name in "qk")
    held = ((Held(((0, 8),), (q,)),), (Held(((0, 8),), (k,)),))
    tile = AttendTile("compute", Tile((0,), (0,), 0), held, ((q,), ()))
    pieces = tuple(
        RowSelection(0, slice(at, at + 2), slice(2 * at, 2 * at + 2), slice(2 * at, 2 * at + 2))
        for at in (0, 2)
    )
    table = np.array([0, 1, 5])
    keys = (RowSelection(0, None, table, table),)
    call = KernelCall(((0, 2), (4, 6)), ((0, 2), (5, 6)), Kind.FULL)
    payload: Any = SimpleNamespace(
        whole_rows=False, backward=False, dtype="bfloat16", heads=lambda _: 1
    )
    facts: Any = SimpleNamespace(payload=payload, latent=False, combines=lambda _: True)
    parts = CallParts(call, pieces, keys, None, None)
    first, second = split_calls.split_calls(draft, facts, tile, parts)
    assert (first.call.q, second.call.q) == (((0, 2),), ((4, 6),))
    assert first.k == second.k == keys and first.call.k == second.call.k == call.k
    assert [x.block for part in (first, second) for x in part.q] == [slice(0, 2), slice(4, 6)]
    assert [x.call for part in (first, second) for x in part.q] == [None, None]
