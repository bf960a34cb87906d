"""The smoke script's code, tiny, on the CPU."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.gpu_smoke import CALLS, PARTS, Bench, _error, right
from tilewise.kernels.torch_cpu import CpuFlash

ROOT = Path(__file__).parents[2]


def test_every_part_runs_on_the_cpu_and_says_so():
    ran = subprocess.run(
        [sys.executable, "benchmarks/gpu_smoke.py", "--cpu"],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT / "src")},
        capture_output=True,
        text=True,
        timeout=250,
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    ended = [line for line in ran.stdout.splitlines() if not line.startswith(" ")]
    assert [line.split(":")[0] for line in ended] == list(PARTS)
    assert all(line.split(": ")[1].startswith("ok, ") for line in ended)
    for said in ("cpu: right", "reference: right", "TFLOP/s: forward", "% hidden"):
        assert said in ran.stdout


def test_a_wrong_kernel_is_named(monkeypatch, capsys):
    class Wrong(CpuFlash):
        def forward(self, *arguments):
            out, *rest = super().forward(*arguments)
            return out * 1.1, *rest

    bench = Bench(cpu=True)
    assert max(_error(bench, CpuFlash(), CALLS[name]) for name in ("causal", "window")) < 1e-4
    monkeypatch.setattr(Bench, "kernels", lambda self: iter([("wrong", Wrong())]))
    with pytest.raises(AssertionError, match="wrong, full: 1"):
        right(bench)
    assert "wrong: wrong" in capsys.readouterr().out
