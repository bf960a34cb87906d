"""What a rank's own work costs: each overhead of a machine enters a pass where it is paid."""

from dataclasses import replace

import pytest

import tilewise as tw
from tilewise.plan.ir import Plan
from tilewise.simulation.machine import KernelSpeed, Link, Machine

ROWS, HEADS, WIDTH = 32, 4, 16
SHARD = ROWS * HEADS * WIDTH * 4


def machine(**fields) -> Machine:
    """Kernels and links as good as free."""
    kernels = tuple(
        KernelSpeed("float32", backward, (16.0,), (16.0,), ((1e18,),)) for backward in (False, True)
    )
    return replace(Machine("free", 64, Link(1e18), Link(1e18), kernels), **fields)


def passes(plan: Plan, cluster: Machine, mask: tw.Mask | None = None) -> tuple[float, float]:
    tokens = ROWS * plan.world_size
    work = tw.Workload(
        tokens, HEADS, HEADS, WIDTH, "float32", None, tw.Full() if mask is None else mask
    )
    found = tw.simulate(plan, replace(work, layout="contiguous"), cluster)
    return found.forward_seconds, found.backward_seconds


def test_a_call_and_its_agreement_come_before_the_pass():
    slow = machine(call_seconds=(1.0, 2.0), agree_seconds=0.25)
    assert passes(tw.ring(5), slow) == pytest.approx((1.0 + 4 * 0.25, 2.0), rel=1e-6)


def test_every_tile_but_the_first_is_merged():
    forward, _ = passes(tw.ring(4), machine(merge_seconds=1.0))
    assert forward == pytest.approx(3, rel=1e-6)
    wire = SHARD + ROWS * HEADS * 4  # out and lse
    forward, _ = passes(tw.ring(4), machine(merge_bandwidth=float(wire)))
    assert forward == pytest.approx(3, rel=1e-6)


def test_keys_and_values_are_packed_once():
    """Beside it out and lse are copied to the results: SHARD bytes, and 4 for each row and head."""
    forward, _ = passes(tw.ring(4), machine(pack_bandwidth=float(2 * SHARD)))
    assert forward == pytest.approx(1 + (SHARD + 4 * ROWS * HEADS) / (2 * SHARD), rel=1e-6)


def test_a_short_message_keeps_its_link_as_long_as_it_is_carried():
    """3 transfers one after the other, or 3 messages of a gather through one port."""
    slow = machine(carry_seconds=1.0)
    assert passes(tw.ring(4), slow)[0] == pytest.approx(3, rel=1e-6)
    assert passes(tw.all_gather(4), slow)[0] == pytest.approx(3, rel=1e-6)


def test_posting_shares_cores():
    """Two ranks, one core: each posts one message and one receive."""
    slow = machine(message_seconds=1.0, cores=1.0)
    assert passes(tw.ring(2), slow)[0] == pytest.approx(4, rel=1e-6)
    assert passes(tw.ring(2), replace(slow, cores=2.0))[0] == pytest.approx(2, rel=1e-6)


def test_only_tiles_at_the_masks_edge_compute_in_vain():
    """A causal ring's last rank has 3 full tiles of ROWS keys and one triangle of half as many."""
    flop = 4 * HEADS * WIDTH * ROWS
    kernels = tuple(
        KernelSpeed("float32", b, (16.0,), (16.0,), ((float(flop),),), edge_keys=8.0)
        for b in (False, True)
    )
    slow = machine(kernels=kernels)
    forward, _ = passes(tw.ring(4), slow, tw.Causal())
    assert forward == pytest.approx(3 * ROWS + (ROWS + 1) / 2 + 8, rel=1e-6)
    assert passes(tw.ring(4), slow)[0] == pytest.approx(4 * ROWS, rel=1e-6)


def test_fewer_heads_fill_a_device_as_fewer_queries_do():
    """All heads of ROWS / 2 queries take what half the heads of ROWS queries do."""
    speeds = tuple((float(x),) for x in (1, 3, 4))
    sizes = ROWS / 2, float(ROWS), 2.0 * ROWS
    table = KernelSpeed("float32", False, sizes, (float(ROWS),), speeds, heads=2 * HEADS)
    assert table.speed(ROWS, ROWS) == table.speed(ROWS, ROWS, 2 * HEADS) == pytest.approx(3)
    assert table.speed(ROWS, ROWS, HEADS) == table.speed(ROWS / 2, ROWS) == pytest.approx(1)
    assert replace(table, heads=0).speed(ROWS, ROWS, HEADS) == pytest.approx(3)
    flop = 4 * HEADS * WIDTH * ROWS * ROWS
    slow = machine(kernels=(table, replace(table, backward=True)))
    assert passes(tw.ring(2), slow)[0] == pytest.approx(2 * flop / 1, rel=1e-6)
