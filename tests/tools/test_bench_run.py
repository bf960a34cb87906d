"""Running cases: figures are right, contenders that misbehave cost only their own row."""

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from processes.launcher import run_processes
from support.bench_contenders import Bad

import tilewise as tw
from tilewise.masks import NAMES
from tilewise_tools.bench.case import BenchCase, LabNetwork, Timing
from tilewise_tools.bench.engine import planned_rows, run_cases
from tilewise_tools.bench.our_kernels import kernel
from tilewise_tools.bench.our_strategies import strategy
from tilewise_tools.bench.traffic import CountOperations

TIMING = Timing(repeats=2, warmups=0, timeout_seconds=60.0)
ALONE = BenchCase("kernels", "causal", 96, num_heads=4, num_kv_heads=2, head_dim=8, dtype="float64")
PAIR = BenchCase(
    *("strategies", "causal", 101, 4, 2, 8, "float64"),
    world_size=2,
    network=LabNetwork("loopback", 1, 2),
)


def measured(plan, timing: Timing = TIMING) -> list[dict]:
    """The rows of a plan."""
    return list(run_cases(planned_rows(plan, timing)))


def with_mask(case: BenchCase, mask: str) -> BenchCase:
    return replace(case, mask=mask)


def test_every_kernel_is_exact_on_every_mask():
    names = "cpu", "reference", "naive", "sdpa"
    plan = [(with_mask(ALONE, mask), tuple(map(kernel, names))) for mask in NAMES]
    rows = measured(plan)
    assert [(row["mask"], row["contender"]) for row in rows] == [
        (mask, name) for mask in NAMES for name in names
    ]
    for row in rows:
        assert (row["outcome"], row["message"]) == ("ok", "")
        assert row["is_exact"], row
        assert max(row[f"error_{name}"] for name in ("out", "dq", "dk", "dv")) < 1e-13
        assert row["peak_bytes"] > 0 and row["bytes_total"] == 0
        assert 0 < row["p20_seconds"] <= row["median_seconds"] <= row["p80_seconds"]
        mask = with_mask(ALONE, row["mask"]).make_mask()
        assert row["pairs"] == 4 * mask.area((0, 96), (0, 96))


def test_strategies_count_the_bytes_that_the_formula_gives():
    names, passes = ("ring", "ulysses", "mesh(2, q_tile=2)", "tiled"), ("forward", "backward")
    others = strategy("tree"), strategy("double_ring"), Bad("counted by others")
    alone = [(replace(PAIR, which=which), (strategy("ring"),)) for which in passes]
    plan = [(PAIR, (*map(strategy, names), *others)), *alone]
    *both, forward, backward = measured(plan)
    rows = {row["contender"]: row for row in both}
    assert "decoding" in rows["tree"]["message"]
    assert "a product, not 2" in rows["double_ring"]["message"]
    assert {rows[name]["outcome"] for name in ("tree", "double_ring")} == {"unsupported"}
    for name in names:
        row = rows[name]
        assert row["outcome"] == "ok", row["message"]
        assert row["is_exact"] and row["bytes_max_rank"] == row["volume_bytes_max_rank"] > 0
        assert sum(row["bytes_by_link"].values()) == row["bytes_total"]
        assert 0 < row["exposed_seconds"] <= max(row["seconds"])
        assert row["predicted_seconds"] > 0 and row["load_imbalance"] >= 1
    assert rows["ring"]["volume_bytes_max_rank"] == max(map(sum, zip(*sent(), strict=True)))

    theirs = rows["counted by others"]
    assert theirs["exposed_seconds"] is None and theirs["pairs"] == rows["ring"]["pairs"]
    assert theirs["total_tflops"] == pytest.approx(2 * theirs["tflops"])

    for which, row in zip(passes, (forward, backward), strict=True):
        assert row["bytes_max_rank"] == max(getattr(sent(), which))
        assert row["is_exact"] and (row["error_dq"] is None) == (which == "forward")


def sent() -> tw.Volume:
    return tw.volume(tw.ring(2), tw.Workload(101, 4, 2, 8, "float64", mask=tw.Causal()))


def count_operations(rank: int) -> list[tuple[dict[int, int], int] | None]:
    """What each of several exchanges of three ranks sends, as counted."""
    x, others = torch.ones(6), [r for r in range(3) if r != rank]

    def send_around() -> None:
        send = dist.P2POp(dist.isend, x, (rank + 1) % 3)
        receive = dist.P2POp(dist.irecv, torch.empty(6), (rank - 1) % 3)
        for work in dist.batch_isend_irecv([send, receive]):
            work.wait()

    splits = [4 if r == rank else 1 for r in range(3)]
    received = torch.empty(4 + len(others))
    counts = []
    for run in (
        send_around,
        lambda: dist.all_gather([torch.empty(6) for _ in range(3)], x),
        lambda: dist.all_reduce(x),
        lambda: dist.all_to_all_single(torch.empty(6), x),
        lambda: dist.all_to_all_single(received, x, splits, splits),
        lambda: functional.all_reduce(x, "sum", dist.group.WORLD).sum().item(),
        lambda: dist.broadcast(x, 0),
        dist.barrier,
    ):
        with CountOperations() as counter:
            run()
        traffic = counter.traffic()
        counts.append(None if traffic is None else (traffic.bytes_to, traffic.messages))
    return counts


def test_operations_of_others_are_counted_by_peer():
    for rank, counts in enumerate(run_processes(3, count_operations)):
        others = [r for r in range(3) if r != rank]
        each = {what: (dict.fromkeys(others, what), 2) for what in (24, 16, 8, 4)}
        around = ({(rank + 1) % 3: 24}, 1)
        assert counts == [around, each[24], each[16], each[8], each[4], each[16], None, ({}, 0)]


def test_four_ways_not_to_be_ok_are_four_outcomes():
    bad = "refuses", "huge", "dies", "runs out", "errs", "gives nan"
    plan = [(PAIR, (strategy("ring"), *map(Bad, bad), strategy("ulysses")))]
    rows = {row["contender"]: row for row in measured(plan)}
    assert {name: row["outcome"] for name, row in rows.items()} == {
        **{"ring": "ok", "ulysses": "ok", "errs": "ok", "gives nan": "ok"},
        **{"refuses": "unsupported", "huge": "out_of_memory", "runs out": "out_of_memory"},
        "dies": "failed",
    }
    assert rows["refuses"]["message"] == "it has no such mask"
    assert "predicted" in rows["huge"]["message"] and "GB" in rows["huge"]["message"]
    assert rows["dies"]["message"] == "rank 1: the process ended without an answer"
    assert rows["runs out"]["message"] == "rank 1: MemoryError: no more"
    assert rows["ring"]["is_exact"] and rows["ulysses"]["is_exact"]
    assert not rows["errs"]["is_exact"] and rows["errs"]["error_out"] > 1e-3
    assert not rows["gives nan"]["is_exact"] and rows["gives nan"]["error_out"] is None


@pytest.mark.slow
def test_a_contender_that_hangs_is_timed_out():
    timing = Timing(repeats=1, warmups=0, timeout_seconds=20.0)
    plan = [(PAIR, (Bad("hangs"), Bad("raises"), strategy("ring")))]
    rows = measured(plan, timing)
    assert rows[1]["message"] == "rank 1: KeyError: 'this one'"
    assert [(row["contender"], row["outcome"]) for row in rows] == [
        ("hangs", "timed_out"),
        ("raises", "failed"),
        ("ring", "ok"),
    ]


def test_a_case_beyond_memory_is_recorded_before_it_runs():
    large = BenchCase("kernels", "full", 1 << 21, num_heads=8, head_dim=64)
    beyond = BenchCase("kernels", "full", 1 << 40, num_heads=8, head_dim=64)
    plan = [(large, (kernel("naive"),)), (beyond, (kernel("cpu"),))]
    rows = measured(plan)
    assert [row["outcome"] for row in rows] == ["out_of_memory", "out_of_memory"]
    assert all("predicted" in row["message"] for row in rows)


def test_long_cases_are_checked_on_sampled_rows():
    timing = Timing(repeats=1, warmups=0, truth_pairs=96 * 10)
    (row,) = measured([(ALONE, (kernel("cpu"),))], timing)
    assert row["error_rows"] == 10 and row["is_exact"]
    assert json.loads(json.dumps(row, allow_nan=False)) == row
    assert all(math.isfinite(x) for x in row.values() if isinstance(x, float))
    page = (Path(__file__).resolve().parents[2] / "docs" / "benchmark.md").read_text()
    assert not [name for name in row if f"`{name}`" not in page]


def test_a_limited_network_is_as_slow_as_it_says():
    slow = replace(PAIR, kind="network", which="forward", network=LabNetwork("limited", 2, 1, 4.0))
    (row,) = measured([(slow, (strategy("ring"),))])
    assert (row["network"], row["mbit"], row["is_exact"]) == ("limited", 4.0, True)
    assert row["median_seconds"] > 0.5 * 8 * row["bytes_max_rank"] / 4e6
    assert row["machine"] == "cpu-gloo, 4 Mbit/s"


def test_the_planner_and_its_file_are_contenders(tmp_path: Path):
    case = replace(PAIR, mask="causal")
    work = tw.Workload(case.num_tokens, *case.heads, dtype=case.dtype, mask=tw.Causal())
    best = tw.search(work, tw.Machine.preset("cpu-gloo"), world_size=2)[0]
    path = tmp_path / "plan.json"
    path.write_text(best.to_json())
    rows = list(measured([(case, (strategy("auto"), strategy(str(path))))]))
    assert [row["outcome"] for row in rows] == ["ok", "ok"], rows
    assert "for tokens" in str(strategy(str(path)).supports(replace(case, num_tokens=64)))
