"""Ranks that are alike: declared where they are, simulated and counted as every one by itself."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from dataclasses import replace
from itertools import product

import pytest
from conformance.table import plans
from support.described import MACHINES, machine, workload
from support.symmetry_search import maps_to_itself, permutations, respects, searched, written
from support.thinned import thinned

import tilewise as tw
from tilewise.plan.ir import Plan, Traits, find_symmetry
from tilewise.plan.shifts import Shift
from tilewise.simulation.machine import Link, Machine
from tilewise.simulation.simulator import Simulation, simulate


def seen(found: Simulation, rank: int) -> list:
    """What a rank did, without who stands for it."""
    return [use._replace(rank=0, members=0) for use in found.use(rank)]


@pytest.mark.parametrize(("n", "name"), thinned(product((4, 12), MACHINES), 4))
def test_a_class_of_ranks_does_what_every_one_of_them_does(n: int, name: str):
    fewer = 0
    unlike = [plan for plan in plans(n, "tree") if "balanced" not in plan.name]
    for plan in unlike[[*MACHINES].index(name) % 12 :: 1 if n < 12 else 12]:
        work = workload(n, num_kv_heads=24, num_heads=48, save=None)
        try:
            work.resolve(plan)
        except ValueError:
            continue
        every = simulate(plan, work, MACHINES[name], exact=True)
        found = simulate(plan, work, MACHINES[name])
        fewer += found.symmetries[0].num_classes < n
        assert found.forward_seconds == pytest.approx(every.forward_seconds, rel=1e-6)
        assert found.backward_seconds == pytest.approx(every.backward_seconds, rel=1e-6)
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


def test_causal_ranks_are_simulated_each_and_taken_as_alike_if_that_is_asked_for():
    cluster = machine(1e9, 1e12, node_size=4, nics=4, inside=Link(8e9))
    for plan in (tw.mesh(32, q_tile=4), tw.attention2d(8, 4)):
        work = workload(32, num_kv_heads=4, mask=tw.Causal())
        found, every = (simulate(plan, work, cluster, exact=e) for e in (None, True))
        assert found.seconds == every.seconds
        for rank in range(32):
            assert found.use(rank) == every.use(rank)
        rough = simulate(plan, work, cluster, exact=False)
        assert rough.symmetries[0].num_classes < 32
        assert rough.seconds == pytest.approx(every.seconds, rel=0.05), plan
        assert rough.compute_seconds == pytest.approx(every.compute_seconds)
    work = workload(128, num_kv_heads=4, mask=tw.Causal())
    assert simulate(tw.mesh(128, q_tile=8), work, cluster).symmetries[0].num_classes == 128


def test_under_documents_one_rank_of_a_head_team_stands_for_all_if_that_is_asked_for():
    cu = (0, 100, 333, 760, 1024)
    layout = tw.zigzag_documents(cu, 16)
    cluster = machine(1e9, 1e12, node_size=4, nics=4, inside=Link(8e9))
    for mask in (tw.Document(cu), tw.Document(cu) & tw.Causal()):
        work = replace(workload(16, num_heads=8), num_tokens=1024, layout=layout, mask=mask)
        for plan, members in ((tw.ulysses(4, tw.mesh(4)), 4), (tw.ulysses(8, tw.ring(2)), 8)):
            every, found = (simulate(plan, work, cluster, exact=e) for e in (None, False))
            assert every.symmetries[0].members == 1
            assert found.symmetries[0].members == members
            assert found.seconds == pytest.approx(every.seconds, rel=0.01)
            assert found.compute_seconds == pytest.approx(every.compute_seconds)
            # A shard is a whole number of tokens, 63 to 65: all are taken to send as the largest.
            assert found.sent_bytes == pytest.approx(every.sent_bytes, rel=0.02)
            assert found.sent_bytes >= every.sent_bytes
        ring = simulate(tw.ring(16), work, cluster, exact=False)
        assert ring.symmetries[0].members == 1
    equal = (0, 96, 352, 768, 1024)  # multiples of 32: every shard has 64 tokens
    layout = tw.zigzag_documents(equal, 16)
    for mask in (tw.Document(equal), tw.Document(equal) & tw.Causal()):
        work = replace(work, layout=layout, mask=mask)
        every, found = (simulate(plan, work, cluster, exact=e) for e in (None, False))
        assert found.seconds == pytest.approx(every.seconds, rel=1e-6)
        assert found.total_bytes_by_link == every.total_bytes_by_link
    by_head = replace(work, mask=tw.PerHead((tw.Full(), *[tw.Causal()] * 7)), num_kv_heads=8)
    found = simulate(plan, by_head, cluster, exact=False)
    assert found.symmetries[0].members == 1


def test_many_ranks_that_are_not_alike_are_refused():
    work = workload(2048, 2)
    with pytest.raises(ValueError, match=r"no ranks of balanced_ring\(2048\) .* exact=True"):
        simulate(tw.balanced_ring(2048), work, machine())


def test_shifts_are_fitted_to_a_machine():
    assert find_symmetry(tw.ring(64)).num_classes == 1
    assert find_symmetry(tw.ring(64), (8,)).num_classes == 8
    assert find_symmetry(tw.ring(64), (6,)).num_classes == 64
    assert find_symmetry(tw.mesh(64, q_tile=8), (8,)).num_classes == 1
    assert find_symmetry(tw.mesh(64, q_tile=8), (2, 8)).num_classes == 2
    assert find_symmetry(tw.mesh(64, q_tile=16), (8,)).num_classes == 8
    assert find_symmetry(tw.ulysses(8, inner=tw.mesh(32, q_tile=4)), (8,)).num_classes == 1
    assert find_symmetry(tw.balanced_ring(16)).num_classes == 16
    assert find_symmetry(tw.attention2d(8, 8), (8,)).num_classes == 8
    assert find_symmetry(tw.attention2d(16, 4), (8,)).num_classes == 4
    assert find_symmetry(tw.attention2d(64, 64), (8,)).num_classes == 64
    nested = tw.hierarchical(tw.mesh(32, q_tile=4), tw.mesh(8, q_tile=2))
    assert find_symmetry(nested, (8,)).num_classes == 1
    assert find_symmetry(tw.ulysses(4, inner=nested), (8,)).num_classes == 1
    assert find_symmetry(tw.needed(tw.Causal(), tw.zigzag(64, 8))).num_classes == 8


@pytest.mark.parametrize("n", thinned((2, 16, 3, 12, 4, 8, 6)))
def test_strategies_declare_shifts_that_map_the_whole_plan_to_itself_and_all_that_are_found(n: int):
    for plan in plans(n, "tree"):
        is_symmetric_and_no_less_than_found(plan, [(), (2,), (3,), (4,), (2, 4), (2, 6), (5,)])


@pytest.mark.parametrize(
    "plan",
    (
        tw.attention2d(3, 9),
        tw.attention2d(9, 3),
        tw.attention2d(4, 8),
        tw.attention2d(8, 4),
        tw.attention2d(6, 12),
        tw.attention2d(8, 8),
        tw.attention2d(5, 2),
        tw.attention2d(7, 3),
        tw.hierarchical(tw.attention2d(4, 2), tw.mesh(4, q_tile=2)),
        tw.ulysses(4, inner=tw.attention2d(4, 4)),
        tw.mesh(36, q_tile=6),
        tw.mesh(48, q_tile=12, schedule="gather"),
    ),
    ids=lambda plan: plan.name,
)
def test_larger_plans_declare_what_is_found_too(plan: Plan):
    is_symmetric_and_no_less_than_found(plan, [(), (4,), (6,), (2, 8), (4, 16), (8,)])


def is_symmetric_and_no_less_than_found(plan: Plan, machines: list[tuple[int, ...]]) -> None:
    n, rows = plan.world_size, written(plan)
    for shift in plan.traits.shifts:
        for permutation in permutations(shift, n):
            assert maps_to_itself(plan, rows, permutation), (plan, shift)
    for blocks in machines:
        blocks = tuple(block for block in blocks if block < n)
        declared, found = find_symmetry(plan, blocks), searched(plan, rows, blocks)
        assert all(respects(shift, blocks, n) for shift in declared.shifts), (plan, blocks)
        if "overlap" in plan.name:  # of its digits, which keep their order, no halves are declared
            continue
        assert found.num_classes > n // 2 or declared.num_classes <= found.num_classes, (
            plan,
            blocks,
        )


def test_a_wrong_shift_is_seen_by_the_search():
    plan = tw.balanced_ring(4)
    permutation = next(permutations(Shift(1, 4), 4))
    assert not maps_to_itself(plan, written(plan), permutation)
    unfree = tw.mesh(8, q_tile=4)
    cycle, swap = permutations(Shift(1, 4, free=True), 8)
    assert maps_to_itself(unfree, written(unfree), cycle)
    assert not maps_to_itself(unfree, written(unfree), swap)


def test_plans_that_nobody_declares_symmetric_have_their_ranks_apart():
    plan = tw.ring(8)
    for foreign in (tw.parse(tw.show(plan)), tw.from_json(tw.to_json(plan))):
        assert foreign == plan and find_symmetry(foreign).num_classes == 8
    assert find_symmetry(pickle.loads(pickle.dumps(plan))).num_classes == 1
    with pytest.raises(ValueError, match="in which rank r owns shard r"):
        Plan("tree", 2, 1, tw.tree(2).owners, (), traits=Traits((Shift(1, 2),)))


BIG: tuple[tuple[Callable[[], Plan], float, float, int], ...] = (
    (lambda: tw.ring(4096), 0, 4095, 1),
    (lambda: tw.mesh(4096, q_tile=64), 63, 63, 1),
    (lambda: tw.ulysses(8, inner=tw.mesh(512, q_tile=16)), 7 / 8 + 15, 7 / 8 + 31, 8),
    (lambda: tw.ulysses(64, inner=tw.ring(64)), 63 / 64, 63 / 64 + 63, 64),
    (lambda: tw.hierarchical(tw.mesh(512, q_tile=16), tw.ring(8)), 15, 31 + 7 * 32, 1),
    (
        lambda: tw.ulysses(8, inner=tw.hierarchical(tw.mesh(64, q_tile=8), tw.ring(8))),
        *(7 / 8 + 7, 7 / 8 + 7 + 7 * 8, 8),
    ),
)


@pytest.mark.parametrize(("make", "x", "y", "degree"), thinned(BIG, 2, 1))
def test_volumes_and_simulated_bytes_at_4096_ranks_are_the_closed_forms(
    make: Callable[[], Plan], x: float, y: float, degree: int
):
    plan, cluster = make(), Machine.preset("h100x8")
    for heads, wire in ((64, "bfloat16"), (8, "float32")):
        work = tw.Workload(4096 * 64, 64, heads, 32, wire_dtype=wire, save="replay")
        u, l, w = 64 * 64 * 32 * 2, 64 * 64 * 4, 2 if wire == "float32" else 1  # noqa: E741
        rho = max(heads, degree) / 64
        forward = x * (u + w * u + l) + y * 2 * rho * u
        padding = 64 * degree * (-2 * 4 * 64 // degree % 16)  # of lse and delta, to 16 bytes
        backward = x * (2 * u + 2 * l + padding + w * u) + y * 2 * rho * u * (1 + w)
        sent = tw.volume(plan, work)
        assert {*sent.forward} == {forward} and {*sent.backward} == {backward}
    if "ring(4096" not in plan.name:
        found = simulate(plan, work, cluster)
        assert found.sent_bytes == forward + backward


@pytest.mark.parametrize("n", (8, 16, 128, 256, 1024))
def test_volumes_are_the_closed_forms_in_between(n: int):
    """x and y transfers of u and 2 u, lse with partials, as in test_volume.py up to 64 ranks."""
    work = tw.Workload(n * 8, 32, 32, 16, layout="contiguous", save="replay")
    u, l = 8 * 32 * 16 * 2, 8 * 32 * 4  # noqa: E741
    transfers = [
        (tw.ring(n), 0, n - 1),
        (tw.ring(n, moves="q"), n - 1, 0),
        (tw.all_gather(n), 0, n - 1),
        (tw.double_ring(n // 8, 8), 0, n - 1),
        (tw.mesh(n, q_tile=8, schedule="kv_first"), 7, n // 8 - 1),
        (tw.hierarchical(tw.ring(n // 8, moves="q"), tw.ring(8)), n // 8 - 1, 7),
        (tw.hierarchical(tw.ring(n // 4), tw.ring(4, moves="q")), 3, n // 4 - 1),
        (tw.ulysses(8, inner=tw.ring(n // 8)), 7 / 8, 7 / 8 + n // 8 - 1),
        (tw.ulysses(4, inner=tw.mesh(n // 4, q_tile=2)), 3 / 4 + 1, 3 / 4 + n // 8 - 1),
    ]
    for plan, x, y in transfers:
        sent = tw.volume(plan, work)
        assert {*sent.forward} == {x * (2 * u + l) + y * 2 * u}, plan
        assert {*sent.backward} == {x * (3 * u + 2 * l) + y * 4 * u}, plan


@pytest.mark.parametrize("n", (8, 32, 128, 512))
def test_volumes_of_uneven_shards_are_those_of_every_rank(n: int):
    """Relabelled transfers weigh what the relabelled shards have."""
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


@pytest.mark.parametrize(
    ("n", "rows", "degree"), ((64, 8, 1), (256, 32, 1), (4096, 64, 1), (4096, 16, 4))
)
def test_volumes_of_attention2d_and_of_heads_around_it_are_the_closed_forms(
    n: int, rows: int, degree: int
):
    """One more KV transfer where a rank's own shard is not in its column."""
    inner = n // degree
    columns = inner // rows
    plan = tw.attention2d(rows, columns)
    if degree > 1:
        plan = tw.ulysses(degree, inner=plan)
    work = tw.Workload(n * 8, 32, 32, 16, layout="contiguous", save="replay")
    u, l = 8 * 32 * 16 * 2, 8 * 32 * 4  # noqa: E741
    sent, share = tw.volume(plan, work), (degree - 1) / degree
    for rank in range(0, n, 37):
        own = rank // degree
        x = share + columns - 1
        y = share + rows - 1 + (own // rows != own % columns)
        assert sent.forward[rank] == x * (2 * u + l) + y * 2 * u
        assert sent.backward[rank] == x * (3 * u + 2 * l) + y * 4 * u


@pytest.mark.slow
def test_simulated_bytes_of_attention2d_at_4096_ranks_are_the_volume():
    plan, cluster = tw.attention2d(64, 64), Machine.preset("h100x8")
    work = tw.Workload(4096 * 64, 64, 8, 32, save="replay")
    found, sent = simulate(plan, work, cluster), tw.volume(plan, work)
    for rank in range(0, 4096, 511):
        got = tuple(sum(use.bytes_by_link.values()) for use in found.use(rank))
        assert got == (sent.forward[rank], sent.backward[rank])


def test_at_256_ranks_the_best_mesh_saves_88_percent_and_the_best_hybrid_95():
    work = tw.Workload(256 * 2, 64, 64, 128, save="replay")
    divisors = [1 << k for k in range(9)]
    sent = {
        (u, a): max(tw.volume(tw.ulysses(u, inner=tw.mesh(256 // u, q_tile=a)), work).forward)
        for u in divisors[:4]
        for a in divisors
        if a <= 256 // u
    }
    ring = max(tw.volume(tw.ring(256), work).forward)
    assert min(x for (u, _), x in sent.items() if u == 1) / ring == pytest.approx(0.12, abs=0.005)
    assert min(sent.values()) / ring <= 0.05
