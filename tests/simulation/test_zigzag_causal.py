"""Causal zigzag by relabelled programs: the rows, seconds and bytes of every rank's own program."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.described import MACHINES, workload

import tilewise as tw
from tilewise.plan.ir import Plan, RankStep, find_symmetry
from tilewise.plan.shifts import Symmetry
from tilewise.simulation import simulator
from tilewise.simulation.halves import Halves
from tilewise.simulation.machine import Machine
from tilewise.simulation.simulator import MOST_MESSAGES, num_messages, simulate, simulate_pass
from tilewise.strategies.mesh import SCHEDULES

CAUSAL = tw.Causal()


def divisors(n: int) -> list[int]:
    return [d for d in range(1, n + 1) if n % d == 0]


@st.composite
def plans(draw: st.DrawFn, world_size: int) -> Plan:
    """Any strategy of the library for so many ranks, most of them in a split by heads."""
    degree = draw(st.sampled_from([d for d in divisors(world_size) if d in (1, 2, 4, 8)]))
    n = world_size // degree
    some = draw(st.sampled_from(divisors(n)))
    makes: dict[str, Callable[[], Plan]] = {
        "ring": lambda: tw.ring(n, moves=draw(st.sampled_from(("kv", "q")))),
        "all_gather": lambda: tw.all_gather(n),
        "double_ring": lambda: tw.double_ring(n // some, some),
        "attention2d": lambda: tw.attention2d(some, n // some),
        "mesh": lambda: tw.mesh(n, q_tile=some, schedule=draw(st.sampled_from(SCHEDULES))),
        "backward": lambda: tw.mesh(n, q_tile=some, backward=True, kv_bytes=0.5),
        "hierarchical": lambda: tw.hierarchical(tw.ring(n // some), tw.mesh(some, q_tile=some)),
    }
    plan = makes[draw(st.sampled_from(sorted(makes)))]()
    return plan if degree == 1 else tw.ulysses(degree, inner=plan)


def check(plan: Plan, work: tw.Workload, machine: Machine) -> None:
    for backward in (False, True):
        (fast, symmetry), (slow, _) = (
            simulate_pass(plan, work, machine, backward, exact) for exact in (None, True)
        )
        assert symmetry.members == 1
        assert fast.seconds == pytest.approx(slow.seconds, rel=1e-9)
        for mine, theirs in zip(fast.ranks, slow.ranks, strict=True):
            assert mine.bytes_by_link == theirs.bytes_by_link, (plan, mine.rank)
            assert mine.compute_seconds == pytest.approx(theirs.compute_seconds, rel=1e-9)
            assert mine.exposed_seconds == pytest.approx(
                theirs.exposed_seconds, rel=1e-7, abs=1e-9 * slow.seconds
            )


def draws(sizes: list[int]) -> st.SearchStrategy[Plan]:
    return st.sampled_from(sizes).flatmap(lambda n: plans(n))


@settings(deadline=None, max_examples=12, derandomize=True)
@given(
    draws([2, 6, 8, 12, 16]),
    st.sampled_from(sorted(MACHINES)),
    st.sampled_from((1, 2, 8)),
    st.sampled_from(("replay", "gathered")),
)
def test_every_rank_does_what_its_own_pruned_program_does(
    plan: Plan, name: str, num_kv_heads: int, save: str
):
    work = workload(plan.world_size, num_kv_heads=num_kv_heads, mask=CAUSAL, save=save)
    check(plan, work, MACHINES[name])


@pytest.mark.slow
@settings(deadline=None, max_examples=5, derandomize=True)
@given(draws([40, 64]), st.sampled_from(sorted(MACHINES)))
def test_every_rank_of_many_does_what_its_own_pruned_program_does(plan: Plan, name: str):
    check(plan, workload(plan.world_size, num_kv_heads=2, mask=CAUSAL), MACHINES[name])


@settings(deadline=None, max_examples=15, derandomize=True)
@given(draws([4, 6, 16, 24]))
def test_the_rows_of_transfers_are_those_that_pruning_leaves(plan: Plan):
    n = plan.world_size
    shifts = find_symmetry(plan).plan_shifts
    halves = Halves(plan, shifts, 8)
    pruned = tw.prune(plan, CAUSAL, tw.zigzag(8 * n, n))
    dropped = [len(x.transfers) for x in pruned.steps] != [len(x.transfers) for x in plan.steps]
    assert halves.complete or dropped
    if not halves.complete:
        return
    found = halves.pruned(plan)
    busy = [k for k, step in enumerate(plan.steps) if step.transfers or any(step.tiles)]
    for rank in range(n):
        steps = dict(enumerate(found.rank_steps(rank)))
        for place, number in enumerate(busy):
            mine = [x.rows is None for x in steps.get(number, RankStep()).sends]
            kept = [x.rows is None for x in pruned.rank_steps(rank)[place].sends]
            assert sorted(kept) == sorted(mine), (plan, rank, number)


def test_so_many_messages_are_replayed_that_it_takes_seconds_and_no_more():
    work = workload(128, 2, num_kv_heads=8, mask=CAUSAL)
    few, many = tw.mesh(128, q_tile=8), tw.ring(384)
    assert num_messages(few) == 128 * 2 * (7 + 15)
    assert num_messages(many) == 384 * 2 * 383 > MOST_MESSAGES
    exact, rough = (simulate(few, work, MACHINES["nodes"], exact=e) for e in (None, False))
    assert exact.symmetries[0].members == 1 < rough.symmetries[0].members
    found = simulate(many, workload(384, 2, mask=CAUSAL), MACHINES["nodes"])
    assert found.symmetries[0].members > 1


TEAMS = {
    "mesh": tw.ulysses(8, inner=tw.mesh(16, q_tile=4)),
    "ring": tw.ulysses(4, inner=tw.ring(24)),
    "across nodes": tw.ulysses(16, inner=tw.ring(8)),
}


@pytest.mark.parametrize("name", sorted(TEAMS))
def test_one_rank_of_a_team_stands_for_all_of_them(name: str, monkeypatch: pytest.MonkeyPatch):
    plan, machine = TEAMS[name], tw.Machine.preset("h100x8")
    work = tw.Workload(32 * plan.world_size, 16, 16, 64, mask=CAUSAL)
    few, symmetry = simulate_pass(plan, work, machine, backward=True)
    assert symmetry.members == plan.num_head_groups
    monkeypatch.setattr(simulator, "_among_models", lambda symmetry, _: Symmetry(plan.world_size))
    every, _ = simulate_pass(plan, work, machine, backward=True)
    assert few.seconds == pytest.approx(every.seconds, rel=1e-12)
    stands_for = {use.rank: use for use in few.ranks}
    for use in every.ranks:
        mine = stands_for[symmetry.representative(use.rank)]
        assert mine.bytes_by_link == use.bytes_by_link
        assert mine.exposed_seconds == pytest.approx(use.exposed_seconds, abs=1e-9 * few.seconds)


def test_a_plan_with_needless_transfers_is_pruned_rank_by_rank():
    plan = tw.ulysses(2, inner=tw.attention2d(3, 4))
    assert not Halves(plan, find_symmetry(plan).plan_shifts, 8).complete
    check(plan, workload(24, num_kv_heads=2, mask=CAUSAL), MACHINES["nodes"])
