"""The catalog of strategies: whoever goes over all strategies finds every one of them there."""

from math import isqrt

import pytest
from conformance import table

import tilewise as tw
from tilewise.expressions import read_plan
from tilewise.plan.payload import head_groups
from tilewise.planning.options import options
from tilewise.strategies import catalog
from tilewise.strategies.catalog import degrees, divisors, near_square, tile_sizes
from tilewise_tools.bench import our_strategies

LISTED = (*catalog.STRATEGIES, *catalog.MASK_AWARE)


def called(plan: tw.Plan) -> str:
    """The strategy in a plan's name."""
    return plan.name.partition("(")[0]


@pytest.mark.parametrize("n", [1, 4, 6])
def test_the_conformance_table_has_plans_of_every_strategy(n: int):
    for strategy in table.STRATEGIES:
        plans = list(strategy.plans(n))
        assert plans and {plan.world_size for plan in plans} == {n}
        assert {called(plan) for plan in plans} == {strategy.name}
    tried = [strategy.name for strategy in table.STRATEGIES]
    aware = dict.fromkeys(name.removesuffix(" of q") for name, _ in table.MASK_AWARE)
    assert [*tried, *aware] == [entry.name for entry in LISTED]


def test_the_planner_tries_every_strategy_but_those_for_decoding():
    work = tw.Workload(48, 4, 4, 8, mask=tw.Causal(), layout="contiguous")
    tried = {called(option.make()) for option in options(work, 4, 2)}
    decoding = {entry.name for entry in catalog.STRATEGIES if entry.decodes}
    assert tried == {entry.name for entry in LISTED} - decoding


def test_the_planner_makes_no_plan_that_it_does_not_try(monkeypatch: pytest.MonkeyPatch):
    def refuse(*args: object, **kwargs: object) -> None:
        raise AssertionError("a plan was made")

    work = tw.Workload(96, 8, 4, 8, mask=tw.Causal(), layout="contiguous")
    monkeypatch.setattr(tw.Plan, "__init__", refuse)
    assert len(options(work, 12, 4, hold_few=True)) > 100


def test_every_strategy_is_a_contender_by_its_name():
    assert {entry.name for entry in LISTED} <= set(our_strategies.STRATEGIES)


@pytest.mark.parametrize("entry", catalog.STRATEGIES, ids=lambda entry: entry.name)
def test_a_variant_reads_the_shards_that_its_shape_says(entry: catalog.StrategyEntry):
    for variant in entry.variants(6, kv_bytes=0.5):
        plan = variant.make()
        assert plan == read_plan(plan.name)
        tiles = [tile for step in plan.steps for rank in step.tiles for tile in rank]
        calls = [(len(tile.q), len(tile.kv)) for tile in tiles]
        if variant.shape.q:
            assert sum(q * kv for q, kv in calls) == 6 * variant.shape.q * variant.shape.kv
            assert all(
                any(q <= rows and kv <= columns for rows, columns in variant.shape.calls)
                for q, kv in calls
            )
            assert not variant.shape.at_once or len(calls) == 6


@pytest.mark.parametrize("n", [*range(1, 40), 64, 144])
def test_factors_of_a_number_of_ranks(n: int):
    a, b = near_square(n)
    assert a * b == n and not [d for d in range(a + 1, isqrt(n) + 1) if n % d == 0]
    assert divisors(n) == [d for d in range(1, n + 1) if n % d == 0]
    assert tile_sizes(n) == ([d for d in range(2, n) if n % d == 0] or [1])


@pytest.mark.parametrize("heads", [(8, 8), (16, 4), (12, 2), (7, 1)])
def test_degrees_are_those_that_the_heads_allow(heads: tuple[int, int]):
    for n in (1, 6, 8, 14, 64):
        found = degrees(n, *heads)
        assert all(head_groups(*heads, degree).groups == degree for degree in found)
        for degree in set(divisors(n)) - set(found):
            with pytest.raises(ValueError, match="degrees that work"):
                head_groups(*heads, degree)
