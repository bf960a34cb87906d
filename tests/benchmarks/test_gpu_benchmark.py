"""The GPU benchmark, tried out on the CPU: parts run, crashes are survived, targets are judged."""

import json
import re
import time
from contextlib import closing
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
from torch.nn.attention import SDPBackend

import tilewise as tw
from benchmarks import gpu
from benchmarks.gpu_parts import bodies, cases, correctness, executor, kernels
from benchmarks.gpu_parts.case import GRACE, Case
from benchmarks.gpu_parts.clocks import Clocks
from benchmarks.gpu_parts.runner import Runner
from benchmarks.gpu_parts.session import Session, Times
from benchmarks.gpu_parts.sizes import FULL, mask_named
from tilewise.compiler.codegen import pass_code
from tilewise.execution import forward_backward
from tilewise.kernels.registry import kernel_named

TINY = {"device": "cpu", "tiny": True}


def rows_of(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def does(what: str, lane: str = "lane", limit: float = 100.0) -> Case:
    """A case of gpu_answers.py; a hanging one is given up after its limit."""
    return Case("part", {"does": what}, (limit - GRACE) / 3, lane)


@pytest.fixture
def runner(tmp_path):
    with closing(
        Runner("support.gpu_answers:answer", tmp_path / "rows.jsonl", 600.0, TINY)
    ) as made:
        yield made


def test_a_case_that_crashes_or_hangs_has_a_row_and_the_others_go_on(runner):
    asked = ["work", "crash", "work", "hang", "exit", "fail", "work", "poison", "work"]
    runner.run([does(x, limit=1.0) if x == "hang" else does(x) for x in asked])
    rows = rows_of(runner.path)
    assert rows == runner.rows and [r["does"] for r in rows] == asked
    said = [r.get("error") for r in rows]
    assert said == [
        None,
        "its process died: signal SIGABRT",
        None,
        "no answer within 1 s; its process was ended",
        "its process died: exit code 3",
        "RuntimeError: out of memory",
        None,
        "RuntimeError: an illegal memory access",
        None,
    ]
    processes = [r["process"] for r in rows if "process" in r]
    assert len(set(processes)) == 4
    log = runner.path.with_suffix(".log").read_text()
    assert "Aborted" in log and "gpu_answers.py" in log


def test_a_failure_that_leaves_the_device_working_keeps_the_process(runner):
    runner.run([does("work"), does("fail"), does("work")])
    assert len({r["process"] for r in runner.rows if "process" in r}) == 1


def test_lanes_have_processes_of_their_own_side_by_side(runner):
    runner.run([does("work", lane) for lane in "abcabc"], at_once=3)
    assert [r["does"] for r in runner.rows] == ["work"] * 6
    assert len({r["process"] for r in runner.rows}) == 3


def test_what_hangs_twice_is_not_asked_again(runner):
    hanging = [does("hang", limit=0.2)] * 3
    runner.run([*hanging, Case("other", {"does": "work"}, 1.0, "lane")])
    assert ["error" in r for r in runner.rows] == [True, True, False, False]
    assert runner.rows[2]["skipped"] == "2 cases of part gave no answer"
    assert runner.rows[3]["right"]


def test_a_case_for_which_no_time_is_left_has_a_row(tmp_path):
    with closing(
        Runner("support.gpu_answers:answer", tmp_path / "rows.jsonl", 99.0, TINY)
    ) as runner:
        runner.run([Case("part", {"case": x}, x, "lane") for x in (400.0, 1.0)])
    assert re.search("it takes 400 s of [89]. s", runner.rows[0]["skipped"])
    assert runner.rows[1]["right"]


def test_it_says_so_without_a_gpu(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(gpu, "ANSWER", "support.gpu_answers:without_gpu")
    assert gpu.main(["--out", str(tmp_path / "rows.jsonl")]) == 2
    assert "no CUDA device here: run this on a machine with a GPU" in capsys.readouterr().err
    assert not (tmp_path / "rows.jsonl").exists()


@pytest.mark.parametrize("part", ["ahead", *cases.PARTS])
def test_every_part_runs(part):
    tiny = *cases.before(["cpu"], True), *cases.timed(["cpu"], True)
    asked = [case for case in tiny if case.part == part]
    assert asked and all(json.loads(json.dumps(c.options)) == c.options for c in asked)
    for case in asked[:: max(1, len(asked) // 2)]:
        row, healthy = bodies.answer({**TINY, "part": part, "options": case.options})
        assert healthy and "error" not in row, row
        assert row.get("right") is not False


def test_an_error_says_where(monkeypatch):
    question = {**TINY, "part": "scaling", "options": {"plan": "no such plan"}}
    row, healthy = bodies.answer(question)
    assert healthy and row["error"].startswith("KeyError: 'no such plan' (scaling.py:")


def test_the_environment_names_the_providers_of_both_passes():
    row, _ = bodies.answer({**TINY, "part": "environment", "options": {}})
    assert row["able"] == ["cpu", "reference"] and row["torch_version"] == torch.__version__
    assert {"cuda", "triton", "flex"} <= row["doctor"].keys()


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_dry_run_has_a_row_of_every_case(tmp_path, capsys):
    path = tmp_path / "rows.jsonl"
    assert gpu.main(["--dry-run", "--out", str(path)]) == 0
    rows, able = rows_of(path), ["cpu", "reference"]
    asked = [*cases.before(able, True), *cases.timed(able, True)]
    assert rows[0]["part"] == "environment" and len(rows) == len(asked) + 1
    assert not [r for r in rows if "error" in r or "skipped" in r]
    checked = sum("right" in r for r in rows)
    assert checked > 100 and f"{checked} of {checked} right" in capsys.readouterr().out
    assert gpu.main(["--summary", str(path)]) == 0
    assert "target: conformance green: met" in capsys.readouterr().out


def test_the_plan_fits_its_targets_into_the_time(capsys):
    assert gpu.main(["--plan"]) == 0
    lines = capsys.readouterr().out.splitlines()
    heard = [line for line in lines if "torch flex sliding_window_causal 65536" in line]
    assert heard and float(heard[-1].split("to")[1].split()[0]) < 540
    timed = cases.timed(cases.EXPECTED, False)
    kernels = [c.options for c in timed if c.part == "kernels"]
    assert {o["num_tokens"] // 1024 for o in kernels} == {8, 16, 32, 64, 128}
    assert {o["heads"] for o in kernels} == {"32:32", "64:8"}
    assert len({c.title for c in timed}) == len(timed)


@pytest.mark.parametrize("name", ["causal_document", "sliding_window_causal"])
def test_flex_is_asked_for_the_same_mask(name):
    num_tokens = 300
    rule, index = kernels._rule(name, num_tokens, torch.device("cpu")), torch.arange(num_tokens)
    found = rule(index, index, index[:, None], index[None, :])
    wanted = mask_named(name, num_tokens).dense(np.arange(num_tokens), np.arange(num_tokens))
    assert torch.equal(found, torch.as_tensor(wanted))


@pytest.mark.parametrize("packed", [False, True])
def test_the_library_called_directly_computes_the_same(packed, monkeypatch):
    monkeypatch.setattr(kernels, "BACKENDS", {"cuda": SDPBackend.MATH})
    draw = Session(torch.device("cpu"), tiny=True).normal
    q, dout, k, v = (draw(50, heads, 16).float() for heads in (4, 4, 2, 2))
    given = kernels.Inputs(q, k, v, dout, "causal", tw.Causal())
    passes = kernels._direct("cuda", given, packed)
    out, grads = cast("Any", (passes.forward(), passes.backward()))
    found = [x[0].transpose(0, 1) for x in (out, *grads)]
    wanted = correctness.dense([q, k, v, dout], tw.Causal())
    for x, y in zip(found, wanted, strict=True):
        assert torch.allclose(x, y, atol=1e-5)


def test_shares_are_of_rounds_in_turns():
    slow, fast = Times((2.0, 4.0, 8.0)), Times((1.0, 2.0, 6.0))
    assert slow.share("x", fast) == {"x_share": 0.5, "x_share_range": [0.5, 0.75]}
    assert slow.row("x") == {"x_ms": 4000.0, "x_ms_range": [2000.0, 8000.0]}
    assert slow.tflops(8e12) == 2.0


def test_clocks_are_sampled_all_through():
    lines = "1980, 2619, 650.5, 60\\n[N/A]\\n1200, 2619, 700, 61\\n"
    clocks = Clocks(command=("sh", "-c", f"printf '{lines}'; exec sleep 60"))
    found, until = {}, time.monotonic() + 60
    while found.get("celsius") != [60.0, 60.5, 61.0] and time.monotonic() < until:
        time.sleep(0.05)
        found = clocks.during(0.0, float("inf"))
    clocks.close()
    assert found["sm_mhz"] == [1200.0, 1590.0, 1980.0] and found["watts"][2] == 700.0
    assert Clocks(command=("no-such-command",)).during(0.0, 1e9) == {}


def test_sizes_cover_what_the_kernels_are_for():
    assert FULL.world == (256, 16, 1 << 20)
    names = {c.options["kernel"] for c in cases.before(cases.EXPECTED, False) if c.part == "ahead"}
    assert names == {"triton", "triton_deterministic"}
    plans = {c.options["plan"] for c in cases.before(cases.EXPECTED, False) if "plan" in c.options}
    assert len(plans) == 9 and "none" in plans


@pytest.mark.parametrize("options", [{"q_tile": 4, "schedule": "gather"}, {"head_groups": 2}])
def test_a_rank_compiles_each_pass_once_and_one_call_has_its_work(options, monkeypatch):
    shape = {"mask": "causal", "heads": "4:2", "head_dim": 16, "num_tokens": 16 * 24}
    asked = executor.Shape.of({**shape, "world_size": 16, **options})
    compiled = []
    monkeypatch.setattr(
        forward_backward,
        "pass_code",
        lambda *arguments, **given: (
            compiled.append(given["backward"]) or pass_code(*arguments, **given)
        ),
    )
    with torch.no_grad():
        watched = executor.Watched(kernel_named("cpu"))
        rank = executor.Rank(Session(torch.device("cpu"), tiny=True), asked, watched)
        area = watched.area
        for run in (rank.forward, rank.backward) * 2:
            run()
    assert compiled == [False, True]
    whole = 384 * 385 // 2
    assert area * 16 / asked.plan.num_head_groups == pytest.approx(whole, rel=0.1)
    assert asked.call_heads[0] * asked.plan.num_head_groups == 4
