"""The canonical check proves what is made, and finds every change that could change a bit."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cache
from itertools import product
from random import Random
from typing import NamedTuple

import pytest
from support.canonical_mutations import CHANGES, HARMLESS
from support.codes import TRAITS

import tilewise as tw
from tilewise.compiler.canonical_check import CanonicalError, check_codes, check_moves
from tilewise.compiler.canonical_terms import Terms
from tilewise.compiler.code import Code, Copy, Merge, Table
from tilewise.compiler.codegen import CallTraits, pass_code
from tilewise.compiler.placement import Departures
from tilewise.compiler.resolved import CallShape, resolve_passes
from tilewise.compiler.row_code import row_code
from tilewise.compiler.row_moves import RowMoves
from tilewise.layouts.leaves import leaf_layouts
from tilewise.masks.base import Mask
from tilewise.plan.sums import FLOAT32
from tilewise.wires.wire import Wires

WORLD, TOKENS, HEADS, KV_HEADS, WIDTH = 4, 200, 4, 2, 8
MASK = tw.Causal() & tw.Document([0, 70, TOKENS])  # leaves of 64, and of 6, 64 and 2 tokens
PLANS = (
    tw.ring(4),
    tw.ring(4, moves="q"),
    tw.mesh(4, q_tile=2),
    tw.attention2d(2, 2),
    tw.ulysses(4),
    tw.ulysses(2, inner=tw.ring(2)),
    tw.hierarchical(tw.ring(2), tw.ring(2)),
    tw.double_ring(2, 2),
    tw.all_gather(4),
    tw.balanced_ring(4),
)
Passes = tuple[Sequence[Code], Sequence[Code]]


class Case(NamedTuple):
    """Codes of all ranks and passes, and the call that they are of."""

    codes: Passes
    call: CallShape

    def with_code(self, code: Code) -> Case:
        """This case with another code of the same rank and pass."""
        codes = [[*of_pass] for of_pass in self.codes]
        codes[code.backward][code.rank] = code
        return self._replace(codes=(codes[0], codes[1]))

    def check(self) -> None:
        check_codes(*self.codes, self.call)


def workload(**more: object) -> tw.Workload:
    given = {"dtype": "float32", "mask": MASK, "reduction": "canonical", **more}
    return tw.Workload(TOKENS, HEADS, KV_HEADS, WIDTH, **given)  # pyright: ignore


@cache
def case_of(plan: tw.Plan, dtype: str = "float32") -> Case:
    work = workload(dtype=dtype)
    codes = (
        [plan.code(work, rank, backward) for rank in range(WORLD)] for backward in (False, True)
    )
    forward, backward = codes
    return Case((forward, backward), work.call_shape(WORLD))


def mutants(name: str, plans: Sequence[tw.Plan], random: Random) -> Iterator[Case]:
    """A change of one rank's code for every plan, dtype and pass that has a place for it.

    Sums of bf16 are encoded on their way.
    """
    mutation = {**CHANGES, **HARMLESS}[name]
    for plan, dtype in product(plans, ("float32", "bfloat16")):
        case = case_of(plan, dtype)
        for of_pass in case.codes:
            changed = (mutation(code, random) for code in random.sample(of_pass, WORLD))
            code = next((code for code in changed if code is not None), None)
            if code is not None:
                yield case.with_code(code)


def is_found(case: Case) -> bool:
    try:
        case.check()
    except CanonicalError as error:
        assert str(error)
        return True
    return False


@pytest.mark.parametrize("name", CHANGES)
def test_a_planted_change_is_found(name: str):
    """Of one plan that has a place for it; test_every_planted_change_is_found is of all."""
    random = Random(name)
    plans = random.sample(PLANS, len(PLANS))
    assert is_found(next(mutants(name, plans, random)))


@pytest.mark.parametrize("name", HARMLESS)
def test_another_order_of_the_same_sums_is_accepted(name: str):
    random = Random(name)
    plans = random.sample(PLANS, len(PLANS))
    next(mutants(name, plans, random)).check()


def test_more_than_50_kinds_of_change_are_planted():
    assert len(CHANGES) >= 50


@pytest.mark.slow
@pytest.mark.parametrize("plan", PLANS, ids=lambda plan: plan.name)
def test_every_planted_change_is_found_in_every_strategy(plan: tw.Plan):
    random, planted = Random(plan.name), 0
    for _ in range(3):
        for name in CHANGES:
            for case in mutants(name, [plan], random):
                assert is_found(case), name
                planted += 1
        for name in HARMLESS:
            for case in mutants(name, [plan], random):
                case.check()
    assert planted > 150


def a_document(random: Random, tokens: int) -> Mask:
    edges = [0]
    while edges[-1] < tokens:
        edges.append(min(tokens, edges[-1] + random.choice([1, 5, 64, 65, 100, 200, 333])))
    return tw.Document(edges)


def drawn(random: Random) -> tuple[tw.Plan, tw.Workload]:
    """Any strategy, layout, mask, dtype, and number of heads."""
    n, tokens = random.randrange(1, 9), random.choice([37, 130, 300, 512])
    num_kv_heads, shared = random.choice([1, 2, 3, 4]), random.choice([1, 2, 3])
    mask = random.choice(
        (
            tw.Full(),
            tw.Causal(),
            tw.Causal() & tw.Window(random.choice([3, 64, 150]), 0),
            tw.Causal() & a_document(random, tokens),
            a_document(random, tokens) | tw.Window(1, 1),
            tw.PerHead(
                random.choice([tw.Causal(), tw.Full(), tw.Causal() & tw.Window(70, 0)])
                for _ in range(num_kv_heads)
            ),
        )
    )
    plans = [tw.ring(n), tw.ring(n, moves="q"), tw.all_gather(n), tw.balanced_ring(n)]
    for a in (a for a in range(2, n + 1) if n % a == 0):
        kinds = "greedy", "eager", "kv_first", "gather"
        plans += [tw.mesh(n, q_tile=a, schedule=kind) for kind in kinds]
        plans += [tw.double_ring(a, n // a), tw.attention2d(a, n // a)]
        plans += [tw.hierarchical(tw.ring(a), tw.ring(n // a))]
        if num_kv_heads % a == 0 or (a % num_kv_heads == 0 and num_kv_heads * shared % a == 0):
            plans += [tw.ulysses(a, inner=tw.ring(n // a)), tw.ulysses(a, inner=tw.ring(n // a))]
    rows: list[list[int]] = [[] for _ in range(n)]
    for token in range(tokens):
        rows[random.randrange(n)].append(token)
    for of_rank in rows:
        random.shuffle(of_rank)
    layout = random.choice(
        [
            *(make(tokens, n) for make in (tw.contiguous, tw.zigzag, tw.striped)),
            tw.balanced(mask, tokens, n),
            tw.Layout.from_positions(rows, tokens),
        ]
    )
    if random.random() < 0.25 and n > 1:
        plans = [tw.needed(mask, layout), tw.tiled(mask, layout)]
    work = tw.Workload(
        tokens,
        num_kv_heads * shared,
        num_kv_heads,
        random.choice([8, 16, 5]),
        random.choice(("float64", "float32", "bfloat16", "float16")),
        mask=mask,
        layout=layout,
        v_head_dim=random.choice([None, 3, 16]),
        max_logit=random.random() < 0.3,
        save=random.choice((None, "replay", "gathered")),
        reduction="canonical",
    )
    return random.choice(plans), work


@pytest.mark.parametrize("seed", range(8))
def test_the_codes_of_a_draw_are_proven(seed: int):
    plan, work = drawn(Random(seed))
    plan.check_canonical(work)


@pytest.mark.slow
@pytest.mark.parametrize("first", range(8, 408, 100))
def test_the_codes_of_many_draws_are_proven(first: int):
    for seed in range(first, first + 100):
        plan, work = drawn(Random(seed))
        plan.check_canonical(work)


def test_plans_that_see_the_mask_are_proven_though_they_cut_shards():
    layout = tw.zigzag(TOKENS, WORLD)
    for plan in (tw.needed(MASK, layout), tw.tiled(MASK, layout)):
        plan.check_canonical(workload(layout=layout))


def test_a_backward_plan_of_another_strategy_is_proven():
    tw.ring(4).check_canonical(workload(), tw.mesh(4, q_tile=2))


@pytest.mark.parametrize("traits", ["as NCCL", "as gloo"])
def test_the_codes_of_every_transport_and_batch_are_proven(traits: str):
    work, facts = workload(save="gathered"), TRAITS[traits]
    for plan in (tw.ring(4), tw.ulysses(4), tw.ulysses(2, inner=tw.ring(2))):
        passes = work.resolve(plan)
        forward, backward = (
            [
                pass_code(passes, rank, backward=x, call=CallTraits(2, keep=not x), traits=facts)
                for rank in range(WORLD)
            ]
            for x in (False, True)
        )
        departs = Departures(facts.sends_in_flight, not facts.receives_ahead)
        check_codes(forward, backward, work.call_shape(WORLD), departs=departs)


def test_codes_of_replicated_queries_and_of_keys_of_another_sequence_are_proven():
    tw.tree(4).check_canonical(workload(mask=tw.Causal()))
    mask, layout, kv_layout = tw.Full(), tw.zigzag(TOKENS, 3), tw.striped(130, 3)
    q, kv = leaf_layouts(mask, layout, kv_layout, 2)
    sizes = HEADS, KV_HEADS, WIDTH, "float32", Wires().resolved("float32")
    call = CallShape(mask, q, *sizes, kv_layout=kv, canonical=True)
    passes = resolve_passes(call, tw.ring(3))
    forward, backward = (
        [pass_code(passes, rank, backward=x) for rank in range(3)] for x in (False, True)
    )
    check_codes(forward, backward, call)


def test_the_reason_names_rank_operation_rows_and_terms():
    case = case_of(tw.ring(4))
    code = case.codes[1][1]
    merge = next(i for i, op in enumerate(code.ops) if isinstance(op, Merge))
    lacking = code._replace(ops=code.ops[:merge] + code.ops[merge + 1 :])
    with pytest.raises(CanonicalError) as error:
        case.with_code(lacking).check()
    fault, *rest = error.value.faults
    assert {fault.result, *(x.result for x in rest)} == {"dk", "dv"}
    assert (fault.rank, fault.heads) == (1, (0, 1))
    rows = case.call.layout.rows(1).tolist()
    assert set(fault.positions) <= set(rows)
    assert fault.reason.startswith("rank 1, op ") and "of backward (" in fault.reason
    assert f"that of token {rows[0]}, head 0, lacks the terms of Q tokens" in fault.reason


def test_codes_at_hand_are_checked_in_place_of_the_plans():
    plan, work = tw.ring(4), workload()
    forward, backward = ([*of_pass] for of_pass in case_of(plan).codes)
    plan.check_canonical(work, codes=(forward, backward))
    code = backward[1]
    backward[1] = code._replace(ops=tuple(op for op in code.ops if not isinstance(op, Merge)))
    with pytest.raises(CanonicalError, match="rank 1"):
        plan.check_canonical(work, codes=(forward, backward))


def test_rows_that_do_not_arrive_at_the_ranks_of_their_leaves_are_found():
    layouts = tw.striped(TOKENS, 3), tw.contiguous(TOKENS, 3)
    moves = RowMoves("rows of leaves", layouts[0], layouts[1].runs)
    codes = [row_code(moves, rank, (1, 1, 8), "float32") for rank in range(3)]
    check_moves(codes, layouts)
    code = codes[1]
    for number, op in enumerate(code.ops):
        if isinstance(op, Copy) and op.rows is not None:
            turned = op._replace(rows=Table.of(op.rows.numbers[::-1]))
            codes[1] = code._replace(ops=(*code.ops[:number], turned, *code.ops[number + 1 :]))
            with pytest.raises(CanonicalError, match="rows of rank"):
                check_moves(codes, layouts)
    assert codes[1] != code
    with pytest.raises(CanonicalError, match="rows of"):
        check_moves([codes[0], code, codes[2]], (layouts[0], tw.zigzag(TOKENS, 3)))


def test_of_a_fast_code_every_row_is_listed_with_a_reason():
    with pytest.raises(CanonicalError, match="a shape that depends on the split") as error:
        tw.ring(4).check_canonical(workload(reduction="fast"))
    for result in ("out", "lse", "dq", "dk", "dv"):
        rows = {
            x for fault in error.value.faults if fault.result == result for x in fault.positions
        }
        assert rows == set(range(TOKENS)), result


def test_a_code_of_another_layout_or_mask_is_refused():
    case = case_of(tw.ring(4))
    other = workload(layout="contiguous").call_shape(WORLD)
    with pytest.raises(CanonicalError, match="but the call"):
        case._replace(call=other).check()
    for mask in (tw.Causal(), tw.Document([0, 70, TOKENS]), MASK & tw.Window(99, 0)):
        with pytest.raises(CanonicalError):
            case._replace(call=case.call._replace(mask=mask)).check()


def test_codes_of_some_ranks_or_of_the_other_pass_are_refused():
    forward, backward = case_of(tw.ring(4)).codes
    call = case_of(tw.ring(4)).call
    for codes in ((forward[1:], backward), (backward, forward), (forward[::-1], backward)):
        with pytest.raises(ValueError, match="ranks 0 to 3 in order"):
            check_codes(*codes, call)


def test_a_sum_of_more_terms_than_its_format_holds_is_refused(monkeypatch: pytest.MonkeyPatch):
    most = FLOAT32.most_terms
    monkeypatch.setattr(Terms, "most_terms", lambda *_: most + 1)
    with pytest.raises(CanonicalError, match=f"more than {most} terms"):
        case_of(tw.ring(4)).check()
