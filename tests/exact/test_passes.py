"""A canonical call: the plans that serve it, its bytes, its codes, and what it refuses."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

import tilewise as tw
from tilewise.exact.blocks import document_edges, usual_sizes
from tilewise.exact.check import check_code
from tilewise.plan.ir import Plan

TOKENS = 1024
WORK = tw.Workload(
    num_tokens=TOKENS,
    num_heads=8,
    num_kv_heads=4,
    head_dim=64,
    dtype="float32",
    mask=tw.Causal(),
    reduction="canonical",
)
LAYOUT = tw.zigzag(TOKENS, 4)
SERVED = (
    tw.all_gather(4),
    tw.needed(tw.Causal(), LAYOUT),
    tw.ulysses(4),
    tw.ulysses(2, inner=tw.all_gather(2)),
    tw.ring(1),
)


@pytest.mark.parametrize("save", ["replay", "gathered"])
@pytest.mark.parametrize("plan", SERVED, ids=lambda plan: plan.name)
def test_volume_and_simulation_are_of_codes_that_merge_nothing(plan: Plan, save: Any):
    work = replace(WORK, save=save)
    volume, machine = tw.volume(plan, work), tw.Machine.preset("cpu-gloo")
    for backward, sent in enumerate(volume):
        codes = [plan.code(work, rank, bool(backward)) for rank in range(plan.world_size)]
        assert [code.bytes_sent for code in codes] == [*sent]
        for code in codes:
            check_code(code)
    plan.check_canonical(work)
    simulation = tw.simulate(plan, work, machine)
    assert simulation.sent_bytes == max(map(sum, zip(*volume, strict=True)))
    peaks = [
        max(plan.code(work, r, b).peak_bytes for r in range(plan.world_size)) for b in (False, True)
    ]
    assert [*simulation.pass_peak_bytes] == peaks or work.save == "gathered"
    for rank in range(plan.world_size):
        spans = [span for span in simulation.backward.rank_spans(rank) if span.lane != "call"]
        assert len(spans) == len(plan.code(work, rank, True).ops)


def test_bytes_are_those_of_gathering_keys_twice_and_queries_once():
    q, kv, row = 8 * 64 * 4, 2 * 4 * 64 * 4, 8 * 4
    full = replace(WORK, mask=tw.Full())
    others = 3 * TOKENS // 4
    forward, backward = (x[0] for x in tw.volume(tw.all_gather(4), full))
    assert (forward, backward) == (others * kv, others * (kv + 2 * q + 2 * row))
    kept = tw.volume(tw.all_gather(4), replace(full, save="gathered")).backward[0]
    assert kept == others * (2 * q + 2 * row)
    fast = replace(full, reduction="fast")
    assert tw.volume(tw.ulysses(4), full) == tw.volume(tw.ulysses(4), fast)


MERGING = (
    tw.ring(4),
    tw.ring(4, moves="q"),
    tw.mesh(4, q_tile=2),
    tw.tree(4),
    tw.tiled(tw.Causal(), LAYOUT),
    tw.ulysses(2, inner=tw.ring(2)),
    tw.hierarchical(tw.all_gather(2), tw.all_gather(2)),
)


@pytest.mark.parametrize("plan", MERGING, ids=lambda plan: plan.name)
def test_a_plan_that_merges_is_refused_by_name(plan: Plan):
    served = r"served by all_gather, needed, ulysses.* and 'auto' \(degrees: 1, 2, 4\)"
    with pytest.raises(ValueError, match=served):
        tw.volume(plan, WORK)
    with pytest.raises(ValueError, match=served):
        tw.volume(tw.all_gather(4), WORK, plan)
    assert tw.volume(plan, replace(WORK, reduction="fast"))


def test_a_degree_that_shares_kv_heads_is_refused():
    with pytest.raises(ValueError, match=r"degree of ulysses \(8\) must divide num_kv_heads \(4\)"):
        tw.volume(tw.ulysses(8), WORK)


def test_a_code_that_merges_is_found():
    fast = replace(WORK, reduction="fast")
    with pytest.raises(ValueError, match=r"rank 0, forward, op .* adds partial results"):
        check_code(tw.ring(4).code(fast, 0))
    with pytest.raises(ValueError, match="adds partial results"):
        tw.ring(4).check_canonical(fast)


def test_blocks_follow_the_document():
    for length in (1, 63, 64, 1000, 8192, 1 << 17):
        for size in usual_sizes(length, length):
            assert size & (size - 1) == 0
    edges, _ = document_edges(tw.Causal() & tw.Document([0, 100, 101, 300]), (300, 300))
    assert edges.tolist() == [0, 100, 101, 300]


def test_search_takes_plans_that_serve():
    for found in tw.search(WORK, tw.Machine.preset("cpu-gloo"), world_size=4):
        assert found.strategy.split(" x ")[-1] in ("all_gather", "needed", "ulysses")
        found.plan.check_canonical(found.own_work, found.backward_plan)


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
    "kernel 'reference' cannot serve .*its bits may depend on the split; on cpu 'cpu' can": {
        "kernel": "reference"
    },
    "a wire that rounds results": {"wire_dtype": "bfloat16"},
    "wires that round operands": {"wire": tw.wire.Float8()},
    "must be 'fast' or 'canonical'": {"reduction": "exact"},
    "no gradient of a dense bias": {"bias": torch.zeros(4, TOKENS, TOKENS, requires_grad=True)},
}


@pytest.mark.parametrize("message", REFUSED)
def test_what_would_break_the_promise_is_refused(message: str):
    with pytest.raises(ValueError, match=message):
        call(**REFUSED[message])


def test_ranks_that_ask_for_different_reductions_get_the_usual_error():
    layout = tw.striped(TOKENS, 2)

    def main(rank: int, group: Any) -> None:
        x = layout.shard(torch.randn(TOKENS, 4, 8), rank)
        reduction = ("fast", "canonical")[rank]
        given = {"plan": tw.all_gather(2), "layout": layout, "group": group, "mask": tw.Causal()}
        tw.attention(x, x, x, reduction=reduction, **given)

    with pytest.raises(ValueError, match="reduction"):
        tw.loopback(2, main)


def test_auto_takes_a_plan_that_serves():
    def main(rank: int, group: Any) -> str:
        cp = tw.ContextParallel(group, num_tokens=TOKENS, mask=tw.Causal(), reduction="canonical")
        x = cp.shard(torch.zeros(TOKENS, 4, 8))
        return cp.plan(x, x[:, :2]).name

    (name, *others) = tw.loopback(4, main)
    assert name.startswith(("all_gather", "needed", "ulysses")) and {*others} == {name}
