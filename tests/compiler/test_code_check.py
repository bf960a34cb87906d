"""check_code finds what harms a code: each mutation changes one thing.

What it cannot find is an addition left out, a merge or a kernel call that adds: the bytes that it
adds to were written before, and bytes do not tell how often they were added to. A send that leaves
earlier is found only if what it sends is written in between.
"""

from __future__ import annotations

from collections.abc import Callable
from random import Random

import pytest
from support.codes import Setting, all_plans, settings_of

import tilewise as tw
from tilewise.compiler.code import (
    Attend,
    Code,
    Copy,
    Decode,
    Encode,
    Home,
    Post,
    Wait,
)
from tilewise.compiler.code_check import CodeError, check_code
from tilewise.compiler.placement import Departures, buffer_spans

NUM_MUTANTS = 100


def ops_of(code: Code, *kinds: type) -> list[int]:
    return [number for number, op in enumerate(code.ops) if isinstance(op, kinds)]


def without(code: Code, number: int) -> Code:
    return code._replace(ops=code.ops[:number] + code.ops[number + 1 :])


def any_of(random: Random, numbers: list[int]) -> int | None:
    return random.choice(numbers) if numbers else None


def no_wait(code: Code, random: Random, departs: Departures) -> Code | None:
    number = any_of(random, ops_of(code, Wait))
    return None if number is None else without(code, number)


def two_waits(code: Code, random: Random, departs: Departures) -> Code | None:
    number = any_of(random, ops_of(code, Wait))
    if number is None:
        return None
    again = random.randint(number + 1, len(code.ops))
    return code._replace(ops=(*code.ops[:again], code.ops[number], *code.ops[again:]))


def a_late_wait(code: Code, random: Random, departs: Departures) -> Code | None:
    """After what reads what has arrived; a team's exchange is over as a whole."""
    teams = {op.handle for op in code.ops if isinstance(op, Post) and op.team}
    waits = [x for x in ops_of(code, Wait) if code.ops[x].handle not in teams]  # pyright: ignore
    number = any_of(random, waits)
    if number is None:
        return None
    wait = code.ops[number]
    assert isinstance(wait, Wait)
    buffers = {code.tensors[ref.tensor].buffer for ref in wait.touched if ref.rows is None}
    for later in range(number + 1, len(code.ops)):
        if any(code.tensors[ref.tensor].buffer in buffers for ref in code.ops[later].reads):
            ops = [*code.ops[: later + 1], wait, *code.ops[later + 1 :]]
            return without(code._replace(ops=tuple(ops)), number)
    return None


def no_post(code: Code, random: Random, departs: Departures) -> Code | None:
    receiving = [x for x in ops_of(code, Post) if code.ops[x].writes]
    number = any_of(random, receiving)
    return None if number is None else without(code, number)


def no_copy(code: Code, random: Random, departs: Departures) -> Code | None:
    number = any_of(random, ops_of(code, Copy, Encode, Decode))
    return None if number is None else without(code, number)


def no_first_result(code: Code, random: Random, departs: Departures) -> Code | None:
    """A kernel call that writes is left out."""
    found = []
    for number in ops_of(code, Attend):
        op = code.ops[number]
        assert isinstance(op, Attend)
        if any(not result.adds for result in op.results):
            found.append(number)
    number = any_of(random, found)
    return None if number is None else without(code, number)


def a_place_taken(code: Code, random: Random, departs: Departures) -> Code | None:
    """A buffer is moved to where another lies whose contents are needed at the same time."""
    spans = buffer_spans(code.tensors, code.buffers, code.ops, departs)
    pairs = [
        (one, other)
        for one, mine in enumerate(spans)
        for other, theirs in enumerate(spans)
        if one != other
        and mine
        and theirs
        and code.buffers[one].num_bytes <= code.buffers[other].num_bytes
        and mine[0].begin <= max(x.end for x in theirs)
        and theirs[0].begin < mine[0].begin < theirs[0].end
    ]
    if not pairs:
        return None
    one, other = random.choice(pairs)
    offsets = [*code.offsets]
    offsets[one] = offsets[other]
    return code._replace(offsets=tuple(offsets))


def sent_too_early(code: Code, random: Random, departs: Departures) -> Code | None:
    """A launch before the last op that writes what it sends."""
    found = []
    for number in ops_of(code, Post):
        sent = {code.tensors[ref.tensor].buffer for ref in code.ops[number].reads}
        for before in reversed(range(number)):
            if isinstance(code.ops[before], Post | Wait):
                break
            if any(code.tensors[ref.tensor].buffer in sent for ref in code.ops[before].writes):
                found.append((number, before))
                break
    if not found:
        return None
    number, before = random.choice(found)
    ops = [*code.ops]
    ops.insert(before, ops.pop(number))
    return code._replace(ops=tuple(ops))


def outside(code: Code, random: Random, departs: Departures) -> Code | None:
    numbers = [i for i, x in enumerate(code.buffers) if x.home is Home.WORKSPACE and x.num_bytes]
    number = any_of(random, numbers)
    if number is None:
        return None
    offsets = [*code.offsets]
    offsets[number] = code.num_bytes
    return code._replace(offsets=tuple(offsets))


MUTATIONS: tuple[Callable[[Code, Random, Departures], Code | None], ...] = (
    no_wait,
    two_waits,
    a_late_wait,
    no_post,
    no_copy,
    no_first_result,
    a_place_taken,
    sent_too_early,
    outside,
)


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
