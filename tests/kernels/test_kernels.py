"""Kernels: the reference and the cpu kernel against autograd of dense attention."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.kernel_cases import CALLS, HEADS, SCALE, SCORES, call_of, dense, draw, error, run
from support.kernel_cases import wanted as wanted_of

from tilewise.kernels import kernel_for
from tilewise.kernels.call_masks import call_mask
from tilewise.kernels.delta import out_for_delta
from tilewise.kernels.protocol import accumulator_dtype
from tilewise.kernels.reference import Reference
from tilewise.kernels.torch_cpu import CpuFlash
from tilewise.tiles.calls import Kind, Slice


@pytest.mark.parametrize("kernel", [Reference(), CpuFlash()], ids=lambda kernel: kernel.name)
@pytest.mark.parametrize("heads", HEADS.values(), ids=HEADS)
@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_kernels_equal_dense_attention_in_fp64(kernel, heads, call):
    case = draw(call, heads, torch.float64)
    answer = dense(case, call)
    wanted = (answer.out, answer.lse, *answer.grads)
    for got, want in zip(run(kernel, case, answer, call), wanted, strict=True):
        assert got.shape == want.shape and error(got, want) < 1e-14


@pytest.mark.parametrize("scores", SCORES.values(), ids=SCORES)
@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_the_reference_has_softcap_dropout_and_the_largest_score(call, scores):
    case = draw(call, (4, 2), torch.float64, head_dim=6, v_head_dim=9)
    answer = dense(case, call, scores)
    got = run(Reference(), case, answer, call, scores)
    for x, y in zip(got, wanted_of(answer, scores), strict=True):
        assert x.shape == y.shape and error(x, y) < 1e-14


@pytest.mark.parametrize("kernel", [Reference(), CpuFlash()], ids=lambda kernel: kernel.name)
@pytest.mark.parametrize("widths", [(24, 16), (16, 40), (1, 3), (3, 1)])
@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_values_may_be_wider_or_narrower(kernel, widths, call):
    case = draw(call, (4, 2), torch.float64, head_dim=widths[0], v_head_dim=widths[1])
    answer = dense(case, call)
    wanted = wanted_of(answer, SCORES["plain"])
    for x, y in zip(run(kernel, case, answer, call), wanted, strict=True):
        assert x.shape == y.shape and error(x, y) < 1e-14
    into = torch.zeros_like(case.dout), torch.full(case.q.shape[:3], -math.inf).double()
    assert error(kernel.forward(*case[:3], call, SCALE, into)[0], answer.out) < 1e-14


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_a_loss_of_lse_alone_has_no_gradient_of_v(call, dtype):
    case = draw(call, (4, 2), dtype)
    case.dout.zero_()
    answer = dense(case, call)
    _, _, dq, dk, dv = run(CpuFlash(), case, answer, call)
    bound = {torch.float64: 1e-14, torch.float32: 3e-6, torch.bfloat16: 2e-2}[dtype]
    assert error(dq, answer.grads[0]) < bound and error(dk, answer.grads[1]) < bound
    assert float(dv.abs().max()) < 1e-20


def test_a_causal_call_with_more_keys_is_aligned_at_the_bottom_right():
    call = call_of(3, 5, Kind.CAUSAL)
    assert call_mask(call).tolist() == [[j <= a + 2 for j in range(5)] for a in range(3)]
    case = draw(call, (2, 1), torch.float64)
    answer = dense(case, call)
    got = run(Reference(), case, answer, call)
    for x, y in zip(got, (answer.out, answer.lse, *answer.grads), strict=True):
        assert error(x, y) < 1e-14
    with pytest.raises(ValueError, match="3 queries and 5 keys is not square"):
        CpuFlash().forward(*case[:3], call, SCALE)


@pytest.mark.parametrize("kernel", [Reference(), CpuFlash()], ids=lambda kernel: kernel.name)
@pytest.mark.parametrize("sizes", [(0, 4), (4, 0), (0, 0)])
def test_empty_calls_yield_nothing(kernel, sizes):
    call = call_of(*sizes)
    case = draw(call, (4, 2), torch.float32)
    out, lse = kernel.forward(*case[:3], call, SCALE)
    assert out.shape == case.q.shape and not out.any() and (lse == -math.inf).all()
    grads = kernel.backward(*case[:4], lse, torch.zeros_like(lse), call, SCALE)
    for grad, x in zip(grads, case[:3], strict=True):
        assert grad.shape == x.shape and not grad.any()


@pytest.mark.parametrize("kernel", [Reference(), CpuFlash()], ids=lambda kernel: kernel.name)
def test_rows_without_keys_are_exactly_empty_even_with_gradients(kernel):
    call = CALLS["holes"]
    case = draw(call, (2, 2), torch.float32)
    lse = kernel.forward(*case[:3], call, SCALE)[1]
    empty = lse[:, 0, 0] == -math.inf
    assert empty.nonzero().flatten().tolist() == [10, 11, 20, 21]
    grads = kernel.backward(*case[:4], lse, torch.ones_like(lse), call, SCALE)
    assert all(g.isfinite().all() for g in grads) and not grads[0][empty].any()


@pytest.mark.parametrize("kernel", [Reference(), CpuFlash()], ids=lambda kernel: kernel.name)
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_into_merges_the_call_in_place(kernel, dtype):
    call, wide = CALLS["holes"], accumulator_dtype(dtype)
    case = draw(call, (4, 2), dtype)
    out, lse = kernel.forward(*case[:3], call, SCALE)
    into = torch.zeros(call.num_q, 2, 4, 19, dtype=wide), torch.full_like(lse, -math.inf)
    again = kernel.forward(*case[:3], call, SCALE, into)
    assert again is into
    assert torch.equal(into[0], out.to(wide)) and torch.equal(into[1], lse)


def test_any_strides_with_unit_last_stride_give_the_same_bits():
    call = CALLS["holes"]
    case = draw(call, (4, 2), torch.float32)
    strided = [x.permute(1, 2, 0, 3).contiguous().permute(2, 0, 1, 3) for x in case[:4]]
    lse, delta = torch.zeros(2, 30, 2, 4)
    kernel = CpuFlash()
    for a, b in (
        (kernel.forward(*case[:3], call, SCALE), kernel.forward(*strided[:3], call, SCALE)),
        (
            kernel.backward(*case[:4], lse, delta, call, SCALE),
            kernel.backward(*strided, lse, delta, call, SCALE),
        ),
    ):
        assert all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kind", [Kind.FULL, Kind.CAUSAL])
def test_half_precision_is_no_worse_than_the_plain_kernel(dtype, kind):
    """The plain backward takes the rounded out; ours takes delta: its error is no larger."""
    call = call_of(256, 256, kind)
    case = draw(call, (4, 2), dtype, head_dim=64)
    case.dlse.zero_()
    answer = dense(case, call)
    got = run(CpuFlash(), case, answer, call)
    bhsd = [x.permute(1, 2, 0, 3) for x in case[:4]]
    out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        *bhsd[:3], 0.0, kind is Kind.CAUSAL, scale=SCALE
    )
    plain = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
        bhsd[3], *bhsd[:3], out, lse, 0.0, kind is Kind.CAUSAL, scale=SCALE
    )
    for ours, theirs, want in zip(got[2:], plain, answer.grads, strict=True):
        rms = [
            (x.double() - want).square().mean().sqrt() for x in (ours, theirs.permute(2, 0, 1, 3))
        ]
        assert rms[0] <= 1.05 * rms[1]


@given(st.integers(0, 10**6), st.sampled_from([torch.float64, torch.float32, torch.bfloat16]))
def test_out_for_delta_keeps_delta(seed, dtype):
    g = torch.Generator().manual_seed(seed)
    dout = torch.randn(50, 1, 2, 8, generator=g, dtype=torch.float64).to(dtype)
    dout *= torch.randint(0, 2, dout.shape, generator=g)
    wide = accumulator_dtype(dtype)
    delta = torch.randn(50, 1, 2, generator=g, dtype=wide)
    delta *= 10.0 ** torch.randint(-12, 4, delta.shape, generator=g)
    changed, out = out_for_delta(dout, delta)
    kept = (changed.to(wide) * out.to(wide)).sum(-1)
    bits = {torch.float64: 51, torch.float32: 22, torch.bfloat16: 22}[dtype]
    assert ((kept - delta).abs() <= 2.0**-bits * delta.abs()).all()
    least = 2.0**-79 * delta.abs() + 2 * torch.finfo(dtype).tiny
    assert ((changed - dout).abs().amax(-1).to(wide) <= least).all()


def test_out_for_delta_lies_in_memory_batch_first():
    dout = torch.randn(5, 3, 2, 8).transpose(1, 2).contiguous().transpose(1, 2)
    for x in out_for_delta(dout, torch.randn(5, 3, 2)):
        assert x.shape == dout.shape and x.transpose(0, 1).is_contiguous()


def test_call_mask_reads_slices_row_by_row():
    slices = (Slice(1, 3, 0, 0, 1, 1), Slice(1, 3, 4, 0, 6, 0), Slice(3, 4, 0, 1, 5, 0))
    expected = ["......", "xx..xx", "xxx.xx", "...xx."]
    for part, rows in ((slices, expected), (slices[:1], ["......", "xx....", "xxx...", "......"])):
        mask = call_mask(call_of(4, 6, Kind.SLICES, part))
        assert ["".join(".x"[x] for x in row) for row in mask.tolist()] == rows


@pytest.mark.parametrize("kernel", [Reference(), CpuFlash()], ids=lambda kernel: kernel.name)
def test_into_adds_gradients_in_place(kernel):
    call = CALLS["holes"]
    case = draw(call, (4, 2), torch.float32)
    answer = dense(case, call)
    given_ = case[:4], answer.lse.float(), answer.delta.float()
    grads = kernel.backward(*given_[0], *given_[1:], call, SCALE)
    into = tuple(torch.ones_like(x) for x in grads)
    assert kernel.backward(*given_[0], *given_[1:], call, SCALE, into) is into
    assert all(torch.equal(total, 1 + grad) for total, grad in zip(into, grads, strict=True))
    empty, into = call_of(0, 4), tuple(torch.ones(n, 1, 1, 2) for n in (0, 4, 4))
    case = draw(empty, (1, 1), torch.float32, batch=1, head_dim=2)
    lse = torch.zeros(0, 1, 1)
    assert kernel.backward(*case[:4], lse, lse, empty, SCALE, into) is into and into[1].all()


def test_a_kernel_is_chosen_or_refused_never_replaced(monkeypatch):
    monkeypatch.setattr("tilewise.kernels.triton.kernel.find_spec", lambda name: name)
    assert kernel_for("cpu", torch.bfloat16, 64).name == "cpu"
    assert kernel_for("cuda", torch.bfloat16, 128).name == "cuda"
    assert kernel_for("cuda", torch.bfloat16, 512).name == "efficient"
    assert kernel_for("cuda", torch.float32, 128).name == "efficient"
    assert kernel_for("cuda", torch.float32, 7).name == "triton"
    assert kernel_for("cuda", torch.float32, 258).name == "reference"
    assert kernel_for("cuda", torch.float64, 128).name == "reference"
    for arguments, reason in (
        (("cuda", torch.bfloat16, 516), r"\(516\) is over 256; .* \(516\) is no multiple of 8"),
        (("cpu", torch.int64, 64), "int64 is none of"),
        (("tpu", torch.float32, 64), "no kernel runs on tpu"),
    ):
        with pytest.raises(ValueError, match=reason):
            kernel_for(*arguments)
