"""What a canonical reduction sends, takes and refuses is known before it runs."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

import tilewise as tw
from tilewise.compiler.code import AttendLeaves, Finish, Merge
from tilewise.compiler.finished_results import finished_early
from tilewise.layouts.leaves import MOST_TERMS, leaf_edges, leaf_size
from tilewise.layouts.whole_blocks import split_blocks
from tilewise.plan import Plan, RankBuilder
from tilewise.plan.ir import RankStep, Role, Side
from tilewise.plan.payload import head_groups

TOKENS = 1024
WORK = tw.Workload(
    num_tokens=TOKENS,
    num_heads=4,
    num_kv_heads=2,
    head_dim=64,
    dtype="float32",
    mask=tw.Causal(),
    reduction="canonical",
)


def test_leaves_are_few_enough_for_sums_and_follow_the_document():
    for length in (1, 63, 64, 1000, 8192, 1 << 17, 1 << 20):
        for shared in (1, 4, 8, 32):
            size = leaf_size(length, shared)
            assert size & (size - 1) == 0
            assert -(-length // size) * shared <= max(MOST_TERMS, shared)
    mask = tw.Causal() & tw.Document([0, 100, 101, 300])
    assert leaf_edges(mask, 300, 1) == (0, 64, 100, 101, 165, 229, 293, 300)


@pytest.mark.parametrize("layout", ["contiguous", "zigzag", "striped"])
def test_volume_is_codes_and_moves(layout: Any):
    work, plan = replace(WORK, layout=layout), tw.ring(3)
    volume, moved = tw.volume(plan, work), work.leaf_bytes(plan)
    for passes, (sent, rows) in enumerate(zip(volume, moved, strict=True)):
        codes = [plan.code(work, rank, backward=bool(passes)).bytes_sent for rank in range(3)]
        assert [a - b for a, b in zip(sent, rows, strict=True)] == codes
    assert (sum(moved.forward) > 0) == bool(
        split_blocks(work.layout_for(3), leaf_edges(work.mask, TOKENS, 2))
    )


@pytest.mark.parametrize("save", ["replay", "gathered"])
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_bytes_and_memory_are_at_most_twice_those_of_fast(dtype: Any, save: Any):
    """fast's partials travel in half precision where q, k, v are of it."""
    work = replace(WORK, layout="zigzag", dtype=dtype, save=save)
    fast = replace(work, reduction="fast")
    plans = (
        tw.ring(4),
        tw.ring(4, moves="q"),
        tw.double_ring(2, 2),
        tw.attention2d(2, 2),
        tw.ulysses(4),
        tw.ulysses(2, inner=tw.ring(2)),
    )
    for plan in plans:
        sent = [sum(map(sum, tw.volume(plan, one))) for one in (work, fast)]
        assert sent[0] <= 2 * sent[1], plan.name
        for backward in (False, True):
            peaks = [plan.code(one, 0, backward=backward).peak_bytes for one in (work, fast)]
            assert peaks[0] <= 2 * peaks[1], plan.name


def test_every_merge_of_the_code_is_canonical_and_printed():
    for plan in (tw.ring(4), tw.ulysses(4), tw.tree(4)):
        for backward in (False, True):
            code = plan.code(WORK, 0, backward=backward)
            kinds = {type(op).__name__ for op in code.ops}
            assert {"AttendLeaves", "Finish"} <= kinds and "Attend" not in kinds
            assert all(op.columns is not None for op in code.ops if isinstance(op, Merge))
            assert str(code).splitlines()[-1].startswith("finish ")
            assert any(isinstance(op, AttendLeaves | Finish) for op in code.ops)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float64"])
def test_what_is_complete_when_it_leaves_travels_as_a_result(dtype: Any):
    """After Ulysses all is but gradients of KV heads that several ranks share."""
    work = replace(WORK, layout="contiguous", dtype=dtype)
    fast, machine = replace(work, reduction="fast"), tw.Machine.preset("cpu-gloo")
    plan = tw.ulysses(2)
    assert tw.volume(plan, work) == tw.volume(plan, fast)
    assert tw.simulate(plan, work, machine).sent_bytes == max(
        map(sum, zip(*tw.volume(plan, work), strict=True))
    )
    for backward in (False, True):
        code = plan.code(work, 0, backward=backward)
        assert code.bytes_sent == tw.volume(plan, work)[backward][0]
        assert {"finish q1!", *(["finish kv1!"] if backward else [])} <= set(str(code).splitlines())
    shared = [tw.volume(tw.ulysses(4), one) for one in (work, fast)]
    assert shared[0].forward == shared[1].forward
    assert min(shared[0].backward) > max(shared[1].backward)
    plan.check_canonical(work)
    tw.ulysses(4).check_canonical(work)


@pytest.mark.parametrize("plan", [tw.ring(4), tw.ulysses(4), tw.mesh(4, q_tile=2)], ids=str)
def test_simulated_time_has_what_adding_to_sums_takes(plan: Plan):
    work = replace(WORK, num_tokens=8192, layout="zigzag")
    preset = tw.Machine.preset("cpu-gloo")
    slow, quick = (replace(preset, merge_bandwidth=speed) for speed in (1e9, 1e10))
    seconds = [tw.simulate(plan, work, machine).seconds for machine in (slow, quick, preset)]
    fast = tw.simulate(plan, replace(work, reduction="fast"), slow).seconds
    assert seconds[0] > seconds[1] > seconds[2]
    assert seconds[0] > fast


def test_only_partials_that_their_home_receives_once_are_complete_before():
    def finished(plan: Plan, num_kv_heads: int = 8) -> set[tuple[Side, Role]]:
        groups = head_groups(8, num_kv_heads, plan.num_head_groups)
        steps = finished_early(plan, groups).steps
        return {x.item[:2] for step in steps for x in step.transfers if x.item.role is Role.RESULT}

    of_both = {(Side.Q, Role.RESULT), (Side.KV, Role.RESULT)}
    for plan in (tw.ring(4), tw.ring(4, moves="q"), tw.mesh(8, q_tile=2), tw.all_gather(4)):
        assert not finished(plan)
        assert finished_early(plan, head_groups(8, 8, 1)) is plan
    assert finished(tw.attention2d(4, 4))
    for plan in (tw.ulysses(4), tw.ulysses(2, inner=tw.ring(2)), tw.plan.parse(str(tw.ulysses(4)))):
        assert finished(plan) == of_both
    assert finished(tw.ulysses(4), 2) == {(Side.Q, Role.RESULT)}


def test_simulate_counts_the_moves_and_search_takes_plans_that_keep_the_promise():
    machine = tw.Machine.preset("cpu-gloo")
    striped, own = (replace(WORK, layout=name) for name in ("striped", "contiguous"))
    sent = [tw.simulate(tw.ring(4), work, machine).sent_bytes for work in (striped, own)]
    assert sent[0] == max(map(sum, zip(*tw.volume(tw.ring(4), striped), strict=True)))
    assert sent[0] > sent[1]
    for found in tw.search(replace(WORK, layout="zigzag"), machine, world_size=4):
        assert found.strategy != "tiled"
        assert not split_blocks(found.layout, leaf_edges(WORK.mask, TOKENS, 2))


def call(**options: Any) -> Any:
    x = torch.randn(TOKENS, 4, 8)
    given = {"plan": tw.ring(1), "layout": tw.contiguous(TOKENS, 1), "mask": tw.Causal()}
    return tw.attention(x, x, x, **{**given, "reduction": "canonical", **options})


class OtherKernel:
    """A kernel that nobody knows."""

    name, square_causal, whole_tile = "other", False, False

    def supports(self, *_: Any, **__: Any) -> None:
        return None

    def forward(self, *_: Any) -> Any:
        raise AssertionError

    backward = forward


REFUSED = {
    "kernel 'other' cannot serve": {"kernel": OtherKernel()},
    "a wire that rounds partial": {"wire_dtype": "bfloat16"},
    "wires that round operands": {"wire": tw.wire.Float8()},
    "must be": {"reduction": "exact"},
}


@pytest.mark.parametrize("message", REFUSED)
def test_what_would_break_the_promise_is_refused(message: str):
    with pytest.raises(ValueError, match=message):
        call(**REFUSED[message])


def test_a_dense_bias_that_learns_is_refused():
    bias = torch.zeros(4, TOKENS, TOKENS, requires_grad=True)
    with pytest.raises(ValueError, match="no gradient of a dense bias"):
        call(bias=bias)


def test_a_plan_that_splits_leaves_is_refused():
    def script(rank: int) -> tuple[RankStep, ...]:
        steps = RankBuilder(rank)
        steps.tile((0, 1), (0, 1))
        return steps.done()

    owners, cuts = (((0,), (0,)), ((0,), (0,))), ((0, 100), (100, TOKENS))
    plan = Plan("parts", 1, 1, owners, script=script, cuts=cuts)
    with pytest.raises(ValueError, match="parts splits the q leaf of tokens 0 to 127"):
        tw.volume(plan, replace(WORK, layout=tw.contiguous(TOKENS, 1)))


def test_ranks_that_ask_for_different_reductions_get_the_usual_error():
    layout = tw.striped(TOKENS, 2)

    def main(rank: int, group: Any) -> None:
        x = layout.shard(torch.randn(TOKENS, 4, 8), rank)
        reduction = ("fast", "canonical")[rank]
        given = {"plan": tw.ring(2), "layout": layout, "group": group, "mask": tw.Causal()}
        tw.attention(x, x, x, reduction=reduction, **given)

    with pytest.raises(ValueError, match="reduction"):
        tw.loopback(2, main)
