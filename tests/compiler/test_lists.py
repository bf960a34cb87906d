"""Kernels that read rows where they lie: the same answers, nothing copied together."""

from __future__ import annotations

from itertools import product
from typing import Any

import numpy as np
import pytest
import torch
from conformance.oracle import assert_close, dense, draw, split
from conformance.table import STRATEGIES
from hypothesis import given, settings
from hypothesis import strategies as st
from support.gpu_codes import LARGE, LAYOUTS, LONG, MASKS, errors_in_bf16, plans_of_four_heads
from support.list_kernel import ListKernel
from support.thinned import thinned

import tilewise as tw
from tilewise.compiler.ops import Attend, ComputeDelta, Copy, Fill, Merge
from tilewise.execution import forward_backward
from tilewise.kernels.reference import Reference
from tilewise.plan.row_ranges import row_index
from tilewise.tiles.calls import Kind
from tilewise.tiles.cover import tile_calls
from tilewise.tiles.lists import call_of_slices, moved_slices, pieces_of


@pytest.fixture
def wait(monkeypatch: Any) -> Any:
    def waiting(most: int) -> None:
        monkeypatch.setattr(forward_backward, "kernel_traits", lambda _, style: (style, most))

    return waiting


@pytest.mark.parametrize(
    ("strategy", "mask"),
    thinned(product(STRATEGIES, MASKS), 2),
    ids=lambda x: getattr(x, "name", x),
)
def test_every_strategy_is_exact_where_rows_are_read_where_they_lie(strategy, mask: str, wait):
    number = STRATEGIES.index(strategy) + [*MASKS].index(mask)
    for i, plan in enumerate(plans_of_four_heads(strategy)[number % 3 :: 3][:4]):
        wait((0, 1, 4)[i % 3])
        kernel = ListKernel()
        x = draw((13, 8, 4), (13, 4, 4), seed=number)
        layout = LAYOUTS[(number + i) % 3](13, 4)
        assert_close(split(x, plan, layout, MASKS[mask], kernel=kernel), dense(x, MASKS[mask]))
        assert kernel.calls or plan.num_head_groups > 1  # heads that one buffer exchanges


class Library(Reference):
    """A kernel that leaves its results in the dtype of its operands, as those of libraries do."""

    def forward(self, q: torch.Tensor, *rest: Any) -> Any:
        out, *statistics = super().forward(q, *rest)
        return out.to(q.dtype), *statistics

    def backward(self, q: torch.Tensor, *rest: Any) -> Any:
        return tuple(x.to(q.dtype) for x in super().backward(q, *rest))


@pytest.mark.parametrize("plan", [tw.ring(4), tw.mesh(4, q_tile=2), tw.attention2d(2, 2)], ids=repr)
def test_bf16_is_as_near_as_of_a_library_whose_results_wait(plan: tw.Plan, wait):
    wait(4)
    before, now = errors_in_bf16(plan, Library()), errors_in_bf16(plan, ListKernel())
    for name in ("out", "dq", "dk", "dv"):
        assert now[name] <= 1.03 * before[name], name


@pytest.mark.parametrize("variant", ["gathered", "dropout", "narrow", "largest"])
def test_options_are_exact_where_rows_are_read_where_they_lie(variant: str, wait):
    options: dict[str, Any] = {
        "gathered": {"save": "gathered"},
        "dropout": {"dropout_p": 0.4, "dropout_seed": 3},
        "narrow": {"wire_dtype": torch.float64},
        "largest": {"return_max_logit": True},
    }[variant]
    x = draw((64, 4, 4), (64, 2, 4), seed=2)
    layout, mask = tw.zigzag(64, 4), tw.Document([0, 9, 40, 64]) & tw.Causal()
    given = x.q.float(), x.k.float(), x.v.float(), x.dout.float()

    def results(kernel: Any, most: int) -> list[torch.Tensor]:
        wait(most)
        plan = tw.mesh(4, q_tile=2)

        def on_rank(rank: int, group: Any) -> list[torch.Tensor]:
            q, k, v, dout = (layout.shard(t, rank).clone() for t in given)
            leaves = [t.requires_grad_() for t in (q, k, v)]
            call = {"plan": plan, "layout": layout, "mask": mask, "group": group, "kernel": kernel}
            found = tw.attention(*leaves, **call, **options)
            out, *more = found if isinstance(found, tuple) else (found,)
            return [out.detach(), *more, *torch.autograd.grad(out, leaves, dout)]

        return [t for ends in tw.loopback(4, on_rank) for t in ends]

    kernel = ListKernel()
    for ours, theirs in zip(results(kernel, 2), results(tw.kernel("reference"), 0), strict=True):
        assert torch.allclose(ours, theirs, atol=2e-6)
    assert kernel.calls


MOST_GB = {  # forward and backward
    "mesh": (17, 54),
    "mesh of 8 KV heads": (19.5, 31.5),
    "gather": (4, 10),
    "ulysses": (3.2, 9.6),
    "long ring": (23.5, 82),
    "ring": (3.7, 11.5),
}


@pytest.mark.parametrize("name", LARGE)
def test_a_rank_copies_no_rows_together(name: str):
    """Causal, bf16: what is left is adding to partials, and messages."""
    for backward in (False, True):
        code = LARGE[name].code(backward, kernel="triton")
        assert code.traffic_bytes <= MOST_GB[name][backward] * 1e9
        assert not any(isinstance(op, Fill | Merge) for op in code.ops)
        assert not any(isinstance(op, Copy) and op.label.startswith("gather") for op in code.ops)
        calls = [op for op in code.ops if isinstance(op, Attend)]
        assert all(op.call.kind is Kind.LISTS and op.wholes for op in calls)


def test_tiles_between_which_nothing_is_awaited_are_one_call():
    work = tw.Workload(LONG, 32, 32, 128, mask=tw.Causal())
    plan = tw.mesh(256, q_tile=16)
    for backward, least in ((False, 9), (True, 27)):
        programs = (
            plan.code(work, 85, backward, device=device, kernel="triton")
            for device in ("cpu", "cuda")
        )
        labels = [[x for x in code.labels if x.startswith("compute")] for code in programs]
        tiles = {tile for x in labels[0] for tile in x.removeprefix("compute ").split(", ")}
        mine = [x.removeprefix("compute ").split(", ") for x in labels[1]]
        assert tiles == {tile for x in mine for tile in x}
        assert sum(map(len, mine)) - len(mine) >= least


def test_delta_of_a_query_is_made_once_by_the_rank_that_owns_it():
    work = tw.Workload(1 << 14, 8, 8, 64, mask=tw.Causal())
    for plan in (tw.mesh(4, q_tile=2), tw.ring(4), tw.ulysses(2, inner=tw.ring(2))):
        for kernel in ("cudnn", "triton"):
            code = plan.code(work, 1, True, device="cuda", kernel=kernel)
            (made,) = (op for op in code.ops if isinstance(op, ComputeDelta))
            assert code.num_bytes_of(made.delta) == work.num_tokens // 4 * work.num_heads * 4


def test_a_long_tile_of_rectangles_alone_is_cut_as_a_short_one():
    documents = tw.Document([0, 1 << 16, 1 << 17])
    for num_tokens in (1 << 10, 1 << 17):
        mask = tw.Document([0, num_tokens // 2, num_tokens]) if num_tokens < 1 << 17 else documents
        work = tw.Workload(num_tokens, 4, 4, 64, mask=mask)
        code = tw.all_gather(2).code(work, 0, kernel="triton")
        assert sum(op.call.area for op in code.ops if isinstance(op, Attend)) == num_tokens**2 // 4


@settings(max_examples=80, deadline=None)
@given(st.data())
def test_calls_of_lists_have_the_cells_of_the_tile_where_its_rows_lie(data):
    def placed(size: int) -> np.ndarray:
        cuts = sorted(data.draw(st.sets(st.integers(1, size - 1), max_size=3)))
        pieces = data.draw(st.permutations(np.split(np.arange(size), cuts)))
        found, at = np.zeros(size, np.int64), 0
        for piece in pieces:
            at += data.draw(st.integers(0, 3))
            found[piece] = at + np.arange(len(piece))
            at += len(piece)
        return found

    edges = sorted(data.draw(st.sets(st.integers(1, 29), max_size=4)))
    mask = data.draw(st.sampled_from([tw.Full(), tw.Causal(), tw.Window(4, 2)]))
    mask = mask & tw.Document([0, *edges, 30])
    q, k = np.arange(2, 30), np.arange(30)
    for call in tile_calls(q, k, mask, whole_tile=True):
        orders = [row_index(x) for x in call.sides]
        places = [placed(len(q))[orders[0]], placed(len(k))[orders[1]]]
        slices = moved_slices(call.as_slices, *map(pieces_of, places))
        lists, (first_row, first_key) = call_of_slices(slices)
        wanted = np.zeros((100, 100), int)
        allowed = mask.dense(q, k)[np.ix_(*orders)]
        wanted[np.ix_(places[0] - first_row, places[1] - first_key)] = allowed
        cells = np.zeros_like(wanted)
        for x in lists.slices:
            for row in range(x.q0, x.q1):
                cells[row, x.lo + x.lo_slope * row : x.hi + x.hi_slope * row] += 1
        assert np.array_equal(cells, wanted)
        assert lists.area == allowed.sum()
        assert [row_index(x).tolist() for x in lists.sides] == [
            np.flatnonzero(wanted.any(axis)).tolist() for axis in (1, 0)
        ]
