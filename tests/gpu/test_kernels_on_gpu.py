"""Every kernel that runs on this GPU against dense attention in fp64: both passes, all calls."""

import math

import numpy as np
import pytest
import torch
from kernel_cases import CALLS, HEADS, SCALE, Answer, Case, call_of, dense, draw, error
from triton_checks import MASKS, NUM_TOKENS

from tilewise.calls import Call, Kind, Slice
from tilewise.kernels.providers import PROVIDERS, kernel_named
from tilewise.tile import tile_calls

pytestmark = pytest.mark.gpu
GPU_KERNELS = [name for name in PROVIDERS if name not in ("cpu", "reference")]
BOUNDS = {torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 2e-2}
LARGE = {
    "full": call_of(1000, 1337),
    "causal": call_of(1025, 1025, Kind.CAUSAL),
    "window": call_of(900, 1100, Kind.SLICES, (Slice(0, 900, 0, 1, 200, 1),)),
    "documents": call_of(
        700,
        700,
        Kind.SLICES,
        (Slice(0, 130, 0, 0, 1, 1), Slice(130, 131, 130, 0, 131, 0), Slice(131, 700, 131, 0, 1, 1)),
    ),
}


def usable(name: str, dtype: torch.dtype, head_dim: int, backward: bool = True):
    kernel = kernel_named(name)
    reason = kernel.supports("cuda", dtype, head_dim, backward)
    if reason is not None:
        pytest.skip(reason)
    return kernel


def on_gpu(case: Case) -> Case:
    return Case(*(x.cuda() for x in case))


def check(kernel, case: Case, answer: Answer, call: Call, backward: bool = True) -> None:
    bound, there = BOUNDS[case.q.dtype], on_gpu(case)
    out, lse = kernel.forward(*there[:3], call, SCALE)
    assert error(out.cpu(), answer.out) < bound and error(lse.cpu(), answer.lse) < bound
    into = torch.zeros_like(out, dtype=torch.float32), torch.full_like(lse, -math.inf)
    assert kernel.forward(*there[:3], call, SCALE, into) is into
    assert error(into[0].cpu(), answer.out) < bound
    if not backward:
        return
    given = answer.lse.float().cuda(), answer.delta.float().cuda()
    for got, want in zip(
        kernel.backward(*there[:4], *given, call, SCALE), answer.grads, strict=True
    ):
        assert error(got.cpu(), want) < 4 * bound


def cut(kernel, call: Call) -> list[Call]:
    """A causal call as the kernel takes it: cases that are not square are left to others."""
    square = call.kind is not Kind.CAUSAL or call.num_q == call.num_k
    return [call] if square or not kernel.square_causal else []


@pytest.mark.parametrize("dtype", BOUNDS, ids=str)
@pytest.mark.parametrize("heads", HEADS.values(), ids=HEADS)
@pytest.mark.parametrize("name", GPU_KERNELS)
def test_kernels_equal_dense_attention_on_calls_of_every_kind(name, heads, dtype):
    kernel = usable(name, dtype, 64)
    for call in (*CALLS.values(), call_of(3, 50, Kind.CAUSAL), call_of(5, 1)):
        for one in cut(kernel, call):
            case = draw(one, heads, dtype, head_dim=64)
            check(kernel, case, dense(case, one), one)


@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("name", GPU_KERNELS)
def test_kernels_equal_dense_attention_on_many_blocks(name, head_dim):
    kernel = usable(name, torch.bfloat16, head_dim)
    for call in LARGE.values():
        case = draw(call, (4, 2), torch.bfloat16, batch=1, head_dim=head_dim)
        case = Case(case.q * 0.3, *case[1:])
        check(kernel, case, dense(case, call), call)


def test_flashinfer_equals_dense_attention_forward():
    kernel = usable("flashinfer", torch.bfloat16, 128, backward=False)
    for call in (*CALLS.values(), call_of(3, 50, Kind.CAUSAL)):
        case = draw(call, (4, 2), torch.bfloat16, head_dim=128)
        check(kernel, case, dense(case, call), call, backward=False)


@pytest.mark.parametrize("name", GPU_KERNELS)
def test_a_loss_of_lse_alone_has_its_gradients(name):
    kernel, call = usable(name, torch.bfloat16, 64), CALLS["causal"]
    case = draw(call, (4, 2), torch.bfloat16, head_dim=64)
    case.dout.zero_()
    answer = dense(case, call)
    given = answer.lse.float().cuda(), answer.delta.float().cuda()
    dq, dk, dv = kernel.backward(*on_gpu(case)[:4], *given, call, SCALE)
    assert error(dq.cpu(), answer.grads[0]) < 4e-2 and error(dk.cpu(), answer.grads[1]) < 4e-2
    assert float(dv.abs().max()) < 1e-6


@pytest.mark.parametrize("mask", MASKS.values(), ids=MASKS)
def test_triton_takes_whole_tiles_of_all_masks(mask):
    kernel, rows = usable("triton", torch.bfloat16, 64), np.arange(NUM_TOKENS)
    for call in tile_calls(rows, rows, mask, whole_tile=True):
        case = draw(call, (4, 2), torch.bfloat16, head_dim=64)
        check(kernel, case, dense(case, call), call)


def test_triton_gives_the_same_bits_every_time():
    kernel, call = usable("triton", torch.bfloat16, 128), LARGE["window"]
    case = on_gpu(draw(call, (8, 2), torch.bfloat16, head_dim=128))
    lse = kernel.forward(*case[:3], call, SCALE)[1]
    once, again = (kernel.backward(*case[:4], lse, lse * 0, call, SCALE) for _ in range(2))
    assert all(torch.equal(x, y) for x, y in zip(once, again, strict=True))


def test_triton_kernels_can_be_captured_in_a_graph():
    kernel, call = usable("triton", torch.bfloat16, 64), LARGE["causal"]
    case = on_gpu(draw(call, (4, 2), torch.bfloat16, head_dim=64))
    wanted = kernel.forward(*case[:3], call, SCALE)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = kernel.forward(*case[:3], call, SCALE)
    graph.replay()
    assert all(torch.equal(x, y) for x, y in zip(wanted, got, strict=True))
