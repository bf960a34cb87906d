"""Every kernel that runs on this GPU against dense attention in fp64: both passes, all calls.

Small calls first. What compiles, compiles once for each dtype, head_dim and kind of heads: that is
nearly all the time it takes, so few of them are asked for.
"""

import math
from functools import lru_cache

import numpy as np
import pytest
import torch
from support.kernel_cases import (
    CALLS,
    HEADS,
    SCALE,
    SCORES,
    Answer,
    Case,
    call_of,
    dense,
    draw,
    error,
    placed,
    run,
    wanted,
)
from support.triton_checks import MASKS, NUM_TOKENS

from tilewise.kernels import torch_sdpa
from tilewise.kernels.call_cache import CallCache
from tilewise.kernels.protocol import Kernel, Places, Scores
from tilewise.kernels.registry import PROVIDERS, kernel_named
from tilewise.kernels.triton import kernel as triton_kernel
from tilewise.tiles.calls import KernelCall, Kind, Slice
from tilewise.tiles.cover import tile_calls

# A kernel that hangs would hold the process for ever.
pytestmark = [pytest.mark.gpu, pytest.mark.timeout(150, method="thread")]
# Not flex, which compiles anew for every size; flashinfer has no backward; the other backward of
# triton has a test of its own.
OTHERS = "cpu", "reference", "flex", "flashinfer", "triton_deterministic"
NAMES = [name for name in PROVIDERS if name not in OTHERS]
BOUNDS = {torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 2e-2}
SMALL = {**CALLS, "more keys": call_of(3, 50, Kind.CAUSAL), "one key": call_of(5, 1)}
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


def usable(name: str, dtype: torch.dtype, head_dim: int, backward: bool = True) -> Kernel:
    kernel = kernel_named(name)
    reason = kernel.supports("cuda", dtype, head_dim, backward)
    if reason is not None:
        pytest.skip(reason)
    return kernel


@lru_cache(maxsize=64)
def small(name: str, heads: tuple[int, int], dtype: torch.dtype) -> tuple[Case, Answer]:
    case = draw(SMALL[name], heads, dtype, head_dim=64)
    return case, dense(case, SMALL[name])


@lru_cache(maxsize=64)
def large(name: str, head_dim: int) -> tuple[Case, Answer]:
    case = draw(LARGE[name], (4, 2), torch.bfloat16, batch=1, head_dim=head_dim)
    case = Case(case.q * 0.3, *case[1:])
    return case, dense(case, LARGE[name])


def on_gpu(case: Case) -> Case:
    return Case(*(x.cuda() for x in case))


def check_forward(kernel: Kernel, case: Case, answer: Answer, call: KernelCall) -> None:
    bound = BOUNDS[case.q.dtype]
    out, lse = kernel.forward(*on_gpu(case)[:3], call, SCALE)
    assert error(out.cpu(), answer.out) < bound
    assert error(lse.cpu(), answer.lse) < bound


def check_into(kernel: Kernel, case: Case, answer: Answer, call: KernelCall) -> None:
    """Results added to accumulators: to nothing, and gradients to ones."""
    bound, there = BOUNDS[case.q.dtype], on_gpu(case)
    out = torch.zeros(case.q.shape, device="cuda")
    into = out, torch.full(case.q.shape[:3], -math.inf, device="cuda")
    assert kernel.forward(*there[:3], call, SCALE, into) is into
    assert error(out.cpu(), answer.out) < bound
    dq, dk, dv = (torch.ones(x.shape, device="cuda") for x in case[:3])
    ones = dq, dk, dv
    given = answer.lse.float().cuda(), answer.delta.float().cuda()
    assert kernel.backward(*there[:4], *given, call, SCALE, ones) is ones
    for got, want in zip(ones, answer.grads, strict=True):
        assert error(got.cpu() - 1, want) < 4 * bound


def check_backward(kernel: Kernel, case: Case, answer: Answer, call: KernelCall) -> None:
    given = answer.lse.float().cuda(), answer.delta.float().cuda()
    grads = kernel.backward(*on_gpu(case)[:4], *given, call, SCALE)
    for got, want in zip(grads, answer.grads, strict=True):
        assert error(got.cpu(), want) < 4 * BOUNDS[case.q.dtype]


def takes(kernel: Kernel, call: KernelCall) -> bool:
    """Causal calls that are not square are not for all kernels."""
    return not kernel.square_causal or call.kind is not Kind.CAUSAL or call.num_q == call.num_k


@pytest.mark.parametrize("call", SMALL)
@pytest.mark.parametrize("name", NAMES)
def test_kernels_equal_dense_attention_on_calls_of_every_kind(name, call):
    kernel = usable(name, torch.bfloat16, 64)
    if takes(kernel, SMALL[call]):
        case, answer = small(call, HEADS["GQA"], torch.bfloat16)
        check_forward(kernel, case, answer, SMALL[call])
        check_into(kernel, case, answer, SMALL[call])
        check_backward(kernel, case, answer, SMALL[call])


@pytest.mark.parametrize(
    ("heads", "dtype"), [("MHA", torch.float16), ("MQA", torch.float32)], ids=str
)
@pytest.mark.parametrize("name", NAMES)
def test_kernels_equal_dense_attention_in_other_dtypes_and_heads(name, heads, dtype):
    kernel = usable(name, dtype, 64)
    for call in ("causal", "holes"):
        case, answer = small(call, HEADS[heads], dtype)
        check_forward(kernel, case, answer, SMALL[call])
        check_backward(kernel, case, answer, SMALL[call])


@pytest.mark.parametrize("name", NAMES)
def test_a_loss_of_lse_alone_has_its_gradients(name):
    kernel, call = usable(name, torch.bfloat16, 64), SMALL["causal"]
    case = draw(call, HEADS["GQA"], torch.bfloat16, head_dim=64)
    case.dout.zero_()
    answer = dense(case, call)
    given = answer.lse.float().cuda(), answer.delta.float().cuda()
    dq, dk, dv = kernel.backward(*on_gpu(case)[:4], *given, call, SCALE)
    assert error(dq.cpu(), answer.grads[0]) < 4e-2 and error(dk.cpu(), answer.grads[1]) < 4e-2
    assert float(dv.abs().max()) < 1e-6


@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("name", NAMES)
def test_kernels_equal_dense_attention_on_many_blocks(name, head_dim):
    kernel = usable(name, torch.bfloat16, head_dim)
    for call in LARGE:
        case, answer = large(call, head_dim)
        check_forward(kernel, case, answer, LARGE[call])
        check_backward(kernel, case, answer, LARGE[call])


def test_flex_equals_dense_attention():
    kernel = usable("flex", torch.bfloat16, 64)
    case, answer = large("documents", 64)
    check_forward(kernel, case, answer, LARGE["documents"])
    check_backward(kernel, case, answer, LARGE["documents"])


@pytest.mark.parametrize("call", CALLS)
def test_flashinfer_equals_dense_attention_forward(call):
    kernel = usable("flashinfer", torch.bfloat16, 64, backward=False)
    case, answer = small(call, HEADS["GQA"], torch.bfloat16)
    check_forward(kernel, case, answer, CALLS[call])


@pytest.mark.parametrize("mask", MASKS.values(), ids=MASKS)
def test_triton_takes_whole_tiles_of_all_masks(mask):
    kernel, rows = usable("triton", torch.bfloat16, 64), np.arange(NUM_TOKENS)
    for call in tile_calls(rows, rows, mask, whole_tile=True):
        case = draw(call, HEADS["GQA"], torch.bfloat16, head_dim=64)
        answer = dense(case, call)
        check_forward(kernel, case, answer, call)
        check_backward(kernel, case, answer, call)


@pytest.mark.parametrize("head_dim", [64, 128])
def test_the_deterministic_backward_of_triton_equals_dense_attention(head_dim):
    kernel = usable("triton_deterministic", torch.bfloat16, head_dim)
    for call in LARGE:
        check_backward(kernel, *large(call, head_dim), LARGE[call])


def test_triton_gives_the_same_bits_every_time():
    kernel = usable("triton_deterministic", torch.bfloat16, 64)
    case, answer = large("window", 64)
    given = answer.lse.float().cuda(), answer.delta.float().cuda()
    once, *others = (
        kernel.backward(*on_gpu(case)[:4], *given, LARGE["window"], SCALE) for _ in range(5)
    )
    for again in others:
        assert all(torch.equal(x, y) for x, y in zip(once, again, strict=True))


def test_triton_kernels_can_be_captured_in_a_graph():
    kernel, call = usable("triton", torch.bfloat16, 64), LARGE["causal"]
    case = on_gpu(large("causal", 64)[0])
    wanted = kernel.forward(*case[:3], call, SCALE)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = kernel.forward(*case[:3], call, SCALE)
    graph.replay()
    assert all(torch.equal(x, y) for x, y in zip(wanted, got, strict=True))


@pytest.mark.parametrize("name", ["triton", "efficient"])
def test_a_graph_keeps_the_lists_and_masks_that_it_reads(name, monkeypatch):
    """While others drive them out of the cache, and take their memory."""
    kernel, call = usable(name, torch.bfloat16, 64), LARGE["window"]
    cache = CallCache(most_bytes=1 << 14)
    for module in (triton_kernel, torch_sdpa):
        monkeypatch.setattr(module, "CALL_CACHE", cache)
    case = on_gpu(large("window", 64)[0])
    wanted = kernel.forward(*case[:3], call, SCALE)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = kernel.forward(*case[:3], call, SCALE)
    for width in range(100, 170):
        window = Slice(0, call.num_q, 0, 1, width, 1)
        kernel.forward(*case[:3], call._replace(slices=(window,)), SCALE)
    graph.replay()
    assert all(torch.equal(x, y) for x, y in zip(wanted, got, strict=True))


def windowed(n: int, width: int) -> KernelCall:
    """Rows that see themselves and the keys before, so many in all."""
    first = Slice(0, width - 1, 0, 0, 1, 1), Slice(width - 1, n, 1 - width, 1, 1, 1)
    return call_of(n, n, Kind.SLICES, first)


def test_offsets_of_more_than_32_bits():
    """A long call's last rows are those of a short one of its last rows and keys."""
    kernel = usable("triton", torch.bfloat16, 128)
    if torch.cuda.mem_get_info()[0] < 70 << 30:
        pytest.skip("needs 70 GiB")
    check_last_rows(kernel, 600_000, 32, torch.device("cuda"), torch.bfloat16)


def check_last_rows(
    kernel: Kernel, n: int, heads: int, device: torch.device, dtype: torch.dtype
) -> None:
    width, tail = 1024, 1500
    near = tail + width - 1  # keys that the last rows see
    q, k, v, dout = (torch.randn(n, 1, heads, 128, device=device, dtype=dtype) for _ in range(4))
    out, lse = kernel.forward(q, k, v, windowed(n, width), SCALE)
    last = q[-tail:], k[-near:], v[-near:]
    short = call_of(tail, near, Kind.SLICES, (Slice(0, tail, 0, 1, width, 1),))
    own_out, own_lse = kernel.forward(*last, short, SCALE)
    assert error(out[-tail:], own_out) < 1e-3 and error(lse[-tail:], own_lse) < 1e-3
    delta = torch.zeros_like(lse)
    delta[-tail:] = (out[-tail:].float() * dout[-tail:].float()).sum(-1)
    del out
    dq, dk, dv = kernel.backward(q, k, v, dout, lse, delta, windowed(n, width), SCALE)
    own = kernel.backward(*last, dout[-tail:], lse[-tail:], delta[-tail:], short, SCALE)
    assert error(dq[-tail:], own[0]) < 1e-3
    for grad, near_end in zip((dk, dv), own[1:], strict=True):
        assert error(grad[-tail:], near_end[-tail:]) < 1e-3


def there(scores: Scores, call: KernelCall) -> Scores:
    """With the places of a call, if there is dropout, on the GPU."""
    places = placed(scores, call).places
    if places is None:
        return scores
    positions = (x.cuda() for x in places[:2])
    return scores._replace(places=Places(*positions, places.first_head))


@pytest.mark.parametrize("widths", [(64, 64), (192, 128), (64, 96)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("what", SCORES)
@pytest.mark.parametrize("name", [*NAMES, "triton_deterministic", "flex", "reference"])
def test_softcap_dropout_the_largest_score_and_widths(name, what, dtype, widths, monkeypatch):
    """By every kernel that says that it has them; the same pairs are dropped as on a CPU."""
    kernel, scores, call = kernel_named(name), SCORES[what], SMALL["holes"]
    if name == "flex" and (dtype, widths) != (torch.bfloat16, (64, 64)):
        pytest.skip("compiles 10 to 40 seconds for each dtype and width")
    reason = kernel.supports("cuda", dtype, max(widths), needs=scores.needs)
    if reason is not None:
        pytest.skip(reason)
    case = draw(call, (4, 2), dtype, head_dim=widths[0], v_head_dim=widths[1])
    answer = dense(case, call, scores)
    given = answer._replace(lse=answer.lse.cuda(), delta=answer.delta.cuda())
    monkeypatch.setattr("support.kernel_cases.placed", there)
    got = run(kernel, on_gpu(case), given, call, scores)
    for x, y in zip(got, wanted(answer, scores), strict=True):
        assert x.shape == y.shape and error(x.cpu(), y) < 4 * BOUNDS[dtype]
