"""tw.attention as a function: what it takes, what it returns, several calls at once."""

from __future__ import annotations

import pytest
import torch
from conformance.oracle import assert_close, dense, draw, error, split
from conformance.table import plans

import tilewise as tw
from tilewise.plan.ir import Plan

FLOAT = {"dtype": torch.float64}


def test_a_world_of_one_needs_no_group():
    x, mask = draw((7, 4, 3), (7, 2, 3), seed=0), tw.Causal()
    q, k, v = (t.clone().requires_grad_() for t in x[:3])
    out, lse = tw.attention(
        q, k, v, plan=tw.ring(1), layout=tw.contiguous(7, 1), mask=mask, return_lse=True
    )
    ((out * x.dout).sum() + (lse * x.dlse).sum()).backward()
    want = dense(x, mask)
    for got, expected in zip((out, lse, q.grad, k.grad, v.grad), want, strict=True):
        assert error(got.detach(), expected) <= 1e-12


def test_lse_is_returned_if_asked_for():
    q = torch.randn(5, 2, 3)
    call = {"plan": tw.ring(1), "layout": tw.contiguous(5, 1), "mask": tw.Full()}
    out = tw.attention(q, q, q, **call)
    again, lse = tw.attention(q, q, q, **call, return_lse=True)
    assert torch.equal(out, again) and lse.shape == (5, 2) and lse.dtype == torch.float32


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_results_come_in_the_inputs_dtype(dtype: torch.dtype):
    layout = tw.zigzag(12, 2)
    x = draw((12, 2, 8), (12, 2, 8), seed=3)
    got = split(x, tw.ring(2), layout, tw.Causal(), dtype)
    statistic = torch.float64 if dtype == torch.float64 else torch.float32
    assert [t.dtype for t in got] == [dtype, statistic, dtype, dtype, dtype]
    assert all(error(t, w) < 0.05 for t, w in zip(got, dense(x, tw.Causal()), strict=True))


@pytest.mark.parametrize("plan", [tw.mesh(4, q_tile=2), tw.ulysses(2, inner=tw.ring(2))], ids=repr)
def test_a_batch_is_as_many_calls(plan: Plan):
    x, mask, layout = draw((3, 18, 2, 4), (3, 18, 2, 4), seed=1), tw.Causal(), tw.zigzag(18, 4)
    assert_close(split(x, plan, layout, mask), dense(x, mask))


def test_inputs_need_not_be_contiguous():
    def on_rank(rank: int, group) -> torch.Tensor:
        q, k, v = (t.transpose(0, 1) for t in torch.randn(3, 2, 6, 8, **FLOAT))
        call = {"plan": tw.ring(2), "layout": layout, "mask": tw.Causal(), "group": group}
        strided = tw.attention(q, k, v, **call)
        packed = tw.attention(*(t.contiguous() for t in (q, k, v)), **call)
        return (strided - packed).abs().max()

    layout = tw.contiguous(12, 2)
    assert max(tw.loopback(2, on_rank)) < 1e-12


def test_inputs_are_left_as_they_were():
    layout = tw.zigzag(16, 4)

    def on_rank(rank: int, group) -> bool:
        tensors = [torch.randn(4, 2, 8, requires_grad=True) for _ in range(3)]
        before = [t.detach().clone() for t in tensors]
        plan = tw.mesh(4, q_tile=2, schedule="gather")
        out = tw.attention(*tensors, plan=plan, layout=layout, mask=tw.Causal(), group=group)
        dout = torch.ones_like(out)
        out.backward(dout)
        same = all(torch.equal(t, b) for t, b in zip(tensors, before, strict=True))
        return same and bool((dout == 1).all())

    assert all(tw.loopback(4, on_rank))


def test_several_calls_in_flight_go_back_in_any_order():
    mask, layout, plan = tw.Causal(), tw.zigzag(20, 4), tw.mesh(4, q_tile=2)
    cases = [draw((20, 2, 4), (20, 2, 4), seed) for seed in range(3)]

    def on_rank(rank: int, group) -> list[torch.Tensor]:
        calls = []
        for x in cases:
            leaves = [layout.shard(t, rank).clone().requires_grad_() for t in x[:3]]
            out = tw.attention(*leaves, plan=plan, layout=layout, mask=mask, group=group)
            calls.append((leaves, (out * layout.shard(x.dout, rank)).sum()))
        for _, loss in reversed(calls):
            loss.backward()
        return [t.grad for leaves, _ in calls for t in leaves]

    got = [layout.unshard(parts) for parts in zip(*tw.loopback(4, on_rank), strict=True)]
    want = [dense(x._replace(dlse=0 * x.dlse), mask)[2:] for x in cases]
    assert all(error(a, b) <= 1e-12 for a, b in zip(got, (g for w in want for g in w), strict=True))


def test_one_call_may_feed_the_next():
    mask, layout, plan = tw.Causal(), tw.zigzag(14, 3), tw.ring(3)
    x = draw((14, 2, 4), (14, 2, 4), seed=5)

    def twice(attend, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return attend(attend(q, k, v), k, v)

    def on_rank(rank: int, group) -> tuple[torch.Tensor, ...]:
        leaves = [layout.shard(t, rank).clone().requires_grad_() for t in x[:3]]

        def attend(*qkv):
            return tw.attention(*qkv, plan=plan, layout=layout, mask=mask, group=group)

        (twice(attend, *leaves) * layout.shard(x.dout, rank)).sum().backward()
        return tuple(t.grad for t in leaves)

    whole = [t.clone().requires_grad_() for t in x[:3]]
    one = {"plan": tw.ring(1), "layout": tw.contiguous(14, 1), "mask": mask}
    (twice(lambda *qkv: tw.attention(*qkv, **one), *whole) * x.dout).sum().backward()
    for parts, leaf in zip(zip(*tw.loopback(3, on_rank), strict=True), whole, strict=True):
        assert error(layout.unshard(parts), leaf.grad) <= 1e-12


def test_without_gradients_nothing_is_kept():
    layout = tw.contiguous(8, 2)

    def on_rank(rank: int, group) -> tuple[bool, int]:
        q = torch.randn(4, 2, 4, requires_grad=True)
        call = {"plan": tw.ring(2), "layout": layout, "mask": tw.Full(), "group": group}
        with torch.no_grad():
            out = tw.attention(q, q, q, **call)
        plain = tw.attention(*[q.detach()] * 3, **call)
        return out.requires_grad or plain.requires_grad, group.bytes_sent

    shard_bytes = 2 * 4 * 2 * 4 * 4
    assert tw.loopback(2, on_rank) == [(False, 2 * shard_bytes)] * 2


def test_only_what_needs_a_gradient_gets_one():
    layout = tw.contiguous(8, 2)

    def on_rank(rank: int, group) -> list[bool]:
        q, k, v = (torch.randn(4, 2, 4, requires_grad=name == "k") for name in "qkv")
        tw.attention(
            q, k, v, plan=tw.ring(2), layout=layout, mask=tw.Causal(), group=group
        ).sum().backward()
        return [t.grad is not None for t in (q, k, v)]

    assert tw.loopback(2, on_rank) == [[False, True, False]] * 2


def test_the_same_bits_every_run():
    x, layout = draw((40, 4, 8), (40, 2, 8), seed=2), tw.zigzag(40, 8)
    runs = [split(x, tw.mesh(8, q_tile=2), layout, tw.Causal(), torch.float32) for _ in range(3)]
    assert all(torch.equal(a, b) for run in runs for a, b in zip(run, runs[0], strict=True))


def test_rows_that_no_key_reaches():
    """out 0, lse -inf, gradients 0; a loss of lse alone too."""
    mask = tw.Document([0, 9]) & tw.Slices([((4, 9), (0, 3), "full")])
    x = draw((9, 2, 4), (9, 2, 4), seed=4)
    for plan in plans(3):
        if plan.replicated_queries or plan.num_head_groups > 1:
            continue
        for uses in ((True, True), (False, True)):
            y = x._replace(dout=x.dout * uses[0])
            got = split(y, plan, tw.contiguous(9, 3), mask, uses=uses)
            assert_close(got, dense(y, mask))
            assert (got.lse[:4] == -torch.inf).all() and not got.out[:4].any()
            assert not got.dq[:4].any() and not got.dk[3:].any() and not got.dv[3:].any()


def test_nothing_is_allowed_at_all():
    mask = tw.Window(None, None) & tw.Slices([])
    x = draw((6, 2, 4), (6, 2, 4), seed=4)
    assert_close(split(x, tw.ring(3), tw.zigzag(6, 3), mask), dense(x, mask))


@pytest.mark.parametrize("plan", list(plans(4, "tree", "ulysses"))[::5], ids=repr)
def test_keys_may_have_a_layout_and_a_length_of_their_own(plan: Plan):
    x, mask = draw((10, 4, 4), (23, 2, 4), seed=6), tw.Causal() | tw.Window(0, 9)
    got = split(x, plan, tw.contiguous(10, 4), mask, kv_layout=tw.striped(23, 4))
    assert_close(got, dense(x, mask))


@pytest.mark.parametrize("n", [1, 2, 3, 5, 8])
@pytest.mark.parametrize("positions", [None, [0], [11, 3, 3, 7]])
def test_tree_decodes_at_any_positions(n: int, positions: list[int] | None):
    num_queries = 2 if positions is None else len(positions)
    x, mask = draw((num_queries, 4, 4), (12, 2, 4), seed=8), tw.Causal() & tw.Window(6, 0)
    at = torch.tensor([10, 11] if positions is None else positions)
    options = {} if positions is None else {"q_positions": at}
    got = split(x, tw.tree(n), tw.striped(12, n), mask, **options)
    assert_close(got, dense(x, mask, at))


@pytest.mark.parametrize("save", ["replay", "gathered"])
def test_backward_may_take_another_plan(save: str):
    x, mask, layout = draw((24, 2, 4), (24, 2, 4), seed=9), tw.Causal(), tw.zigzag(24, 6)
    plan = tw.mesh(6, q_tile=2)
    other = tw.mesh(6, q_tile=3, backward=True) if save == "replay" else tw.mesh(6, q_tile=2)
    got = split(x, plan, layout, mask, save=save, backward_plan=other)
    assert_close(got, dense(x, mask))


def test_masks_may_differ_by_head():
    mask = tw.PerHead([tw.Causal(), tw.Window(2, 2)])
    x = draw((15, 4, 4), (15, 2, 4), seed=10)
    for plan in (tw.ring(3), tw.mesh(3, q_tile=3), tw.ulysses(2, inner=tw.ring(2))):
        layout = tw.zigzag(15, plan.world_size)
        assert_close(split(x, plan, layout, mask), dense(x, mask))


def test_a_parsed_plan_is_as_good_as_a_built_one():
    x, mask, layout = draw((16, 2, 4), (16, 2, 4), seed=11), tw.Causal(), tw.zigzag(16, 4)
    for plan in (tw.parse(tw.show(tw.ring(4))), tw.from_json(tw.to_json(tw.mesh(4, q_tile=2)))):
        assert_close(split(x, plan, layout, mask), dense(x, mask))


def test_validation_can_be_left_out():
    layout = tw.contiguous(6, 2)
    x = draw((6, 2, 4), (6, 2, 4), seed=12)
    got = split(x, tw.ring(2), layout, tw.Causal(), validate="never")
    assert_close(got, dense(x, tw.Causal()))


@pytest.mark.parametrize(
    "validate, refused", [("always", "disagree on mask"), ("first", "are in different calls")]
)
def test_another_call_on_one_rank_is_refused_after_one_that_was_agreed_on(validate, refused):
    layout = tw.contiguous(6, 2)

    def on_rank(rank: int, group) -> None:
        q = torch.zeros(3, 1, 2)
        call = {"plan": tw.ring(2), "layout": layout, "group": group, "validate": validate}
        tw.attention(q, q, q, mask=tw.Full(), **call)
        tw.attention(q, q, q, mask=tw.Causal() if rank else tw.Full(), **call)

    with pytest.raises(ValueError, match=f"ranks {refused}"):
        tw.loopback(2, on_rank)
