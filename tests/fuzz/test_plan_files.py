"""Damaged plan files are refused, or hold a plan: whatever passes check is exact attention."""

from __future__ import annotations

import copy
import json
import tempfile
from functools import cache
from pathlib import Path
from random import Random
from typing import Any

from conformance.oracle import assert_close, dense, draw, split
from hypothesis import given
from hypothesis import strategies as st
from support.drawn_calls import DrawnCall, calls
from support.fuzzing import examples

import tilewise as tw
from tilewise.planning.candidate import load_plan

DAMAGE = (None, -1, 10**11, 1.5, "x", {}, [], True, [[]], 0, 1, 2, 3, [0], "0", [[0, 1, 2]], 1e400)
CHANGES = "01234567890,:x-[]|>*!qkv\n \"'{}eN"


def used(plan: tw.Plan, call: DrawnCall) -> None:
    """Everything that a plan from a file is good for, each by itself."""
    mask, layout = call.mask, call.layout
    work = tw.Workload(*call.sizes, mask=mask, layout=layout)
    uses = (
        lambda: tw.show(plan),
        lambda: hash(plan),
        lambda: tw.check(plan),
        lambda: tw.prune(plan, mask, layout),
        lambda: [tw.lower(plan, rank) for rank in range(plan.world_size)],
        lambda: tw.volume(plan, work),
        lambda: tw.simulate(plan, work, MACHINE),
        lambda: plan.code(work, 0),
    )
    for use in uses:
        try:
            use()
        except ValueError as error:  # PlanError is one
            assert str(error) and "Error(" not in str(error)


MACHINE = tw.Machine.preset("cpu-gloo")


def read_or_refused(text: str, read: Any) -> tw.Plan | None:
    try:
        plan = read(text)
    except ValueError as error:
        assert str(error) and "Error(" not in str(error)
        return None
    assert tw.from_json(tw.to_json(plan)) == plan == tw.parse(tw.show(plan))
    return plan


def is_right(plan: tw.Plan, call: DrawnCall) -> bool:
    """Whether a plan passes check for a call; then attention by it is exact."""
    try:
        tw.check(plan, call.mask, call.layout)
    except ValueError:
        return False
    num_tokens, num_heads, num_kv_heads, width = call.sizes
    last = min(2, num_tokens) if plan.replicated_queries else num_tokens
    x = draw((last, num_heads, width), (num_tokens, num_kv_heads, width), 0)
    positions = tw.contiguous(num_tokens, 1).positions(0)[num_tokens - last :]
    try:
        got = split(x, plan, call.layout, call.mask)
    except ValueError as error:  # for other ranks or head groups than the call's
        assert str(error)
        return False
    assert_close(got, dense(x, call.mask, positions))
    return True


@examples(2)
@given(call=calls(world_sizes=(1, 2, 3, 4)), seed=st.integers(0, 2**32), pruned=st.booleans())
def test_damaged_json_is_refused_or_a_plan_like_any_other(call: DrawnCall, seed: int, pruned: bool):
    random = Random(seed)
    plan = call.plan.pruned(call.mask, call.layout) if pruned else call.plan
    whole = json.loads(tw.to_json(plan))
    for _ in range(4):
        data = copy.deepcopy(whole)
        for _ in range(random.choice((1, 1, 2))):
            damage(data, random)
        read = read_or_refused(json.dumps(data), tw.from_json)
        if read is not None:
            used(read, call)
            is_right(read, call)


@examples(1)
@given(call=calls(world_sizes=(1, 2, 3)), seed=st.integers(0, 2**32))
def test_damaged_text_is_refused_or_a_plan_like_any_other(call: DrawnCall, seed: int):
    random, text = Random(seed), tw.show(call.plan)
    for _ in range(4):
        place = random.randrange(len(text))
        end = place + random.choice((0, 1, 1, random.randint(0, 30)))
        new = "".join(random.choice(CHANGES) for _ in range(random.choice((0, 1, 1, 3))))
        read = read_or_refused(text[:place] + new + text[end:], tw.parse)
        if read is not None:
            used(read, call)
            is_right(read, call)


def damage(data: Any, random: Random) -> None:
    """Replace, delete, double or exchange an entry, at any depth."""
    while True:
        keys = [*data] if isinstance(data, dict) else range(len(data))
        if not keys:
            return
        key = random.choice(keys)
        deeper = isinstance(data[key], dict | list) and random.random() < 0.8
        if not deeper:
            break
        data = data[key]
    match random.randrange(5):
        case 0:
            del data[key]
        case 1 if isinstance(data, list):
            data.insert(key, copy.deepcopy(random.choice(data)))
        case 2:
            other = random.choice(keys)
            data[key], data[other] = data[other], data[key]
        case 3 if type(data[key]) is int:
            data[key] += random.choice((-1, 1))
        case _:
            data[key] = copy.deepcopy(random.choice(DAMAGE))


WORK = tw.Workload(64, 4, 2, 16, mask=tw.Causal())


@cache
def candidate() -> str:
    """The file that `tilewise plan -o` writes."""
    return tw.search(WORK, MACHINE, world_size=4)[0].to_json()


@examples(2)
@given(seed=st.integers(0, 2**32))
def test_a_damaged_candidate_is_refused_or_one_like_any_other(seed: int):
    random, data = Random(seed), json.loads(candidate())
    for _ in range(random.choice((1, 1, 2))):
        damage(data, random)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "plan.json"
        path.write_text(json.dumps(data))
        for read in (tw.load_candidate, load_plan):
            try:
                found = read(path)
            except ValueError as error:
                assert str(error) and "Error(" not in str(error)
                continue
            try:
                plan = found if isinstance(found, tw.Plan) else found.plan
                own = WORK if isinstance(found, tw.Plan) else found.own_work
                tw.simulate(plan, own, MACHINE)
            except ValueError as error:
                assert str(error)
