"""The fluid network: rates are max-min fair, flows end when they should, equal flows are one."""

from __future__ import annotations

from random import Random

import numpy as np
import pytest

from tilewise.simulation.network import FairShare, Route, fair_rates


def arrays(routes: list[Route], num_resources: int) -> tuple[np.ndarray, np.ndarray]:
    width = max(map(len, routes))
    use, weight = np.full((len(routes), width), num_resources), np.zeros((len(routes), width))
    for i, route in enumerate(routes):
        for j, (resource, w) in enumerate(route):
            use[i, j], weight[i, j] = resource, w
    return use, weight


def rates(routes: list[Route], num_resources: int, counts: list[int] | None = None) -> list[float]:
    use, weight = arrays(routes, num_resources)
    every = np.array(counts or [1] * len(routes), float)
    return fair_rates(use, weight, every, num_resources + 1).tolist()


def filled_slowly(routes: list[Route], num_resources: int, counts: list[int]) -> list[float]:
    """Progressive filling, one bottleneck at a time."""
    rate, room = [0.0] * len(routes), [1.0] * num_resources
    still = {i for i, count in enumerate(counts) if count}
    while still:
        load = [0.0] * num_resources
        for i in still:
            for resource, w in routes[i]:
                load[resource] += w * counts[i]
        levels = {r: room[r] / load[r] for r in range(num_resources) if load[r] > 1e-15}
        level = min(levels.values())
        full = {r for r in levels if levels[r] <= level * (1 + 1e-9)}
        done = {i for i in still if any(r in full for r, _ in routes[i])}
        for i in done:
            rate[i] = level
            for resource, w in routes[i]:
                room[resource] -= w * counts[i] * level
        still -= done
    return rate


def draw(random: Random) -> tuple[list[Route], int, list[int]]:
    num = random.randint(1, 8)
    routes = []
    for _ in range(random.randint(1, 20)):
        some = random.sample(range(num), random.randint(1, min(num, 4)))
        routes.append(tuple((r, random.choice((1.0, 1.0, 0.25, 2.0, 3.5))) for r in some))
    return routes, num, [random.choice((0, 1, 1, 1, 5)) for _ in routes]


@pytest.mark.parametrize("seed", range(60))
def test_rates_are_those_of_progressive_filling(seed: int):
    routes, num, counts = draw(Random(seed))
    got = rates(routes, num, counts)
    assert got == pytest.approx(filled_slowly(routes, num, counts), rel=1e-9)


@pytest.mark.parametrize("seed", range(60))
def test_every_flow_has_a_full_resource_on_which_none_is_faster(seed: int):
    routes, num, counts = draw(Random(1000 + seed))
    got = rates(routes, num, counts)
    used = [0.0] * num
    for route, rate, count in zip(routes, got, counts, strict=True):
        for resource, w in route:
            used[resource] += w * rate * count
    assert max(used) <= 1 + 1e-9
    for route, rate, count in zip(routes, got, counts, strict=True):
        fastest = {
            r: max(x for p, x, c in zip(routes, got, counts, strict=True) if c and r in dict(p))
            for r, _ in route
            if count
        }
        full = [r for r in fastest if used[r] >= 1 - 1e-9 and fastest[r] <= rate * (1 + 1e-9)]
        assert full or not count


def test_known_shares():
    """Two flows share port 0; one of them shares port 1 with a third, which takes what is left."""
    assert rates([((0, 1.0),), ((0, 1.0), (1, 0.5)), ((1, 1.0),)], 2) == [0.5, 0.5, 0.75]
    assert rates([((0, 1.0),)] * 3 + [((0, 1.0), (1, 1.0)), ((1, 1.0),)], 2) == [0.25] * 4 + [0.75]
    assert rates([((0, 4.0),)], 1) == [0.25]
    assert rates([((0, 1.0),), ((0, 1.0),)], 1, [3, 1]) == [0.25, 0.25]


def run(fluid: FairShare) -> dict[int, float]:
    ends = {}
    while fluid.next_end < np.inf:
        for flow in fluid.advance(fluid.next_end):
            ends[flow] = fluid.now
    return ends


def add(fluid: FairShare, ids: list[int], routes: list[int], amounts: list[float]) -> None:
    fluid.add(ids, np.array(routes), np.ones(len(ids), int), np.array(amounts))


def test_a_flow_speeds_up_when_another_ends():
    fluid = FairShare([((0, 1.0),)], 1)
    add(fluid, [7, 8], [0, 0], [1.0, 3.0])
    assert run(fluid) == {7: 2.0, 8: 4.0}


def test_a_flow_that_comes_later_shares_from_then_on():
    fluid = FairShare([((0, 1.0), (1, 1.0)), ((1, 1.0),)], 2)
    add(fluid, [0], [0], [2.0])
    assert fluid.advance(1.0) == [] and fluid.next_end == 2.0
    add(fluid, [1], [1], [1.0])
    assert run(fluid) == pytest.approx({0: 3.0, 1: 3.0})


def test_flows_of_one_kind_end_together():
    fluid = FairShare([((0, 1.0),)], 1)
    add(fluid, list(range(100)), [0] * 100, [0.1] * 100)
    assert len(fluid.advance(fluid.next_end)) == 100
    assert fluid.next_end == np.inf
    assert fluid.now == pytest.approx(10.0)


def test_one_flow_that_stands_for_many_takes_as_long():
    fluid = FairShare([((0, 1.0),)], 1)
    fluid.add([0, 1], np.array([0, 0]), np.array([9, 1]), np.array([0.1, 0.2]))
    assert run(fluid) == pytest.approx({0: 1.0, 1: 1.1})


def ends(routes: list[Route], num: int, flows: list[tuple[float, int, float]]) -> list[float]:
    """When each of some flows (start, route, amount) ends."""
    fluid, found, later = FairShare(routes, num), [0.0] * len(flows), sorted(range(len(flows)))
    later.sort(key=lambda flow: flows[flow][0])
    while later or fluid.next_end < np.inf:
        start = flows[later[0]][0] if later else np.inf
        now = min(start, fluid.next_end)
        for flow in fluid.advance(now):
            found[flow] = now
        while later and flows[later[0]][0] <= now:
            _, route, amount = flows[later[0]]
            fluid.add([later.pop(0)], np.array([route]), np.array([1]), np.array([amount]))
    return found


@pytest.mark.parametrize("seed", range(20))
def test_flows_end_alike_whether_islands_are_few_or_many_or_joined(
    seed: int, monkeypatch: pytest.MonkeyPatch
):
    random = Random(2000 + seed)
    routes: list[Route] = []
    num = 0
    for _ in range(random.randint(1, 4)):
        some, resources, _ = draw(random)
        routes += [tuple((num + r, w) for r, w in route) for route in some]
        num += resources
    flows = [
        (random.choice((0.0, 0.5, random.random())), random.randrange(len(routes)), random.random())
        for _ in range(60)
    ]
    found = ends(routes, num, flows)
    monkeypatch.setattr("tilewise.simulation.network.FEW", 0)
    assert ends(routes, num, flows) == pytest.approx(found, rel=1e-9)
    joined = [(*route, (num, 0.0)) for route in routes]  # by a resource that nobody fills
    assert ends(joined, num + 1, flows) == pytest.approx(found, rel=1e-9)
