"""The functions that stand in for flash_attn's mean what flash_attn's do."""

import numpy as np
import pytest
import torch
from torch import Tensor

from tilewise_verify import flash_attn_shim


def dense(
    q: Tensor, k: Tensor, v: Tensor, dout: Tensor, allowed: Tensor
) -> tuple[Tensor, Tensor, list[Tensor]]:
    """out, lse and gradients of [tokens, heads, head_dim] under any mask."""
    leaves = [x.detach().clone().requires_grad_() for x in (q, k, v)]
    ratio = q.shape[1] // k.shape[1]
    keys, values = (x.repeat_interleave(ratio, 1) for x in leaves[1:])
    scores = torch.einsum("mhd,nhd->hmn", leaves[0], keys) * q.shape[-1] ** -0.5
    scores = scores.masked_fill(~allowed, -torch.inf)
    lse = scores.logsumexp(-1)
    p = (scores - lse.masked_fill(lse == -torch.inf, 0.0)[..., None]).exp()
    out = torch.einsum("hmn,nhd->mhd", p, values)
    return out.detach(), lse.detach(), list(torch.autograd.grad(out, leaves, dout))


def normal(*shapes: tuple[int, ...]) -> list[Tensor]:
    make = torch.Generator().manual_seed(1)
    return [torch.randn(shape, generator=make, dtype=torch.float64) for shape in shapes]


@pytest.mark.parametrize(
    "num_q, num_k, causal, window",
    [
        (24, 24, True, (-1, -1)),
        (24, 40, True, (-1, -1)),
        (40, 24, True, (-1, -1)),
        (24, 40, False, (-1, -1)),
        (24, 24, True, (5, -1)),
        (24, 40, False, (6, 3)),
        (40, 24, False, (2, 0)),
    ],
)
def test_the_shim_means_what_flash_attn_means(num_q, num_k, causal, window):
    queries, keys = (num_q, 4, 8), (num_k, 2, 8)
    q, k, v, dout = normal(queries, keys, keys, queries)
    offset = np.arange(num_k) - (np.arange(num_q)[:, None] + num_k - num_q)
    left, right = window[0], 0 if causal else window[1]
    allowed = (offset >= -left if left >= 0 else offset == offset) & (
        offset <= right if right >= 0 else offset == offset
    )
    want_out, want_lse, want = dense(q, k, v, dout, torch.from_numpy(allowed))
    options = {"causal": causal, "window_size_left": window[0], "window_size_right": window[1]}
    out, lse, *_ = flash_attn_shim.forward(q[None], k[None], v[None], **options)
    grads = [torch.full_like(x, torch.nan) for x in (q, k, v)]
    flash_attn_shim.backward(
        *(x[None] for x in (dout, q, k, v)), out, lse, *(x[None] for x in grads), **options
    )
    assert torch.allclose(out[0], want_out, rtol=0, atol=1e-13)
    nobody = want_lse == -torch.inf
    assert torch.equal(lse[0] == torch.inf, nobody), "flash_attn says +inf where no key is seen"
    assert torch.allclose(lse[0][~nobody], want_lse[~nobody], rtol=0, atol=1e-13)
    for got, grad in zip(grads, want, strict=True):
        assert torch.allclose(got, grad, rtol=0, atol=1e-13)


def test_the_shim_computes_documents_of_other_lengths_of_queries_and_keys():
    q, k, v, dout = normal((20, 4, 8), (33, 2, 8), (33, 2, 8), (20, 4, 8))
    edges = {"cu_seqlens_q": torch.tensor([0, 7, 20]), "cu_seqlens_k": torch.tensor([0, 12, 33])}
    allowed = torch.zeros(20, 33, dtype=torch.bool)
    allowed[:7, :12] = torch.ones(7, 12).tril(5).bool()
    allowed[7:, 12:] = torch.ones(13, 21).tril(8).bool()
    want_out, want_lse, want = dense(q, k, v, dout, allowed)
    out, lse, *_ = flash_attn_shim.varlen_forward(q=q, k=k, v=v, causal=True, **edges)
    dq, dk, dv = (torch.full_like(x, torch.nan) for x in (q, k, v))
    saved = {"dout": dout, "out": out, "softmax_lse": lse, "dq": dq, "dk": dk, "dv": dv}
    flash_attn_shim.varlen_backward(q=q, k=k, v=v, causal=True, **saved, **edges)
    pairs = zip((out, lse, dq, dk, dv), (want_out, want_lse, *want), strict=True)
    assert all(torch.allclose(got, right, rtol=0, atol=1e-13) for got, right in pairs)


def test_the_shims_differentiable_function_is_its_two_passes():
    q, k, v, dout = normal((24, 4, 8), (40, 2, 8), (40, 2, 8), (24, 4, 8))
    leaves = [x[None].requires_grad_() for x in (q, k, v)]
    out, lse, _ = flash_attn_shim.flash_attn_func(*leaves, causal=True, return_attn_probs=True)
    allowed = torch.ones(24, 40, dtype=torch.bool).tril(16)
    want_out, want_lse, want = dense(q, k, v, dout, allowed)
    found = out[0], lse[0], *torch.autograd.grad(out[0], leaves, dout)
    for got, right in zip(found, (want_out, want_lse, *want), strict=True):
        assert torch.allclose(got.squeeze(0), right, rtol=0, atol=1e-13)


def test_the_shims_packed_function_differentiates_documents():
    q, k, v, dout = normal((20, 4, 8), (33, 2, 8), (33, 2, 8), (20, 4, 8))
    edges = torch.tensor([0, 7, 20]), torch.tensor([0, 12, 33])
    leaves = [x.requires_grad_() for x in (q, k, v)]
    out = flash_attn_shim.flash_attn_varlen_func(*leaves, *edges, 13, 21, causal=True)
    allowed = torch.zeros(20, 33, dtype=torch.bool)
    allowed[:7, :12] = torch.ones(7, 12).tril(5).bool()
    allowed[7:, 12:] = torch.ones(13, 21).tril(8).bool()
    want_out, _, want = dense(q, k, v, dout, allowed)
    for got, right in zip(
        (out, *torch.autograd.grad(out, leaves, dout)), (want_out, *want), strict=True
    ):
        assert torch.allclose(got, right, rtol=0, atol=1e-13)


def test_what_the_shim_cannot_compute_is_an_error():
    (q,) = normal((8, 2, 8))
    with pytest.raises(NotImplementedError, match="dropout"):
        flash_attn_shim.forward(q[None], q[None], q[None], dropout_p=0.5)
