"""Triton's attention with lists of keys: its results in the interpreter, and that it compiles."""

import json
from pathlib import Path

import pytest
import torch
from support.alone import INTERPRETED, run_alone, skip_where_the_interpreter_fails

from tilewise.indexed.lists import REFERENCE, list_kernel

SCRIPT = Path(__file__).resolve().parents[1] / "support" / "triton_lists.py"
# coarse: fp32 with scores of some 300, which are rounded to 1.5e-5
BOUNDS = {"fp32": 3e-6, "fp16": 1e-3, "coarse": 3e-5}
ADDED = """
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from tilewise.kernels.triton.lists import add_shares
types = {"total": "*fp32", "shares": "*fp32", "order": "*i64", "ends": "*i64", "width": "i32"}
aligned = {(i,): [["tt.divisibility", 16]] for i in range(5)}
source = ASTSource(add_shares, types | {"COLUMNS": "constexpr"}, {"COLUMNS": 1024}, aligned)
ptx = triton.compile(source, target=GPUTarget("cuda", 90, 32)).asm["ptx"]
print("ld.global.v4" in ptx, "st.global.v4" in ptx, "atom" in ptx)
"""
REFUSALS = (
    "dtype torch.float64 is none of bfloat16, float16, float32",
    "bfloat16 is wrong in Triton's interpreter",
    "head_dim 320 and v_head_dim 64 are over 256 and 256",
    "head_dim 576 and v_head_dim 576 are over 576 and 512",
    "dtype torch.float64 is none of bfloat16, float16, float32",
)


@pytest.mark.parametrize("which", ["quick", pytest.param("more", marks=pytest.mark.slow)])
def test_lists_in_triton_equal_dense_attention_in_the_interpreter(which: str):
    """out, lse and each gradient; the script compares calls of cp.attention itself."""
    skip_where_the_interpreter_fails()
    found = json.loads(run_alone(str(SCRIPT), which, timeout=280, **INTERPRETED))
    if which == "quick":
        assert found.pop("same bits") and found.pop("nothing")
        ends = [f"cannot serve mask=tw.Chosen(...): {x}; 'reference' can" for x in REFUSALS]
        for message, end in zip(found.pop("refusals"), ends, strict=True):
            assert message.endswith(f"kernel 'triton' {end}")
    assert len(found) >= 9
    for name, errors in found.items():
        assert len(errors) == 5
        assert max(errors) <= BOUNDS[name.rpartition(", ")[2]], name


def test_lists_go_to_triton_on_cuda_where_it_serves_them():
    pytest.importorskip("triton")
    lists = pytest.importorskip("tilewise.kernels.triton.lists")
    half, double = torch.bfloat16, torch.float64
    served = list_kernel(None, "cuda", half, 576, 512), list_kernel("triton", "cuda", half, 64, 64)
    assert {kernel.forward for kernel in served} == {lists.attend}
    for asked in (
        (None, "cuda", double, 64, 64),
        (None, "cuda", half, 64, 640),
        (None, "cpu", half, 64, 64),
        ("reference", "cuda", half, 64, 64),
    ):
        assert list_kernel(*asked) is REFERENCE
    with pytest.raises(ValueError, match=r"head_dim 320 and v_head_dim 64 are over 256 and 256"):
        list_kernel("triton", "cuda", torch.float32, 320, 64)
    with pytest.raises(
        ValueError, match=r"kernel \(flex\) takes no list .*'reference' or 'triton'"
    ):
        list_kernel("flex", "cuda", half, 64, 64)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
@pytest.mark.parametrize("arch", [80, 90, 100])
def test_compiled_kernels_of_lists_fit_shared_memory_and_registers(arch: int, dtype: str):
    pytest.importorskip("triton")
    command = ["-m", "benchmarks.triton_code", "--lists", "--json", "--arch", str(arch)]
    codes = json.loads(run_alone(*command, "--dtype", dtype, timeout=280))
    assert len(codes) == {"bf16": 9, "fp32": 6}[dtype]
    most = {80: 99, 90: 227, 100: 227}[arch] * 1024
    for code in codes:
        assert code["shared"] <= most and code["fit"] >= 1 and not code["narrow"], code
        (loop,) = code["loops"]
        assert 12 * loop["spilled"] <= loop["instructions"], code
        assert loop["copies"] or code["blocks"].split()[3] == "1", code


@pytest.mark.slow
def test_shares_are_added_in_whole_words_without_atomics():
    pytest.importorskip("triton")
    assert run_alone("-c", ADDED, timeout=100) == "True True False\n"
