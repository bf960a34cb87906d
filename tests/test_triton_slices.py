"""Our Triton kernel: its work lists, its results in the interpreter, and that it compiles."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_cases import CALLS, call_of

from tilewise.calls import Call, Kind
from tilewise.kernels.slices import call_mask
from tilewise.kernels.triton_slices import TritonSlices
from tilewise.kernels.work_list import work_list
from tilewise.mask import Causal, Document, Full, Mask, Window
from tilewise.tile import tile_calls

TESTS = Path(__file__).resolve().parent
BOUNDS = {"fp32": 2e-6, "fp16": 1e-3}


def run_alone(script: str, timeout: int, **environment: str) -> str:
    """What a test's script prints in a process with this environment."""
    path = f"{TESTS}:{TESTS.parent / 'src'}"
    run = subprocess.run(
        [sys.executable, str(TESTS / script)],
        env={"PATH": "/usr/bin:/bin", "HOME": str(Path.home()), "PYTHONPATH": path, **environment},
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    return run.stdout


def test_the_kernel_equals_dense_attention_in_the_interpreter():
    pytest.importorskip("triton")
    printed = run_alone("triton_checks.py", 280, TRITON_INTERPRET="1", OMP_NUM_THREADS="1")
    found = json.loads(printed)
    assert found.pop("same bits") and found.pop("nothing")
    assert len(found) > 20
    wrong = {name: x for name, x in found.items() if not x <= BOUNDS[name.rpartition(", ")[2]]}
    assert not wrong


@pytest.mark.slow
@pytest.mark.parametrize("arch", [80, 90])
def test_the_kernels_compile_without_a_gpu_and_fit_its_shared_memory(arch: int):
    pytest.importorskip("triton")
    found = json.loads(run_alone("triton_compiled.py", 280, ARCH=str(arch)))
    assert len(found) == 9
    most = {80: 163, 90: 227}[arch] * 1024
    assert not {name: x for name, x in found.items() if x["shared"] > most or not x["products"]}


def listed(call: Call, own: int, others: int, of_keys: bool) -> np.ndarray:
    """How often each cell of a call stands in its work list."""
    work = work_list(call, own, others, of_keys)
    sizes = (call.num_k, call.num_q) if of_keys else (call.num_q, call.num_k)
    counts = np.zeros((-(-sizes[0] // own) * own, sizes[1]), int)
    amounts = []
    for block, f0, f1, g0, g1 in work.items.tolist():
        rows = np.arange(block * own, (block + 1) * own)
        for start, stop in work.full[f0:f1].tolist():
            assert (stop - start) % others == 0 and 0 <= start < stop <= sizes[1]
            counts[rows, start:stop] += 1
        for (start, stop), (low, high) in zip(
            work.masked[g0:g1].tolist(), work.intervals[g0:g1], strict=True
        ):
            for row, a, b in zip(rows, low, high, strict=True):
                assert a == b == 0 or start <= a < b <= stop
                counts[row, a:b] += 1
        runs = np.concatenate([work.full[f0:f1], work.masked[g0:g1]])
        amounts.append(int((runs[:, 1] - runs[:, 0]).sum()))
    assert sorted(work.items[:, 0].tolist()) == list(range(len(work.items)))
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
