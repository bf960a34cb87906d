"""Tiles: calls cover each allowed pair once and no other, and few large ones do it."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tilewise.layouts.layout import Layout, contiguous, striped, zigzag
from tilewise.masks.base import Causal, Document, Full, Mask, Window
from tilewise.plan.row_ranges import row_index, to_ranges
from tilewise.tiles.calls import KernelCall, Kind, Slice
from tilewise.tiles.cover import MAX_CELLS, tile_calls
from tilewise_tools.mask_report.figures import waste


def cells(call: KernelCall) -> np.ndarray:
    """The pairs that a call allows, counted from its definition, int [num_q, num_k]."""
    m, n = call.num_q, call.num_k
    a, j = np.arange(m)[:, None], np.arange(n)[None, :]
    match call.kind:
        case Kind.FULL:
            return np.ones((m, n), int)
        case Kind.CAUSAL:
            assert n >= m
            return (j <= a + n - m).astype(int)
        case Kind.SLICES:
            total = np.zeros((m, n), int)
            for s in call.slices:
                assert 0 <= s.q0 < s.q1 <= m
                inside = (s.q0 <= a) & (a < s.q1) & (s.lo + s.lo_slope * a <= j)
                inside &= j < s.hi + s.hi_slope * a
                assert inside[s.q0 : s.q1].any(1).all(), "a slice is empty on one of its rows"
                assert inside.sum() == s.area
                total += inside
            return total


def covered(calls: tuple[KernelCall, ...], m: int, n: int) -> np.ndarray:
    """How many times the calls compute each pair of a tile."""
    total = np.zeros((m, n), int)
    for call in calls:
        part = cells(call)
        assert part.sum() == call.area <= call.computed <= part.size
        q, k = row_index(call.q), row_index(call.k)
        assert len(set(q.tolist())) == len(q) and len(set(k.tolist())) == len(k)
        total[np.ix_(q, k)] += part
    return total


def rows(layout: Layout, shards) -> np.ndarray:
    return np.concatenate([layout.rows(s) for s in shards])


def measure(q: np.ndarray, k: np.ndarray, mask: Mask):
    calls = tile_calls(q, k, mask)
    return calls, waste(calls)


def mesh_tile(n: int, a: int, rank: int) -> tuple[list[int], list[int]]:
    """The shards of queries and keys of a rank's a x n/a tile (algorithms.md)."""
    return [a * (rank // a) + t for t in range(a)], [rank % a + t * a for t in range(n // a)]


def documents(num_tokens: int, shortest: int, longest: int, seed: int) -> Document:
    """Lengths log-uniform between shortest and longest, the last one cut."""
    rng, edges = np.random.default_rng(seed), [0]
    while edges[-1] < num_tokens:
        length = int(np.exp(rng.uniform(np.log(shortest), np.log(longest))))
        edges.append(min(num_tokens, edges[-1] + length))
    return Document(edges)


@st.composite
def masks(draw, num_tokens: int, depth: int = 2) -> Mask:
    if depth and draw(st.booleans()):
        a, b = draw(masks(num_tokens, depth - 1)), draw(masks(num_tokens, depth - 1))
        return a & b if draw(st.booleans()) else a | b
    side = st.none() | st.integers(0, num_tokens)
    edges = st.lists(st.integers(0, num_tokens), max_size=9)
    return draw(
        st.sampled_from([Full(), Causal()])
        | st.builds(Window, side, side)
        | edges.map(lambda e: Document(sorted([0, *e, num_tokens])))
    )


@st.composite
def tiles(draw, longest: int):
    num_tokens, n = draw(st.integers(1, longest)), draw(st.integers(1, 8))
    layout = draw(st.sampled_from([contiguous, zigzag, striped]))(num_tokens, n)
    shards = st.lists(st.integers(0, n - 1), min_size=1, unique=True)
    q, k = rows(layout, draw(shards)), rows(layout, draw(shards))
    if draw(st.integers(0, 9)) == 0:
        q = np.array(draw(st.permutations(q.tolist())), int)
    return q, k, draw(masks(num_tokens))


@settings(max_examples=120)
@given(tiles(60), st.booleans())
def test_calls_cover_each_allowed_pair_once_and_no_other(tile, square):
    q, k, mask = tile
    calls = tile_calls(q, k, mask, square_causal=square)
    assert (covered(calls, len(q), len(k)) == mask.dense(q, k)).all()
    assert not square or all(c.num_q == c.num_k for c in calls if c.kind is Kind.CAUSAL)


@settings(max_examples=25)
@given(tiles(1500), st.booleans())
def test_larger_tiles_are_covered_too(tile, square):
    q, k, mask = tile
    calls = tile_calls(q, k, mask, square_causal=square)
    assert (covered(calls, len(q), len(k)) == mask.dense(q, k)).all()


@pytest.mark.parametrize("n, size", [(8, 4096), (16, 1000), (64, 1024)])
def test_causal_zigzag_rings_waste_nothing_and_need_one_call_a_tile(n, size):
    layout = zigzag(n * size + 3, n)
    for i, j in ((0, 0), (0, n - 1), (n - 1, 0), (n // 2, 3), (3, n // 2), (n - 1, n - 1)):
        calls, report = measure(layout.rows(i), layout.rows(j), Causal())
        assert len(calls) == 1 and report.ratio == 1.0
        assert calls[0].kind is (Kind.CAUSAL if i == j else Kind.FULL)


@pytest.mark.parametrize("n, a", [(16, 4), (64, 8), (64, 4)])
def test_causal_zigzag_meshes_waste_nothing_in_at_most_six_calls(n, a):
    layout = zigzag(512 * n, n)
    for rank in (0, n // 2 - 1, n - 1):
        q, k = mesh_tile(n, a, rank)
        calls, report = measure(rows(layout, q), rows(layout, k), Causal())
        assert len(calls) <= 6 and report.ratio < 1.05


def test_first_halves_of_several_shards_are_one_call():
    """Ranks 5 to 7 hold later first halves than ranks 0 to 2, and earlier second halves."""
    layout = zigzag(16 * 300, 8)
    calls, report = measure(rows(layout, (5, 6, 7)), rows(layout, (0, 1, 2)), Causal())
    assert [(c.kind, c.num_q, c.num_k) for c in calls] == [(Kind.FULL, 1800, 900)]
    assert calls[0].q == ((0, 1800),) and report.ratio == 1.0


def test_striped_tiles_are_one_causal_call_where_strides_agree():
    layout = striped(64 * 256, 64)
    pairs = [((3,), (9,)), ((9,), (3,)), (range(3, 64, 8), range(5, 64, 8))]
    for q, k in pairs:
        calls, report = measure(rows(layout, q), rows(layout, k), Causal())
        assert [call.kind for call in calls] == [Kind.CAUSAL] and report.ratio == 1.0


def test_striped_tiles_of_unequal_strides_are_cut_into_progressions():
    layout = striped(64 * 1024, 64)
    calls, report = measure(rows(layout, range(8)), rows(layout, range(0, 64, 8)), Causal())
    assert {call.kind for call in calls} == {Kind.CAUSAL} and len(calls) == 64
    assert report.ratio == 1.0


def test_one_causal_call_holds_the_rectangle_where_the_kernel_can():
    q, k = np.arange(2000, 3000), np.arange(3000)
    assert [c.kind for c in tile_calls(q, k, Causal())] == [Kind.FULL, Kind.CAUSAL]
    (call,) = tile_calls(q, k, Causal(), square_causal=False)
    assert call == KernelCall(((0, 1000),), ((0, 3000),), Kind.CAUSAL)


@pytest.mark.parametrize("lengths", [(1, 8192), (64, 4096), (10, 500)])
@pytest.mark.parametrize("layout", [contiguous, zigzag])
def test_documents_waste_at_most_thirty_percent(lengths, layout):
    num_tokens, n = 1 << 15, 4
    mask, layout = documents(num_tokens, *lengths, seed=0), layout(num_tokens, n)
    for m in (mask, mask & Causal()):
        shards = [layout.rows(r) for r in range(n)]
        calls = tuple(c for q in shards for k in shards for c in tile_calls(q, k, m))
        report = waste(calls)
        assert report.allowed == m.area((0, num_tokens), (0, num_tokens))
        assert report.allowed <= report.computed <= 1.3 * report.allowed
        assert report.num_calls <= 2 * (len(mask.cu_seqlens) + n * n)


def test_long_documents_are_one_causal_call_each_and_short_ones_share():
    mask = Document([0, 1000, 3000, *range(3010, 3501, 10), 4500]) & Causal()
    calls = tile_calls(np.arange(4500), np.arange(4500), mask)
    sizes = [call.num_q for call in calls if call.kind is Kind.CAUSAL]
    assert sizes == [1000, 2000, 1000]
    assert sum(len(call.slices) for call in calls) == 50 and len(calls) <= 3 + 500 // 128 + 1


@pytest.mark.parametrize("window", [(16, 0), (100, 100), (1024, 0), (3000, 3000)])
def test_windows_waste_no_more_than_their_grain(window):
    """A call of 128 rows wastes at most 128 x 128 cells at either end of its window."""
    positions = np.arange(1 << 14)
    _, report = measure(positions, positions, Window(*window))
    grain = 2 * 128 * len(positions)
    assert report.computed - report.allowed <= grain
    assert report.num_calls <= 2 * len(positions) // 128


def test_slices_calls_stay_small_enough_for_a_dense_mask():
    positions = np.arange(1 << 13)
    masks = (Window(7, 900), documents(1 << 13, 1, 50, seed=1), Window(2000, 0) & Causal())
    for mask in masks:
        for call in tile_calls(positions, positions, mask):
            assert call.kind is not Kind.SLICES or call.computed <= MAX_CELLS


def test_a_full_tile_keeps_memory_order():
    q, k = np.array([9, 3, 5]), np.array([2, 8, 1, 0])
    assert tile_calls(q, k, Full()) == (KernelCall(((0, 3),), ((0, 4),), Kind.FULL),)
    assert (
        tile_calls(q, k[:0], Full()) == () == tile_calls(q, k, Causal() & Window(None, 0) & far())
    )


def far() -> Mask:
    """Documents that put queries 3, 5, 9 and keys 0, 1, 2, 8 apart."""
    return Document([0, 3, 8, 9, 10])


def test_ranges_and_rows_are_inverse():
    for order in ([], [4], [0, 1, 2], [5, 6, 1, 2, 9], [3, 2, 1]):
        assert row_index(to_ranges(np.array(order, int))).tolist() == order
    assert to_ranges(np.array([5, 6, 1, 2, 9])) == ((5, 7), (1, 3), (9, 10))


def test_areas_of_calls_and_slices():
    assert Slice(2, 5, 0, 0, 1, 1).area == 3 + 4 + 5
    assert KernelCall(((0, 3),), ((0, 5),), Kind.CAUSAL).area == 3 + 4 + 5
    report = waste((KernelCall(((0, 3),), ((0, 5),), Kind.SLICES, (Slice(0, 2, 0, 0, 3, 0),)),))
    assert report == (1, 1, 15, 6) and report.ratio == 2.5 and "(2.500)" in str(report)
