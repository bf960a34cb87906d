"""Canonical calls by Triton: the bits of one rank in its interpreter; that the kernel compiles."""

import json
from pathlib import Path

import pytest
import torch
from support.alone import INTERPRETED, run_alone, skip_where_the_interpreter_fails

from tilewise.exact import trial
from tilewise.exact.triton_kernel import TritonKernel
from tilewise.kernels.protocol import Operands, Scores

SCRIPT = Path(__file__).resolve().parents[1] / "support" / "triton_whole_rows.py"
BOUNDS = {"float32": 3e-6, "float16": 1e-3}
REFUSALS = (
    "it has no bias",
    "dtype torch.float64 is none of bfloat16, float16, float32",
    "head_dim (320) is over 256",
)


@pytest.mark.parametrize("which", ["quick", pytest.param("more", marks=pytest.mark.slow)])
def test_any_split_has_the_bits_of_one_rank_in_the_interpreter(which: str):
    """And out, lse and each gradient are those of fp64; the script compares the bits itself."""
    skip_where_the_interpreter_fails()
    found = json.loads(run_alone(str(SCRIPT), which, timeout=280, **INTERPRETED))
    if which == "quick":
        for message, reason in zip(found.pop("refusals"), REFUSALS, strict=True):
            assert message.startswith(
                "kernel 'triton' cannot serve reduction='canonical': " + reason
            )
            assert message.endswith("; on cpu 'cpu' can")
    assert len(found) >= 2
    for name, errors in found.items():
        assert max(errors.values()) < BOUNDS[name.rpartition("torch.")[2]], (name, errors)


class _OfCpu(TritonKernel):
    """The CPU's kernel in its place, and something wrong with what it gives."""

    def __init__(self, wrong, mask, num_tokens):
        object.__setattr__(self, "wrong", wrong)
        object.__setattr__(self, "right", trial.CpuKernel(mask, num_tokens))

    def attend(self, q, k, v, scores: Scores):
        return self.right.attend(q, k, v, scores)

    def query_gradients(self, operands: Operands, scores: Scores):
        dq = self.right.query_gradients(operands, scores)
        return dq + 1 if self.wrong == "dq" else dq

    def key_gradients(self, operands: Operands, scores: Scores):
        dk, dv = self.right.key_gradients(operands, scores)
        return dk, dv + 1e-6 if self.wrong == "dv" and len(dv) < trial.ROWS else dv


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ("", ""),
        ("dq", r"float32 and widths 16 and 8, dq is off by .*, where 1e-04 is allowed"),
        ("dv", "dv of a row has other bits beside other rows"),
    ],
)
def test_a_machine_on_which_the_trial_fails_is_refused(wrong: str, message: str, monkeypatch):
    monkeypatch.setattr(trial, "TritonKernel", lambda *args: _OfCpu(wrong, *args))
    arguments = torch.device("cpu"), torch.float32, (16, 8)
    if not wrong:
        trial.prove.__wrapped__(*arguments)
        return
    with pytest.raises(ValueError, match=message):
        trial.prove.__wrapped__(*arguments)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
@pytest.mark.parametrize("arch", [80, 90, 100])
def test_compiled_kernels_fit_shared_memory_and_registers(arch: int, dtype: str):
    pytest.importorskip("triton")
    command = ["-m", "benchmarks.triton_code", "--whole-rows", "--json", "--arch", str(arch)]
    codes = json.loads(run_alone(*command, "--dtype", dtype, timeout=280))
    assert len(codes) == 9
    for code in codes:
        assert code["shared"] <= 99 * 1024 and code["fit"] >= 2, code
        assert code["registers"] <= 255 and code["stack"] <= 512, code
