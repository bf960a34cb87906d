"""PyTorch's flash attention operator for CPU tensors, computed by our CPU kernel.

torch's context_parallel knows the operators of CUDA only; on CPU tensors
scaled_dot_product_attention takes another one, which it refuses. So the adapter calls the operator
that CUDA tensors would take, and this is its CPU side.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.library import Library

from tilewise_verify import flash_attn_shim


def provide() -> Library:
    """Register both operators; they stay as long as what is returned."""
    library = Library("aten", "IMPL")
    library.impl("_scaled_dot_product_flash_attention", _forward, "CPU")
    library.impl("_scaled_dot_product_flash_attention_backward", _backward, "CPU")
    return library


def _forward(  # noqa: PLR0913 - ATen's own
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    return_debug_mask: bool = False,
    *,
    scale: float | None = None,
) -> tuple[object, ...]:
    settings = {"dropout_p": dropout_p, "softmax_scale": scale, "causal": is_causal}
    out, lse, *_ = flash_attn_shim.forward(*(x.transpose(1, 2) for x in (q, k, v)), **settings)
    nothing = torch.zeros((), dtype=torch.int64)  # 0-dim: DTensor wraps no others
    lengths = q.shape[2], k.shape[2]
    return out.transpose(1, 2), lse, nothing, nothing, *lengths, nothing, nothing, nothing


def _backward(  # noqa: PLR0913 - ATen's own
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, *rest, scale=None
) -> tuple[Tensor, ...]:
    _, _, _, _, dropout_p, is_causal, *_ = rest
    grads = [torch.empty_like(x) for x in (q, k, v)]
    operands = (x.transpose(1, 2) for x in (dout, q, k, v, out))
    buffers = (x.transpose(1, 2) for x in grads)
    flash_attn_shim.backward(*operands, lse, *buffers, dropout_p, scale, is_causal)
    return tuple(grads)
