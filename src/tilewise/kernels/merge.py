"""Merging partial attentions of the same queries over disjoint keys, exactly.

Kernels merge into accumulators, the executor on arrival, the tree in its reduction.
"""

from typing import NamedTuple

import torch
from torch import Tensor


class Partial(NamedTuple):
    """out [num_tokens, ..., num_heads, head_dim] and lse [num_tokens, ..., num_heads]."""

    out: Tensor
    lse: Tensor


def merge(a: Partial, b: Partial) -> Partial:
    """Combine two partial attentions of the same queries over disjoint keys.

    lse = log(exp(lse_a) + exp(lse_b));  out = exp(lse_a - lse) out_a + exp(lse_b - lse) out_b.

    Args:
        a, b: out [num_tokens, num_heads, head_dim] and lse [num_tokens, num_heads], both fp32 or
            wider, natural log. lse is -inf on rows no key reaches; out is 0 there and stays 0.
    Raises:
        ValueError: if shapes differ.
    Source: Milakov and Gimelshein 2018. Departs from it by working on normalised outputs.
    """
    _check_shapes(a, b)
    lse, share = _weigh(a.lse, b.lse)
    return Partial(torch.lerp(a.out, b.out.to(a.out.dtype), share[..., None]), lse)


def merge_into(out_acc: Tensor, lse_acc: Tensor, out: Tensor, lse: Tensor) -> None:
    """`merge` in place: the accumulators, fp32 or wider, take in (out, lse), out in any dtype.

    One pass over out_acc; out is read once (and converted once where it is narrower, but on CUDA,
    where one kernel does all and allocates nothing).
    """
    _check_shapes(Partial(out_acc, lse_acc), Partial(out, lse))
    if out_acc.is_meta:  # shapes without values
        return
    if out_acc.is_cuda and out_acc.ndim == 4:
        from tilewise.kernels.triton.merge import merge_rows

        merge_rows(out_acc, lse_acc, out, lse)
        return
    total, share = _weigh(lse_acc, lse.to(lse_acc.dtype))
    out_acc.lerp_(out.to(out_acc.dtype), share.to(out_acc.dtype)[..., None])
    lse_acc.copy_(total)


def _weigh(lse_a: Tensor, lse_b: Tensor) -> tuple[Tensor, Tensor]:
    """The lse of both and the share exp(lse_b - lse) of b; 0 where b has no key."""
    # by the difference, since exp(lse_b - lse) has the rounding of a large lse in its exponent
    share = (lse_b - lse_a).sigmoid_()
    # -inf - -inf is nan: a row that neither side reaches keeps out_a, which is 0
    return torch.logaddexp(lse_a, lse_b), share.masked_fill_(lse_b == -torch.inf, 0.0)


def _check_shapes(a: Partial, b: Partial) -> None:
    if a.out.shape != b.out.shape or a.lse.shape != b.lse.shape:
        raise ValueError(
            f"partials differ in shape: out {tuple(a.out.shape)} and {tuple(b.out.shape)}, "
            f"lse {tuple(a.lse.shape)} and {tuple(b.lse.shape)}; merge the same rows and heads"
        )
