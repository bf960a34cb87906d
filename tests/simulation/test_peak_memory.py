"""Peak memory of a pass is the planner's figure, for every strategy.

Counted are the caller's tensors (q, k, v; in backward out, lse, dout and gradients too), operands
kept for backward, and the workspace: all that a pass holds but what kernels allocate inside.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from support.bound_passes import Case, on_ranks

import tilewise as tw
from tilewise.compiler.codegen import DEFAULT_TRAITS, CallTraits, CodeTraits, pass_code
from tilewise.compiler.resolved import ResolvedPass
from tilewise.execution.forward_backward import backward_pass, forward_pass
from tilewise.execution.workspace import Workspace
from tilewise.plan.ir import find_symmetry
from tilewise.simulation.halves import halves_of
from tilewise.simulation.peak_memory import PassMemory
from tilewise.tiles.call_rows import CallStyle

HEADS = {"GQA": (8, 4, 32), "MHA": (4, 4, 32)}
NEAR = 0.01


def plans(n: int) -> Iterator[tw.Plan]:
    half = n // 2
    yield from (tw.ring(n), tw.ring(n, moves="q"), tw.all_gather(n), tw.double_ring(2, half))
    yield tw.hierarchical(tw.ring(2), tw.ring(half, moves="q"))
    yield tw.hierarchical(tw.mesh(2, q_tile=2), tw.ring(half))
    yield from (tw.balanced_ring(n), tw.attention2d(2, half))
    yield from (tw.mesh(n, q_tile=2, schedule=name) for name in ("greedy", "eager", "gather"))
    yield tw.mesh(n, q_tile=half, schedule="kv_first")
    yield tw.mesh(n, q_tile=half, kv_bytes=1.0, backward=True)
    yield tw.mesh(n, q_tile=2, held=min(half, 3) + 2)
    yield tw.ulysses(2, inner=tw.ring(half))
    yield tw.ulysses(2, inner=tw.mesh(half, q_tile=2))
    if n == 4:
        yield from (tw.attention2d(4, 1), tw.ulysses(4))


def documents(num_tokens: int) -> tw.Mask:
    ends = [0, *(num_tokens * part // 64 for part in (3, 5, 17, 18, 40, 47)), num_tokens]
    return tw.Document(ends) & tw.Causal()


def by_head(num_tokens: int) -> tw.Mask:
    window = tw.Window(num_tokens // 3, 0)
    return tw.PerHead([tw.Causal(), tw.Full(), window, tw.Causal()])


MASKS = {
    "full": (lambda _: tw.Full(), tw.contiguous),
    "causal": (lambda _: tw.Causal(), tw.zigzag),
    "documents": (documents, tw.zigzag),
    "by head": (by_head, tw.contiguous),
}


def cases(n: int, mask_name: str) -> Iterator[tuple[tw.Plan, tw.Mask, tw.Layout]]:
    mask, make = MASKS[mask_name]
    mask, layout = mask(64 * n), make(64 * n, n)
    for plan in (*plans(n), tw.needed(mask, layout), tw.tiled(mask, layout)):
        yield plan, mask, layout


def held(
    monkeypatch: pytest.MonkeyPatch,
    plan: tw.Plan,
    mask: tw.Mask,
    layout: tw.Layout,
    **options: Any,
) -> list[tuple[tuple[int, int], tuple[int, int]]]:
    """By rank and pass: bytes held by a pass, and bytes counted."""
    asked: dict[int, list[int]] = {}
    enter = Workspace.enter

    def counted(workspace: Workspace, code: Any, num_bytes: int, *rest: Any) -> Any:
        asked.setdefault(threading.get_ident(), []).append(num_bytes)
        return enter(workspace, code, num_bytes, *rest)

    def measured(case: Case) -> tuple[tuple[int, int], tuple[int, int]]:
        problem, inputs = case.problem, (case.q, case.k, case.v)
        out, lse, kept = forward_pass(problem, case.transport, *inputs, keep=True)
        saved = *inputs, out, lse
        grads = backward_pass(problem, case.transport, saved, kept, (case.dout, None))
        forward, backward = asked.pop(threading.get_ident())
        both = sum(x.nbytes for x in (*saved, *kept))
        later = case.dout.nbytes + sum(x.nbytes for x in grads)
        told = (of_rank(problem.passes, case.transport.rank, backward=b) for b in (False, True))
        return (both + forward, both + later + backward), (*told,)  # pyright: ignore[reportReturnType]

    with monkeypatch.context() as patched:
        patched.setattr(Workspace, "enter", counted)
        return on_ranks(plan, layout, mask, measured, dtype=torch.bfloat16, **options)


def of_rank(
    passes: tuple[ResolvedPass, ResolvedPass],
    rank: int,
    *,
    backward: bool,
    traits: CodeTraits = DEFAULT_TRAITS,
) -> int:
    """Peak bytes by the rank's own code, of all its rows."""
    call = CallTraits(keep=passes[1].payload.saved and not backward)
    return pass_code(passes, rank, backward=backward, call=call, traits=traits).peak_bytes


def check(
    monkeypatch: pytest.MonkeyPatch,
    case: tuple[tw.Plan, tw.Mask, tw.Layout],
    heads: tuple[int, int, int],
    **options: Any,
) -> None:
    plan, mask, layout = case
    ranks = held(monkeypatch, plan, mask, layout, heads=heads, **options)
    work = tw.Workload(layout.num_tokens, *heads, layout=layout, mask=mask, **options)
    for backward in (False, True):
        told = PassMemory(work.resolve(plan), backward=backward).peak_bytes
        most = max(measured[backward] for measured, _ in ranks)
        assert told == pytest.approx(most, rel=NEAR), (plan, mask, options, backward)
        for measured, counted in ranks:
            assert counted[backward] == measured[backward], (plan, mask, options, backward)


@pytest.mark.parametrize(
    ("mask", "save", "part"),
    [
        ("causal", "replay", slice(0, None, 2)),
        ("full", "gathered", slice(1, None, 2)),
        pytest.param("causal", "replay", slice(1, None, 2), marks=pytest.mark.slow),
        pytest.param("full", "gathered", slice(0, None, 2), marks=pytest.mark.slow),
        pytest.param("documents", "gathered", slice(None), marks=pytest.mark.slow),
        pytest.param("documents", "replay", slice(None), marks=pytest.mark.slow),
        pytest.param("by head", "replay", slice(None), marks=pytest.mark.slow),
    ],
)
def test_peak_memory_is_the_planners_figure(mask, save, part, monkeypatch):
    for case in [*cases(4, mask)][part]:
        check(monkeypatch, case, HEADS["GQA"], save=save)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("n", "mask", "heads", "save"),
    [
        (4, "full", "MHA", "replay"),
        (4, "causal", "GQA", "gathered"),
        (8, "full", "GQA", "replay"),
        (8, "causal", "MHA", "replay"),
        (8, "causal", "GQA", "gathered"),
        (8, "documents", "GQA", "replay"),
        (16, "full", "MHA", "gathered"),
        (16, "causal", "GQA", "replay"),
        (16, "causal", "MHA", "gathered"),
    ],
)
def test_peak_memory_is_the_planners_figure_on_more_ranks(n, mask, heads, save, monkeypatch):
    for case in cases(n, mask):
        check(monkeypatch, case, HEADS[heads], save=save)


@pytest.mark.parametrize("plan", [tw.ring(4), tw.mesh(4, q_tile=2), tw.ulysses(4)], ids=repr)
def test_wire_dtype_counts(plan, monkeypatch):
    case = plan, tw.Causal(), tw.zigzag(256, 4)
    check(monkeypatch, case, HEADS["GQA"], wire_dtype="float32")


@pytest.mark.parametrize(
    ("plan", "save"),
    [(tw.ring(4), "replay"), (tw.ulysses(4), "gathered"), (tw.mesh(4, q_tile=2), "replay")],
    ids=repr,
)
def test_what_wires_are_decoded_into_counts(plan, save, monkeypatch):
    eight, layout = tw.wire.Float8(16), tw.zigzag(128, 4)
    wire = tw.wire.Wires(eight, tw.wire.Plain("float16"), partials=eight)
    check(monkeypatch, (plan, tw.Causal(), layout), HEADS["GQA"], save=save, wire=wire)


@pytest.mark.parametrize("plan", [tw.all_gather(4), tw.ulysses(4), tw.mesh(4, q_tile=2)], ids=repr)
@pytest.mark.parametrize("save", ["replay", "gathered"])
def test_the_largest_scores_are_no_gathered_operands(plan, save):
    work = tw.Workload(128, 8, 4, 16, mask=tw.Causal(), save=save)
    plain, asked = (
        PassMemory(replace(work, max_logit=asked).resolve(plan), backward=True).peak_bytes
        for asked in (False, True)
    )
    assert 0 <= asked - plain <= 4096, "two numbers a head"


@pytest.mark.parametrize("plan", [tw.ring(4, moves="q"), tw.attention2d(2, 2)], ids=repr)
def test_keys_may_have_a_layout_of_their_own(plan, monkeypatch):
    q_layout, kv_layout = tw.zigzag(256, 4), tw.striped(256, 4)
    for measured, counted in held(
        monkeypatch, plan, tw.Causal(), q_layout, kv_layout=kv_layout, heads=(4, 2, 16)
    ):
        assert counted == measured


@pytest.mark.parametrize("n", [8, 16])
def test_all_kernels_need_about_the_same(n):
    """However they want a tile cut: results that are put aside are as large as a call."""
    layout = tw.zigzag(1024 * n, n)
    work = tw.Workload(layout.num_tokens, 8, 4, 64, mask=tw.Causal(), layout=layout)
    for plan in (tw.attention2d(2, n // 2), tw.mesh(n, q_tile=4), tw.mesh(n, n // 2, "gather")):
        passes = work.resolve(plan)
        cuts = CallStyle(), CallStyle(square_causal=True), CallStyle(whole_tile=True)
        for rank in (0, n // 2, n - 1):
            told = {
                of_rank(passes, rank, backward=True, traits=DEFAULT_TRAITS._replace(cut=cut))
                for cut in cuts
            }
            assert max(told) <= 1.02 * min(told), (plan, rank)


@pytest.mark.parametrize("n", [8, pytest.param(32, marks=pytest.mark.slow)])
def test_ranks_that_are_looked_at_stand_for_all(n):
    """And a plan whose rows are those of halves holds what the pruned plan does."""
    layout = tw.zigzag(128 * n, n)
    for plan in (tw.ring(n), tw.mesh(n, q_tile=4), tw.attention2d(4, n // 4)):
        work = tw.Workload(layout.num_tokens, 8, 4, 16, mask=tw.Causal(), layout=layout)
        shifts = find_symmetry(plan).plan_shifts
        assert halves_of(plan, shifts, 128).complete
        for backward in (False, True):
            passes = work.resolve(plan)
            memory = PassMemory(passes, backward=backward)
            every = [of_rank(passes, rank, backward=backward) for rank in range(n)]
            assert memory.of_rank(n // 3) == every[n // 3]
            assert memory.peak_bytes == pytest.approx(max(every), rel=NEAR)


def test_copies_and_results_count():
    """All keys and values on one rank, in the order of their positions; dk and dv in fp32."""
    n, heads, width = 8, 4, 64
    layout = tw.contiguous(64 * n, n)
    work = tw.Workload(layout.num_tokens, heads, heads, width, layout=layout)
    unit, lse = 64 * heads * width * 2, 64 * heads * 4
    inputs, results, gathered, partial = 3 * unit, unit + lse, n * 2 * unit, 2 * unit + lse
    told = PassMemory(work.resolve(tw.all_gather(n)), backward=False).peak_bytes
    assert told == inputs + results + gathered + partial
