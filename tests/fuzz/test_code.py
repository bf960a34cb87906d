"""Codes of any plan send the bytes that are counted and pass check_code; damaged ones do not."""

from __future__ import annotations

from collections.abc import Iterator
from random import Random
from typing import Any

import pytest
from hypothesis import given, reject
from hypothesis import strategies as st
from support.code_mutations import MUTATIONS, a_place_taken, sent_too_early
from support.codes import TRAITS
from support.drawn_calls import DrawnCall, calls, exact_calls
from support.fuzzing import examples

import tilewise as tw
from tilewise.compiler.code import Code
from tilewise.compiler.codegen import pass_code
from tilewise.compiler.facts import CallTraits
from tilewise.compiler.placement import Departures
from tilewise_verify.code_check import CodeError, check_code

# A buffer may lie on bytes of another of which only others are read later; and what is sent before
# a kernel call adds to it was written before, too.
MAY_DO_NO_HARM = (a_place_taken, sent_too_early)
DTYPES = ("float64", "float32", "bfloat16", "float16")


def wires() -> st.SearchStrategy[Any]:
    """Wires that need no tensor, None among them."""
    float8 = st.builds(tw.wire.Float8, st.integers(1, 20))
    plain = st.builds(tw.wire.Plain, st.sampled_from((None, *DTYPES)))
    one = float8 | plain
    return st.none() | one | st.builds(tw.wire.Wires, one, one, one)


@st.composite
def workloads(draw: st.DrawFn, call: DrawnCall) -> tw.Workload:
    return tw.Workload(
        *call.sizes,
        draw(st.sampled_from(DTYPES)),
        mask=call.mask,
        layout=call.layout,
        v_head_dim=call.v_head_dim,
        max_logit=draw(st.booleans()),
        save=draw(st.sampled_from((None, "replay", "gathered"))),
        wire=draw(wires()),
    )


def codes(plan: tw.Plan, work: tw.Workload) -> Iterator[Code]:
    for rank in range(plan.world_size):
        for backward in (False, True):
            yield plan.code(work, rank, backward)


@examples(1.5)
@given(data=st.data(), call=calls())
def test_a_code_sends_what_is_counted_and_passes_its_check(data: st.DataObject, call: DrawnCall):
    work = data.draw(workloads(call), "workload")
    volume = tw.volume(call.plan, work)
    for code in codes(call.plan, work):
        assert code.bytes_sent == volume[code.backward][code.rank]
        check_code(code)


@examples(0.5)
@given(data=st.data(), call=exact_calls())
def test_a_canonical_code_merges_nothing(data: st.DataObject, call: DrawnCall):
    work = tw.Workload(
        *call.sizes,
        data.draw(st.sampled_from(DTYPES)),
        mask=call.mask,
        layout=call.layout,
        v_head_dim=call.v_head_dim,
        max_logit=data.draw(st.booleans()),
        save=data.draw(st.sampled_from((None, "replay", "gathered"))),
        reduction="canonical",
    )
    call.plan.check_canonical(work)


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda mutation: mutation.__name__)
@examples(0.5)
@given(data=st.data(), call=calls(), seed=st.integers(0, 2**32))
def test_a_damaged_code_is_refused(data: st.DataObject, call: DrawnCall, seed: int, mutation: Any):
    """Of any transport and number of sequences at once."""
    passes = data.draw(workloads(call), "workload").resolve(call.plan)
    traits = TRAITS[data.draw(st.sampled_from(sorted(TRAITS)), "traits")]
    rank = data.draw(st.integers(0, call.plan.world_size - 1), "rank")
    backward = data.draw(st.booleans(), "backward")
    keep = passes[1].payload.saved and not backward
    shape = CallTraits(batch=data.draw(st.integers(1, 2), "batch"), keep=keep)
    code = pass_code(passes, rank, backward=backward, call=shape, traits=traits)
    departs = Departures(traits.sends_in_flight, not traits.receives_ahead)
    check_code(code, departs)
    mutant = mutation(code, Random(seed), departs)
    if mutant is None:
        reject()
    if mutation not in MAY_DO_NO_HARM:
        with pytest.raises(CodeError) as error:
            check_code(mutant, departs)
        assert -1 <= error.value.op < len(mutant.ops) and str(error.value)
