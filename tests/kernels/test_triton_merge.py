"""Merging in one Triton kernel, in Triton's interpreter on the CPU, against plain merging."""

import subprocess
import sys

import pytest

pytest.importorskip("triton")

PROGRAM = """
import warnings
import torch
from tilewise.kernels.merge import merge_into
from tilewise.kernels.triton.merge import merge_rows
warnings.filterwarnings("ignore", "divide by zero")
for dtype, narrow, bound in ((torch.float32, torch.float16, 2e-6), (torch.float64,) * 2 + (4e-15,)):
    torch.manual_seed(0)
    acc, lse = torch.randn(37, 2, 3, 24, dtype=dtype), torch.randn(37, 2, 3, dtype=dtype)
    out = torch.randn(2, 37, 3, 24).to(narrow).transpose(0, 1)
    late = torch.randn(3, 37, 2, dtype=dtype).permute(1, 2, 0)
    for x, y, rows in ((acc, lse, [0, 5]), (out, late, [0, 1])):  # row 0: neither side has a key
        x[rows], y[rows] = 0.0, -torch.inf
    want = acc.clone(), lse.clone()
    merge_into(*want, out, late)
    merge_rows(acc, lse, out, late)
    assert (acc - want[0]).abs().max() <= bound
    assert torch.equal(lse == -torch.inf, want[1] == -torch.inf)
    assert (lse - want[1]).nan_to_num(0.0).abs().max() <= bound
print("same")
"""


def test_one_kernel_merges_as_merge_into_does(monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    command = [sys.executable, "-c", PROGRAM]
    run = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert (run.returncode, run.stdout) == (0, "same\n"), run.stderr
