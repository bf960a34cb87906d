"""Plain causal in two dimensions: exact, equally loaded, and few bytes on every rank."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest
from conformance.oracle import assert_close, dense, draw, split
from hypothesis import given, settings
from hypothesis import strategies as st
from support.thinned import thinned

import tilewise as tw
from benchmarks.tiled import best_mesh
from tilewise.plan.builder import REACH
from tilewise.plan.ir import Plan, Role
from tilewise.strategies.tiling.causal.blocks import Rect, causal_blocks, cells
from tilewise_tools.mask_report.figures import moved

CAUSAL = tw.Causal()
HEADS = ((32, 32), (32, 8), (64, 8))
KV_BYTES = (2.0, 0.5, 0.25)


def lengths(n: int) -> tuple[int, ...]:
    """A token a rank, shards of fewer than 4 chunks, and uneven shards and chunks."""
    return n, 3 * n - 1, 19 * n + 5


@pytest.mark.parametrize("n", thinned((1, 2, 3, 4, 5, 7, 8, 16, 11)))
def test_it_is_exact_at_any_length(n: int):
    for num_tokens in lengths(n):
        layout = tw.contiguous(num_tokens, n)
        x = draw((num_tokens, 4, 4), (num_tokens, 2, 4), seed=n)
        assert_close(split(x, tw.tiled(CAUSAL, layout), layout, CAUSAL), dense(x, CAUSAL))


@pytest.mark.parametrize("options", [{"save": "gathered"}, {"prune": False}], ids=str)
def test_it_takes_the_options_of_attention(options: dict):
    layout = tw.contiguous(61, 6)
    plans = [tw.tiled(CAUSAL, layout, kv_bytes=kv_bytes) for kv_bytes in KV_BYTES]
    x = draw((2, 61, 4, 4), (2, 61, 1, 4), seed=2)
    want = dense(x, CAUSAL)
    assert_close(split(x, plans[0], layout, CAUSAL, **options), want)
    if "save" not in options:
        assert_close(split(x, plans[0], layout, CAUSAL, backward_plan=plans[2], **options), want)


QUICK = (1, 2, 3, 5, 8, 12, 15)
REST = [pytest.param(n, marks=pytest.mark.slow) for n in (*range(1, 17), 23) if n not in QUICK]


@pytest.mark.parametrize("n", [*QUICK, *REST])
def test_check_accepts_it_and_no_transfer_can_be_dropped(n: int):
    for num_tokens in lengths(n):
        layout = tw.contiguous(num_tokens, n)
        for kv_bytes in KV_BYTES:
            plan = tw.tiled(CAUSAL, layout, kv_bytes=kv_bytes)
            tw.check(plan, CAUSAL, layout)
            assert tw.droppable(plan, CAUSAL, layout) == ()


def test_one_rank_may_meet_all_others_in_a_step():
    """Rank 2 exchanges keys with ranks 0 and 1 in one step, they none with each other."""
    hub = tw.Slices([((0, 16), (16, 24), "full"), ((16, 24), (7, 16), "full")])
    layout = tw.contiguous(24, 3)
    x = draw((24, 2, 4), (24, 2, 4), seed=3)
    for plan in (tw.needed(hub, layout), tw.tiled(hub, layout)):
        assert_close(split(x, plan, layout, hub), dense(x, hub))


@pytest.mark.parametrize("num_tokens", [1, 2, 5])
def test_fewer_tokens_than_ranks_work(num_tokens: int):
    for layout in (tw.contiguous(num_tokens, 6), tw.tiled_layout(CAUSAL, num_tokens, 6)):
        x = draw((num_tokens, 2, 4), (num_tokens, 2, 4), seed=num_tokens)
        assert_close(split(x, tw.tiled(CAUSAL, layout), layout, CAUSAL), dense(x, CAUSAL))


@pytest.mark.parametrize("layout", [tw.zigzag(52, 4), tw.striped(30, 3)], ids=repr)
def test_other_layouts_work_too(layout: tw.Layout):
    x = draw((layout.num_tokens, 2, 4), (layout.num_tokens, 2, 4), seed=1)
    assert_close(split(x, tw.tiled(CAUSAL, layout), layout, CAUSAL), dense(x, CAUSAL))


def bytes_of_the_mesh(n: int, heads: tuple[int, int], tuned: bool) -> list[tuple[float, ...]]:
    """Per pass: mean, most sent and most received, each beside the best zigzag mesh's."""
    work = tw.Workload(n * 256, *heads, 128, mask=CAUSAL, layout="contiguous")
    ratio = heads[1] / heads[0]
    plan = tw.tiled(CAUSAL, work.layout_for(n), kv_bytes=None if tuned else 2 * ratio)
    found = []
    for backward, sent in zip((False, True), tw.volume(plan, work), strict=True):
        mesh = best_mesh(n, ratio, backward) * 256 * heads[0] * 128 * 2
        took = moved(plan, work, backward=backward).received
        assert sum(took) == sum(sent)
        found.append((float(np.mean(sent)) / mesh, max(sent) / mesh, max(took) / mesh))
    return found


@pytest.mark.parametrize("heads", HEADS, ids=str)
@pytest.mark.parametrize(
    ("n", "most"), [(64, 0.80), pytest.param(256, 0.77, marks=pytest.mark.slow)]
)
def test_bytes_of_one_plan_stay_below_the_meshs_in_both_passes(
    n: int, most: float, heads: tuple[int, int]
):
    for mean, sent, took in bytes_of_the_mesh(n, heads, tuned=True):
        assert mean <= most
        assert sent <= 0.9
        assert took <= 0.9


@pytest.mark.parametrize(("n", "kv_bytes"), thinned(product((8, 12, 16, 33, 64, 256), KV_BYTES), 7))
def test_every_rank_computes_as_much(n: int, kv_bytes: float):
    layout = tw.contiguous(n * 128 + 3, n)
    work = tw.Workload(layout.num_tokens, 1, 1, 1, mask=CAUSAL, layout=layout)
    area = np.array(moved(tw.tiled(CAUSAL, layout, kv_bytes=kv_bytes), work).areas)
    assert area.sum() == layout.num_tokens * (layout.num_tokens + 1) // 2
    assert area.max() <= 1.03 * area.mean()


def test_a_plan_is_weighed_for_the_heads_that_it_finds():
    n, heads = 32, (64, 8)
    plan = tw.tiled(CAUSAL, tw.contiguous(n * 256, n))
    tuned = plan.tuned(*heads)
    assert (tuned.owners, tuned.cuts) == (plan.owners, plan.cuts)
    assert tuned == tw.tiled(CAUSAL, tw.contiguous(n * 256, n), kv_bytes=0.25)
    assert plan.tuned(*heads) is tuned
    assert plan.tuned(8, 8) == plan
    assert bytes_of_the_mesh(n, heads, tuned=True) == bytes_of_the_mesh(n, heads, tuned=False)


@pytest.mark.parametrize("kv_bytes", KV_BYTES)
def test_no_partial_gathers_more_roundings_than_its_reach(kv_bytes: float):
    plan: Plan = tw.tiled(CAUSAL, tw.contiguous(48 * 8, 48), kv_bytes=kv_bytes)
    rounded: dict[tuple, int] = {}
    for step in plan.steps:
        leaving = {
            transfer: rounded.pop((transfer.item, transfer.src), 0) + 1
            for transfer in step.transfers
            if transfer.item.role is Role.PARTIAL
        }
        assert max(leaving.values(), default=0) <= REACH
        for transfer, times in leaving.items():
            if transfer.dst != plan.home(transfer.item.side, transfer.item.shard):
                rounded[transfer.item, transfer.dst] = (
                    rounded.get((transfer.item, transfer.dst), 0) + times
                )
    assert not rounded


@given(
    n=st.integers(1, 40),
    chunks=st.integers(1, 5),
    q_cost=st.floats(0.1, 10),
    kv_cost=st.floats(0.1, 10),
)
@settings(max_examples=25)
def test_blocks_cover_the_triangle_once(n: int, chunks: int, q_cost: float, kv_cost: float):
    table = np.zeros((n * chunks, n * chunks), int)
    for share in causal_blocks(n, chunks, q_cost, kv_cost):
        for q0, q1, k0, k1 in share:
            table[q0:q1, k0:k1] += 1
    assert (np.tril(table) == np.tril(np.ones_like(table))).all()


@given(st.lists(st.integers(0, 30), min_size=4, max_size=4))
def test_cells_count_what_is_below_the_diagonal(edges: list[int]):
    (q0, q1), (k0, k1) = sorted(edges[:2]), sorted(edges[2:])
    above = np.subtract.outer(np.arange(q0, q1), np.arange(k0, k1))
    assert cells(*map(np.array, (q0, q1, k0, k1))) == (above > 0).sum() + (above == 0).sum() / 2
    assert Rect(q0, q1, k0, k1).mirror(30).mirror(30) == (q0, q1, k0, k1)


def test_the_layout_is_zigzag_where_moving_queries_does_not_pay():
    assert tw.tiled_layout(CAUSAL, 6400, 64) == tw.contiguous(6400, 64)
    assert tw.tiled_layout(CAUSAL, 6400, 64, kv_bytes=0.25) == tw.contiguous(6400, 64)
    assert tw.tiled_layout(CAUSAL, 800, 8) == tw.contiguous(800, 8)
    assert tw.tiled_layout(CAUSAL, 800, 8, kv_bytes=0.25) == tw.zigzag(800, 8)


@pytest.mark.parametrize(
    ("n", "heads"), thinned(product((2, 3, 4, 6, 8, 12, 16, 24), HEADS)), ids=str
)
def test_on_its_own_layout_it_moves_no_more_than_a_zigzag_that_moves_keys_only(
    n: int, heads: tuple[int, int]
):
    def total(plan: Plan, layout: tw.Layout) -> int:
        work = tw.Workload(n * 64, *heads, 128, mask=CAUSAL, layout=layout)
        return sum(sum(sent) for sent in tw.volume(plan, work))

    layout, zigzag = (
        tw.tiled_layout(CAUSAL, n * 64, n, kv_bytes=2 * heads[1] / heads[0]),
        tw.zigzag(n * 64, n),
    )
    assert total(tw.tiled(CAUSAL, layout), layout) <= total(tw.needed(CAUSAL, zigzag), zigzag)


def test_bad_ratios_are_refused():
    for kv_bytes in (0.0, -1.0, float("nan")):
        with pytest.raises(ValueError, match=r"kv_bytes \((0\.0|-1\.0|nan)\)"):
            tw.tiled(CAUSAL, tw.contiguous(64, 4), kv_bytes=kv_bytes)
        with pytest.raises(ValueError, match="kv_bytes"):
            tw.tiled_layout(CAUSAL, 64, 4, kv_bytes=kv_bytes)
