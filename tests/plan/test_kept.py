"""What is derived from a plan is kept beside its function, for as long as that plan lives."""

import gc
import threading
import weakref

import pytest

import tilewise as tw
from tilewise.plan.ir import Plan, own_shards
from tilewise.plan.kept import kept_with_plan


def counted(keep: int = 2, **options):
    """A kept function, and the arguments with which it was computed."""
    computed: list[object] = []

    @kept_with_plan(keep, **options)
    def derive(plan: Plan, argument: object) -> list[object]:
        computed.append(argument)
        return [argument]

    return derive, computed


def test_the_most_recent_arguments_stay():
    plan, (derive, computed), (other, _) = tw.ring(2), counted(), counted(1)
    for argument in "abaca":
        assert derive(plan, argument) == [argument]
    for number in range(9):  # another function drives nothing out
        other(plan, number)
    assert derive(plan, "a") is derive(plan, "a")
    assert computed == ["a", "b", "c"]
    derive(plan, "b")
    assert computed == ["a", "b", "c", "b"]


def test_every_rank_may_keep_as_many():
    plan, (derive, computed) = tw.ring(3), counted(2, each_rank=True)
    for number in [*range(6), *range(6)]:
        derive(plan, number)
    assert computed == [*range(6)]


def test_equal_plans_share_nothing_and_no_plan_is_hashed():
    def script(rank: int):
        raise AssertionError("built the steps")

    derive, computed = counted()
    plans = [Plan("unbuildable", 4, 1, own_shards(4), script=script) for _ in range(2)]
    assert derive(plans[0], 1) is not derive(plans[1], 1)
    assert computed == [1, 1]


def test_values_go_with_their_plan_at_once():
    class Value:
        pass

    @kept_with_plan()
    def derive(plan: Plan) -> Value:
        return Value()

    gc.disable()
    try:
        plan = tw.ring(2)
        value = weakref.ref(derive(plan))
        assert value() is derive(plan)
        del plan
        assert value() is None
    finally:
        gc.enable()


def test_an_error_is_not_kept():
    tries: list[int] = []

    @kept_with_plan()
    def derive(plan: Plan) -> int:
        tries.append(len(tries))
        if len(tries) == 1:
            raise ValueError("not yet")
        return 7

    plan = tw.ring(2)
    with pytest.raises(ValueError, match="not yet"):
        derive(plan)
    assert derive(plan) == derive(plan) == 7 and tries == [0, 1]


def test_threads_get_one_value():
    together = threading.Barrier(8)

    @kept_with_plan()
    def derive(plan: Plan) -> object:
        together.wait()  # all are building
        return object()

    plan, found = tw.ring(2), []
    threads = [threading.Thread(target=lambda: found.append(derive(plan))) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 8 and len(set(map(id, found))) == 1
