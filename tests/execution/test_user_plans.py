"""Plans that are not the library's own: checked before they run, wherever they run."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from conformance.oracle import error

import tilewise as tw

KV = tw.Side.KV
RANKS, NUM_TOKENS = 2, 12
LAYOUT = tw.zigzag(NUM_TOKENS, RANKS)
MASK = tw.Causal()
WORK = tw.Workload(NUM_TOKENS, num_heads=2, num_kv_heads=2, head_dim=4, mask=MASK)


def swap(fault: str = "", calls: list[int] | None = None) -> tw.Plan:
    """Two ranks exchange their keys and values, with a fault or right."""

    def script(rank: int) -> tuple:
        if calls is not None:
            calls.append(rank)
        s, other = tw.RankBuilder(rank), 1 - rank
        if fault != "not sent":
            s.send(tw.operand(KV, rank), other if fault != "to no rank" else 2)
            s.recv(tw.operand(KV, other), other)
        s.tile([rank], [rank])
        s.next()
        s.tile([rank], [other if fault != "no such shard" else 7])
        if fault == "twice":
            s.tile([rank], [other])
        s.next()
        if fault != "left there":
            s.send(tw.partial(KV, other), other)
            s.recv(tw.partial(KV, rank), other)
        return s.done()

    return tw.Plan("swap", RANKS, script=script)


def attend(plan: tw.Plan) -> torch.Tensor:
    x = torch.randn(3, NUM_TOKENS, 2, 4, dtype=torch.float64, generator=torch.manual_seed(0))

    def rank_call(rank: int, group: Any) -> torch.Tensor:
        q, k, v = (LAYOUT.shard(t, rank) for t in x)
        return tw.attention(q, k, v, plan=plan, layout=LAYOUT, mask=MASK, group=group)

    return LAYOUT.unshard(tw.loopback(plan.world_size, rank_call))


RUNS: dict[str, Callable[[tw.Plan], Any]] = {
    "attention": attend,
    "volume": lambda plan: tw.volume(plan, WORK),
    "simulate": lambda plan: tw.simulate(plan, WORK, tw.Machine.preset("h100x8")),
}
FAULTS = {
    "twice": "step 1, rank 0: q0 x kv1 was computed already",
    "not sent": "tile q0 x kv1 reads kv1: it is not there, and nobody sends it to rank 0",
    "left there": r"kv1\* is left on rank 0, away from its home, rank 1",
    "no such shard": "there is no such shard; kv shards are 0..1",
    "to no rank": "from rank 0 to rank 2 is known to one end only",
}
WRAPS: dict[str, Callable[[tw.Plan], tw.Plan]] = {
    "alone": lambda plan: plan,
    "nested": lambda plan: tw.hierarchical(plan, tw.ring(1)),
    "read": lambda plan: tw.from_json(tw.to_json(plan)),
}


@pytest.mark.parametrize("run", RUNS)
@pytest.mark.parametrize("wrap", WRAPS)
@pytest.mark.parametrize("fault", FAULTS)
def test_a_wrong_plan_is_refused_wherever_it_is_to_run(fault: str, wrap: str, run: str):
    with pytest.raises(ValueError, match=FAULTS[fault]):
        RUNS[run](WRAPS[wrap](swap(fault)))


@pytest.mark.parametrize("wrap", WRAPS)
def test_a_right_plan_runs(wrap: str):
    assert error(attend(WRAPS[wrap](swap())), attend(tw.ring(RANKS))) <= 1e-12


def test_a_plan_is_checked_once():
    calls: list[int] = []
    plan = swap(calls=calls)
    attend(plan)
    built = len(calls)
    for _ in range(3):
        attend(plan)
    assert len(calls) == built


def test_a_strategy_of_the_library_is_not_built_for_a_check():
    assert tw.volume(tw.ring(2048), tw.Workload(4096, 2, 2, 4, mask=tw.Full())).forward
    assert tw.ulysses(2, inner=tw.mesh(6, q_tile=2)).traits.proven
    assert not tw.ulysses(2, inner=swap()).traits.proven


def test_scripted_plans_of_one_name_are_told_apart():
    def other(rank: int) -> tuple:
        return tw.ring(RANKS, moves="q").rank_steps(rank)

    assert swap().fingerprint != tw.Plan("swap", RANKS, script=other).fingerprint


def test_what_the_checker_accepts_runs_unpruned_with_shards_of_no_rows():
    layout = tw.Layout(4, [[], [tw.Run(0, 4)]])
    first, *steps = tw.ring(2).steps
    kept = tuple(transfer for transfer in first.transfers if transfer.item.shard != 0)
    plan = tw.ring(2).replaced("lacks a transfer", [first._replace(transfers=kept), *steps])
    with pytest.raises(tw.PlanError, match="reads kv0: it is not there"):
        tw.check(plan, tw.Full(), layout)
