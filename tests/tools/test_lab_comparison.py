"""Strategies compared on a lab, on the transport that stands in for one, and bytes per NIC."""

import json
import os
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from processes.launcher import run_processes
from typer.testing import CliRunner

import tilewise as tw
from tilewise_tools.bench.case import LAYOUTS, BenchCase, LabNetwork, Timing
from tilewise_tools.bench.our_strategies import strategy
from tilewise_tools.bench.worlds import world_on
from tilewise_tools.cli import app
from tilewise_tools.lab.comparison import ContestRow, compete, nic_bytes
from tilewise_tools.lab.rate_limited import Nics, RateLimited, nics
from tilewise_tools.lab.site import missing

REASON = missing()
needs_lab = pytest.mark.skipif(REASON is not None, reason=f"no network lab: {REASON}")

SMALL = ("--hosts", "2", "--tokens-per-rank", "16", "--repeats", "1")


def workload(num_tokens: int, mask: tw.Mask | None = None) -> tw.Workload:
    return tw.Workload(
        num_tokens, 4, 4, 16, dtype="float32", mask=tw.Full() if mask is None else mask
    )


@pytest.mark.parametrize("mask", [tw.Full(), tw.Causal()])
@pytest.mark.parametrize("plan", [tw.ring(6), tw.mesh(6, q_tile=2), tw.ulysses(2, tw.ring(3))])
def test_with_one_rank_a_host_a_nic_sends_what_volume_says(plan: tw.Plan, mask: tw.Mask):
    work = workload(100, mask)
    sent = [nic_bytes(plan, work, 1, backward=backward) for backward in (False, True)]
    assert sent == list(tw.volume(plan, work))


def test_without_pruning_a_mask_changes_nothing():
    sent = nic_bytes(tw.ring(6), workload(96, tw.Causal()), 2, backward=False, prune=False)
    assert sent == nic_bytes(tw.ring(6), workload(96), 2, backward=False)


def test_transfers_inside_a_host_do_not_count():
    work = workload(96)
    shard = 2 * 16 * 4 * 16 * 4  # k and v of 16 tokens, 4 heads of 16, 4 bytes
    assert nic_bytes(tw.ring(6), work, 3, backward=False) == (5 * shard, 5 * shard)
    assert nic_bytes(tw.ring(6), work, 6, backward=True) == (0,)
    with pytest.raises(ValueError, match=r"world_size \(6\) must be a multiple"):
        nic_bytes(tw.ring(6), work, 4, backward=False)


def competed(case: BenchCase, *names: str) -> list[ContestRow]:
    """Rows of strategies on a case's network, of one repeat."""
    timing = Timing(repeats=1, warmups=0, timeout_seconds=120.0, truth_pairs=1)
    order: list[int] = []
    with world_on(case.network, timing.timeout_seconds) as world:
        rows = compete(world, case, [strategy(name) for name in names], timing, order.append)
    assert order == 2 * list(range(len(names)))
    return rows


@needs_lab
def test_in_a_lab_the_wire_carries_what_volume_says():
    network = LabNetwork("lab", 3, 1, 200.0)
    case = BenchCase("network", "full", 768, 6, 6, 32, world_size=3, network=network)
    rows = competed(case, "ring(3)", "ulysses(3)")
    for row, plan in zip(rows, (tw.ring(3), tw.ulysses(3)), strict=True):
        assert row.network == "network namespaces"
        volume = tw.volume(plan, tw.Workload(768, 6, 6, 32, dtype="float32"))
        assert row.formula_bytes == sum(map(sum, volume))
        assert row.counted_bytes is not None
        assert row.formula_bytes < row.counted_bytes < 1.02 * row.formula_bytes
        assert len(row.seconds) == len(row.ratios) == 1
    assert rows[0].ratios == (1.0,)
    assert rows[1].byte_ratio > 1.5


def exactly(rank: int, speeds: Nics) -> tuple[float, int, int]:
    world = dist.group.WORLD
    assert world is not None
    transport = RateLimited(world, speeds)
    layout = tw.contiguous(48, 4)
    make = torch.Generator().manual_seed(0)
    q, k, v = torch.randn((3, 48, 4, 16), generator=make, dtype=torch.float64)
    shards = [layout.shard(x, rank).requires_grad_() for x in (q, k, v)]
    plan = tw.mesh(4, q_tile=2)
    out = tw.attention(*shards, plan=plan, layout=layout, mask=tw.Full(), group=transport)
    assert isinstance(out, torch.Tensor)
    out.sum().backward()
    rows = torch.einsum("qhd,khd->hqk", q, k).div(4).softmax(-1)
    dense = torch.einsum("hqk,khd->qhd", rows, v)
    error = (out - layout.shard(dense, rank)).abs().max().item()
    return error, transport.bytes_sent, len(transport._sent)


def test_the_rate_limited_transport_carries_every_byte():
    work = tw.Workload(48, 4, 4, 16, dtype="float64", layout="contiguous")
    with nics(2, 2, 100.0) as speeds:
        ranks = run_processes(4, exactly, speeds)
    assert max(error for error, _, _ in ranks) < 1e-12
    sent = list(map(sum, zip(*tw.volume(tw.mesh(4, q_tile=2), work), strict=True)))
    assert [num_bytes for _, num_bytes, _ in ranks] == sent
    assert [unfinished for _, _, unfinished in ranks] == [0] * 4


def test_of_the_nics_the_first_free_is_taken():
    with nics(3, 1, 8.0) as speeds:
        first, end = speeds.reserve(0, [(1, 0), (2, 0)], 1000)
        assert first == (1, 0)
        # Rank 2's NIC can still receive, but rank 0's sends until then.
        second, later = speeds.reserve(0, [(2, 0)], 1000)
        assert second == (2, 0)
        assert later == pytest.approx(end + 0.001)
        third, _ = speeds.reserve(1, [(2, 0), (0, 0)], 1000)
        assert third == (0, 0)


def test_without_a_lab_the_command_says_so_and_is_no_faster_than_its_nics():
    words = ["--tokens-per-rank", "512", "--heads", "4", "--head-dim", "16", "--mbit", "20"]
    words += ["--machine", "cpu-gloo"]
    result = CliRunner().invoke(app, ["lab", "run", "--limited", "--json", *SMALL, *words])
    assert result.exit_code == 0
    rows = json.loads(result.stdout)["rows"]
    assert [row["strategy"] for row in rows] == ["ring(2)", "ulysses(2)"]
    for row in rows:
        assert (row["network"], row["counted_bytes"]) == ("rate-limited transport", None)
        assert row["line_share"] <= 1.1  # a bucket is 10 ms deep
    work = tw.Workload(1024, 4, 4, 16, "float32", layout="zigzag")
    predicted = tw.simulate(tw.ring(2), work, tw.Machine.preset("cpu-gloo")).forward_seconds
    assert rows[0]["predicted_seconds"] == predicted


def test_without_root_the_command_says_so_and_falls_back(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    result = CliRunner().invoke(app, ["lab", "run", *SMALL])
    assert result.exit_code == 0
    assert "need root" in result.stderr
    assert "rate-limited transport" in result.stdout
    refused = CliRunner().invoke(app, ["lab", "clean"])
    assert refused.exit_code == 1
    assert "need root" in refused.stderr


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--strategy ring(3)", "ring(3) is for 3 ranks, but --hosts x --ranks-per-host is 2"),
        ("--strategy rong(2)", "strategy 'rong' is not known"),
        ("--mbit 0", "mbit (0.0) must be from 1 to 100000"),
        ("--mask nothing", "mask 'nothing' is not known"),
        ("--heads 3 --strategy ulysses(2)", "degree"),
        ("--layout spiral", "layout 'spiral' is not known; take one of own"),
    ],
)
def test_bad_input_is_refused_in_one_line(words: str, message: str):
    result = CliRunner().invoke(app, ["lab", "run", "--hosts", "2", *words.split()])
    assert result.exit_code == 2
    assert message in result.stderr
    assert len(result.stderr.strip().splitlines()) == 1


@pytest.mark.parametrize("layout", ["contiguous", "tiled"])
def test_strategies_that_see_the_mask_are_made_for_the_layout_of_the_case(layout: str):
    case = BenchCase("network", "causal & document([0, 20, 96])", 96, 4, 2, 8, world_size=4)
    case = replace(case, layout=layout)
    mask, at = case.make_mask(), LAYOUTS[layout](case.make_mask(), 96, 4)
    made = {name: strategy(name).planned(case)[:2] for name in ("needed", "tiled", "ring")}
    assert made["needed"] == (tw.needed(mask, at), at)
    assert made["tiled"] == (tw.tiled(mask, at, kv_bytes=1.0), at)
    assert made["ring"] == (tw.ring(4), at)
