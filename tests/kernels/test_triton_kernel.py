"""Our Triton kernel: its work lists, its results in the interpreter, and that it compiles."""

import json
import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.alone import INTERPRETED, TESTS, run_alone, skip_where_the_interpreter_fails
from support.kernel_cases import CALLS, call_of

from tilewise.kernels.call_masks import call_mask
from tilewise.kernels.triton.kernel import TritonSlices
from tilewise.kernels.triton.tuning import tuning_for
from tilewise.kernels.triton.views import in_steps, view_of
from tilewise.kernels.triton.work_list import UNIT, work_list
from tilewise.masks.base import Causal, Document, Full, Mask, Window
from tilewise.tiles.calls import KernelCall, Kind
from tilewise.tiles.cover import tile_calls

BOUNDS = {"fp32": 2e-6, "fp16": 1e-3, "fp16 results": 4e-3}


@pytest.mark.parametrize("which", ["quick", pytest.param("more", marks=pytest.mark.slow)])
def test_the_kernel_equals_dense_attention_in_the_interpreter(which: str):
    skip_where_the_interpreter_fails()
    printed = run_alone(
        str(TESTS / "support" / "triton_checks.py"), which, timeout=280, **INTERPRETED
    )
    found = json.loads(printed)
    assert which == "more" or (found.pop("same bits") and found.pop("nothing"))
    assert len(found) >= 7
    # Rounding of a sum goes with the root of its length; 2e-6 is for 64 products at most.
    found["head_dim 256, fp32"] = found.get("head_dim 256, fp32", 0.0) / math.sqrt(256 / 64)
    wrong = {name: x for name, x in found.items() if not x <= BOUNDS[name.rpartition(", ")[2]]}
    assert not wrong


@pytest.mark.slow
def test_other_blocks_are_timed_beside_those_of_the_table():
    skip_where_the_interpreter_fails()
    command = ("-m", "benchmarks.triton_blocks", "--dry-run", "--json", "--head-dim", "128")
    rows = run_alone(*command, timeout=280, **INTERPRETED).splitlines()
    found = [json.loads(row) for row in rows]
    assert not [row for row in found if "error" in row or row["ms"] <= 0]
    tuning = tuning_for(128, torch.bfloat16)
    for name in ("forward", "dq", "at_once"):
        first, *others = [row["blocks"] for row in found if row["entry"] == name]
        assert first == " ".join(str(x) for x in getattr(tuning, name) if x) and others


@pytest.mark.slow
@pytest.mark.parametrize("arch", [80, 90, 100])
def test_compiled_kernels_fit_shared_memory_and_keep_loads_ahead(arch: int):
    pytest.importorskip("triton")
    command = ("-m", "benchmarks.triton_code", "--json", "--arch", str(arch))
    codes = json.loads(run_alone(*command, timeout=280))
    assert len(codes) == {80: 10, 90: 12, 100: 10}[arch]
    most = {80: 99, 90: 227, 100: 227}[arch] * 1024
    for code in codes:
        assert code["shared"] <= most and code["fit"] >= 1 and not code["narrow"], code
        assert [loop["masked"] for loop in code["loops"]] == [False, True]
        for loop in code["loops"]:
            assert loop["copies"] or code["blocks"].split()[3] == "1", code
            assert 12 * loop["spilled"] <= loop["instructions"], code


NARROW = """
import torch
from benchmarks.triton_code import Target, compiled, jobs, narrow_accesses
from tilewise.kernels.triton.tuning import LaunchBlocks
job = jobs(32, torch.bfloat16, {arch})[0]._replace(blocks=LaunchBlocks(16, 32, 4, 2, 0))
for stepped in (True, False):
    ptx = compiled(job, Target({arch}, 32), stepped=stepped).asm["ptx"]
    print(narrow_accesses(ptx), "cp.async.cg.shared.global" in ptx)
"""


@pytest.mark.slow
@pytest.mark.parametrize("arch", [90, 100])
def test_rows_of_16_bytes_are_loaded_whole_where_strides_are_in_steps(arch: int):
    """With blocks of few rows; those of the table stand in the test above."""
    pytest.importorskip("triton")
    stepped, plain = run_alone("-c", NARROW.format(arch=arch), timeout=100).splitlines()
    assert stepped == "0 True" and plain.endswith("False") and int(plain.split()[0]) > 8


def test_strides_are_in_steps_of_what_divides_all_of_them_up_to_16_bytes():
    def steps(*tensors: torch.Tensor) -> tuple[list[tuple[int, ...]], int]:
        views, step = in_steps([view_of(x) for x in tensors])
        return [view[1:] for view in views], step

    wire = torch.empty(6, 1, 5 * 64 + 8, dtype=torch.bfloat16)  # five heads and padding
    rows, lse = wire[..., :320].unflatten(2, (5, 64)), torch.empty(6, 1, 5)
    assert steps(rows, lse, rows.float()) == ([(41, 0, 8), (5, 5, 1), (40, 0, 8)], 8)
    assert steps(rows.float(), rows.double()) == ([(80, 0, 16)] * 2, 4)
    odd = torch.empty(6, 2, 5, 65, dtype=torch.bfloat16)
    assert steps(rows, odd) == ([(328, 0, 64), (650, 325, 65)], 1)
    partial = torch.empty(6, 2, 5 * 64 + 10, dtype=torch.bfloat16)  # five heads and their lse
    assert steps(partial[..., :320].unflatten(2, (5, 64))) == ([(330, 165, 32)], 2)


@pytest.mark.slow
def test_on_hopper_matrix_products_are_not_waited_for_one_by_one():
    pytest.importorskip("triton")
    command = ("-m", "benchmarks.triton_code", "--json", "--group", "1", "--into")
    for code in json.loads(run_alone(*command, timeout=280)):
        for loop in code["loops"]:
            assert loop["tensor_cycles"] > 0 and 1 <= loop["waits"] <= 3, code
            assert loop["matrix"] > 2 * loop["waits"], code


@pytest.mark.parametrize("asked", [False, True])
@pytest.mark.parametrize(("head_dim", "offered"), [(64, True), (128, True), (256, False)])
def test_dq_is_made_by_atomics_unless_determinism_is_asked_for(
    monkeypatch, head_dim, offered, asked
):
    fake_cuda = pytest.importorskip("cuda_model.fake_cuda", reason="triton is not installed")
    cuda, call = fake_cuda.FakeCuda(monkeypatch), CALLS["causal"]
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: asked)
    passes = ["keys_backward"] if head_dim < 256 else ["keys_backward"] * 2
    with cuda():
        q, k = (cuda.empty(41, 1, heads, head_dim, dtype=torch.bfloat16) for heads in (4, 2))
        lse = cuda.empty(41, 1, 4, dtype=torch.float32)
        for deterministic in (None, False, True):
            cuda.launches.clear()
            kernel = TritonSlices(deterministic=deterministic)
            grads = kernel.backward(q, k, k, q, lse, lse, call, 0.1)
            assert [x.shape for x in grads] == [q.shape, k.shape, k.shape]
            at_once = offered and not (asked if deterministic is None else deterministic)
            by_rows = [] if at_once else ["rows_backward"]
            assert cuda.launches == ["row_statistics", *by_rows, *passes]


def listed(call: KernelCall, own: int, others: int, of_keys: bool) -> np.ndarray:
    """How often each cell of a call stands in its work list."""
    work = work_list(call, own, others, of_keys)
    sizes = (call.num_k, call.num_q) if of_keys else (call.num_q, call.num_k)
    counts = np.zeros((-(-sizes[0] // own) * own, sizes[1]), int)
    amounts = []
    for first, end, f0, f1, g0, g1, _ in work.items.tolist():
        assert first < end <= first + own and first % own == 0
        rows = np.arange(first, first + own)
        for start, stop in work.full[f0:f1].tolist():
            assert (stop - start) % others == 0 and 0 <= start < stop <= sizes[1]
            assert not of_keys or start % UNIT == 0
            counts[rows, start:stop] += 1
        for (start, stop), (low, high) in zip(
            work.masked[g0:g1].tolist(), work.intervals[g0:g1], strict=True
        ):
            assert not of_keys or start % UNIT == 0
            for row, a, b in zip(rows, low, high, strict=True):
                assert a == b == 0 or start <= a < b <= stop
                counts[row, a:b] += 1
        runs = np.concatenate([work.full[f0:f1], work.masked[g0:g1]])
        amounts.append(int((runs[:, 1] - runs[:, 0]).sum()))
    assert sorted(work.items[:, 0].tolist()) == [own * i for i in range(len(work.items))]
    assert amounts == sorted(amounts, reverse=True)
    assert work.num_busy == np.count_nonzero(amounts)
    counts = counts[: sizes[0]]
    return counts.T if of_keys else counts


@pytest.mark.parametrize("of_keys", [False, True], ids=["rows", "keys"])
@pytest.mark.parametrize("blocks", [(4, 4), (16, 8), (8, 16), (64, 64)], ids=str)
@pytest.mark.parametrize("call", [*CALLS.values(), call_of(7, 20, Kind.CAUSAL)])
def test_work_lists_hold_every_allowed_cell_once(call, blocks, of_keys):
    assert np.array_equal(listed(call, *blocks, of_keys), call_mask(call).numpy())


@st.composite
def drawn(draw: st.DrawFn) -> tuple[Mask, int]:
    edges = sorted(draw(st.sets(st.integers(1, 39), max_size=8)))
    part = st.sampled_from(
        [Full(), Causal(), Document([0, *edges, 40]), Window(draw(st.integers(0, 20)), 3)]
    )
    mask = draw(part) & draw(part)
    return (mask | (draw(part) & draw(part))) if draw(st.booleans()) else mask, 40


@settings(max_examples=60)
@given(drawn(), st.sampled_from([(4, 4), (16, 8), (8, 32)]), st.integers(1, 5))
def test_a_whole_tile_is_one_call_with_every_allowed_cell(mask, blocks, stride):
    mask, num_tokens = mask
    q, k = np.arange(0, num_tokens, stride), np.arange(num_tokens)[::-1].copy()
    calls = tile_calls(q, k, mask, whole_tile=True)
    allowed = mask.dense(range(num_tokens), range(num_tokens))[np.ix_(q, k)]
    assert len(calls) == int(allowed.any())
    for call in calls:
        q_rows, k_rows = (np.concatenate([np.arange(*r) for r in side]) for side in call[:2])
        for of_keys in (False, True):
            cells = np.zeros_like(allowed, dtype=int)
            cells[np.ix_(q_rows, k_rows)] = listed(call, *blocks, of_keys)
            assert np.array_equal(cells, allowed)


def test_small_documents_share_blocks():
    slices = tile_calls(np.arange(64), np.arange(64), Document(range(0, 65, 4)), whole_tile=True)
    work = work_list(slices[0], 32, 32)
    assert work.masked.tolist() == [[0, 32], [32, 64]] and len(work.full) == 0


def test_the_kernel_says_what_it_cannot_do():
    kernel = TritonSlices()
    for arguments, reason in (
        (("cuda", torch.float64, 64), "float64 is none of"),
        (("cuda", torch.bfloat16, 320), r"head_dim \(320\) is over 256"),
        (("cpu", torch.float32, 64), "only in Triton's interpreter"),
        (("tpu", torch.float32, 64), "not on tpu"),
    ):
        assert reason.replace("\\", "") in str(kernel.supports(*arguments))
    assert kernel.supports("cuda", torch.bfloat16, 128) is None
