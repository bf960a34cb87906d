"""Causal attention of packed documents, one document after the other, by torch's own."""

from collections.abc import Sequence
from itertools import pairwise

from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention


def gradients_of_documents(whole: Sequence[Tensor], cu_seqlens: Sequence[int]) -> list[Tensor]:
    """dq, dk and dv of the whole sequence.

    Args:
        whole: q, k, v and the gradient of out, [num_tokens, heads, head_dim] each.
    """
    leaves = [x.clone().requires_grad_() for x in whole[:3]]
    for start, stop in pairwise(cu_seqlens):
        q, k, v = (x[start:stop].transpose(0, 1)[None] for x in leaves)
        out = scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        (out[0].transpose(0, 1) * whole[3][start:stop]).sum().backward()
    return [x.grad for x in leaves if x.grad is not None]
