"""out_for_delta in one Triton kernel: in the interpreter on the CPU as plain torch; compiled."""

import subprocess
import sys

import pytest

pytest.importorskip("triton")

SAME = """
import torch
from tilewise.kernels.delta import LEAST_DIVISORS, _put_out_for_delta
from tilewise.kernels.triton.delta import put_out_for_delta
for dtype, columns in ((torch.float32, 1), (torch.float16, 3)):
    torch.manual_seed(0)
    dout = torch.randn(2, 37, 3, 24).to(dtype).transpose(0, 1)
    dout *= torch.randint(0, 2, dout.shape)
    delta = torch.randn(3, 37, 2).permute(1, 2, 0)
    delta *= 10.0 ** torch.randint(-6, 3, delta.shape)
    delta[5] = 0.0
    want, got = (
        [torch.full((2, 37, 3, 24), 7.0, dtype=dtype).transpose(0, 1) for _ in range(2)]
        for _ in range(2)
    )
    _put_out_for_delta(dout, delta, *want, columns)
    put_out_for_delta(dout, delta, *got, columns, LEAST_DIVISORS[dtype])
    for x, y in zip(got, want, strict=True):
        torch.testing.assert_close(x, y, rtol=1e-6, atol=0.0)
print("same")
"""

COMPILED = """
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from tilewise.kernels.triton.delta import _put
given = {"STEP": 8, "COLUMNS": 3, "HEAD_DIM": 80, "WIDTH": 128, "BLOCK": 32}
given |= {"d_column": 1, "o_column": 1}  # as Triton takes a stride of 1
aligned = {(i,): [["tt.divisibility", 16]] for i in range(4)}
types = {
    name: "constexpr" if name in given
    else {"dout": "*bf16", "changed": "*bf16", "out": "*bf16", "delta": "*fp32"}.get(
        name, "fp32" if name in ("share", "tiny") else "i32"
    )
    for name in _put.arg_names
}
for arch in (80, 90):
    source = ASTSource(_put, types, given, aligned)
    ptx = triton.compile(source, target=GPUTarget("cuda", arch, 32)).asm["ptx"]
    assert "ld.global.v" in ptx and "ld.global.b16" not in ptx and "st.global.b16" not in ptx
print("compiled")
"""


def run(program: str) -> tuple[int, str, str]:
    command = [sys.executable, "-c", program]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    return ended.returncode, ended.stdout, ended.stderr


def test_one_kernel_makes_what_out_for_delta_makes(monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    returncode, out, errors = run(SAME)
    assert (returncode, out) == (0, "same\n"), errors


@pytest.mark.slow
def test_it_compiles_to_whole_words_for_bfloat16_on_ampere_and_hopper(monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    returncode, out, errors = run(COMPILED)
    assert (returncode, out) == (0, "compiled\n"), errors
