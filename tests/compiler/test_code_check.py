"""check_code finds what harms a code: each mutation changes one thing.

What it cannot find is an addition left out, a merge or a kernel call that adds: the bytes that it
adds to were written before, and bytes do not tell how often they were added to. A send that leaves
earlier is found only if what it sends is written in between.
"""

from __future__ import annotations

from random import Random

import pytest
from support.code_mutations import MUTATIONS, a_place_taken
from support.codes import Setting, all_plans, settings_of

import tilewise as tw
from tilewise.compiler.code import Code
from tilewise.compiler.placement import Departures
from tilewise_verify.code_check import CodeError, check_code

NUM_MUTANTS = 100


def any_code(random: Random) -> tuple[Code, Setting]:
    plan = random.choice(all_plans())
    setting = random.choice(settings_of(plan))
    rank, backward = random.randrange(plan.world_size), random.random() < 0.5
    return setting.code(setting.workload().resolve(plan), rank, backward=backward), setting


@pytest.mark.parametrize("mutation", MUTATIONS)
def test_every_mutation_is_found(mutation):
    random, tried, missed = Random(0), 0, []
    while tried < NUM_MUTANTS:
        code, setting = any_code(random)
        mutant = mutation(code, random, setting.departs)
        if mutant is None:
            continue
        tried += 1
        try:
            check_code(mutant, setting.departs)
        except CodeError as error:
            assert -1 <= error.op < len(mutant.ops) and str(error)
        else:
            missed.append((setting, code.rank, code.backward))
    # A buffer may lie on bytes of another of which only others are read later.
    allowed = NUM_MUTANTS // 5 if mutation is a_place_taken else 0
    assert len(missed) <= allowed, f"{len(missed)} of {tried}: {missed}"


def test_what_leaves_later_than_the_code_was_placed_for_is_found():
    """Buffers are used again too early where a transport keeps what it sends for longer."""
    found = 0
    for plan in (tw.ring(4), tw.double_ring(2, 2), tw.mesh(4, q_tile=2)):
        for code in Setting().codes(plan):
            check_code(code, Departures(1, True))
            try:
                check_code(code, Departures(None, False))
            except CodeError as error:
                assert "while a message uses it" in str(error)
                found += 1
    assert found
