"""The CUDA kernel's arguments: flash attention emulated on the CPU from its documented contract."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.kernel_cases import CALLS, HEADS, SCALE, call_of, dense, draw, error, run

from tilewise.kernels import torch_flash
from tilewise.kernels.call_masks import call_mask
from tilewise.kernels.torch_flash import CudaFlash, flash_parts
from tilewise.tiles.calls import Kind, Slice


def flash_mask(m: int, n: int, causal: bool, window: dict) -> torch.Tensor:
    """What flash attention computes: bottom-right aligned, windows inclusive."""
    distance = torch.arange(n) - torch.arange(m)[:, None] - (n - m)
    left, right = window.get("window_size_left"), window.get("window_size_right")
    mask = torch.ones(m, n, dtype=torch.bool) if not causal else distance <= 0
    if left is not None and left >= 0:
        mask &= distance >= -left
    if right is not None and right >= 0:
        mask &= distance <= right
    return mask


def emulated_forward(q, k, v, cum_q, cum_k, m, n, dropout, causal, debug, *, scale, **window):
    """The CUDA op's contract on a CPU, in fp64: [batch, rows, heads, head_dim], lse [b, h, r]."""
    assert cum_q is cum_k is None and dropout == 0.0 and debug is False
    assert all(side is None or side >= 0 for side in window.values())  # FA4 takes -1 as a side
    assert (m, n) == (q.shape[1], k.shape[1]) and q.shape[-1] % 8 == 0
    group = q.shape[2] // k.shape[2]
    k, v = (x.repeat_interleave(group, 2).double() for x in (k, v))
    scores = scale * torch.einsum("bmhd,bnhd->bhmn", q.double(), k)
    scores = scores.masked_fill(~flash_mask(m, n, causal, window), -math.inf)
    assert (scores > -math.inf).any(-1).all()
    lse = torch.logsumexp(scores, -1)
    out = torch.einsum("bhmn,bnhd->bmhd", torch.exp(scores - lse[..., None]), v)
    return out.to(q.dtype), lse.float(), None, None, None


def emulated_backward(dout, q, k, v, out, lse, *arguments, scale, **window):
    cum_q, cum_k, m, n, dropout, causal, *_ = arguments
    assert all(side is None or side >= 0 for side in window.values())
    assert cum_q is cum_k is None and dropout == 0.0 and lse.is_contiguous()
    heads, kv_heads = q.shape[2], k.shape[2]
    wide_k, wide_v = (x.repeat_interleave(heads // kv_heads, 2).double() for x in (k, v))
    q, dout, out = q.double(), dout.double(), out.double()
    scores = scale * torch.einsum("bmhd,bnhd->bhmn", q, wide_k) - lse[..., None]
    p = torch.exp(scores).masked_fill(~flash_mask(m, n, causal, window), 0.0)
    delta = (dout * out).sum(-1).transpose(1, 2)[..., None]
    ds = scale * p * (torch.einsum("bmhd,bnhd->bhmn", dout, wide_v) - delta)
    dq = torch.einsum("bhmn,bnhd->bmhd", ds, wide_k)
    dk, dv = (torch.einsum("bhmn,bmhd->bnhd", x, y) for x, y in ((ds, q), (p, dout)))
    return dq, *(x.unflatten(2, (kv_heads, -1)).sum(3) for x in (dk, dv))


@pytest.mark.parametrize("v_head_dim", [None, 8, 40])
@pytest.mark.parametrize("heads", HEADS.values(), ids=HEADS)
@pytest.mark.parametrize("call", [*CALLS.values(), call_of(3, 5, Kind.CAUSAL)])
def test_the_cuda_kernel_calls_flash_attention_as_its_contract_says(
    call, heads, v_head_dim, monkeypatch
):
    monkeypatch.setattr(torch_flash, "_forward", emulated_forward)
    monkeypatch.setattr(torch_flash, "_backward", emulated_backward)
    case = draw(call, heads, torch.bfloat16, v_head_dim=v_head_dim)
    answer = dense(case, call)
    got = run(CudaFlash(), case, answer, call)
    for x, y in zip(got, (answer.out, answer.lse, *answer.grads), strict=True):
        assert x.shape == y.shape and error(x, y) < 4e-3
    into = torch.zeros_like(case.dout, dtype=torch.float32), torch.full_like(got[1], -math.inf)
    assert CudaFlash().forward(*case[:3], call, SCALE, into) == into
    assert error(into[0], answer.out) < 4e-3


@pytest.mark.parametrize(
    "call, alone", [(call_of(5, 5, Kind.CAUSAL), True), (CALLS["holes"], False)]
)
def test_gradients_of_one_rectangle_are_returned_as_they_were_made(call, alone, monkeypatch):
    made = []

    def backward(*arguments, **named):
        made.append(emulated_backward(*arguments, **named))
        return made[-1]

    monkeypatch.setattr(torch_flash, "_forward", emulated_forward)
    monkeypatch.setattr(torch_flash, "_backward", backward)
    case = draw(call, HEADS["GQA"], torch.bfloat16)
    got = run(CudaFlash(), case, dense(case, call), call)[2:]
    storages = {x.untyped_storage().data_ptr() for x in made[0]}
    assert [x.untyped_storage().data_ptr() in storages for x in got] == [alone] * 3


@settings(max_examples=50)
@given(st.data())
def test_flash_parts_cover_a_slice_exactly(data):
    q0, rows, lo = (data.draw(st.integers(a, 9)) for a in (0, 1, 0))
    lo_slope, hi_slope = data.draw(st.integers(0, 1)), data.draw(st.integers(0, 1))
    first = lo + lo_slope * q0
    width = data.draw(st.integers(1, 9)) + max(0, lo_slope - hi_slope) * (rows - 1)
    s = Slice(q0, q0 + rows, lo, lo_slope, first + width - hi_slope * q0, hi_slope)
    n = s.hi + hi_slope * (s.q1 - 1)
    call = call_of(s.q1, n, Kind.SLICES, (s,))
    (part,) = flash_parts(call)
    window = {"window_size_left": part.left, "window_size_right": part.right}
    mask = torch.zeros(s.q1, n, dtype=torch.bool)
    mask[part.q0 : part.q1, part.k0 : part.k1] = flash_mask(rows, part.k1 - part.k0, False, window)
    assert torch.equal(mask, call_mask(call)) and int(mask.sum()) == s.area


def test_the_cuda_kernel_refuses_torchs_adapter_of_version_4(monkeypatch):
    assert CudaFlash().supports("cuda", torch.bfloat16, 64) is None
    for active, refused in (("FA2", False), ("FA3", False), ("FA4", True)):
        monkeypatch.setattr(
            torch.nn.attention, "current_flash_attention_impl", lambda active=active: active
        )
        reason = CudaFlash().supports("cuda", torch.bfloat16, 64)
        assert (reason is not None and "kernel='flash_attn_4'" in reason) == refused
