"""The oracle: attention of one call written out in plain torch, any dtype, any kind of call.

Computes in fp64 for fp64 and in fp32 for the rest, holding the whole table of scores; other kernels
are right when they agree with it.
"""

from collections.abc import Callable, Iterable

import torch
from torch import Tensor

from tilewise.kernels.bias import BiasPlaces, add_bias_gradient, bias_of_pairs
from tilewise.kernels.call_masks import call_mask
from tilewise.kernels.dropout import kept
from tilewise.kernels.protocol import Accumulators, AsideKernel, Operands, Scores, accumulator_dtype
from tilewise.tiles.calls import KernelCall, Kind

_BLOCK = 1 << 14


class Reference(AsideKernel):
    """Plain torch on any device, quadratic in memory; yields fp32 (fp64 for fp64)."""

    name = "reference"
    square_causal = False
    whole_tile = False
    equal_widths = False
    device = None
    dtypes = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
    most_width = None
    has = ("softcap", "dropout_p", "return_max_logit", "bias")

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, call: KernelCall, scores: Scores
    ) -> Accumulators:
        dtype = accumulator_dtype(q.dtype)
        table = _masked(_capped(q.to(dtype), k.to(dtype), scores), call, scores)
        lse = _logsumexp(table)
        statistics = (lse, table.amax(-1)) if scores.max_logit else (lse,)
        p = _weights(table, lse)
        if scores.dropout_p:
            p *= _kept(scores, p)
        out = torch.einsum("bhgmn,nbhd->mbhgd", p, v.to(dtype))
        return out.flatten(2, 3), *(x.permute(3, 0, 1, 2).flatten(2) for x in statistics)

    def differentiate(
        self, operands: Operands, call: KernelCall, scores: Scores
    ) -> Iterable[Tensor]:
        dtype = accumulator_dtype(operands.q.dtype)
        q, k, v, dout, lse, delta = (x.to(dtype) for x in operands)
        heads = (k.shape[2], -1)
        lse, delta = (x.unflatten(2, heads).permute(1, 2, 3, 0) for x in (lse, delta))
        capped = _capped(q, k, scores)
        slope = None if scores.softcap is None else 1 - (capped / scores.softcap).square_()
        p = _weights(_masked(capped, call, scores), lse)
        dout = dout.unflatten(2, heads)
        dp = torch.einsum("mbhgd,nbhd->bhgmn", dout, v)
        weights = p
        if scores.dropout_p:
            factor = _kept(scores, p)
            weights, dp = p * factor, dp * factor
        ds = torch.where(p == 0, 0.0, p * (dp - delta[..., None]))
        if scores.bias is not None:
            places = _bias_places(scores, q.shape[2])
            add_bias_gradient(scores.bias, places, ds.sum(0).flatten(0, 1))
        ds *= scores.scale if slope is None else slope.mul_(scores.scale)
        dq = torch.einsum("bhgmn,nbhd->mbhgd", ds, k).flatten(2, 3)
        dk = torch.einsum("bhgmn,mbhgd->nbhd", ds, q.unflatten(2, heads))
        return dq, dk, torch.einsum("bhgmn,mbhgd->nbhd", weights, dout)


def _capped(q: Tensor, k: Tensor, scores: Scores) -> Tensor:
    """cap(scale q k^T), [batch, num_kv_heads, queries a KV head, m, n]."""
    table = torch.einsum("mbhgd,nbhd->bhgmn", q.unflatten(2, (k.shape[2], -1)), k) * scores.scale
    if scores.softcap is not None:
        table = _in_blocks(torch.tanh_, table.div_(scores.softcap)).mul_(scores.softcap)
    return table


def _masked(table: Tensor, call: KernelCall, scores: Scores) -> Tensor:
    """The table with the bias added, and -inf where a pair is not allowed; changed in place."""
    if scores.bias is not None:
        groups = table.shape[1:3]
        places = _bias_places(scores, groups[0] * groups[1])
        table += bias_of_pairs(scores.bias, places, table.dtype).unflatten(0, groups)
    if call.kind is not Kind.FULL:
        table.masked_fill_(~call_mask(call, table.device), -torch.inf)
    return table


def _bias_places(scores: Scores, num_heads: int) -> BiasPlaces:
    assert scores.places is not None
    q, k, first = scores.places
    return BiasPlaces(q, k, (first, first + num_heads))


def _weights(table: Tensor, lse: Tensor) -> Tensor:
    """exp(table - lse), 0 on rows whose lse is -inf."""
    return _in_blocks(torch.exp_, table - lse.masked_fill(lse == -torch.inf, 0.0)[..., None])


def _logsumexp(table: Tensor) -> Tensor:
    """log(sum(exp(table))) of every row."""
    most = table.amax(-1)
    most = most.masked_fill(most.abs() == torch.inf, 0.0)
    weights = _in_blocks(torch.exp_, table - most[..., None])
    return _in_blocks(torch.log_, weights.sum(-1)) + most


def _in_blocks(function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """Return a tensor changed by a function in place, a block that is one thread's at a time.

    ATen computes the last numbers of what a thread gets by other instructions than those before, so
    bits would depend on the number of threads, and of heads.
    """
    if x.device.type != "cpu":
        return function(x)
    x = x.contiguous()
    for block in x.view(-1).split(_BLOCK):
        function(block)
    return x


def _kept(scores: Scores, p: Tensor) -> Tensor:
    """Return the factors by which dropout multiplies the weights."""
    table = kept(scores, p.shape[0], p.shape[1] * p.shape[2])
    return table.unflatten(1, p.shape[1:3]).to(p.dtype).div_(1 - scores.dropout_p)
