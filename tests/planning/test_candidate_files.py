"""What the planner hands out and reads: candidate files, quantities, the commands."""

from __future__ import annotations

import json
import re
from functools import cache
from pathlib import Path

import pytest
import torch
from conformance.oracle import dense, draw, error
from support.described import machine, workload
from typer.testing import CliRunner

import tilewise as tw
from tilewise.expressions import read_heads
from tilewise.planning.candidate_format import FULL_RANKS, FilePlan, read_plan, write_plan
from tilewise.serializer import read
from tilewise_tools.cli import app
from tilewise_tools.cli.options import read_bytes, read_count


@pytest.fixture(autouse=True)
def searched_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a test runs twice, as JSON and as a table, is searched once."""
    monkeypatch.setattr("tilewise_tools.cli.plan.search", cache(tw.search))


@pytest.mark.parametrize("n", (4, 32))
def test_the_number_of_results_that_wait_is_kept(n: int):
    plan = tw.mesh(n, q_tile=4).changed(waiting_results=1)
    where = tw.Full(), tw.zigzag(64, n)
    written = json.loads(json.dumps(write_plan(plan)))
    assert ("digest" in written) == (n > FULL_RANKS)
    file = read(FilePlan, written, "plan")
    again = read_plan(file, n, "replay", where)
    assert again == plan and again.waiting_results == 1
    assert "waiting_results" not in write_plan(tw.mesh(n, q_tile=4))


def test_a_narrow_terminal_gets_whole_numbers():
    words = ["plan", "--world-size", "8", "--num-tokens", "16K"]
    wide, narrow = (
        CliRunner().invoke(app, words, env={"COLUMNS": columns}).stdout for columns in ("80", "40")
    )
    assert "gathered" in wide and "waits" in wide
    assert "\u2026" not in wide + narrow
    assert re.search(r"ulysses\(4\) x.* [\d.]+ [µm]?s +[\d.]+ MB", narrow)


def test_a_preset_is_planned_as_its_options_say():
    def run(*words: str) -> str:
        return CliRunner().invoke(app, ["plan", *words], env={"COLUMNS": "100"}).stdout

    said = run("--world-size", "8", "--preset", "flux")
    assert "4.5K tokens, 24:24 heads of 128, bfloat16, Full(), joint" in said
    said = run("--world-size", "4", "--preset", "wan", "--heads", "8:8", "--num-tokens", "4K")
    assert "4K tokens, 8:8 heads of 128, bfloat16, Full(), contiguous" in said


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
        assert isinstance(out, torch.Tensor)
        out.backward(read.layout.shard(x.dout, rank))
        return [out.detach(), *(t.grad for t in mine)]

    results = tw.loopback(n, on_rank)
    for parts, expected in zip(zip(*results, strict=True), (want.out, *want[2:5]), strict=True):
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


@pytest.fixture(scope="module")
def written() -> str:
    return tw.search(workload(4), machine(), world_size=4)[0].to_json()


def _edited(written: str, tmp_path: Path, change) -> Path:
    data = json.loads(written)
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
        (lambda data: data.pop("machine"), "candidate lacks machine"),
        (lambda data: data.update(save="never"), "save ('never') must be one of replay, gathered"),
        (lambda data: data.update(format="tilewise plan 1"), "format is 'tilewise plan 1'"),
        (lambda data: data["workload"].update(num_heads=9), "workload: num_heads (9)"),
        (lambda data: data["predicted"].pop("peak_bytes"), "candidate.predicted lacks peak_bytes"),
        (
            lambda data: data["rows"][0].update(seconds="x"),
            "rows[0].seconds ('x') must be a finite",
        ),
        (lambda data: data["rows"][0].update(backward_plan=3), "backward_plan (3) must be text"),
        (lambda data: data["workload"].update(max_logit=1e30), "max_logit (1e+30) must be true or"),
        (lambda data: data["workload"].update(num_tokens=1.5), "num_tokens (1.5) must be a whole"),
        (lambda data: data.update(world_size=10**30), "world_size (1000000000"),
        (lambda data: data.update(machine="x"), "machine ('x') must be a list"),
        (lambda data: data.update(reason=None), "reason (None) must be text"),
        (
            lambda data: data["rows"][0]["bytes_by_link"].update(inside="4"),
            "rows[0].bytes_by_link.inside ('4') must be a whole number",
        ),
        (
            lambda data: data["layout"].update(runs=[[[0, 4]]]),
            "layout.runs[0][0] ([0, 4]) must be a list of 3",
        ),
        (lambda data: data.update(wire=[]), "wire ([]) must be an object"),
        (
            lambda data: data["workload"].update(mask={"kind": "And", "a": 5, "b": 5}),
            "workload.mask.a (5) must be an object",
        ),
        (lambda data: data["workload"].update(head_dim=10**18), "is more than any memory holds"),
    ),
)
def test_an_edited_file_is_refused(written: str, tmp_path: Path, change, message: str):
    path = _edited(written, tmp_path, change)
    with pytest.raises(ValueError) as raised:
        tw.load_candidate(path)
    assert message in str(raised.value) and str(path) in str(raised.value)


def test_a_truncated_file_is_refused(written: str, tmp_path: Path):
    path = tmp_path / "half.json"
    path.write_text(written[:900])
    with pytest.raises(ValueError, match="no complete JSON"):
        tw.load_candidate(path)


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
    words = ["plan", "--world-size", "4", "--num-tokens", "16K", "--heads", "8:2", "--json"]
    run = CliRunner().invoke(app, [*words, "-o", str(path)])
    assert run.exit_code == 0, run.output
    data = json.loads(run.stdout)
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
    assert json.loads(run.stdout)["forward_seconds"] > 0
    assert json.loads(path.read_text())["traceEvents"]
    assert CliRunner().invoke(app, words).exit_code == 0


@pytest.mark.parametrize(
    ("words", "message"),
    (
        (["--machine", "h100x7"], "or a preset: a100"),
        (["--heads", "8:3"], "num_heads (8)"),
        (["--memory", "much"], "--memory ('much')"),
        (["--memory", "1kB"], "needs least"),
        (["--memory", "9" * 400], "must be from 1 to"),
        (["--num-tokens", "99999999999999"], "--num-tokens (99999999999999) must be from 1 to"),
        (["--num-tokens", "many"], "--num-tokens ('many')"),
        (["--mask", "moon"], "moon"),
        (["--layout", "spiral"], "spiral"),
    ),
)
def test_bad_options_end_with_code_2_and_one_line(words: list[str], message: str):
    base = ["plan", "--world-size", "4", "--num-tokens", "4K", "--heads", "8:2"]
    run = CliRunner().invoke(app, [*base, *words])
    assert run.exit_code == 2
    # A busy machine may take long enough for a search to say that it is under way.
    lines = [x for x in run.output.strip().splitlines() if not x.startswith("searching")]
    assert len(lines) == 1 and message in lines[0]
