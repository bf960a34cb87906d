"""Cells of shard pairs against brute force over dense tables."""

import tracemalloc

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.drawn_masks import NUM_TOKENS, boundaries, layouts, masks

from tilewise.layouts import cells as shard_cells
from tilewise.layouts.layout import Layout, Run, contiguous, striped, zigzag
from tilewise.masks.base import Causal, Document, Full, Mask, Window
from tilewise.masks.patterns import block_sparse
from tilewise.masks.tables import PerHead


def ranges(rows: np.ndarray) -> tuple[tuple[int, int], ...]:
    """The distinct numbers as half-open ranges."""
    rows = np.unique(rows)
    parts = np.split(rows, np.flatnonzero(np.diff(rows) > 1) + 1)
    return tuple((int(part[0]), int(part[-1]) + 1) for part in parts)


def brute_force(mask: Mask, q_layout: Layout, k_layout: Layout) -> dict:
    found = {}
    for i in range(q_layout.world_size):
        for j in range(k_layout.world_size):
            dense = mask.dense(q_layout.rows(i), k_layout.rows(j))
            dense = dense if dense.ndim == 3 else dense[None]
            if dense.any():
                area = -(-int(dense.sum()) // len(dense))
                i_rows, j_rows = np.nonzero(dense.any(0))
                found[i, j] = shard_cells.Cell(area, ranges(i_rows), ranges(j_rows))
    return found


@given(masks(), layouts())
def test_cells_equal_brute_force(mask: Mask, layout: Layout):
    assert shard_cells.cells(mask, layout, layout) == brute_force(mask, layout, layout)


@given(masks(), layouts(), layouts())
def test_cells_equal_brute_force_across_two_layouts(mask: Mask, q: Layout, k: Layout):
    assert shard_cells.cells(mask, q, k) == brute_force(mask, q, k)


@given(masks(), layouts(), st.lists(st.integers(0, NUM_TOKENS - 1), min_size=1, max_size=5))
def test_few_queries_in_any_order_on_every_rank(mask: Mask, k: Layout, positions: list[int]):
    q = Layout.from_positions([positions] * k.world_size, NUM_TOKENS)
    assert shard_cells.cells(mask, q, k) == brute_force(mask, q, k)


@given(masks(), layouts(), layouts(), st.sampled_from((1, 3, 50)))
def test_cells_do_not_depend_on_how_they_are_counted(mask, q, k, at_once):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shard_cells, "FEW_RUNS", 0)
        patch.setattr(shard_cells, "AT_ONCE", at_once)
        assert shard_cells.cells(mask, q, k) == brute_force(mask, q, k)


@given(masks(), layouts(), st.integers(1, 30), st.sampled_from((1, 3, 50, 2**20)))
def test_many_strips_on_striped_keys_keep_their_areas(mask: Mask, q: Layout, n: int, at_once: int):
    k = striped(NUM_TOKENS, n)
    exact = brute_force(mask, q, k)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shard_cells, "MAX_JOIN", 0)
        patch.setattr(shard_cells, "AT_ONCE", at_once)
        found = shard_cells.cells(mask, q, k)
    assert {pair: cell.area for pair, cell in found.items()} == {
        p: c.area for p, c in exact.items()
    }
    for (i, j), cell in found.items():
        whole = shard_cells.Cell(cell.area, ((0, q.size(i)),), ((0, k.size(j)),))
        assert cell in (whole, exact[i, j])


def test_memory_of_many_blocks_on_striped_shards_is_bounded():
    """All rows of all blocks at once were gigabytes."""
    num_tokens, block = 65536, 64
    table = np.random.default_rng(0).random((num_tokens // block,) * 2) < 0.5
    mask, layout = block_sparse(table, block), striped(num_tokens, 8)
    allowed = int(table.sum()) * block * block
    mask.strips()
    tracemalloc.start()
    try:
        found = shard_cells.cells(mask, layout, layout)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert sum(cell.area for cell in found.values()) == allowed
    assert peak < 400 * shard_cells.AT_ONCE


@given(st.lists(masks(), min_size=1, max_size=3), layouts())
def test_masks_by_head_need_what_any_head_needs(heads: list[Mask], layout: Layout):
    mask = PerHead(heads)
    assert shard_cells.cells(mask, layout, layout) == brute_force(mask, layout, layout)


def test_causal_contiguous_needs_nothing_above_the_diagonal():
    layout = contiguous(10, 3)
    assert shard_cells.cells(Causal(), layout, layout) == {
        (0, 0): (10, ((0, 4),), ((0, 4),)),
        (1, 0): (12, ((0, 3),), ((0, 4),)),
        (1, 1): (6, ((0, 3),), ((0, 3),)),
        (2, 0): (12, ((0, 3),), ((0, 4),)),
        (2, 1): (9, ((0, 3),), ((0, 3),)),
        (2, 2): (6, ((0, 3),), ((0, 3),)),
    }


def test_causal_zigzag_reads_half_of_what_lies_ahead():
    layout = zigzag(16, 2)
    cells = shard_cells.cells(Causal(), layout, layout)
    assert cells[1, 0] == (32, ((0, 8),), ((0, 4),)), "rank 1 reads the first half of rank 0"
    assert cells[0, 1] == (32, ((4, 8),), ((0, 8),)), "the second half of rank 0 reads rank 1"


@given(boundaries(), st.integers(1, 9))
def test_areas_add_up_over_every_layout(cu: list[int], n: int):
    mask = Document(cu) | Window(2, 1)
    span = (0, NUM_TOKENS)
    for make in (contiguous, zigzag, striped):
        layout = make(NUM_TOKENS, n)
        total = sum(cell.area for cell in shard_cells.cells(mask, layout, layout).values())
        assert total == mask.area(span, span)


def test_large_layouts_are_counted_exactly():
    num_tokens, n = 2**20, 256
    part = num_tokens // n
    cells = shard_cells.cells(Causal(), striped(num_tokens, n), striped(num_tokens, n))
    assert cells[0, 1].area == part * (part - 1) // 2 and cells[1, 0].area == part * (part + 1) // 2
    assert (
        len(shard_cells.cells(Full(), contiguous(num_tokens, n), contiguous(num_tokens, n)))
        == n * n
    )
    cu = np.linspace(0, num_tokens, 2001).astype(int)
    mask = Document(cu) & Causal()
    total = mask.area((0, num_tokens), (0, num_tokens))
    for make in (zigzag, striped):
        layout = make(num_tokens, 64)
        cells = shard_cells.cells(mask, layout, layout)
        assert sum(cell.area for cell in cells.values()) == total


@pytest.mark.parametrize(
    "run", [Run(3, 2, -1), Run(0, 2, 0), Run(-1, 2), Run(3, 2), Run(0, 3, 2), Run(1, -2)]
)
def test_a_run_that_descends_or_leaves_the_sequence_is_refused(run: Run):
    with pytest.raises(ValueError, match=r"shard 1 has Run\(.*ascends within the positions 0..3"):
        Layout(4, [[Run(0, 1)], [run]])


@pytest.mark.parametrize("run", [(0, 2.0, 1), "ab", 5, (0,)])
def test_a_run_of_other_kinds_is_named(run):
    with pytest.raises(ValueError, match=r"shard 1: .* must be a run of whole numbers"):
        Layout(4, [[Run(0, 2)], [run]])


def test_descending_rows_are_runs_of_one_token():
    layout = Layout.from_positions([[5, 4, 3], [2, 0, 1]])
    assert layout.is_partition
    assert layout.rows(0).tolist() == [5, 4, 3]
