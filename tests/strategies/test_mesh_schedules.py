"""Mesh schedules: the pacing model against the simulator, the optimum, and bounded shards."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from support.described import machine, workload
from support.programs import most_held
from support.thinned import thinned

import tilewise as tw
from benchmarks.mesh_optimum import least, optimum, relaxed, search
from tilewise.plan.ir import Item, Plan, PlanError, Role, Side
from tilewise.plan.payload import ShardWeights
from tilewise.simulation.peak_memory import PassMemory
from tilewise.simulation.simulator import simulate_pass
from tilewise.strategies.mesh_schedules.greedy import (
    greedy_tile_steps,
    least_held,
    stepwise_tile_steps,
)
from tilewise.strategies.mesh_schedules.model import seconds_of, transfer_bytes
from tilewise.strategies.mesh_schedules.paper import paper_tile_steps

FORWARD, BACKWARD = ShardWeights(1, 2, 1, 0), ShardWeights(2, 2, 1, 2)
GQA, GQA_BACKWARD = ShardWeights(1, 0.5, 1, 0), ShardWeights(2, 0.5, 1, 0.5)
TILES = ((1, 4), (4, 1), (2, 2), (2, 3), (2, 6), (3, 3), (4, 4))
RATIOS = (0.0625, 0.25, 0.5, 1.0, 1.4, 4.0, 16.0)


def block_seconds(shape: tuple[int, int], costs: ShardWeights, ratio: float) -> float:
    return max(1, round(64 * ratio * transfer_bytes(shape, costs) / (shape[0] * shape[1]))) / 64


@pytest.mark.parametrize("backward", (False, True))
@pytest.mark.parametrize("ratio", (0.2, 1.0, 3.0))
@pytest.mark.parametrize("shape", ((2, 3), (4, 4), (3, 5)))
def test_the_pacing_model_is_the_simulators(shape: tuple[int, int], ratio: float, backward: bool):
    """Ranks on one port each, no latency: the same seconds, once messages have their real bytes."""
    rows, columns = shape
    n = rows * columns
    work = workload(n)
    plan = tw.mesh(n, rows, backward=backward)
    payload = work.resolve(plan)[backward].payload
    row_bytes = [payload.row_bytes(item) for item in _items()]
    costs = ShardWeights(*(16.0 * size for size in row_bytes))
    flop = (10 if backward else 4) * 16 * 16 * 8 * 16
    block = ratio * sum(costs) / 4
    tile_steps = greedy_tile_steps(shape, BACKWARD if backward else FORWARD)
    timeline, _ = simulate_pass(plan, work, machine(1.0, flop / block), backward)
    assert timeline.seconds == pytest.approx(seconds_of(tile_steps, costs, block))


def _items():
    return [Item(side, role, 0) for role in (Role.OPERAND, Role.PARTIAL) for side in Side]


@pytest.mark.parametrize("costs", (FORWARD, BACKWARD, GQA, GQA_BACKWARD))
@pytest.mark.parametrize("shape", ((2, 2), (2, 4), (3, 3), (4, 3), (3, 5)))
def test_found_programs_take_as_long_as_their_steps(shape: tuple[int, int], costs: ShardWeights):
    for ratio in RATIOS:
        block = block_seconds(shape, costs, ratio)
        for width in (1, 8):
            found = search(shape, costs, block, width)
            assert found is not None
            assert seconds_of(found.tile_steps, costs, block) == pytest.approx(found.seconds)
            assert search(shape, costs, block, width, found.seconds / 1000) is None


def test_the_optimum_of_small_tiles_is_that_worked_out_by_hand():
    pytest.importorskip("ortools")
    # ring of 3: two arrivals of 2, then the last block
    assert optimum((1, 3), FORWARD, 1.0, 6.0) == (5.0, True)
    # q comes during (0, 0), kv during (1, 0); (1, 1) at 3; o leaves during (0, 1)
    assert optimum((2, 2), FORWARD, 1.0, 9.0) == (5.0, True)
    assert optimum((2, 2), FORWARD, 100.0, 999.0) == (400.0, True)
    # nothing but messages: kv 2, q 1, o 1, and the blocks between q and o
    assert optimum((2, 2), FORWARD, 0.125, 9.0).seconds == 4.125


def test_what_no_program_can_do_is_not_in_the_optimum():
    """Waiting for q before asking for kv would end at 2.94, but nothing waits without a use."""
    pytest.importorskip("ortools")
    block = 0.4375
    assert relaxed((2, 2), GQA, block) == (2.9375, True)
    assert optimum((2, 2), GQA, block, 9.0) == (3.375, True)
    assert least((2, 2), GQA, block, 9.0, 1000) == 3.375
    assert least((2, 2), GQA, block, 3.375, 1000) == 3.375  # none ends before
    assert least((2, 2), GQA, block, 9.0, 3) is None  # more programs than that


@pytest.mark.parametrize("costs", thinned((FORWARD, BACKWARD, GQA_BACKWARD, GQA)))
def test_no_schedule_beats_the_optimum_and_greedy_comes_within_five_percent(
    costs: ShardWeights,
):
    """But for a few tiles and ratios, and there less than a tenth."""
    pytest.importorskip("ortools")
    over = []
    for shape in TILES:
        plain = greedy_tile_steps(shape, costs)
        others = [stepwise_tile_steps(*shape, name, costs) for name in ("eager", "kv_first")]
        others.append(paper_tile_steps(shape, costs))
        for ratio in RATIOS:
            block = block_seconds(shape, costs, ratio)
            pace = block * shape[0] * shape[1] / transfer_bytes(shape, costs)
            paced = greedy_tile_steps(shape, costs, pace=pace)
            times = [seconds_of(tile_steps, costs, block) for tile_steps in (plain, paced, *others)]
            best = optimum(shape, costs, block, min(times))
            assert best.proven
            assert min(times) >= best.seconds * (1 - 1e-9)
            assert times[1] <= min(times[0], 1.08 * best.seconds)
            over.append(times[0] / best.seconds)
    assert max(over) <= 1.1
    assert sum(x <= 1.05 for x in over) >= 0.95 * len(over)


def test_a_bound_holds_for_every_program():
    """The search drops what is bound to end late: with and without dropping it finds the same."""
    pytest.importorskip("ortools")
    for costs in (FORWARD, GQA_BACKWARD):
        for ratio in (0.5, 1.0, 2.0):
            block = block_seconds((2, 3), costs, ratio)
            every = least((2, 3), costs, block, 1e6, 10_000)
            assert every is not None
            assert least((2, 3), costs, block, every * 1.001, 10_000) == pytest.approx(every)
            assert every >= relaxed((2, 3), costs, block).seconds * (1 - 1e-9)


def test_the_solver_names_what_is_wrong(monkeypatch: pytest.MonkeyPatch):
    with pytest.raises(ValueError, match=r"block \(0\)"):
        relaxed((2, 2), FORWARD, 0)
    monkeypatch.setitem(sys.modules, "ortools.sat.python", None)
    with pytest.raises(ImportError, match=r"tilewise\[solver\]"):
        optimum((2, 2), FORWARD, 1.0, 9.0)


def test_a_number_as_schedule_is_a_pace():
    slow, fast = tw.mesh(16, 4, 0.5, kv_bytes=0.5), tw.mesh(16, 4, schedule=2.0, kv_bytes=0.5)
    assert slow.name == "mesh(16, q_tile=4, schedule=0.5, kv_bytes=0.5)"
    assert tw.mesh(12, 3, 1.0, kv_bytes=0.5) != tw.mesh(12, 3, kv_bytes=0.5)
    work = workload(16)
    assert tw.volume(slow, work) == tw.volume(fast, work) == tw.volume(tw.mesh(16, 4), work)
    for plan in (slow, fast, tw.mesh(64, 4, 0.7, held=7)):
        tw.check(plan)
    for pace in (0, -1.0, float("nan"), float("inf")):
        with pytest.raises(ValueError, match=r"schedule \(.*\) must be .*greedy"):
            tw.mesh(16, 4, pace)


@pytest.mark.parametrize("backward", (False, True))
@pytest.mark.parametrize(("n", "a"), ((5, 1), (9, 3), (12, 3), (20, 4), (20, 5)))
def test_a_bounded_rank_holds_no_more_and_sends_the_same(n: int, a: int, backward: bool):
    work = workload(n)
    for held in (least_held(a, n // a), least_held(a, n // a) + 1, a + n // a):
        plan = tw.mesh(n, a, held=held, backward=backward)
        tw.check(plan)
        assert 2 + most_held(tw.lower(plan, 0)) <= held  # its own two, and what it receives
        assert tw.volume(plan, work) == tw.volume(tw.mesh(n, a), work)


def test_a_bounded_mesh_has_no_transfer_that_can_be_dropped():
    plan = tw.mesh(12, 3, held=6, backward=True)
    for number, step in enumerate(plan.steps):
        for transfer in [
            transfer for transfer in step.transfers if 0 in (transfer.src, transfer.dst)
        ]:
            kept = tuple(other for other in step.transfers if other != transfer)
            steps = (*plan.steps[:number], step._replace(transfers=kept), *plan.steps[number + 1 :])
            with pytest.raises(PlanError):
                tw.check(plan.replaced("one transfer less", steps))


@pytest.mark.parametrize("backward", (False, True))
def test_few_held_shards_take_less_memory_than_all(backward: bool):
    work = tw.Workload(64 * 1024, 8, 8, 64, layout="contiguous")

    def peak(plan: Plan) -> int:
        return PassMemory(work.resolve(plan), backward=backward).peak_bytes

    bounded = peak(tw.mesh(64, 4, held=7, backward=backward))
    assert bounded < 0.55 * peak(tw.mesh(64, 4, "kv_first"))
    # In its order for backward, eager lets KV partials go early and holds little.
    assert bounded < (1.1 if backward else 0.96) * peak(tw.mesh(64, 4, "eager"))


def test_a_bounded_mesh_is_exact():
    n, tokens = 10, 50
    layout, mask = tw.zigzag(tokens, n), tw.Causal()
    forward, back = tw.mesh(n, 2, held=5), tw.mesh(n, 2, held=5, backward=True)
    q, k, v, dout = (torch.randn(tokens, h, 4, dtype=torch.float64) for h in (4, 2, 2, 4))

    def one(rank, group):
        mine = [layout.shard(x, rank).requires_grad_() for x in (q, k, v)]
        out = tw.attention(
            *mine, plan=forward, backward_plan=back, layout=layout, mask=mask, group=group
        )
        out.backward(layout.shard(dout, rank))
        return [out.detach(), *(x.grad for x in mine)]

    found = [layout.unshard(list(parts)) for parts in zip(*tw.loopback(n, one), strict=True)]
    for got, want in zip(found, _expected(q, k, v, dout), strict=True):
        assert (got - want).abs().max() < 1e-12 * max(1, want.abs().max())


def _expected(q, k, v, dout):
    q, k, v = (x.clone().requires_grad_() for x in (q, k, v))
    out = torch.nn.functional.scaled_dot_product_attention(
        *(x.transpose(0, 1) for x in (q, k, v)), is_causal=True, enable_gqa=True
    ).transpose(0, 1)
    out.backward(dout)
    return out.detach(), q.grad, k.grad, v.grad


def test_impossible_bounds_name_the_least():
    with pytest.raises(ValueError, match=r"held \(10\) must be at least 11 for a tile of 8 x 32"):
        tw.mesh(256, 8, held=10)
    with pytest.raises(ValueError, match=r"held \(11\) needs schedule='greedy'; 'gather' holds"):
        tw.mesh(256, 8, "gather", held=11)


@pytest.mark.slow
def test_the_benchmarks_print_tables():
    pytest.importorskip("ortools")
    root = Path(__file__).parents[2]

    def rows(*command: str) -> list[dict]:
        done = subprocess.run(
            [sys.executable, *command, "--json"], cwd=root, capture_output=True, check=True
        )
        return [json.loads(line) for line in done.stdout.splitlines()]

    greedy = rows("benchmarks/greedy.py", "--tiles", "2x3", "--ratios", "0.25,4")
    assert len(greedy) == 12 and all(row["proven"] for row in greedy)
    assert all(1 - 1e-9 <= row["best"] <= min(row["greedy"], row["paced"]) for row in greedy)
    assert all(row["paced"] <= 1.05 for row in greedy)
    memory = rows("benchmarks/memory.py", "--ranks", "16", "--q-tile", "4")
    assert [row["held"] for row in memory] == [7, 8]
    assert memory[0]["forward_bytes"] < memory[-1]["forward_bytes"]
