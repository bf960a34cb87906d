"""Layouts of any positions: which runs they are written in makes no difference."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.drawn_masks import layouts

import tilewise as tw
from tilewise.arguments import MOST_RANKS
from tilewise.layouts.layout import Run, normal_runs, runs_of_positions

RUNS = st.lists(
    st.builds(Run, st.integers(0, 30), st.integers(1, 5), st.integers(1, 4)), max_size=8
)


def rows_of(runs) -> list[int]:
    return [run.start + i * run.stride for run in runs for i in range(run.count)]


@given(runs=RUNS)
def test_normal_runs_depend_on_the_rows_alone(runs: list[Run]):
    rows = rows_of(runs)
    canonical = normal_runs(runs)
    assert rows_of(canonical) == rows
    assert canonical == runs_of_positions(np.array(rows, np.int64))
    assert canonical == normal_runs([Run(x, 1) for x in rows])
    assert canonical == normal_runs(canonical)


def test_neighbours_stay_together():
    assert runs_of_positions(np.array([0, 5, 6, 7, 9, 11, 13, 3])) == (
        Run(0, 1),
        Run(5, 3),
        Run(9, 3, 2),
        Run(3, 1),
    )


@given(layout=layouts())
def test_a_layout_is_that_of_its_positions(layout: tw.Layout):
    ranks = range(layout.world_size)
    for kind in (layout.positions, layout.rows, lambda r: layout.rows(r).tolist()):
        same = tw.Layout.from_positions([kind(rank) for rank in ranks])
        assert same == layout
        assert hash(same) == hash(layout)
        assert [same.rows(rank).tolist() for rank in ranks] == [
            layout.rows(rank).tolist() for rank in ranks
        ]


@pytest.mark.parametrize("make", [tw.contiguous, tw.zigzag, tw.striped])
def test_known_layouts(make):
    layout = make(37, 3)
    assert tw.Layout.from_positions([layout.positions(r) for r in range(3)]) == layout
    assert tw.Layout.from_positions([layout.positions(r) for r in (0, 2, 1)]) != layout


@pytest.mark.parametrize(
    ("positions", "message"),
    [
        ([[0, 1], [1, 2]], r"has 4 positions, .* lacks 3, has 1 twice"),
        ([[0, 1], [3]], r"has 3 positions, .* lacks 2, has 3, which is none"),
        ([[0, 1.5]], r"positions of rank 0 \(\[0, 1.5\]\) must be a list of whole numbers"),
        (
            [[0], torch.ones(2, 2, dtype=torch.long)],
            r"positions of rank 1 \((?s:.*) must be a list of whole numbers",
        ),
        ([[0], [True]], r"positions of rank 1 \(\[True\]\) must be a list of whole numbers"),
        ([], "num_tokens"),
        ([[-1, 0]], r"lacks 1, has -1, which is none"),
    ],
)
def test_wrong_positions(positions, message: str):
    with pytest.raises(ValueError, match=message):
        tw.Layout.from_positions(positions)


def test_attention_on_any_positions_is_exact():
    torch.manual_seed(0)
    order = torch.randperm(23)
    layout = tw.Layout.from_positions([order[:9], order[9:10], order[10:]])
    q, k, v = torch.randn(3, 23, 2, 8, dtype=torch.float64)

    def on_rank(rank, group):
        mine = (layout.shard(x, rank) for x in (q, k, v))
        return tw.attention(*mine, plan=tw.ring(3), layout=layout, mask=tw.Causal(), group=group)

    out = layout.unshard(tw.loopback(3, on_rank))
    dense = torch.nn.functional.scaled_dot_product_attention(
        *(x.movedim(0, 1) for x in (q, k, v)), is_causal=True
    )
    assert (out - dense.movedim(1, 0)).abs().max() < 1e-12


def test_zigzag_takes_as_many_ranks_as_other_layouts():
    n = MOST_RANKS
    assert tw.zigzag(2 * n, n).world_size == tw.contiguous(2 * n, n).world_size == n
    for layout in (tw.zigzag, tw.contiguous):
        with pytest.raises(ValueError, match=rf"n \({n + 1}\) must be from 1 to {n}"):
            layout(2 * n, n + 1)
