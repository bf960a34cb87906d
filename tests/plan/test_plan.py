"""The plan as a value: frozen, compared by what it does, written whole or per rank."""

from __future__ import annotations

import pytest

import tilewise as tw
from tilewise.plan.builder import RankBuilder, operand, partial
from tilewise.plan.ir import (
    Item,
    Plan,
    PlanError,
    RankStep,
    Role,
    Side,
    Step,
    Tile,
    Traits,
    Transfer,
    own_shards,
)


def whole(plan: Plan, name: str = "whole") -> Plan:
    return plan.replaced(name, plan.steps)


def test_a_scripted_plan_equals_the_same_steps_written_out():
    plan = tw.mesh(6, q_tile=2)
    assert plan.scripted and not whole(plan).scripted
    assert whole(plan) == plan and hash(whole(plan)) == hash(plan)
    assert [whole(plan).rank_steps(r) for r in range(6)] == [
        (*plan.rank_steps(r), *[RankStep()] * (len(plan.steps) - len(plan.rank_steps(r))))
        for r in range(6)
    ]


def test_the_name_does_not_count():
    assert whole(tw.ring(3), "another") == tw.ring(3)
    assert len({whole(tw.ring(3), "another"), tw.ring(3)}) == 1
    assert tw.ring(3) != tw.ring(4) and tw.ring(3) != tw.ring(3, moves="q")
    assert tw.ring(3) != "ring(3, moves='kv')"


@pytest.mark.parametrize("field", ["name", "world_size", "owners", "steps", "anything"])
def test_a_plan_is_frozen(field: str):
    with pytest.raises(AttributeError):
        setattr(tw.ring(2), field, None)


def test_what_a_plan_saves_and_how_its_shards_are_cut_count():
    plan = tw.ring(2)
    cut = Plan("cut", 2, 1, plan.owners, plan.steps, cuts=((0, 4), (0, 4)))
    kept = Plan("kept", 2, 1, plan.owners, plan.steps, default_save="gathered")
    assert len({plan, cut, kept}) == 3


def test_steps_or_script_and_not_both():
    with pytest.raises(ValueError, match="either steps or script"):
        Plan("neither", 1, 1, own_shards(1))
    with pytest.raises(ValueError, match="either steps or script"):
        Plan("both", 1, 1, own_shards(1), (), script=lambda rank: ())
    with pytest.raises(ValueError, match=r"world_size \(0\) must be at least 1"):
        Plan("nobody", 0, 1, own_shards(0), ())


def test_a_script_builds_one_rank_without_the_others():
    asked = []

    def script(rank: int) -> tuple[RankStep, ...]:
        asked.append(rank)
        return tw.ring(64).rank_steps(rank)

    plan = Plan("watched", 64, 1, own_shards(64), script=script)
    plan.rank_steps(5)
    assert asked == [5]
    assert len(plan.steps) == 65 and sorted(asked[1:]) == list(range(64))


@pytest.mark.parametrize("rank", [-1, 4])
def test_there_is_no_such_rank(rank: int):
    with pytest.raises(ValueError, match=rf"rank \({rank}\) must be (from 0 to 3|at least 0)"):
        tw.ring(4).rank_steps(rank)


def test_transfers_are_kept_in_canonical_order():
    transfers = [Transfer(operand(Side.KV, s), s, 1 - s) for s in (1, 0)]
    tiles = (Tile((0,), (0,)),), (Tile((1,), (1,)),)
    plan = Plan("two", 2, 1, own_shards(2), [Step(tiles, tuple(transfers))])
    assert [transfer.src for transfer in plan.steps[0].transfers] == [0, 1]


def test_fingerprints_tell_plans_apart_and_do_not_build_a_script():
    proven = Traits(proven=True)
    unbuildable = Plan(
        "ring of anything", 4, 1, own_shards(4), script=lambda rank: 1 // 0, traits=proven
    )
    assert "ring of anything" in unbuildable.fingerprint
    pruned = [tw.prune(tw.ring(3), m, tw.contiguous(9, 3)) for m in (tw.Causal(), tw.Window(1, 0))]
    assert pruned[0].fingerprint != pruned[1].fingerprint


def test_items_are_short_and_readable():
    assert str(operand(Side.Q, 3)) == "q3"
    assert str(partial(Side.KV, 3, 2)) == "kv3/2*"
    assert str(Item(Side.Q, Role.RESULT, 0)) == "q0!"


def test_a_plan_error_is_a_value_error_that_says_where():
    error = PlanError("wrong", 2, 1, operand(Side.Q, 0))
    assert isinstance(error, ValueError)
    assert (error.step, error.rank, error.item) == (2, 1, Item(Side.Q, Role.OPERAND, 0))


def test_a_script_writes_steps_in_any_order_and_drops_empty_ones_at_the_end():
    script = RankBuilder(0)
    script.at(2).tile([0], [1])
    script.at(0).send(operand(Side.Q, 1), 1)
    script.send(operand(Side.Q, 0), 1)
    script.at(5)
    steps = script.done()
    assert [len(step.sends) for step in steps] == [2, 0, 0]
    assert [transfer.item.shard for transfer in steps[0].sends] == [0, 1]
    assert steps[2].tiles == (Tile((0,), (1,)),)
