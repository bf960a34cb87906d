"""The GPU benchmark, tried out on the CPU: every part runs, every case has its row."""

import json
import sys

import pytest
import torch

from benchmarks import gpu
from benchmarks.gpu_parts.session import Session


def rows_of(path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_it_says_so_without_a_gpu(monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(sys, "argv", ["gpu.py"])
    assert gpu.main() == 2
    assert "no CUDA device here" in capsys.readouterr().err


@pytest.mark.parametrize("part", ["executor", "kernels", "graphs", "scaling"])
def test_every_part_runs(part, tmp_path, monkeypatch, capsys):
    path = tmp_path / "rows.jsonl"
    monkeypatch.setattr(sys, "argv", ["gpu.py", "--dry-run", "--part", part, "--out", str(path)])
    assert gpu.main() == 0
    rows = rows_of(path)
    assert rows[0]["kind"] == "environment" and rows[0]["torch_version"] == torch.__version__
    assert len(rows) > 1 and not [r for r in rows if "error" in r or "skipped" in r]
    assert "rows in" in capsys.readouterr().out


@pytest.mark.slow
def test_every_strategy_is_right(tmp_path, monkeypatch, capsys):
    path = tmp_path / "rows.jsonl"
    options = ["--dry-run", "--part", "correctness", "--out", str(path)]
    monkeypatch.setattr(sys, "argv", ["gpu.py", *options])
    assert gpu.main() == 0
    checked = [r for r in rows_of(path) if "plan" in r]
    assert len(checked) > 100 and all(r["right"] for r in checked)
    assert f"{len(checked)} of {len(checked)} right" in capsys.readouterr().out


def test_a_case_that_fails_or_comes_too_late_has_a_row(tmp_path):
    session = Session(torch.device("cpu"), tmp_path / "rows.jsonl", 60.0, tiny=True)
    session.begin("first", 1.0)

    def fails() -> dict:
        raise RuntimeError("out of memory\nand more")

    assert session.measure("first", {"case": 1}, fails) is None
    assert session.measure("first", {"case": 2}, lambda: {"ms": 3}) is not None
    session.begin("second", 0.0)
    assert session.measure("second", {"case": 3}, lambda: {"ms": 3}) is None
    _, failed, good, _, late = rows_of(tmp_path / "rows.jsonl")
    assert failed["error"] == "RuntimeError: out of memory"
    assert good["ms"] == 3 and "no time left" in late["skipped"]
