"""The planner: never beaten by hand, bounds below times, candidates that run, files checked."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from conformance.oracle import dense, draw, error
from described import machine, workload
from typer.testing import CliRunner

import tilewise as tw
from tilewise.cli import app
from tilewise.machine import Link
from tilewise.planning.bounds import moved_bound, shape_bound, steps_bound
from tilewise.planning.least_bytes import least_bytes
from tilewise.planning.options import Option, options
from tilewise.planning.quantities import read_bytes, read_count, read_heads
from tilewise.planning.scene import Scene
from tilewise.simulator import simulate_pass

CLUSTERS = {
    "nodes": machine(1e9, 1e12, node_size=2, nics=2, inside=Link(8e9, 1e-7), launch_seconds=1e-6),
    "one NIC": machine(1e9, 1e13, node_size=2, nics=1, inside=Link(8e9)),
    "slow": machine(1e6, node_size=2, nics=2, inside=Link(4e6, 1e-6)),
}


def by_hand(n: int, work: tw.Workload) -> list[tw.Plan]:
    """What somebody would try: all strategies, tiles and schedules under every split by heads."""
    found = [tw.balanced_ring(n)]
    for degree in (d for d in range(1, n + 1) if n % d == 0 and work.num_kv_heads % d == 0):
        m = n // degree
        sizes = [d for d in range(1, m + 1) if m % d == 0]
        inner = [tw.ring(m), tw.ring(m, moves="q"), tw.all_gather(m)]
        inner += [tw.double_ring(m // d, d) for d in sizes]
        inner += [tw.attention2d(d, m // d) for d in sizes]
        for schedule in ("greedy", "eager", "kv_first", "gather"):
            inner += [tw.mesh(m, q_tile=d, schedule=schedule) for d in sizes]
        found += inner if degree == 1 else [tw.ulysses(degree, inner=plan) for plan in inner]
    return found


@pytest.mark.parametrize("name", CLUSTERS)
@pytest.mark.parametrize("mask", (tw.Full(), tw.Causal()), ids=repr)
def test_nothing_tried_by_hand_is_faster(name: str, mask: tw.Mask):
    n = 6
    work, cluster = workload(n, num_kv_heads=2, mask=mask, save=None), CLUSTERS[name]
    best = tw.search(work, cluster, world_size=n)[0]
    again = tw.simulate(best.plan, work, cluster, backward_plan=best.backward_plan)
    assert again.seconds == pytest.approx(best.seconds)
    assert again.peak_bytes == best.peak_bytes
    passes = []
    for plan in by_hand(n, work):
        found = tw.simulate(plan, work, cluster)
        assert best.seconds <= found.seconds * (1 + 1e-9), plan
        replayed = tw.simulate(plan, replace(work, save="replay"), cluster)
        passes.append((replayed.forward_seconds, replayed.backward_seconds))
    apart = sum(min(times) for times in zip(*passes, strict=True))
    assert best.seconds <= apart * (1 + 1e-9)


@pytest.mark.parametrize("name", CLUSTERS)
@pytest.mark.parametrize(("n", "mask"), ((8, tw.Causal()), (24, tw.Causal()), (12, tw.Full())))
def test_no_bound_is_above_a_simulated_time(name: str, n: int, mask: tw.Mask):
    work = workload(n, num_kv_heads=4, mask=mask)
    work = replace(work, layout=work.layout_for(n))
    tried = options(work, n, CLUSTERS[name].node_size)
    for backward in (False, True):
        scene = Scene(work, CLUSTERS[name], n, backward)
        for option in tried[:: max(1, len(tried) // 12)]:
            _check_bounds(scene, option, tried)


def _check_bounds(scene: Scene, option: Option, tried: list[Option]) -> None:
    plan = option.make()
    timeline, symmetry = simulate_pass(plan, scene.work, scene.machine, scene.backward)
    bounds = [shape_bound(scene, option), steps_bound(scene, option, plan)]
    if option.twin is not None:
        bounds.append(moved_bound(scene, option, tried[option.twin].make()))
    assert max(bounds) <= timeline.seconds, (plan, bounds, timeline.seconds)
    if scene.alike and scene.world_size > 16 and scene.share(option) == 1:
        assert symmetry.members > 1, plan


@pytest.mark.parametrize("name", CLUSTERS)
def test_more_bandwidth_is_never_slower_and_no_time_below_its_bounds(name: str):
    work, cluster = workload(4, num_kv_heads=4, mask=tw.Causal(), save=None), CLUSTERS[name]
    slow = tw.search(work, cluster, world_size=4)
    assert tw.search(work, cluster.scaled(3), world_size=4)[0].seconds <= slow[0].seconds * 1.01
    seconds = [one.seconds for one in slow]
    assert seconds == pytest.approx(sorted(seconds), rel=1e-11)
    for one in slow:
        assert one.seconds >= one.distances.compute_seconds
        assert sum(one.bytes_by_link.values()) >= one.distances.least_bytes


@pytest.mark.parametrize("num_kv_heads", (1, 2, 8))
@pytest.mark.parametrize("n", (2, 6, 16))
def test_no_plan_moves_less_than_the_least(n: int, num_kv_heads: int):
    for mask in (tw.Full(), tw.Causal()):
        work = workload(n, num_kv_heads=num_kv_heads, mask=mask, save=None)
        least = least_bytes(work, n)
        for option in options(work, n, 1)[::3]:
            plan = option.make()
            for save in ("replay", "gathered"):
                sent = tw.volume(plan, replace(work, save=save))
                busiest = max(map(sum, zip(*sent, strict=True)))
                assert busiest >= least, (plan, save)


def two_sided(plan: tw.Plan) -> bool:
    """Whether a plan moves both queries and keys beside the exchange of a split by heads."""
    inner = plan.head_split[1] if plan.head_split else plan
    sides = {hop.item.side for step in inner.rank_steps(0) for hop in step.sends}
    return len(sides) == 2


@pytest.mark.parametrize("n", (8, 12, 16))
def test_few_kv_heads_and_few_ranks_need_no_second_dimension(n: int):
    """GQA-8, bound by one link's bandwidth: n <= 2 Hq / Hkv forward, n <= 1.5 Hq / Hkv backward."""
    work = workload(n, num_heads=8, num_kv_heads=1, save="replay", layout="contiguous")
    best = tw.search(work, machine(1e6), world_size=n)[0]
    assert not two_sided(best.plan)
    assert n > 12 or not two_sided(best.backward_plan)


def test_the_best_hybrid_of_256_ranks_sends_a_twentieth_of_the_ring():
    work = workload(256, num_heads=32, num_kv_heads=32, head_dim=128, dtype="bfloat16")
    best = tw.search(work, machine(1e6, node_size=1), world_size=256)[0]
    ring = max(tw.volume(tw.ring(256), work).forward)
    assert max(tw.volume(best.plan, work).forward) <= 0.05 * ring


def test_a_candidate_runs_after_it_was_read(tmp_path: Path):
    n, num_tokens = 4, 22
    work = tw.Workload(num_tokens, 4, 2, 4, "float64", mask=tw.Causal())
    slow = tw.Machine.preset("cpu-gloo")
    best = tw.search(work, slow, world_size=n)[0]
    path = tmp_path / "plan.json"
    path.write_text(best.to_json())
    read = tw.load_candidate(path)
    assert read.plan == best.plan and read.backward_plan == best.backward_plan
    assert (read.layout, read.save, read.row) == (best.layout, best.save, best.row)
    assert read.machine == slow and read.work == best.work
    x = draw((num_tokens, 4, 4), (num_tokens, 2, 4), seed=0)
    want = dense(x._replace(dlse=0 * x.dlse), tw.Causal())

    def on_rank(rank: int, group) -> list[torch.Tensor]:
        mine = [read.layout.shard(t, rank).clone().requires_grad_() for t in x[:3]]
        out = tw.attention(
            *mine,
            plan=read.plan,
            backward_plan=read.backward_plan,
            layout=read.layout,
            mask=read.work.mask,
            group=group,
            save=read.save,
            wire_dtype=read.wire_dtype,
        )
        out.backward(read.layout.shard(x.dout, rank))
        return [out.detach(), *(t.grad for t in mine)]

    results = tw.loopback(n, on_rank)
    for parts, expected in zip(zip(*results, strict=True), (want.out, *want[2:]), strict=True):
        assert error(read.layout.unshard(list(parts)), expected) <= 1e-12


def test_a_mask_aware_candidate_is_read_for_its_mask_and_layout(tmp_path: Path):
    mask = tw.Causal() & tw.Document([0, 5, 9, 40, 64])
    work = tw.Workload(64, 4, 2, 4, mask=mask, layout="contiguous", save="replay")
    found = tw.search(work, machine(1e5), world_size=4)
    aware = next(one for one in found if one.strategy in ("tiled", "needed"))
    path = tmp_path / "plan.json"
    path.write_text(aware.to_json())
    read = tw.load_candidate(path)
    assert read.plan == aware.plan and read.work.mask == mask
    again = tw.simulate(read.plan, work, read.machine, backward_plan=read.backward_plan)
    assert again.seconds == pytest.approx(aware.seconds)


def _edited(tmp_path: Path, change) -> Path:
    best = tw.search(workload(4), machine(), world_size=4)[0]
    data = json.loads(best.to_json())
    change(data)
    path = tmp_path / "edited.json"
    path.write_text(json.dumps(data))
    return path


def _drop_a_tile(data: dict) -> None:
    steps = data["plan"]["steps"]["steps"]
    next(step for step in steps if step["tiles"][0])["tiles"][0] = []


@pytest.mark.parametrize(
    ("change", "message"),
    (
        (_drop_a_tile, "plan: "),
        (lambda data: data.update(world_size=5), "5"),
        (lambda data: data.update(world_size="4"), "world_size ('4') must be a whole number"),
        (lambda data: data.pop("machine"), "machine lacks 'machine'"),
        (lambda data: data.update(save="never"), "save ('never') must be"),
        (lambda data: data.update(format="tilewise plan 1"), "format is 'tilewise plan 1'"),
        (lambda data: data["workload"].update(num_heads=9), "workload: num_heads (9)"),
        (lambda data: data["predicted"].pop("peak_bytes"), "lacks 'peak_bytes'"),
    ),
)
def test_an_edited_file_is_refused(tmp_path: Path, change, message: str):
    path = _edited(tmp_path, change)
    with pytest.raises(ValueError) as raised:
        tw.load_candidate(path)
    assert message in str(raised.value) and str(path) in str(raised.value)


def test_a_truncated_file_is_refused(tmp_path: Path):
    path = tmp_path / "half.json"
    path.write_text(tw.search(workload(4), machine(), world_size=4)[0].to_json()[:900])
    with pytest.raises(ValueError, match="no complete JSON"):
        tw.load_candidate(path)


def test_memory_that_nothing_fits_names_what_needs_least():
    work = workload(8, save=None)
    with pytest.raises(ValueError, match=r"no plan fits into 1000 bytes a rank; .* needs least, "):
        tw.search(work, machine(), world_size=8, memory_bytes=1000)
    found = tw.search(work, machine(), world_size=8)
    least = min(one.peak_bytes for one in found)
    assert tw.search(work, machine(), world_size=8, memory_bytes=least)[0].peak_bytes <= least


@pytest.mark.parametrize("n", (1, 7, 100))
def test_any_number_of_ranks(n: int):
    work = workload(n, num_heads=6, num_kv_heads=3)
    assert tw.search(work, machine(node_size=4, nics=4), world_size=n)[0].world_size == n


@pytest.mark.parametrize(
    ("read", "value"),
    (
        (lambda: read_count("x", "1M"), 1 << 20),
        (lambda: read_count("x", "128K"), 1 << 17),
        (lambda: read_heads("32:8"), (32, 8)),
        (lambda: read_heads("16"), (16, 16)),
        (lambda: read_bytes("x", "20GiB"), 20 << 30),
        (lambda: read_bytes("x", "1.5GB"), 1_500_000_000),
        (lambda: read_bytes("x", "77"), 77),
    ),
)
def test_quantities_are_read(read, value):
    assert read() == value


def test_plan_command_ranks_and_writes(tmp_path: Path):
    path = tmp_path / "best.json"
    words = ["plan", "--world-size", "8", "--num-tokens", "16K", "--heads", "8:2", "--json"]
    run = CliRunner().invoke(app, [*words, "-o", str(path)])
    assert run.exit_code == 0, run.output
    data = json.loads(run.output)
    seconds = [row["seconds"] for row in data["candidates"]]
    assert seconds == sorted(seconds) and data["seconds_over_least"] >= 1
    assert tw.load_candidate(path).seconds == pytest.approx(seconds[0])
    table = CliRunner().invoke(app, words[:-1])
    assert table.exit_code == 0 and "of which a rank waits" in " ".join(table.output.split())


def test_simulate_command_tells_both_passes(tmp_path: Path):
    path = tmp_path / "trace.json"
    words = ["simulate", "mesh(8, q_tile=2)", "--num-tokens", "16K", "--trace", str(path)]
    run = CliRunner().invoke(app, [*words, "--json"])
    assert run.exit_code == 0, run.output
    assert json.loads(run.output)["forward_seconds"] > 0
    assert json.loads(path.read_text())["traceEvents"]
    assert CliRunner().invoke(app, words).exit_code == 0


@pytest.mark.parametrize(
    ("words", "message"),
    (
        (["--machine", "h100x7"], "presets are"),
        (["--heads", "8:3"], "num_heads (8)"),
        (["--memory", "much"], "--memory ('much')"),
        (["--memory", "1kB"], "needs least"),
        (["--num-tokens", "many"], "--num-tokens ('many')"),
        (["--mask", "moon"], "moon"),
        (["--layout", "spiral"], "spiral"),
    ),
)
def test_bad_options_end_with_code_2_and_one_line(words: list[str], message: str):
    base = ["plan", "--world-size", "4", "--num-tokens", "4K", "--heads", "8:2"]
    run = CliRunner().invoke(app, [*base, *words])
    assert run.exit_code == 2
    assert message in run.output and len(run.output.strip().splitlines()) == 1
