"""Merging in one Triton kernel: in the interpreter on the CPU as plain merging; compiled."""

import subprocess
import sys

import pytest

pytest.importorskip("triton")

PROGRAM = """
import warnings
import torch
from tilewise.kernels.merge import add_up, combine, merge_into
from tilewise.kernels.triton.merge import combine_rows, merge_rows
warnings.filterwarnings("ignore", "divide by zero")
for dtype, narrow, bound in ((torch.float32, torch.float16, 2e-6), (torch.float64,) * 2 + (4e-15,)):
    torch.manual_seed(0)
    acc, lse = torch.randn(37, 2, 3, 24, dtype=dtype), torch.randn(37, 2, 3, dtype=dtype)
    out = torch.randn(2, 37, 78).to(narrow).transpose(0, 1)  # out of packed rows, lse behind it
    out = out[..., :72].unflatten(2, (3, 24))
    late = torch.randn(3, 37, 2, dtype=dtype).permute(1, 2, 0)
    for x, y, rows in ((acc, lse, [0, 5]), (out, late, [0, 1])):  # row 0: neither side has a key
        x[rows], y[rows] = 0.0, -torch.inf
    want = acc.clone(), lse.clone()
    merge_into(*want, out, late)
    merge_rows(acc, lse, out, late)
    assert (acc - want[0]).abs().max() <= bound
    assert torch.equal(lse == -torch.inf, want[1] == -torch.inf)
    assert (lse - want[1]).nan_to_num(0.0).abs().max() <= bound
    for num in (1, 2, 3, 5):  # of any dtypes, into one of them
        dtypes = [(dtype, narrow)[i % 2] for i in range(num)]
        parts = [torch.randn(37, 2, 3, 24).to(x) for x in dtypes]
        parts[-1] = torch.randn(37, 2, 3, 40).to(dtypes[-1])[..., 8:32]
        lses = [torch.randn(37, 2, 3, dtype=dtype) for _ in parts]
        for x, y in zip(parts, lses):
            x[0], y[0] = 0.0, -torch.inf
        lses[0][5], parts[0][5] = -torch.inf, 0.0
        wanted = [(x.clone(), y.clone()) for x, y in zip(parts, lses)]
        want, total = [x.clone() for x in wanted[0]], wanted[0][0].clone()
        combine(wanted, want)
        add_up([x for x, _ in wanted], total)
        own = parts[0].clone()
        combine_rows([own, *parts[1:]], own)
        assert (own - total).abs().max() <= bound
        combine_rows(parts, parts[0], lses, lses[0])
        assert (parts[0] - want[0]).abs().max() <= bound
        assert torch.equal(lses[0] == -torch.inf, want[1] == -torch.inf)
        assert (lses[0] - want[1]).nan_to_num(0.0).abs().max() <= bound
print("same")
"""

COMPILED = """
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
import triton.language as tl
from tilewise.kernels.triton.merge import _combine, _merge
given = {"OLD_STEP": 4, "HEAD_DIM": 128, "WIDTH": 128, "BLOCK": 64}
given |= {"oa_column": 1, "o_column": 1}  # as Triton takes a stride of 1
aligned = {(i,): [["tt.divisibility", 16]] for i in range(4)}
tensors = {"out_acc": "*fp32", "lse_acc": "*fp32", "out": "*bf16", "lse": "*fp32"}
for arch, step in ((90, 2), (90, 8), (100, 2)):  # packed rows of odd and of four heads
    given["NEW_STEP"] = step
    types = {x: "constexpr" if x in given else tensors.get(x, "i32") for x in _merge.arg_names}
    source = ASTSource(_merge, types, given, aligned)
    ptx = triton.compile(source, target=GPUTarget("cuda", arch, 32)).asm["ptx"]
    assert "ld.global.v4" in ptx and "global.b16" not in ptx
    assert "bar.sync" in ptx[ptx.rindex("ld.global") : ptx.index("st.global")]
for count, by_lse in ((4, True), (5, False)):
    num = count + 1
    statistics = ("*fp32",) * num if by_lse else ()
    strides = ("i32",) * num
    types = {"parts": ("*bf16",) * count + ("*fp32",), "lses": statistics}
    types |= {x: strides for x in ("rows", "batches", "heads")}
    types |= {"columns": ("constexpr",) * num}
    types |= {x: strides[: len(statistics)] for x in ("lse_rows", "lse_batches", "lse_heads")}
    types |= {x: "i32" for x in ("num", "num_batch", "num_heads")}
    given = {"COUNT": count, "STEPS": (8,) * num, "BY_LSE": by_lse, "ACC": tl.float32}
    given |= {"HEAD_DIM": 128, "WIDTH": 128, "BLOCK": 64}
    types |= dict.fromkeys(given, "constexpr")
    columns = _combine.arg_names.index("columns")
    given |= {(columns, i): 1 for i in range(num)}
    aligned = {(0, i): [["tt.divisibility", 16]] for i in range(num)}
    source = ASTSource(_combine, types, given, aligned)
    ptx = triton.compile(source, target=GPUTarget("cuda", 90, 32)).asm["ptx"]
    assert "ld.global.v4" in ptx and "st.global.v4" in ptx and "global.b16" not in ptx
    assert "bar.sync" in ptx[ptx.rindex("ld.global") : ptx.index("st.global")]
print("compiled")
"""


def test_rows_are_loaded_in_words_and_nothing_is_stored_before_all_is_loaded(monkeypatch):
    """Several threads read the lse that one of them writes: on an H200 some read what was written,
    and rows of out were wrong.
    """
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    command = [sys.executable, "-c", COMPILED]
    run = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert (run.returncode, run.stdout) == (0, "compiled\n"), run.stderr


def test_one_kernel_merges_as_merge_into_does(monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    command = [sys.executable, "-c", PROGRAM]
    run = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert (run.returncode, run.stdout) == (0, "same\n"), run.stderr
