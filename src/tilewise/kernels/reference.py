"""The oracle: attention of one call written out in plain torch, any dtype, any kind of call.

Computes in fp64 for fp64 and in fp32 for the rest, holding the whole table of scores; other kernels
are right when they agree with it.
"""

from collections.abc import Iterable

import torch
from torch import Tensor

from tilewise.kernels.call_masks import call_mask
from tilewise.kernels.protocol import AsideKernel, Operands, accumulator_dtype
from tilewise.tiles.calls import KernelCall, Kind


class Reference(AsideKernel):
    """Plain torch on any device, quadratic in memory; yields fp32 (fp64 for fp64)."""

    name = "reference"
    square_causal = False
    whole_tile = False

    def supports(
        self, device_type: str, dtype: torch.dtype, head_dim: int, backward: bool = True
    ) -> str | None:
        return None if dtype.is_floating_point else f"dtype {dtype} is not a floating-point type"

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, call: KernelCall, scale: float
    ) -> tuple[Tensor, Tensor]:
        dtype = accumulator_dtype(q.dtype)
        scores = _scores(q.to(dtype), k.to(dtype), call, scale)
        lse = torch.logsumexp(scores, -1)
        out = torch.einsum("bhgmn,nbhd->mbhgd", _weights(scores, lse), v.to(dtype))
        return out.flatten(2, 3), lse.permute(3, 0, 1, 2).flatten(2)

    def differentiate(self, operands: Operands, call: KernelCall, scale: float) -> Iterable[Tensor]:
        dtype = accumulator_dtype(operands.q.dtype)
        q, k, v, dout, lse, delta = (x.to(dtype) for x in operands)
        heads = (k.shape[2], -1)
        lse, delta = (x.unflatten(2, heads).permute(1, 2, 3, 0) for x in (lse, delta))
        p = _weights(_scores(q, k, call, scale), lse)
        dout = dout.unflatten(2, heads)
        dp = torch.einsum("mbhgd,nbhd->bhgmn", dout, v)
        ds = torch.where(p == 0, 0.0, p * (dp - delta[..., None])) * scale
        dq = torch.einsum("bhgmn,nbhd->mbhgd", ds, k).flatten(2, 3)
        dk = torch.einsum("bhgmn,mbhgd->nbhd", ds, q.unflatten(2, heads))
        return dq, dk, torch.einsum("bhgmn,mbhgd->nbhd", p, dout)


def _scores(q: Tensor, k: Tensor, call: KernelCall, scale: float) -> Tensor:
    """scale q k^T, -inf where not allowed: [batch, num_kv_heads, queries per KV head, m, n]."""
    scores = torch.einsum("mbhgd,nbhd->bhgmn", q.unflatten(2, (k.shape[2], -1)), k) * scale
    if call.kind is not Kind.FULL:
        scores.masked_fill_(~call_mask(call, q.device), -torch.inf)
    return scores


def _weights(scores: Tensor, lse: Tensor) -> Tensor:
    """exp(scores - lse), 0 on rows whose lse is -inf."""
    return (scores - lse.masked_fill(lse == -torch.inf, 0.0)[..., None]).exp_()
