"""The simulator: closed forms, measured figures, bounds, memory, deadlock, traces."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import product
from pathlib import Path

import pytest
from conformance.table import plans
from support.described import FAST, MACHINES, L, U, machine, workload
from support.thinned import thinned

import tilewise as tw
from tilewise.layouts.layout import Layout
from tilewise.plan.builder import RankBuilder, operand
from tilewise.plan.ir import Plan, RankStep, Side, Traits, own_shards
from tilewise.simulation.machine import KernelSpeed, Link
from tilewise.simulation.simulator import simulate

SLOW = pytest.mark.slow


@pytest.mark.parametrize("n", (2, 8, 64))
def test_a_ring_bound_by_bandwidth_takes_its_transfers(n: int):
    slow = machine(1e6, between=Link(1e6, 1e-3))
    found = simulate(tw.ring(n), workload(n), slow)
    assert found.forward_seconds == pytest.approx((n - 1) * (2 * U / 1e6 + 1e-3))
    assert found.exposed_seconds == pytest.approx(found.seconds)
    assert found.bytes_by_link == {"between": (n - 1) * 6 * U}
    # operands n - 1 transfers, partials as many one transfer behind them, both on one port
    least = (n - 1) * 4 * U / 1e6
    assert least <= found.backward_seconds <= least + 2 * n * 1e-3 + 2 * U / 1e6


@pytest.mark.parametrize("n", (2, 8, 64))
def test_a_ring_bound_by_compute_takes_its_kernels(n: int):
    busy = machine(FAST, 1e9, launch_seconds=1e-4)
    found = simulate(tw.ring(n), workload(n), busy)
    tile = 16 * 16 * 8 * 16
    assert found.forward_seconds == pytest.approx(n * (4 * tile / 1e9 + 1e-4))
    assert found.backward_seconds == pytest.approx(n * (10 * tile / 1e9 + 1e-4))
    assert found.compute_seconds == pytest.approx(found.seconds)
    assert found.exposed_seconds == pytest.approx(0, abs=1e-12)


@pytest.mark.parametrize("n", (8, 64, 256))
def test_gathers_bound_by_bandwidth_take_their_bytes(n: int):
    def seconds(plan: Plan) -> float:
        return simulate(plan, workload(n), machine(1e6)).forward_seconds

    assert seconds(tw.all_gather(n)) == pytest.approx((n - 1) * 2 * U / 1e6)
    a = 8 if n > 8 else 2
    sent = (a - 1) * (2 * U + L) + (n // a - 1) * 2 * U
    assert seconds(tw.mesh(n, q_tile=a, schedule="gather")) == pytest.approx(sent / 1e6)
    ratio = seconds(tw.ring(n)) / seconds(tw.mesh(n, q_tile=a))
    assert ratio == pytest.approx((n - 1) * 2 * U / sent, rel=0.01)


@pytest.mark.parametrize(("rows", "columns"), ((2, 2), (2, 4), (4, 2), (3, 3)))
def test_ranks_that_are_ahead_fill_no_nic_of_a_rank_that_has_not_posted_yet(
    rows: int, columns: int
):
    """The first and the last rank send nothing in the first of attention2d's three exchanges.

    Were their messages of the second one to arrive at once, the first would take longer.
    """
    plan = tw.attention2d(rows, columns)
    found = simulate(plan, workload(rows * columns), machine(1e6))
    swapped, gathered = 2 * U, (columns - 1) * U + (rows - 1) * 2 * U
    returned = (columns - 1) * (U + L)
    assert found.forward_seconds == pytest.approx((swapped + gathered + returned) / 1e6)


@pytest.mark.parametrize("n", (4, 12))
def test_messages_to_one_peer_go_one_after_the_other(n: int):
    """Pruned, some ranks send half shards; they do not push in before the whole ones ahead."""
    work = workload(n, mask=tw.Causal())
    found = simulate(tw.ring(n), work, machine(1e6), exact=True)
    assert found.forward_seconds == pytest.approx((n - 1) * 2 * U / 1e6)


def test_ulysses_bound_by_bandwidth_takes_its_two_exchanges():
    found = simulate(tw.ulysses(8), workload(8), machine(1e6))
    assert found.forward_seconds == pytest.approx(7 / 8 * (4 * U + L) / 1e6)


def test_a_shared_nic_carries_what_all_its_devices_send():
    """A mesh whose columns are nodes: every device has a KV ring of its own across nodes."""
    plan, work = tw.mesh(16, q_tile=4, schedule="gather"), workload(16)
    sent = {4: 1, 2: 2, 1: 4}
    for nics, times in sent.items():
        cluster = machine(node_size=4, nics=nics, inside=Link(FAST))
        seconds = 3 * 2 * U / 1e6 * times
        assert simulate(plan, work, cluster).forward_seconds == pytest.approx(seconds)
    pooled = machine(node_size=4, nics=4, pooled=True, inside=Link(FAST))
    alone = machine(node_size=4, nics=4, inside=Link(FAST))
    assert simulate(tw.ring(16), work, pooled).forward_seconds == pytest.approx(
        simulate(tw.ring(16), work, alone).forward_seconds / 4
    )


def test_racks_share_their_link():
    """4 ranks in 2 racks: all-gather sends 2 x 2 shards of each rack over its link."""
    racks = machine(FAST, rack_nodes=2, across=Link(1e6))
    found = simulate(tw.all_gather(4), workload(4), racks)
    assert found.forward_seconds == pytest.approx(4 * 2 * U / 1e6)
    assert found.bytes_by_link == {"between": 6 * U, "across": 12 * U}


def test_shared_cores_slow_kernels_down_and_copies_slow_them_more():
    work, flop = workload(4), 4 * 4 * 16 * 16 * 8 * 16
    shared = machine(FAST, 1e9, cores=1, core_sharers=4)
    assert simulate(tw.ring(4), work, shared).forward_seconds == pytest.approx(4 * flop / 1e9)
    copying = replace(shared, copy_cores=0.5, between=Link(1e7), inside=Link(1e7))
    assert simulate(tw.ring(4), work, copying).forward_seconds > 4.1 * flop / 1e9


MASKS = (tw.Full(), tw.Causal(), tw.Document([0, 20, 50, 96]))


def every_third(start: int) -> list[Plan]:
    """Of the plans of 6 ranks: with three starts in a row, all of them."""
    return list(plans(6, "tree", "ulysses"))[start % 3 :: 3]


@pytest.mark.parametrize("turn", (0, pytest.param(1, marks=SLOW), pytest.param(2, marks=SLOW)))
@pytest.mark.parametrize("mask", MASKS, ids=repr)
def test_bytes_are_the_volume(mask: tw.Mask, turn: int):
    work = workload(6, num_kv_heads=4, mask=mask)
    for plan in every_third(MASKS.index(mask) + turn):
        found, sent = simulate(plan, work, MACHINES["flat"]), tw.volume(plan, work)
        for rank in range(6):
            got = tuple(sum(use.bytes_by_link.values()) for use in found.use(rank))
            assert got == (sent.forward[rank], sent.backward[rank]), (plan, rank)


@pytest.mark.parametrize(("name", "turn"), thinned(product(MACHINES, (0, 1, 2)), 6))
def test_no_time_is_below_its_bounds_and_more_bandwidth_never_slower(name: str, turn: int):
    work, slow = workload(6, num_kv_heads=4, mask=tw.Causal()), MACHINES[name]
    for plan in every_third(list(MACHINES).index(name) + turn):
        found, sent = simulate(plan, work, slow), tw.volume(plan, work)
        widest = max(link.bandwidth for link in (slow.inside, slow.between))
        for timeline, one in zip((found.forward, found.backward), sent, strict=True):
            assert timeline.seconds >= max(one) / widest * (1 - 1e-9)
            for use in timeline.ranks:
                assert timeline.seconds >= use.compute_seconds * (1 - 1e-9)
                parts = use[2:6]  # computing, own work, waiting, idle
                assert sum(parts) == pytest.approx(timeline.seconds) and min(parts) >= 0
        for times in (1.3, 10):
            faster = simulate(plan, work, slow.scaled(times))
            assert faster.seconds <= found.seconds * 1.01, (plan, times)


LAB = (
    (16, 50, 128, tw.ring(16), 1.322),
    (16, 50, 128, tw.mesh(16, q_tile=4, schedule="eager"), 0.559),
    (16, 50, 128, tw.ulysses(16), 0.212),
    (16, 100, 128, tw.ring(16), 0.667),
    (16, 100, 128, tw.mesh(16, q_tile=4, schedule="eager"), 0.303),
    (16, 100, 128, tw.ulysses(16), 0.155),
    (8, 50, 256, tw.ring(8), 1.234),
    (8, 50, 256, tw.mesh(8, q_tile=2, schedule="eager"), 0.737),
    (8, 50, 256, tw.ulysses(8), 0.379),
    (64, 25, 32, tw.ring(64), 2.759),
)


@pytest.mark.parametrize(("hosts", "mbit", "rows", "plan", "measured"), LAB)
def test_measured_times_are_predicted(
    hosts: int, mbit: int, rows: int, plan: Plan, measured: float
):
    """Forward of 16 heads of 32, fp32, between network namespaces on one machine of 2 cores.

    Assumed: line rate x 1448 / 1514 (TCP in Ethernet), two cores shared by all hosts, nothing else
    takes time. A core's 72 GFLOP/s is fitted to the Ulysses rows; rings and meshes hardly feel it.
    What was measured is other, simpler code for the same patterns (its meshes compute as soon as
    they can: "eager"). Two measurements are left out
    because they are missed by more: the 8 x 8 mesh on 64 hosts (0.731 s, 12 % too fast: its hosts
    compete for two cores) and Ulysses on 4 hosts of 4 ranks (0.282 s, 15 % too slow).
    """
    lab = machine(mbit * 1e6 / 8 * 1448 / 1514, 72e9, cores=2, core_sharers=hosts)
    work = workload(hosts, rows, num_heads=16, num_kv_heads=16, head_dim=32, layout="contiguous")
    assert simulate(plan, work, lab).forward_seconds == pytest.approx(measured, rel=0.1)


def test_ranks_of_a_host_share_its_nic_as_measured():
    """4 hosts x 4 ranks, 100 Mbit/s a host: ring 0.668 s, flat 4x4 mesh 0.546 s."""
    lab = machine(
        100e6 / 8 * 1448 / 1514, 72e9, node_size=4, inside=Link(5e9), cores=2, core_sharers=16
    )
    work = workload(16, 128, num_heads=16, num_kv_heads=16, head_dim=32, layout="contiguous")
    for plan, measured in ((tw.ring(16), 0.668), (tw.mesh(16, q_tile=4), 0.546)):
        assert simulate(plan, work, lab).forward_seconds == pytest.approx(measured, rel=0.05)


def test_tiles_of_whole_hosts_beat_flat_tiles():
    """Measured: a 2 x 2 grid of hosts with a KV ring inside each 0.435 s, 1.26 times as fast.

    Ours sends what two thirds of the flat mesh's bytes are, and is faster than that measured code.
    """
    lab = machine(
        100e6 / 8 * 1448 / 1514, 72e9, node_size=4, inside=Link(5e9), cores=2, core_sharers=16
    )
    work = workload(16, 128, num_heads=16, num_kv_heads=16, head_dim=32, layout="contiguous")
    hosts = simulate(tw.hierarchical(tw.mesh(4, q_tile=2), tw.ring(4)), work, lab)
    flat = simulate(tw.mesh(16, q_tile=4), work, lab)
    assert 0.35 < hosts.forward_seconds < 0.435
    assert 1.25 < flat.forward_seconds / hosts.forward_seconds < 1.6


def silent(n: int, rank_that_forgets: int | None) -> Plan:
    """A ring of one transfer, in which one rank (or all, None) never sends."""

    def script(rank: int) -> tuple[RankStep, ...]:
        s, left, right = RankBuilder(rank), (rank - 1) % n, (rank + 1) % n
        if rank_that_forgets is not None and rank != rank_that_forgets:
            s.send(operand(Side.KV, rank), left)
        s.recv(operand(Side.KV, right), right)
        s.next()
        s.tile((rank,), (right,))
        return s.done()

    # As ours are: a plan of somebody else's is checked before it is simulated.
    return Plan("silent", n, 1, own_shards(n), script=script, traits=Traits(proven=True))


def test_a_plan_in_which_ranks_wait_for_ever_is_an_error():
    message = r"no rank can go on: rank 1 waits for kv2 from rank 2; 3 of 4"
    with pytest.raises(RuntimeError, match=message):
        simulate(silent(4, 2), workload(4), machine())
    with pytest.raises(RuntimeError, match="rank 0 waits for kv1 from rank 1; 0 of 4"):
        simulate(silent(4, None), workload(4), machine())


def test_memory_of_a_ring_and_of_a_gather():
    """Forward: own q, k, v; out and lse so far, and as results; all k, v, or two shards at once."""
    n, out = 8, U + L

    def peak(plan: Plan) -> int:
        return simulate(plan, workload(n), machine()).pass_peak_bytes[0]

    assert peak(tw.all_gather(n)) == 3 * U + 2 * out + n * 2 * U
    assert peak(tw.ring(n)) == 3 * U + 2 * out + 2 * 2 * U


def test_gathered_operands_stay_in_memory_and_do_not_travel_again():
    plan, n = tw.all_gather(8), 8
    kept = simulate(plan, workload(n, save="gathered"), machine())
    again = simulate(plan, workload(n), machine())
    assert again.backward_seconds > 1.9 * kept.backward_seconds
    assert kept.bytes_by_link["between"] == 2 * (n - 1) * 2 * U
    with pytest.raises(ValueError, match="save='gathered' needs the same plan"):
        simulate(plan, workload(n, save="gathered"), machine(), tw.ring(n))


def test_backward_may_use_another_plan():
    work = workload(8)
    both = simulate(tw.ring(8), work, machine(), tw.mesh(8, q_tile=2))
    assert both.forward_seconds == simulate(tw.ring(8), work, machine()).forward_seconds
    other = simulate(tw.mesh(8, q_tile=2), work, machine())
    assert both.backward_seconds == other.backward_seconds
    with pytest.raises(ValueError, match="is for 4 ranks"):
        simulate(tw.ring(8), work, machine(), tw.ring(4))


@pytest.mark.parametrize("mask", (tw.Full(), tw.Document([0, 100, 128])), ids=repr)
def test_the_same_simulation_gives_the_same_bits(mask: tw.Mask):
    work = workload(8, mask=mask)
    runs = [simulate(tw.mesh(8, q_tile=2), work, MACHINES["nodes"]) for _ in range(2)]
    assert runs[0] == runs[1]


def test_a_trace_is_readable_and_covers_the_time(tmp_path: Path):
    found = simulate(tw.ring(8), workload(8), MACHINES["nodes"])
    found.trace(tmp_path / "trace.json")
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    spans = [event for event in events if event["ph"] == "X"]
    assert {event["cat"] for event in spans} == {"forward", "backward"}
    assert max(e["ts"] + e["dur"] for e in spans) == pytest.approx(found.seconds * 1e6, rel=1e-6)
    names = {e["args"]["name"] for e in events if e["name"] == "process_name"}
    assert names == {f"rank {rank} and 1 like it" for rank in range(4)}
    busy = sum(e["dur"] for e in spans if e["tid"] == 0 and e["pid"] == 0)
    assert busy == pytest.approx(found.compute_seconds * 1e6, rel=1e-3)


def test_decoding_and_uneven_shards_are_simulated_rank_by_rank():
    found = simulate(tw.tree(6), workload(6), machine())
    assert found.forward_seconds > 0 and len(found.forward.ranks) == 6
    layout = tw.zigzag(97, 6)
    uneven = tw.Workload(97, 8, 8, 16, "float32", layout=layout)
    assert len(simulate(tw.ring(6), uneven, machine()).forward.ranks) == 6


def test_a_layout_of_another_size_is_refused():
    work = workload(4, layout=Layout(64, tw.contiguous(64, 4).runs))
    with pytest.raises(ValueError, match="layout is for 4 ranks"):
        simulate(tw.ring(8), work, machine())


def test_slow_ranks_and_jitter_are_the_same_in_every_run():
    work = tw.Workload(1 << 12, 8, 8, 64, mask=tw.Causal(), layout="zigzag")
    machine = tw.Machine.preset("h100x8")
    plain = tw.simulate(tw.ring(8), work, machine)
    slow = replace(machine, slow_ranks=(3,), slowness=2.0)
    found = tw.simulate(tw.ring(8), work, slow)
    for rank in range(8):
        factor = 2 if rank == 3 else 1
        for a, b in zip(found.use(rank), plain.use(rank), strict=True):
            assert a.compute_seconds == pytest.approx(factor * b.compute_seconds)
    late = replace(machine, jitter=0.3)
    first, again, other = (
        tw.simulate(tw.ring(8), work, replace(late, seed=seed)).seconds for seed in (0, 0, 1)
    )
    assert first == again != other and first > plain.seconds
    assert not replace(machine, slow_ranks=(3,)).is_disturbed
    for wrong in ({"slowness": 0.5}, {"jitter": -1.0}, {"slow_ranks": (-1,)}):
        with pytest.raises(ValueError, match=next(iter(wrong))):
            replace(machine, **wrong)


@pytest.mark.parametrize("mask", (tw.Causal(), tw.Causal() & tw.Window(99, 0)), ids=repr)
def test_unpruned_every_rank_sends_whole_shards_and_computes_what_the_mask_allows(mask: tw.Mask):
    n, tokens = 4, 4096
    flat = tuple(
        KernelSpeed("bfloat16", backward, (1.0,), (1.0,), ((1e14,),)) for backward in (False, True)
    )  # whole shards are cut into other calls than halves
    preset = tw.Machine.preset("h100x8")
    machine = replace(preset, pack_bandwidth=None, kernels=flat, launch_seconds=0.0)
    work = tw.Workload(tokens, 2, 2, 64, mask=mask)
    plan = tw.all_gather(n)
    whole, pruned = (tw.simulate(plan, work, machine, prune=prune) for prune in (False, True))
    sides = 2 * (n - 1) * (tokens // n) * 2 * 64 * 2  # keys and values of the other shards
    sent = sum(sum(use.bytes_by_link.values()) for use in whole.forward.ranks[:1])
    assert sent == sides
    assert whole.sent_bytes > pruned.sent_bytes
    compute = [max(use.compute_seconds for use in x.forward.ranks) for x in (whole, pruned)]
    assert compute[0] == pytest.approx(compute[1], rel=0.02)
