"""tilewise bench on the command line: bad input, killed runs."""

import json
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from tilewise_tools.bench.results import read_results
from tilewise_tools.cli import app

SMALL = ["--quick", "--num-tokens", "64", "--heads", "2:2", "--head-dim", "8", "--repeats", "1"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["kernels", "--mask", "round"], "mask 'round' is not known; take one of full, causal"),
        (["kernels", "--kernel", "fast"], "kernel 'fast' is not known; take one of cpu, cuda"),
        (["strategies", "--strategy", "rings"], "strategy 'rings' is not known; take one of ring"),
        (["strategies", "--strategy", "ring(0)"], "must be at least 1"),
        (["strategies", "--layout", "odd"], "layout 'odd' is not known; take one of own"),
        (["network", "--strategy", "rings"], "strategy 'rings' is not known"),
        (["network", "--mbit", "0"], "mbit (0.0) must be finite and above 0"),
        (["network", "--hosts", "0"], "hosts (0) must be at least 1"),
        (["kernels", "--dtype", "int8"], "dtype"),
        (["kernels", "--num-tokens", "0"], "--num-tokens ('0') must be a number such as"),
        (["kernels", "--repeats", "0"], "repeats (0) must be at least 1"),
        (["kernels", "--heads", "8,8"], "query:KV heads"),
        (["kernels", "--quick", "--cases", "a.toml"], "give one"),
        (["kernels", "--cases", "none.toml"], "cannot be read"),
        (["strategies", "--machine", "abacus"], "abacus"),
        (["strategies", "--also", "no_such_module"], "no_such_module is no module"),
        (["strategies", "--also", "json"], "json is no module with a function contenders()"),
    ],
)
def test_bad_input_is_one_line_and_code_2(tmp_path: Path, words: list[str], message: str):
    path = tmp_path / "r.jsonl"
    ran = CliRunner().invoke(app, ["bench", *words, "-o", str(path)])
    assert ran.exit_code == 2
    assert message in " ".join(ran.stderr.split())
    assert len(ran.stderr.strip().splitlines()) == 1
    assert not path.exists()


@pytest.mark.skipif(torch.cuda.is_available(), reason="a CUDA device is here")
def test_without_a_gpu_rows_of_cuda_are_unsupported(tmp_path: Path):
    for kind, who in (
        ("kernels", ["--kernel", "cuda", "--kernel", "flash_attn"]),
        ("strategies", ["--strategy", "ring"]),
    ):
        words = ["bench", kind, *SMALL, "--mask", "causal", *who, "--device", "cuda", "--json"]
        ran = CliRunner().invoke(app, [*words, "-o", str(tmp_path / kind)])
        assert ran.exit_code == 0, ran.output
        rows = json.loads(ran.stdout)["rows"]
        assert {(row["outcome"], row["device"]) for row in rows} == {("unsupported", "cuda")}
        assert all("no CUDA device here" in row["message"] for row in rows)


def test_a_kind_has_only_its_own_options():
    ran = CliRunner().invoke(app, ["bench", "kernels", "--world-size", "2"])
    assert ran.exit_code == 2 and "No such option" in ran.stderr


def test_rows_are_printed_and_not_measured_twice(tmp_path: Path):
    path = tmp_path / "r.jsonl"
    words = ["bench", "kernels", *SMALL, "--mask", "causal", "--kernel", "cpu", "--kernel", "cuda"]
    first = CliRunner().invoke(app, [*words, "-o", str(path), "--json"])
    again = CliRunner().invoke(app, [*words, "-o", str(path), "--json"])
    assert (first.exit_code, again.exit_code) == (0, 0), first.output
    rows = json.loads(first.stdout)["rows"]
    assert {row["contender"]: row["outcome"] for row in rows} == {
        "cpu": "ok",
        "cuda": "unsupported",
    }
    assert {row["key"] for row in rows} == {row["key"] for row in read_results(path).rows}
    assert json.loads(again.stdout)["rows"] == sorted(rows, key=lambda row: row["contender"])
    assert len(path.read_text().splitlines()) == 2
    retried = CliRunner().invoke(app, [*words, "-o", str(path), "--json", "--retry"])
    assert json.loads(retried.stdout)["rows"][0] == json.loads(again.stdout)["rows"][0]
    contenders = [json.loads(line)["contender"] for line in path.read_text().splitlines()]
    assert contenders[2:] == ["cuda"]  # what was not ok, and only that, was run again
    table = CliRunner().invoke(app, [*words, "-o", str(path)])
    assert "1 ok" in table.stdout and "1 unsupported" in table.stdout and "causal" in table.stdout


def test_a_profile_of_every_measured_row_and_rank_is_written(tmp_path: Path):
    folder, rows = tmp_path / "a" / "profiles", tmp_path / "r.jsonl"
    words = ["bench", "strategies", *SMALL, "--mask", "causal", "--world-size", "2"]
    words += ["--strategy", "ring", "--strategy", "ulysses(2)", "--profile", str(folder)]
    ran = CliRunner().invoke(app, [*words, "-o", str(rows), "--json"])
    assert ran.exit_code == 0, ran.output
    keys = {row["contender"]: row["key"] for row in json.loads(ran.stdout)["rows"]}
    stems = f"ring-{keys['ring']}", f"ulysses-2-{keys['ulysses(2)']}"
    files = {f"{stem}-rank{rank}.json" for stem in stems for rank in range(2)}
    assert {path.name for path in folder.iterdir()} == files
    for path in folder.iterdir():
        events = json.loads(path.read_text())["traceEvents"]
        assert any(str(event.get("name")).startswith("tilewise::fwd compute ") for event in events)
    unwritable = CliRunner().invoke(app, [*words[:-1], str(rows / "in_a_file"), "-o", str(rows)])
    assert unwritable.exit_code == 2 and "r.jsonl is no folder" in unwritable.stderr


@pytest.mark.slow
@pytest.mark.parametrize("end", [signal.SIGKILL, signal.SIGINT])
def test_a_run_that_is_ended_loses_nothing_and_repeats_nothing(tmp_path: Path, end: int):
    path = tmp_path / "r.jsonl"
    words = ["bench", "kernels", *SMALL, "--kernel", "cpu", "--kernel", "naive", "-o", str(path)]
    command = [sys.executable, "-c", "from tilewise_tools.cli import app; app()", *words]
    started = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
    deadline = time.monotonic() + 100
    while time.monotonic() < deadline and not (
        path.exists() and path.read_bytes().count(b"\n") > 4
    ):
        time.sleep(0.01)
    started.send_signal(end)
    _, errors = started.communicate(timeout=60)
    assert started.returncode == (130 if end == signal.SIGINT else -end), errors
    before = path.read_bytes()
    whole = before[: before.rfind(b"\n") + 1]
    subprocess.run(command, check=True, capture_output=True, timeout=200)
    assert path.read_bytes().startswith(whole)
    found = read_results(path)
    lines = path.read_text().splitlines()
    assert found.num_lost == 0 and len(lines) == len(found.rows) == 28
    assert set(Counter(row["mask"] for row in found.rows).values()) == {2}
