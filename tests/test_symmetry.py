"""Ranks that are alike: found where they are, simulated and counted as every one by itself."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from conformance.table import plans
from described import MACHINES, machine, workload

import tilewise as tw
from tilewise.machine import Link, Machine
from tilewise.plan import Plan
from tilewise.simulator import Simulation, simulate
from tilewise.symmetry import find_symmetry


def seen(found: Simulation, rank: int) -> list:
    """What a rank did, without who stands for it."""
    return [use._replace(rank=0, members=0) for use in found.use(rank)]


@pytest.mark.parametrize("name", MACHINES)
@pytest.mark.parametrize("n", (4, 12))
def test_a_class_of_ranks_does_what_every_one_of_them_does(n: int, name: str):
    fewer = 0
    for plan in plans(n, "tree", "balanced_ring"):
        if "balanced" in plan.name:
            continue
        work = workload(n, num_kv_heads=24, num_heads=48, save=None)
        try:
            work.payload(plan, False)
        except ValueError:
            continue
        every = simulate(plan, work, MACHINES[name], exact=True)
        found = simulate(plan, work, MACHINES[name])
        fewer += found.symmetries[0].num_classes < n
        assert found.forward_seconds == pytest.approx(every.forward_seconds, rel=1e-6)
        assert found.backward_seconds == pytest.approx(every.backward_seconds, rel=1e-6)
        assert found.peak_bytes == every.peak_bytes, plan
        assert found.bytes_by_link == every.bytes_by_link
        assert found.total_bytes_by_link == every.total_bytes_by_link
        for rank in range(n):
            for mine, theirs in zip(seen(found, rank), seen(every, rank), strict=True):
                assert mine.compute_seconds == pytest.approx(theirs.compute_seconds, rel=1e-6)
                assert mine.bytes_by_link == theirs.bytes_by_link, (plan, rank)
                assert mine.exposed_seconds == pytest.approx(
                    theirs.exposed_seconds, rel=1e-5, abs=1e-6 * every.seconds
                )
    assert fewer or (name == "odd" and n % 3)


def test_causal_ranks_taken_as_alike_are_close_to_every_rank_by_itself():
    work = workload(32, num_kv_heads=4, mask=tw.Causal())
    cluster = machine(1e9, 1e12, node_size=4, nics=4, inside=Link(8e9))
    for plan in (tw.ring(32), tw.mesh(32, q_tile=4), tw.double_ring(8, 4), tw.all_gather(32)):
        found = simulate(plan, work, cluster)
        every = simulate(plan, work, cluster, exact=True)
        assert found.symmetries[0].num_classes < 32
        assert found.seconds == pytest.approx(every.seconds, rel=0.15), plan
        assert found.compute_seconds == pytest.approx(every.compute_seconds)


def test_classes_are_found_and_false_ones_are_not():
    assert find_symmetry(tw.ring(64)).num_classes == 1
    assert find_symmetry(tw.ring(64), (8,)).num_classes == 8
    assert find_symmetry(tw.ring(64), (6,)).num_classes == 64
    assert find_symmetry(tw.mesh(64, q_tile=8), (8,)).num_classes == 1
    assert find_symmetry(tw.mesh(64, q_tile=8), (2, 8)).num_classes == 2
    assert find_symmetry(tw.mesh(64, q_tile=16), (8,)).num_classes == 8
    assert find_symmetry(tw.ulysses(8, inner=tw.mesh(32, q_tile=4)), (8,)).num_classes == 1
    assert find_symmetry(tw.balanced_ring(16)).num_classes == 16
    assert find_symmetry(tw.needed(tw.Causal(), tw.zigzag(64, 8))).num_classes == 8


BIG: tuple[tuple[Callable[[], Plan], float, float, int], ...] = (
    (lambda: tw.ring(4096), 0, 4095, 1),
    (lambda: tw.all_gather(4096), 0, 4095, 1),
    (lambda: tw.double_ring(512, 8), 0, 4095, 1),
    (lambda: tw.mesh(4096, q_tile=64), 63, 63, 1),
    (lambda: tw.ulysses(8, inner=tw.mesh(512, q_tile=16)), 7 / 8 + 15, 7 / 8 + 31, 8),
    (lambda: tw.ulysses(64, inner=tw.ring(64)), 63 / 64, 63 / 64 + 63, 64),
)


@pytest.mark.parametrize(("make", "x", "y", "degree"), BIG)
def test_volumes_and_simulated_bytes_at_4096_ranks_are_the_closed_forms(
    make: Callable[[], Plan], x: float, y: float, degree: int
):
    plan, cluster = make(), Machine.preset("h100x8")
    for heads, wire in ((64, "bfloat16"), (8, "float32")):
        work = tw.Workload(4096 * 64, 64, heads, 32, wire_dtype=wire, save="replay")
        u, l, w = 64 * 64 * 32 * 2, 64 * 64 * 4, 2 if wire == "float32" else 1  # noqa: E741
        rho = max(heads, degree) / 64
        forward = x * (u + w * u + l) + y * 2 * rho * u
        backward = x * (2 * u + 2 * l + w * u) + y * 2 * rho * u * (1 + w)
        sent = tw.volume(plan, work)
        assert {*sent.forward} == {forward} and {*sent.backward} == {backward}
    if "ring(4096" not in plan.name:
        found = simulate(plan, work, cluster)
        assert sum(found.bytes_by_link.values()) == forward + backward


@pytest.mark.parametrize("n", (8, 16, 128, 256, 1024))
def test_volumes_are_the_closed_forms_in_between(n: int):
    """x and y hops of u and 2 u, lse with the partials, as in test_volume.py up to 64 ranks."""
    work = tw.Workload(n * 8, 32, 32, 16, layout="contiguous", save="replay")
    u, l = 8 * 32 * 16 * 2, 8 * 32 * 4  # noqa: E741
    hops = [
        (tw.ring(n), 0, n - 1),
        (tw.ring(n, moves="q"), n - 1, 0),
        (tw.all_gather(n), 0, n - 1),
        (tw.double_ring(n // 8, 8), 0, n - 1),
        (tw.mesh(n, q_tile=8, schedule="kv_first"), 7, n // 8 - 1),
        (tw.ulysses(8, inner=tw.ring(n // 8)), 7 / 8, 7 / 8 + n // 8 - 1),
        (tw.ulysses(4, inner=tw.mesh(n // 4, q_tile=2)), 3 / 4 + 1, 3 / 4 + n // 8 - 1),
    ]
    for plan, x, y in hops:
        sent = tw.volume(plan, work)
        assert {*sent.forward} == {x * (2 * u + l) + y * 2 * u}, plan
        assert {*sent.backward} == {x * (3 * u + 2 * l) + y * 4 * u}, plan


@pytest.mark.parametrize("n", (8, 32, 128, 512))
def test_volumes_of_uneven_shards_are_those_of_every_rank(n: int):
    """Relabelled hops weigh what the relabelled shards have."""
    work = tw.Workload(5 * n + 3, 8, 8, 16, "float32", layout="contiguous", save="replay")
    sizes = work.layout_for(n).sizes
    for plan in (tw.ring(n), tw.all_gather(n)):
        sent = tw.volume(plan, work)
        row = 2 * 8 * 16 * 4
        total = sum(sizes)
        missing = {"ring": 1, "all_gather": 0}[plan.name.split("(")[0]]
        expected = [
            (total - sizes[(rank - missing) % n]) * row if missing else (n - 1) * sizes[rank] * row
            for rank in range(n)
        ]
        assert list(sent.forward) == expected
