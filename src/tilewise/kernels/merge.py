"""Merging partial attentions of the same queries over disjoint keys, exactly.

Kernels merge into accumulators, the executor on arrival, the tree where it combines ranks.
"""

from collections.abc import Sequence
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
    _check_shapes(*a, *b)
    share = _share(a.lse, b.lse)[..., None]
    out = torch.lerp(a.out, b.out.to(a.out.dtype), share)
    return Partial(out, torch.logaddexp(a.lse, b.lse))


def merge_into(out_acc: Tensor, lse_acc: Tensor, out: Tensor, lse: Tensor) -> None:
    """`merge` in place: the accumulators, fp32 or wider, take in (out, lse), out in any dtype.

    One pass over out_acc; out is read once (and converted once where it is narrower, but on CUDA,
    where one kernel does all and allocates nothing).
    """
    _check_shapes(out_acc, lse_acc, out, lse)
    if out_acc.is_meta:  # shapes without values
        return
    if out_acc.is_cuda and out_acc.ndim == 4:
        from tilewise.kernels.triton.merge import merge_rows

        merge_rows(out_acc, lse_acc, out, lse)
        return
    lse = lse if lse.dtype is lse_acc.dtype else lse.to(lse_acc.dtype)
    out = out if out.dtype is out_acc.dtype else out.to(out_acc.dtype)
    share = _share(lse_acc, lse)
    share = share if share.dtype is out.dtype else share.to(out.dtype)
    out_acc.lerp_(out, share.unsqueeze(-1))
    torch.logaddexp(lse_acc, lse, out=lse_acc)


def combine(partials: Sequence[Sequence[Tensor]], into: Sequence[Tensor]) -> None:
    """Write the `merge` of several partial attentions at once.

    Args:
        partials: (out, lse) each, and the largest scores of rows where those are asked for:
            [rows, batch, heads(, head_dim)], out in any dtype, lse in one.
        into: the same of the result, in any dtype; may be one of the partials.
    """
    if into[0].is_meta:
        return
    if into[0].is_cuda:
        from tilewise.kernels.triton.merge import combine_rows

        combine_rows([x[0] for x in partials], into[0], [x[1] for x in partials], into[1])
    else:
        lse = torch.stack([x[1] for x in partials])
        top = lse.amax(0)
        top = top.masked_fill(top == -torch.inf, 0.0)  # -inf - -inf is nan
        shares = (lse - top).exp_()
        total = shares.sum(0)
        # a row that no side reaches stays 0
        shares /= total.masked_fill(total == 0.0, 1.0)
        out = torch.zeros_like(partials[0][0], dtype=lse.dtype)
        for x, share in zip(partials, shares, strict=True):
            out.addcmul_(x[0].to(lse.dtype), share.unsqueeze(-1))
        into[0].copy_(out)
        into[1].copy_(top + total.log())
    if len(into) == 3:
        into[2].copy_(torch.stack([x[2] for x in partials]).amax(0))


def add_up(parts: Sequence[Tensor], into: Tensor) -> None:
    """Write the sum of tensors [rows, batch, heads, head_dim] of any dtypes.

    Args:
        into: in any dtype; may be one of them.
    """
    if into.is_meta:
        return
    if into.is_cuda:
        from tilewise.kernels.triton.merge import combine_rows

        combine_rows(parts, into)
        return
    dtype = torch.float64 if into.dtype == torch.float64 else torch.float32
    total = parts[0].to(dtype, copy=True)
    for part in parts[1:]:
        total += part
    into.copy_(total)


def _share(lse_a: Tensor, lse_b: Tensor) -> Tensor:
    """Return the share of b in both, exp(lse_b - lse); 0 where b has no key."""
    # by the difference, since exp(lse_b - lse) has the rounding of a large lse in its exponent
    share = (lse_b - lse_a).sigmoid_()
    # -inf - -inf is nan: a row that neither side reaches keeps out_a, which is 0
    return share.masked_fill_(lse_b == -torch.inf, 0.0)


def _check_shapes(out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor) -> None:
    if out_a.shape != out_b.shape or lse_a.shape != lse_b.shape:
        raise ValueError(
            f"partials differ in shape: out {tuple(out_a.shape)} and {tuple(out_b.shape)}, "
            f"lse {tuple(lse_a.shape)} and {tuple(lse_b.shape)}; merge the same rows and heads"
        )
