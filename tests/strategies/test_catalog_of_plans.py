"""What the strategies are: their grids, their equalities, and that check accepts all of them."""

from __future__ import annotations

import math
import pickle
from collections import Counter

import pytest
from conformance.table import divisors, plans
from support.golden_plans import FOLDER, GOLDEN
from support.thinned import thinned

import tilewise as tw
from tilewise.plan.ir import Plan, Role, Side
from tilewise.simulation.peak_memory import PassMemory
from tilewise.strategies.mesh import SCHEDULES


@pytest.mark.parametrize("name", GOLDEN)
def test_the_grid_is_the_golden_one(name: str):
    assert tw.show(GOLDEN[name]) == (FOLDER / f"{name}.txt").read_text(), (
        "if the change is meant, run: python tests/support/golden_plans.py"
    )


def test_every_golden_file_has_a_plan():
    assert {path.stem for path in FOLDER.glob("*.txt")} == set(GOLDEN)


SIZES = [
    *range(1, 12),
    *(pytest.param(n, marks=pytest.mark.slow) for n in (12, 13, 14, 15, 16, 24)),
]


@pytest.mark.parametrize("n", SIZES)
def test_check_accepts_every_strategy_and_no_transfer_can_be_dropped(n: int):
    for plan in plans(n):
        assert plan.world_size == n
        tw.check(plan)
        assert tw.droppable(plan) == (), plan


def _shapes_of_64() -> list[Plan]:
    """One of each kind; the whole table takes minutes, see the slow test."""
    return [
        tw.ring(64),
        tw.ring(64, moves="q"),
        tw.all_gather(64),
        tw.double_ring(8, 8),
        tw.balanced_ring(64),
        tw.attention2d(8, 8),
        tw.hierarchical(tw.mesh(8, q_tile=2), tw.ring(8)),
        tw.hierarchical(tw.mesh(16, q_tile=4), tw.mesh(4, q_tile=2)),
        *(tw.mesh(64, q_tile=8, schedule=s) for s in SCHEDULES),
        tw.mesh(64, q_tile=4),
        tw.ulysses(8, inner=tw.mesh(8, q_tile=2)),
        tw.tree(64),
    ]


@pytest.mark.parametrize("plan", thinned(_shapes_of_64()), ids=repr)
def test_check_accepts_every_strategy_on_64_ranks(plan: Plan):
    tw.check(plan)
    assert tw.droppable(plan) == ()


@pytest.mark.slow
def test_check_accepts_the_whole_table_on_64_ranks():
    for plan in plans(64):
        tw.check(plan)
        assert tw.droppable(plan) == (), plan


@pytest.mark.parametrize("n", [1, 2, 3, 4, 6, 8])
def test_the_ring_is_a_mesh_and_a_double_ring_of_one_node(n: int):
    ring = tw.ring(n)
    assert tw.mesh(n, q_tile=1, schedule="eager") == ring
    assert tw.mesh(n, q_tile=1) == tw.mesh(n, q_tile=1, schedule="kv_first") == ring
    assert tw.mesh(n, q_tile=n) == tw.ring(n, moves="q")
    assert tw.double_ring(1, n) == tw.double_ring(n, 1) == ring
    gathers = tw.mesh(n, q_tile=1, schedule="gather"), tw.all_gather(n)
    assert len({tuple(step.transfers for step in plan.steps) for plan in gathers}) == 1


def test_a_ring_receives_from_the_next_rank_and_its_gradients_follow_one_transfer_behind():
    plan = tw.ring(5)
    for transfer in (transfer for step in plan.steps for transfer in step.transfers):
        home = plan.home(transfer.item.side, transfer.item.shard)
        assert transfer.dst == (transfer.src - 1) % 5
        assert transfer.item.role is Role.OPERAND or transfer.src != home
    assert [step.tiles[0][0].kv for step in plan.steps[:5]] == [(0,), (1,), (2,), (3,), (4,)]


def cells(plan: Plan, rank: int) -> set[tuple[int, int]]:
    tiles = [tile for step in plan.rank_steps(rank) for tile in step.tiles]
    return {(q, kv) for tile in tiles for q in tile.q for kv in tile.kv}


def test_a_hierarchical_cell_is_computed_where_both_plans_say():
    outer, inner = tw.mesh(6, q_tile=2), tw.mesh(4, q_tile=2)
    plan = tw.hierarchical(outer, inner)
    for rank in range(24):
        node, local = divmod(rank, 4)
        nested = {
            (4 * q + i, 4 * kv + j) for q, kv in cells(outer, node) for i, j in cells(inner, local)
        }
        assert cells(plan, rank) == nested
        for step in plan.rank_steps(rank):
            for transfer in step.sends:
                assert transfer.dst // 4 == node or transfer.dst % 4 == local, (
                    "one NIC for each local rank"
                )


def test_rings_in_rings_are_double_rings_and_meshes_of_nodes():
    rings = tw.ring(3), tw.ring(4)
    assert tw.hierarchical(*rings) == tw.double_ring(3, 4)
    assert tw.hierarchical(tw.ring(1), rings[1]) == rings[1]
    assert tw.hierarchical(rings[0], tw.ring(1)) == rings[0]
    turned, flat = tw.hierarchical(tw.ring(3), tw.ring(4, moves="q")), tw.mesh(12, q_tile=4)
    assert all(cells(turned, rank) == cells(flat, rank) for rank in range(12))
    split = tw.ulysses(2, inner=tw.hierarchical(tw.ring(2), tw.ring(2)))
    tw.check(split)
    exchanged = {transfer.dst // 2 for transfer in split.rank_steps(5)[0].sends}
    assert exchanged == {2}, "heads are split between neighbours"


def test_heads_are_split_around_a_grid():
    for rows, columns in ((2, 2), (3, 2), (2, 4)):
        tw.check(tw.ulysses(2, inner=tw.attention2d(rows, columns)))


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize(("n", "a"), [(9, 3), (12, 3), (12, 4), (16, 4)])
def test_mesh_tiles_are_those_of_the_assignment_matrix(n: int, a: int, schedule: str):
    plan = tw.mesh(n, q_tile=a, schedule=schedule)
    for rank in range(n):
        cells = {
            (q, kv)
            for step in plan.steps
            for tile in step.tiles[rank]
            for q in tile.q
            for kv in tile.kv
        }
        queries = {rank // a * a + t for t in range(a)}
        keys = {rank % a + t * a for t in range(n // a)}
        assert cells == {(q, kv) for q in queries for kv in keys}
        assert rank in queries and rank in keys, "the local Q-KV property"


@pytest.mark.parametrize("schedule", ["greedy", "eager", "kv_first", "paper"])
@pytest.mark.parametrize(("n", "a"), [(9, 3), (12, 3), (12, 4), (8, 2)])
def test_mesh_transfers_go_to_neighbours_in_local_order(n: int, a: int, schedule: str):
    """Queries come from the right in their group, KV from a ranks below; #k is the k-th to come."""
    plan = tw.mesh(n, q_tile=a, schedule=schedule)
    arrived = {(rank, side): [rank] for rank in range(n) for side in Side}
    for step in plan.steps:
        for transfer in step.transfers:
            first, local = transfer.dst // a * a, transfer.dst % a
            right = (
                first + (local + 1) % a if transfer.item.side is Side.Q else (transfer.dst + a) % n
            )
            assert transfer.src == right
            if transfer.item.role is Role.OPERAND:
                arrived[transfer.dst, transfer.item.side].append(transfer.item.shard)
    for rank in range(n):
        first, local = rank // a * a, rank % a
        assert arrived[rank, Side.Q] == [first + (local + k) % a for k in range(a)]
        assert arrived[rank, Side.KV] == [(rank + k * a) % n for k in range(n // a)]


@pytest.mark.parametrize("n", [4, 6, 9, 16])
def test_the_diagonal_block_is_local_and_runs_first(n: int):
    for a in divisors(n):
        for schedule in ("greedy", "eager", "kv_first", "paper"):
            first = tw.mesh(n, q_tile=a, schedule=schedule).steps[0]
            assert all(tile[0][:2] == ((r,), (r,)) for r, tile in enumerate(first.tiles))


def test_greedy_overlaps_one_transfer_of_each_kind_with_a_few_blocks():
    """The paper's 3 x 3 example: two KV and two query shards arrive, the first beside a block."""
    plan = tw.mesh(9, q_tile=3)
    arrivals = [
        transfer.item.side
        for step in plan.steps
        for transfer in step.transfers
        if transfer.dst == 3 and transfer.item.role is Role.OPERAND
    ]
    assert sorted(arrivals) == [Side.Q, Side.Q, Side.KV, Side.KV]
    assert plan.steps[0].tiles[0] and plan.steps[0].transfers


@pytest.mark.parametrize("n", range(1, 13))
def test_causal_balanced_ring_has_at_most_half_the_tiles_and_one(n: int):
    mask, layout = tw.Causal(), tw.contiguous(4 * n, n)
    pruned = tw.prune(tw.balanced_ring(n), mask, layout)
    per_rank = Counter(r for step in pruned.steps for r, t in enumerate(step.tiles) for _ in t)
    assert max(per_rank.values()) <= n // 2 + 1
    assert sum(per_rank.values()) == n * (n + 1) // 2


@pytest.mark.parametrize("n", [1, 2, 3, 5, 8, 13, 16, 33, 64])
def test_tree_transfers_in_sequence_are_at_most_twice_the_logarithm(n: int):
    steps = [step for step in tw.tree(n).steps if step.transfers]
    assert len(steps) <= 2 * math.ceil(math.log2(n)) if n > 1 else not steps
    assert sum(len(step.transfers) for step in steps) == 2 * (n - 1)


@pytest.mark.parametrize(("rows", "columns"), [(1, 1), (2, 2), (2, 3), (3, 2), (4, 2), (1, 5)])
def test_attention2d_gathers_residues(rows: int, columns: int):
    plan = tw.attention2d(rows, columns)
    for rank in range(rows * columns):
        column, row = divmod(rank, rows)
        (tile,) = [tile for step in plan.steps for tile in step.tiles[rank]]
        assert set(tile.q) == set(range(row, rows * columns, rows))
        assert set(tile.kv) == set(range(column, rows * columns, columns))


@pytest.mark.parametrize("rows, columns", [(1, 3), (3, 1), (3, 3), (2, 4), (3, 2)])
def test_attention2d_overlapped_moves_the_same_kv_first(rows: int, columns: int):
    plan, n = tw.attention2d(rows, columns, overlap=True), rows * columns
    work = tw.Workload(8 * n, 4, 2, 8, layout="striped")
    assert tw.volume(plan, work) == tw.volume(tw.attention2d(rows, columns), work)
    for rank in range(n):
        queries = [tile.q for step in plan.rank_steps(rank) for tile in step.tiles]
        assert queries[:rows] == [(rank,)] * rows
        assert len(queries) == rows + columns - 1 and {len(q) for q in queries} == {1}


def test_attention2d_overlapped_takes_least_memory_and_no_more_under_a_causal_mask():
    def peak(mask: tw.Mask, overlap: bool) -> int:
        work = tw.Workload(2048, 4, 4, 64, mask=mask, layout="striped")
        passes = work.resolve(tw.attention2d(4, 4, overlap=overlap))
        return PassMemory(passes, backward=True).peak_bytes

    assert peak(tw.Causal(), True) == peak(tw.Full(), True) < peak(tw.Full(), False)
    assert peak(tw.Full(), False) < peak(tw.Causal(), False)


def test_ulysses_cuts_heads_and_keeps_what_it_gathered_if_alone():
    plan = tw.ulysses(2, inner=tw.ulysses(3))
    assert (plan.world_size, plan.num_head_groups) == (6, 6)
    assert tw.ulysses(4).default_save == "gathered"
    assert tw.ulysses(2, inner=tw.ring(2)).default_save == "replay"
    assert "inner=mesh(4, q_tile=2" in tw.ulysses(2, inner=tw.mesh(4, q_tile=2)).name
    for rank in range(4):
        groups = {t.heads for s in tw.ulysses(2, inner=tw.ring(2)).rank_steps(rank) for t in s[0]}
        assert groups == {rank % 2}, "rank = inner_rank * degree + head_rank"


@pytest.mark.parametrize("n", [1, 2, 4, 6])
def test_only_tree_has_results_and_replicated_queries(n: int):
    for plan in plans(n):
        roles = {transfer.item.role for step in plan.steps for transfer in step.transfers}
        assert (Role.RESULT in roles) == (plan.replicated_queries and n > 1)
        assert plan.replicated_queries == plan.name.startswith("tree")


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: tw.ring(0), r"world_size \(0\) must be at least 1"),
        (lambda: tw.all_gather(-1), r"world_size \(-1\) must be at least 1"),
        (lambda: tw.balanced_ring(0), r"world_size \(0\) must be at least 1"),
        (lambda: tw.tree(0), r"world_size \(0\) must be at least 1"),
        (lambda: tw.ring(4, moves="k"), r"moves \('k'\) must be 'kv' or 'q'"),
        (lambda: tw.double_ring(0, 2), r"num_nodes \(0\) must be at least 1"),
        (lambda: tw.attention2d(2, 0), r"columns \(0\) must be at least 1"),
        (lambda: tw.mesh(6, q_tile=4), r"q_tile \(4\) must divide world_size \(6\).*1, 2, 3, 6"),
        (lambda: tw.mesh(6, q_tile=0), r"q_tile \(0\) must be at least 1"),
        (lambda: tw.mesh(6, q_tile=2, schedule="lazy"), r"schedule \('lazy'\) must be 'gre"),
        (lambda: tw.ulysses(0), r"degree \(0\) must be at least 1"),
        (
            lambda: tw.hierarchical(tw.ring(2), tw.ulysses(2)),
            r"splits no heads, but its inner plan is ulysses\(2\); write ulysses\(degree",
        ),
        (lambda: tw.hierarchical(tw.tree(2), tw.ring(2)), r"outer plan .* not tree\(2\)"),
        (
            lambda: tw.hierarchical(tw.ring(2), tw.attention2d(2, 2)),
            r"every rank reads its own shards; in attention2d\(2, 2\) rank 1",
        ),
        (lambda: tw.hierarchical(tw.ring(2), tw.balanced_ring(4)), "all compute in the same st"),
        (lambda: tw.ulysses(2, inner=tw.tree(2)), r"rank r owns shard r, not tree\(2\)"),
    ],
)
def test_bad_arguments_name_the_number_and_what_is_allowed(make, message: str):
    with pytest.raises(ValueError, match=message):
        make()


def sent_by_tile(n: int, heads: tuple[int, int]) -> dict[int, tuple[int, int]]:
    """Bytes of the busiest rank in both passes, by query shards of the tile."""
    work = tw.Workload(4 * n, *heads, 128)
    volumes = {a: tw.volume(tw.mesh(n, a, "gather"), work) for a in divisors(n)}
    return {a: (max(sent.forward), max(sent.backward)) for a, sent in volumes.items()}


@pytest.mark.parametrize("heads", [(64, 64), (64, 8), (48, 1)])
@pytest.mark.parametrize("n", [1, 7, 12, 16, 60, 64])
def test_a_mesh_without_a_tile_sends_least_for_the_heads_it_finds(n: int, heads: tuple[int, int]):
    sent, work, kv_bytes = sent_by_tile(n, heads), tw.Workload(4 * n, *heads, 128), 2 * heads[1]
    for plan in (tw.mesh(n), tw.mesh(n, kv_bytes=kv_bytes / heads[0])):
        found = tw.volume(plan, work)
        assert max(found.forward) + max(found.backward) == min(map(sum, sent.values()))
    back = tw.volume(tw.mesh(n), work, tw.mesh(n, backward=True)).backward
    assert max(back) == min(backward for _, backward in sent.values())


def test_plans_inside_others_are_made_for_the_heads_too():
    heads = 64, 8
    made = [
        (tw.ulysses(4, inner=tw.mesh(16)), tw.ulysses(4, inner=tw.mesh(16, kv_bytes=0.25))),
        (tw.ulysses(16, inner=tw.mesh(4)), tw.ulysses(16, inner=tw.mesh(4, kv_bytes=0.5))),
        (tw.hierarchical(tw.mesh(16), tw.ring(2)),
         tw.hierarchical(tw.mesh(16, kv_bytes=0.25), tw.ring(2))),
        (tw.ulysses(2, inner=tw.hierarchical(tw.ring(2), tw.mesh(16))),
         tw.ulysses(2, inner=tw.hierarchical(tw.ring(2), tw.mesh(16, kv_bytes=0.25)))),
    ]  # fmt: skip
    for plan, wanted in made:
        there = pickle.loads(pickle.dumps(plan))
        assert plan.tuned(*heads) == wanted == there.tuned(*heads)
        assert plan.tuned(64, 64) == plan


@pytest.mark.parametrize("save", ["replay", "gathered"])
def test_backward_has_its_own_order_in_a_mesh_and_in_plans_around_one(save: str):
    back, pair = tw.mesh(16, 4, kv_bytes=0.25, backward=True), tw.ring(2)
    made = [
        (tw.mesh(16, 4), back),
        (tw.mesh(16, 4, kv_bytes=0.25), back),
        (tw.ulysses(2, inner=tw.mesh(16, 4, kv_bytes=0.25)), tw.ulysses(2, inner=back)),
        (tw.hierarchical(tw.mesh(16, 4), pair), tw.hierarchical(back, pair)),
    ]
    for plan, in_backward in made:
        work = tw.Workload(4 * plan.world_size, 64, 8, 128, save=save)
        there = pickle.loads(pickle.dumps(plan))
        for forward, backward in (work.resolve(plan), work.resolve(there)):
            assert forward.plan != in_backward
            assert backward.plan == (forward.plan if save == "gathered" else in_backward)
        assert tw.volume(plan, work).forward == tw.volume(in_backward, work).forward


def test_orders_that_weigh_no_bytes_serve_both_passes():
    for schedule in ("kv_first", "gather"):
        plan = tw.mesh(16, 4, schedule)
        assert plan.in_backward() is plan and plan.tuned(64, 8) is plan
