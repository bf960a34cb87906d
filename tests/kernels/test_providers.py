"""Kernels that need a GPU or a package, on operators emulated by their contracts."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kernels.test_torch_flash import emulated_backward, emulated_forward
from support.kernel_cases import (
    CALLS,
    HEADS,
    SCALE,
    SCORES,
    agrees,
    call_of,
    dense,
    draw,
    error,
    package,
)
from torch.nn.attention.flex_attention import create_block_mask

from tilewise.kernels import flash_attn, flex, torch_sdpa
from tilewise.kernels.call_masks import block_cells, call_mask, row_intervals
from tilewise.kernels.flash_attn import FlashAttn2, FlashAttn3
from tilewise.kernels.flashinfer import FlashInfer
from tilewise.kernels.flex import Flex
from tilewise.kernels.torch_sdpa import CudnnSdpa, EfficientSdpa
from tilewise.tiles.calls import Kind, Slice

ONE_KEY = {"one key": call_of(5, 1), "one cell": call_of(1, 1, Kind.CAUSAL)}
Tensors = tuple[torch.Tensor, ...]


def weights(q, k, scale, allowed):
    """p, lse of [batch, heads, rows, head_dim] in fp64, nan on rows without keys, as on a GPU."""
    scores = scale * q.double() @ k.double().transpose(2, 3) + allowed
    lse = torch.logsumexp(scores, -1)
    return torch.exp(scores - lse[..., None]), lse


def bias_of(q, k, mask, causal):
    assert mask is None or (mask.shape[-2:] == (q.shape[2], k.shape[2]) and not causal)
    if mask is not None:
        assert mask.dtype == q.dtype and mask.stride(-2) % 16 == 0 and mask.stride(-1) == 1
        return mask.double()
    table = torch.zeros(q.shape[2], k.shape[2], dtype=torch.float64)
    hidden = torch.ones_like(table, dtype=torch.bool).triu(1)  # aligned at the top left
    return table.masked_fill(hidden, -math.inf) if causal else table


def gradients(dout, q, k, v, out, lse, bias, scale) -> Tensors:
    p = torch.exp(scale * q.double() @ k.double().transpose(2, 3) + bias - lse.double()[..., None])
    delta = (dout.double() * out.double()).sum(-1, keepdim=True)
    ds = scale * p * (dout.double() @ v.double().transpose(2, 3) - delta)
    return ds @ k.double(), ds.transpose(2, 3) @ q.double(), p.transpose(2, 3) @ dout.double()


def cudnn(q, k, v, mask, with_lse, dropout, causal, debug, *, scale):
    assert with_lse and dropout == 0.0 and not debug and k.shape[2] > 1
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    p, lse = weights(q, k, scale, bias_of(q, k, mask, causal))
    return (p @ v.double()).to(q.dtype), lse.float()[..., None], None, None, 0, 0, None, None, None


def lies_batch_first(*tensors: torch.Tensor) -> bool:
    """[batch, heads, rows, head_dim] whose memory is [batch, rows, heads, head_dim]."""
    return all(x.transpose(1, 2).is_contiguous() for x in tensors)


def cudnn_backward(dout, q, k, v, out, lse, seed, offset, mask, *arguments, scale):
    assert lies_batch_first(dout, out) and lse.is_contiguous()  # what was compiled expects it
    cum_q, cum_k, m, n, dropout, causal = arguments
    assert cum_q is cum_k is None and (m, n) == (q.shape[2], k.shape[2]) and dropout == 0.0
    group = q.shape[1] // k.shape[1]
    wide = [x.repeat_interleave(group, 1) for x in (k, v)]
    bias = bias_of(q, k, mask, causal)
    dq, dk, dv = gradients(dout, q, *wide, out, lse[..., 0], bias, scale)
    return dq, *(x.unflatten(1, (-1, group)).sum(2) for x in (dk, dv))


def efficient(q, k, v, mask, with_lse, dropout, causal, *, scale):
    assert with_lse and dropout == 0.0 and q.shape[1] == k.shape[1] == v.shape[1]
    p, lse = weights(q, k, scale, bias_of(q, k, mask, causal))
    padding = torch.full((*lse.shape[:2], -lse.shape[2] % 32), 7.0)
    return (p @ v.double()).to(q.dtype), torch.cat([lse.float(), padding], 2), None, None


def efficient_backward(
    dout, q, k, v, mask, out, lse, seed, offset, dropout, wanted, causal, *, scale
):
    assert lies_batch_first(out)  # read so, without asking for its strides
    assert lse.shape[2] % 32 == 0 and (lse[..., q.shape[2] :] == math.inf).all()
    assert wanted == [True, True, True, False] and dropout == 0.0
    bias = bias_of(q, k, mask, causal)
    return *gradients(dout, q, k, v, out, lse[..., : q.shape[2]], bias, scale), None


@pytest.mark.parametrize("heads", HEADS.values(), ids=HEADS)
@pytest.mark.parametrize("call", {**CALLS, **ONE_KEY}.values(), ids=[*CALLS, *ONE_KEY])
def test_cudnn_and_efficient_are_called_as_their_contracts_say(call, heads, monkeypatch):
    for name in ("cudnn", "cudnn_backward", "efficient", "efficient_backward"):
        monkeypatch.setattr(torch_sdpa, f"_{name}", globals()[name])
    agrees(CudnnSdpa(), call, heads, torch.bfloat16, 6e-3)
    agrees(EfficientSdpa(), call, heads, torch.float32, 5e-6)
    agrees(CudnnSdpa(), call, heads, torch.bfloat16, 6e-3, v_head_dim=16)
    agrees(EfficientSdpa(), call, heads, torch.float32, 5e-6, head_dim=16, v_head_dim=24)


def test_cudnn_and_efficient_take_these_arguments_and_yield_these_shapes():
    """The operators themselves, on meta tensors: private ones may change with any release."""
    for kernel in (CudnnSdpa(), EfficientSdpa()):
        for mask_rows in (None, 40):
            meta = {"device": "meta", "dtype": torch.bfloat16}
            q, k, v = (torch.empty(2, h, n, 64, **meta) for h, n in ((4, 40), (2, 48), (2, 48)))
            mask = None if mask_rows is None else torch.empty(1, 1, 40, 48, **meta)
            cells = torch_sdpa.Cells(mask, False)
            out, lse = kernel.run_forward(q, k, v, cells, SCALE)
            assert out.shape == q.shape and lse.shape == (2, 4, 40) and lse.dtype == torch.float32
            operands = torch.empty_like(q), q, k, v, torch.empty_like(q)
            grads = kernel.run_backward(operands, lse, cells, SCALE)
            assert [x.shape for x in grads] == [q.shape, k.shape, v.shape]


def flex_emulated(q, k, v, mask, scale, softcap):
    """flex_attention by the rule of its block mask, differentiable, rows without keys 0."""
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    scores = scale * q.double() @ k.double().transpose(2, 3)
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    if mask is not None:
        rows, keys = torch.arange(q.shape[2])[:, None], torch.arange(k.shape[2])[None]
        allowed = mask.mask_mod(torch.tensor(0), torch.tensor(0), rows, keys)
        assert mask.seq_lengths == (q.shape[2], k.shape[2])
        scores = scores.masked_fill(~allowed, -math.inf)
    lse = torch.logsumexp(scores, -1)
    p = torch.exp(scores - lse.detach().masked_fill(lse == -math.inf, 0.0)[..., None])
    p = p * torch.exp(lse.detach() - lse).nan_to_num(1.0)[..., None]
    return (p @ v.double()).to(q.dtype), lse.float()


@pytest.mark.parametrize("heads", HEADS.values(), ids=HEADS)
@pytest.mark.parametrize("call", [*CALLS.values(), call_of(3, 5, Kind.CAUSAL)])
def test_flex_takes_global_lse_and_delta(call, heads, monkeypatch):
    monkeypatch.setattr(flex, "_compiled", lambda: flex_emulated)
    agrees(Flex(), call, heads, torch.float32, 5e-6)
    agrees(Flex(), call, heads, torch.float32, 5e-6, scores=SCORES["softcap"], v_head_dim=40)


def test_flex_refuses_to_run_unfused_and_too_many_intervals():
    case = draw(CALLS["full"], (2, 2), torch.float32, head_dim=16)
    with torch.compiler.set_stance("force_eager"), pytest.raises(RuntimeError, match="unfused"):
        Flex().forward(*case[:3], CALLS["full"], SCALE)
    slices = tuple(Slice(0, 1, 2 * i, 0, 2 * i + 1, 0) for i in range(40))
    many = call_of(1, 80, Kind.SLICES, slices)
    with pytest.raises(ValueError, match="sees 40 intervals of keys; flex takes at most 32"):
        Flex().forward(*draw(many, (1, 1), torch.float32)[:3], many, SCALE)


@pytest.mark.parametrize("call", [*CALLS.values(), call_of(3, 5, Kind.CAUSAL)])
def test_row_intervals_hold_a_calls_cells(call):
    low, high = row_intervals(call).unbind(1)
    keys = torch.arange(call.num_k)
    inside = (keys >= low[..., None]) & (keys < high[..., None])
    assert int(inside.sum(0).max()) == 1 and torch.equal(inside.any(0), call_mask(call))


@settings(max_examples=15)
@given(st.integers(0, 300), st.integers(1, 400), st.integers(0, 200), st.booleans())
def test_flex_gets_the_blocks_that_torch_would_find(first, keys, width, sloped):
    """Rows from `first` on see `width` keys more each (sloped) or the same ones."""
    num_k = 2 * keys + 400  # more than the last row of the widest slice sees
    slices = (Slice(0, first, 0, 0, keys, 0),) if first else ()
    low = keys // 2
    slices += (Slice(first, first + 150, low, 0, low + width + 1 - first * sloped, int(sloped)),)
    call = call_of(first + 150, num_k, Kind.SLICES, slices)
    made, tensors = flex._block_mask(call, torch.device("cpu"))
    assert len(tensors) == 9
    wanted = create_block_mask(made.mask_mod, 1, 1, call.num_q, num_k, device="cpu")
    allowed = torch.nn.functional.pad(call_mask(call), (0, -num_k % 128, 0, -call.num_q % 128))
    cells = allowed.unflatten(1, (-1, 128)).unflatten(0, (-1, 128)).sum((1, 3))
    assert torch.equal(
        torch.from_numpy(block_cells(row_intervals(call).numpy(), num_k, (128, 128))), cells
    )
    assert made.seq_lengths == wanted.seq_lengths and made.BLOCK_SIZE == wanted.BLOCK_SIZE
    for name in ("kv", "full_kv", "q", "full_q"):
        count = getattr(made, f"{name}_num_blocks")
        assert torch.equal(count, getattr(wanted, f"{name}_num_blocks"))
        ours, theirs = (getattr(mask, f"{name}_indices") for mask in (made, wanted))
        used = torch.arange(ours.shape[-1]) < count[..., None]
        assert ours.dtype == theirs.dtype and torch.equal(ours[used], theirs[used])


@pytest.mark.parametrize("call", [*CALLS.values(), call_of(3, 5, Kind.CAUSAL)])
def test_flash_attn_is_called_as_its_contract_says(call, monkeypatch):
    def sizes(q, k, options):
        window = {key: options.pop(f"window_size_{key}") for key in ("left", "right")}
        assert options.pop("dropout_p") == options.pop("softcap") == 0.0
        assert options.pop("causal") is False and options.pop("alibi_slopes") is None
        window = {f"window_size_{k}": None if v < 0 else v for k, v in window.items()}
        return (None, None, q.shape[1], k.shape[1], 0.0, False), window

    def forward(q, k, v, **options):
        assert options.pop("return_softmax") is False
        rest, window = sizes(q, k, options)
        out, lse, *_ = emulated_forward(
            q, k, v, *rest, False, scale=options.pop("softmax_scale"), **window
        )
        assert not options
        return out, lse, None, None

    def backward(dout, q, k, v, out, lse, dq, dk, dv, **options):
        assert options.pop("deterministic") is torch.are_deterministic_algorithms_enabled()
        rest, window = sizes(q, k, options)
        scale = options.pop("softmax_scale")
        grads = emulated_backward(dout, q, k, v, out, lse, *rest, scale=scale, **window)
        for place, grad in zip((dq, dk, dv), grads, strict=True):
            place.copy_(grad)
        assert not options

    functions = {"_flash_attn_forward": forward, "_flash_attn_backward": backward}
    package(monkeypatch, "flash_attn.flash_attn_interface", **functions)
    package(monkeypatch, "flash_attn")
    agrees(FlashAttn2(), call, (4, 2), torch.bfloat16, 1e-2)
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: True)
    agrees(FlashAttn2(), call, (4, 2), torch.bfloat16, 1e-2)


def flash_options(q, k, causal, left, right):
    """The arguments of an emulated operator, from those of version 3."""
    none = {None, -1}
    window = {"window_size_left": left, "window_size_right": right}
    window = {key: None if value in none else value for key, value in window.items()}
    return (None, None, q.shape[1], k.shape[1], 0.0, causal, False), window


@pytest.mark.parametrize("call", [*CALLS.values(), call_of(3, 5, Kind.CAUSAL)])
def test_flash_attn_3_is_called_as_torch_calls_it(call, monkeypatch):
    def forward(q, k, v, *rest):
        assert rest[:9] == (None,) * 9 and rest[9:11] == (q.shape[1], k.shape[1])
        scale, causal, left, right = rest[20:24]
        given, window = flash_options(q, k, causal, left, right)
        out, lse, *_ = emulated_forward(q, k, v, *given, scale=scale, **window)
        return out, lse, None, None

    def backward(dout, q, k, v, out, lse, *rest):
        places, scale, (causal, left, right) = rest[:3], rest[9], rest[10:13]
        assert rest[14] is torch.are_deterministic_algorithms_enabled()
        given, window = flash_options(q, k, causal, left, right)
        grads = emulated_backward(dout, q, k, v, out, lse, *given, scale=scale, **window)
        for place, grad in zip(places, grads, strict=True):
            place.copy_(grad)

    wrapper = flash_attn.import_module("torch.nn.attention._fa3")
    monkeypatch.setattr(wrapper, "_fa3_import_module", lambda path: None)
    monkeypatch.setattr(wrapper, "_FA3_CUDA_FWD", forward)
    monkeypatch.setattr(wrapper, "_FA3_CUDA_BWD", backward)
    agrees(FlashAttn3(), call, (4, 2), torch.bfloat16, 1e-2)
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: True)
    agrees(FlashAttn3(), call, (4, 2), torch.bfloat16, 1e-2)


@pytest.mark.parametrize("call", [*CALLS.values(), call_of(3, 5, Kind.CAUSAL)])
def test_flashinfers_lse_in_base_2_becomes_natural(call, monkeypatch):
    def attend(q, k, v, *, custom_mask, causal, sm_scale, return_lse):
        assert return_lse and (custom_mask is None or not causal)
        bias = torch.zeros(len(q), len(k), dtype=torch.float64)
        allowed = call_mask(call_of(len(q), len(k), Kind.CAUSAL)) if causal else custom_mask
        bias = bias if allowed is None else bias.masked_fill(~allowed, -math.inf)
        q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))
        k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
        p, lse = weights(q, k, sm_scale, bias)
        return (p @ v.double())[0].transpose(0, 1).to(q.dtype), lse[0].T.float() / math.log(2)

    package(monkeypatch, "flashinfer", single_prefill_with_kv_cache=attend)
    case = draw(call, (4, 2), torch.bfloat16)
    answer = dense(case, call)
    out, lse = FlashInfer().forward(*case[:3], call, SCALE)
    assert error(out, answer.out) < 4e-3 and error(lse, answer.lse) < 1e-6
    with pytest.raises(NotImplementedError, match="no backward"):
        FlashInfer().backward(*case[:4], answer.lse, answer.delta, call, SCALE)


def test_kernels_say_what_they_cannot_do(monkeypatch):
    half = torch.bfloat16
    monkeypatch.setattr(flash_attn, "_version", lambda: None)
    monkeypatch.setattr(torch.backends.cudnn, "is_available", lambda: True)
    monkeypatch.setattr("tilewise.kernels.flashinfer.find_spec", lambda module: None)
    for kernel, arguments, reason in (
        (CudnnSdpa(), ("cuda", half, 192), "head_dim (192) is no multiple of 8 up to 128"),
        (CudnnSdpa(), ("cuda", torch.float32, 64), "neither bfloat16 nor float16"),
        (EfficientSdpa(), ("cuda", torch.float32, 18), "no multiple of 4"),
        (EfficientSdpa(), ("cuda", torch.float64, 64), "float64 is none of"),
        (Flex(), ("cpu", half, 64), "on cpu it yields no lse"),
        (Flex(), ("cuda", half, 8), "head_dim (8) is under 16"),
        (FlashAttn2(), ("cuda", half, 64), "flash-attn is not installed"),
        (FlashAttn3(), ("cuda", half, 64), "flash_attn_interface is not installed"),
        (FlashInfer(), ("cuda", half, 64), "flashinfer is not installed"),
    ):
        assert reason in str(kernel.supports(*arguments))
    monkeypatch.setattr(flash_attn, "_version", lambda: "2.6.3")
    assert FlashAttn2().supports("cuda", half, 64) == "flash-attn (2.6.3) must be 2.7 or later"
    monkeypatch.setattr(flash_attn, "_version", lambda: "2.10.0.post1")
    assert FlashAttn2().supports("cuda", half, 64) is None
    monkeypatch.setattr("tilewise.kernels.flashinfer.find_spec", lambda name: name)
    assert FlashInfer().supports("cuda", half, 64, backward=False) is None
    assert FlashInfer().supports("cuda", half, 64) == "it has no backward"
