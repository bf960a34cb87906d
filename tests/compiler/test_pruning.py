"""Pruning: what a mask makes needless does not travel, and what is left is still right."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from conformance.table import plans
from hypothesis import given, settings
from hypothesis import strategies as st
from support.drawn_masks import NUM_TOKENS, masks

import tilewise as tw
from tilewise.compiler.pruning import prune_shards
from tilewise.plan.builder import operand, partial
from tilewise.plan.ir import Plan, Role, Side, Step, Transfer

LAYOUTS = (tw.contiguous, tw.zigzag, tw.striped)


def transfers(plan: Plan) -> list[Transfer]:
    return [transfer for step in plan.steps for transfer in step.transfers]


def sent(plan: Plan, mask: tw.Mask, layout: tw.Layout) -> int:
    """Bytes of forward and backward, all ranks together, for one head of one fp64 value."""
    work = tw.Workload(
        layout.num_tokens,
        plan.num_head_groups,
        plan.num_head_groups,
        1,
        "float64",
        None,
        mask,
        layout,
    )
    return sum(sum(one) for one in tw.volume(plan, work))


@given(st.data())
@settings(max_examples=25)
def test_a_pruned_plan_is_right_and_has_no_transfer_to_spare(data: st.DataObject):
    n = data.draw(st.integers(1, 6))
    plan = data.draw(st.sampled_from(list(plans(n))))
    mask = data.draw(masks())
    layout = data.draw(st.sampled_from(LAYOUTS))(NUM_TOKENS, n)
    pruned = tw.prune(plan, mask, layout)
    tw.check(pruned, mask, layout)
    assert tw.droppable(pruned, mask, layout) == ()
    assert len(transfers(pruned)) <= len(transfers(plan))
    assert sent(plan, mask, layout) <= sent(plan, tw.Full(), layout)


@given(st.data())
@settings(max_examples=30)
def test_pruning_twice_is_pruning_once(data: st.DataObject):
    n = data.draw(st.integers(2, 6))
    plan = data.draw(st.sampled_from(list(plans(n))))
    mask = data.draw(masks())
    layout = data.draw(st.sampled_from(LAYOUTS))(NUM_TOKENS, n)
    once = tw.prune(plan, mask, layout)
    assert tw.prune(once, mask, layout).steps == once.steps


@pytest.mark.parametrize("n", [1, 3, 4])
def test_a_full_mask_leaves_a_plan_as_it_is(n: int):
    for plan in plans(n):
        assert tw.prune(plan, tw.Full(), tw.zigzag(4 * n, n)) is plan
        assert tw.prune(plan, tw.Window(None, None), tw.striped(4 * n, n)) == plan


def test_causal_ring_skips_future_shards():
    n = 5
    pruned = tw.prune(tw.ring(n), tw.Causal(), tw.contiguous(20, n))
    cells = {(t.q[0], t.kv[0]) for step in pruned.steps for tiles in step.tiles for t in tiles}
    assert cells == {(q, kv) for q in range(n) for kv in range(q + 1)}
    read = {
        (transfer.item.shard, transfer.dst)
        for transfer in transfers(pruned)
        if transfer.item.role is Role.OPERAND
    }
    assert read == {(kv, q) for q in range(n) for kv in range(q)}


@pytest.mark.parametrize("make", [tw.ring, tw.all_gather, lambda n: tw.mesh(n, q_tile=1)])
def test_unread_halves_of_zigzag_shards_do_not_travel(make: Callable[[int], Plan]):
    """Ranks after a shard's owner read both its halves or its first alone, never the second."""
    n, half = 4, 3
    pruned = tw.prune(make(n), tw.Causal(), tw.zigzag(2 * n * half, n))
    operands = [transfer for transfer in transfers(pruned) if transfer.item.role is Role.OPERAND]
    assert len(operands) == n * (n - 1)
    for transfer in operands if make is tw.all_gather else ():
        assert transfer.rows == (None if transfer.dst < transfer.item.shard else ((0, half),))
    last_transfers = {transfer.item.shard: transfer for transfer in operands}
    assert all(transfer.rows in (None, ((0, half),)) for transfer in operands)
    assert last_transfers[0].rows == ((0, half),)
    partials = [transfer for transfer in transfers(pruned) if transfer.item.role is Role.PARTIAL]
    assert any(transfer.rows == ((0, half),) for transfer in partials)


def test_a_transfer_is_trimmed_to_what_its_destination_or_a_later_transfer_reads():
    """One document ends in the middle of shard 1: nobody needs shard 0's tokens after it."""
    mask, layout = tw.Document([0, 6, 12]) & tw.Causal(), tw.contiguous(12, 3)
    pruned = tw.prune(tw.ring(3), mask, layout)
    travelling = {
        (h.item, h.src, h.dst, h.rows) for h in transfers(pruned) if h.item.side is Side.KV
    }
    assert (operand(Side.KV, 0), 0, 1, None) in travelling
    assert (operand(Side.KV, 1), 1, 2, ((2, 4),)) in travelling
    assert not any(item.shard == 0 and 2 in (src, dst) for item, src, dst, _ in travelling)


def test_documents_apart_exchange_nothing():
    n = 4
    for plan in plans(n, "attention2d", "ulysses", "tree"):
        if "attention2d" in plan.name:  # hierarchical around it
            continue
        pruned = tw.prune(plan, tw.Document([0, 5, 10, 15, 20]), tw.contiguous(20, n))
        assert transfers(pruned) == []
        assert len(pruned.steps) <= len(plan.steps)


def test_attention2d_sends_a_document_of_its_own_to_where_it_is_computed_only():
    mask, layout = tw.Document([0, 5, 10, 15, 20]), tw.contiguous(20, 4)
    pruned = tw.prune(tw.attention2d(2, 2), mask, layout)
    assert len(transfers(pruned)) < len(transfers(tw.attention2d(2, 2))) / 2
    tw.check(pruned, mask, layout)


def test_relays_that_do_not_read_are_bypassed():
    """Only rank 3 reads shard 1: in a ring of 4 it would come by rank 0."""
    mask = tw.masks.block_sparse(
        [[i == j or (i, j) == (3, 1) for j in range(4)] for i in range(4)], 1
    )
    pruned = tw.prune(tw.ring(4), mask, tw.contiguous(4, 4))
    assert {(str(h.item), h.src, h.dst) for h in transfers(pruned)} == {
        ("kv1", 1, 3),
        ("kv1*", 3, 1),
    }
    operand_steps = [n for n, step in enumerate(pruned.steps) for h in step.transfers if h.dst == 3]
    assert operand_steps == [1], "when the second transfer would have started"
    tw.check(pruned, mask, tw.contiguous(4, 4))


def _with(plan: Plan, step: int, *added: Transfer) -> Plan:
    steps = list(plan.steps)
    steps[step] = Step(steps[step].tiles, (*steps[step].transfers, *added))
    return plan.replaced("padded", steps)


def test_droppable_finds_an_operand_that_nobody_reads():
    plan = tw.ring(3)
    padded = _with(plan, 2, Transfer(operand(Side.Q, 0), 0, 1))
    (found,) = tw.droppable(padded)
    assert (found.step, found.transfer.item) == (2, operand(Side.Q, 0))


def test_droppable_finds_what_a_mask_makes_needless():
    mask, layout = tw.Causal(), tw.contiguous(12, 3)
    plan, pruned = tw.ring(3), tw.prune(tw.ring(3), mask, layout)
    found = [transfer.transfer for transfer in tw.droppable(plan, mask, layout)]
    assert set(found) == set(transfers(plan)) - set(transfers(pruned))


def test_droppable_finds_the_owners_own_share_on_its_way():
    """A published ring: dk, dv start at their owner and go all the way round."""
    n = 3
    plan = tw.ring(n)
    own = [
        Transfer(operand(Side.KV, r)._replace(role=Role.PARTIAL), r, (r - 1) % n) for r in range(n)
    ]
    padded = _with(plan, 1, *own)
    assert {transfer.transfer for transfer in tw.droppable(padded)} >= set(own)


def test_pruned_plans_are_kept_with_their_plan():
    plan, mask, layout = tw.ring(4), tw.Causal(), tw.zigzag(64, 4)
    assert tw.prune(plan, mask, layout) is tw.prune(plan, tw.Causal(), tw.zigzag(64, 4))


def test_layouts_must_be_for_the_plans_ranks():
    with pytest.raises(ValueError, match=r"layout is for 3 ranks, but ring.* for 4"):
        tw.prune(tw.ring(4), tw.Causal(), tw.contiguous(12, 3))


def test_a_step_that_reaches_other_teams_is_no_exchange_of_teams():
    """Gradients of keys that only another team read come from there, not by way of a neighbour."""
    plan, own = tw.ulysses(2, tw.ring(2)), tw.contiguous(8, 4)
    first, second, third, last = own.runs
    swapped = tw.Layout(8, [first, third, second, last])
    pruned = prune_shards(plan, tw.Causal(), (own, swapped))
    assert Transfer(partial(Side.KV, 1), 2, 1) in pruned.steps[-1].transfers
    assert pruned.traits.exchanges == plan.traits.exchanges[:1]
