"""Strips and the areas counted over them, against dense tables."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.drawn_masks import NUM_TOKENS, boundaries, masks

from tilewise.masks import strips
from tilewise.masks import strips as grid
from tilewise.masks.base import Causal, Document, Full, Mask, Window
from tilewise.masks.strips import LIMIT, Strips

ROWS = np.arange(NUM_TOKENS)


def counts(s: Strips, num_tokens: int = NUM_TOKENS) -> np.ndarray:
    """How many strips hold each pair, row by row, by what Strips promises."""
    table = np.zeros((num_tokens, num_tokens), int)
    for q0, q1, lo, lo_slope, hi, hi_slope in zip(*s.columns, strict=True):
        for q in range(q0, min(q1, num_tokens)):
            first, last = lo + lo_slope * q, hi + hi_slope * q
            assert 0 <= first < last <= LIMIT, "a strip must not be empty on any of its rows"
            table[q, first:last] += 1
    return table


@given(masks())
def test_strips_are_disjoint_and_equal_dense(mask: Mask):
    assert (counts(mask.strips()) == mask.dense(ROWS, ROWS)).all()


@given(masks())
def test_strips_are_sorted_and_stay_in_the_domain(mask: Mask):
    s = mask.strips()
    key = list(zip(s.q0, s.lo + s.lo_slope * s.q0, strict=True))
    assert key == sorted(key)
    assert ((s.q0 >= 0) & (s.q1 <= LIMIT) & (s.q0 < s.q1)).all()
    assert set(s.lo_slope) | set(s.hi_slope) <= {0, 1}


@given(masks(), masks())
def test_complement_holds_what_the_mask_does_not(a: Mask, b: Mask):
    outside = strips.complement(a.strips())
    assert (counts(outside) == ~a.dense(ROWS, ROWS)).all()
    assert len(strips.intersect(outside, a.strips())) == 0
    everything = strips.union(strips.union(outside, b.strips()), a.strips())
    assert len(strips.complement(everything)) == 0


def test_complement_of_nothing_is_everything_in_one_strip():
    nothing = strips.make([], [], [], [])
    assert [c.tolist() for c in strips.complement(nothing).columns[:2]] == [[0], [LIMIT]]
    assert len(strips.complement(Full().strips())) == 0


def test_neighbours_with_a_common_side_become_one_strip():
    s = strips.union(strips.make(0, 4, 0, 1, hi_slope=1), strips.make(4, 9, 0, 1, hi_slope=1))
    assert [c.tolist() for c in s.columns] == [[0], [9], [0], [0], [1], [1]]
    triangle = strips.make(0, 9, 0, 1, hi_slope=1)
    band = strips.make(0, 9, 1, 3, lo_slope=1, hi_slope=1)
    assert [c.tolist() for c in strips.union(triangle, band).columns] == [
        [0],
        [9],
        [0],
        [0],
        [3],
        [1],
    ]


@given(masks(), boundaries(), boundaries())
def test_areas_and_coverage_equal_dense_over_any_grid(mask: Mask, q_edges: list, k_edges: list):
    dense = mask.dense(ROWS, ROWS)
    areas, coverage = mask.areas(q_edges, k_edges), mask.coverage(q_edges, k_edges)
    assert coverage.dtype == np.int8
    for i in range(len(q_edges) - 1):
        for j in range(len(k_edges) - 1):
            q_range, k_range = (q_edges[i], q_edges[i + 1]), (k_edges[j], k_edges[j + 1])
            cell = dense[slice(*q_range), slice(*k_range)]
            assert areas[i, j] == cell.sum() == mask.area(q_range, k_range)
            assert coverage[i, j] == (0 if not cell.any() else 2 if cell.all() else 1)


@given(masks(), boundaries(), st.integers(1, 3))
def test_tables_do_not_depend_on_how_many_rows_are_counted_at_once(mask, edges, at_once):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(grid, "CELLS_AT_ONCE", at_once)
        pieces = mask.areas(edges, edges)
    assert (pieces == mask.areas(edges, edges)).all()


def test_areas_of_a_million_tokens_are_exact():
    num_tokens, window = 2**20, 1000
    span = (0, num_tokens)
    assert Causal().area(span, span) == num_tokens * (num_tokens + 1) // 2
    band = Window(window, 0).area(span, span)
    assert band == (window + 1) * num_tokens - window * (window + 1) // 2
    cu = np.linspace(0, num_tokens, 10_001).astype(int)
    sizes = np.diff(cu)
    documents = Document(cu) & Causal()
    assert documents.area(span, span) == (sizes * (sizes + 1) // 2).sum()
    edges = np.arange(0, num_tokens + 1, 4096)
    assert documents.areas(edges, edges).sum() == documents.area(span, span)
    assert (documents.coverage(edges, edges) > 0).sum() == (documents.areas(edges, edges) > 0).sum()


def test_areas_past_64_bits_are_exact():
    span = (0, 2**40)
    assert Full().area(span, span) == 2**80
    assert Causal().area(span, span) == 2**39 * (2**40 + 1)


@pytest.mark.parametrize("bounds", [(3, 1), (-1, 4)])
def test_area_names_the_range_that_is_not_one(bounds):
    with pytest.raises(ValueError, match=rf"k_range \({bounds[0]}, {bounds[1]}\)"):
        Full().area((0, 1), bounds)


def test_tables_refuse_edges_that_descend():
    with pytest.raises(ValueError, match=r"q_edges must be one ascending row .* \[0, 5, 3\]"):
        Full().coverage([0, 5, 3], [0, 5])


def test_a_causal_square_is_one_triangle():
    assert len(Causal().strips()) == 1
    square = strips.intersect(Causal().strips(), strips.make(3, 9, 3, 9))
    assert [c.tolist() for c in square.columns] == [[3], [9], [3], [0], [1], [1]]


def test_first_overlap_names_a_common_pair():
    apart = strips.make([0, 0], [5, 5], [0, 3], [3, 6])
    assert strips.first_overlap(apart) is None
    # the lower one climbs into the upper one on row 3: hi = 1 + q meets lo = 3
    climbing = strips.make([0, 0], [5, 5], [0, 3], [1, 6], hi_slope=[1, 0])
    assert strips.first_overlap(climbing) == (3, 3)
