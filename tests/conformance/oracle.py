"""Dense attention in fp64 and the same through tilewise in loopback, with every gradient apart."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

import tilewise as tw


class Result(NamedTuple):
    """Outputs and gradients of the whole sequence."""

    out: Tensor
    lse: Tensor
    dq: Tensor
    dk: Tensor
    dv: Tensor


class SinkResult(NamedTuple):
    """The same of a call with a sink: its gradient is the sum of the ranks'."""

    out: Tensor
    lse: Tensor
    dq: Tensor
    dk: Tensor
    dv: Tensor
    dsink: Tensor


class Inputs(NamedTuple):
    """Operands and the gradients that arrive at out and lse."""

    q: Tensor
    k: Tensor
    v: Tensor
    dout: Tensor
    dlse: Tensor


class Changes(NamedTuple):
    """What is done beside softmax(scale q k^T + mask) v, written out over the whole table.

    Attributes:
        sink: [num_heads].
        kept: [..., num_heads, num_queries, num_keys], what each weight is multiplied by.
    """

    sink: Tensor | None = None
    softcap: float | None = None
    kept: Tensor | None = None


def draw(
    q_shape: tuple[int, ...], kv_shape: tuple[int, ...], seed: int, v_head_dim: int | None = None
) -> Inputs:
    """Random inputs; v_head_dim: of v and dout, default that of q and k."""
    v_head_dim = v_head_dim or kv_shape[-1]
    v_shape, out_shape = (*kv_shape[:-1], v_head_dim), (*q_shape[:-1], v_head_dim)
    make = torch.Generator().manual_seed(seed)

    def normal(shape: tuple[int, ...]) -> Tensor:
        return torch.randn(shape, generator=make, dtype=torch.float64)

    return Inputs(*map(normal, (q_shape, kv_shape, v_shape, out_shape, q_shape[:-1])))


def dense(
    x: Inputs,
    mask: tw.Mask,
    q_positions: Tensor | None = None,
    scale: float | None = None,
    changes: Changes | None = None,
) -> Any:
    """Plain attention over all tokens ([..., tokens, heads, head_dim], any batch dimensions).

    Returns:
        a Result, or a SinkResult if there is a sink.
    """
    given, softcap, kept = changes or Changes()
    q, k, v = (t.detach().clone().requires_grad_() for t in x[:3])
    sink = None if given is None else given.detach().clone().requires_grad_()
    ratio = q.shape[-2] // k.shape[-2]
    keys, values = (t.repeat_interleave(ratio, -2).transpose(-2, -3) for t in (k, v))
    queries = torch.arange(q.shape[-3]) if q_positions is None else q_positions
    allowed = torch.as_tensor(mask.dense(queries, torch.arange(k.shape[-3])))
    if allowed.ndim == 3:
        allowed = allowed.repeat_interleave(ratio, 0)
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    scores = (q.transpose(-2, -3) @ keys.transpose(-1, -2)) * scale
    if softcap is not None:
        scores = softcap * (scores / softcap).tanh()
    scores = scores.masked_fill(~allowed, -torch.inf)
    whole = scores
    if sink is not None:
        whole = torch.cat([scores, sink[:, None, None].expand(*scores.shape[:-1], 1)], -1)
    lse = whole.logsumexp(-1)
    safe = lse.masked_fill(lse == -torch.inf, 0.0)
    weights = (scores - safe[..., None]).exp()
    out = ((weights if kept is None else weights * kept) @ values).transpose(-2, -3)
    lse = lse.transpose(-1, -2)
    reached = lse != -torch.inf
    (out * x.dout).sum().add((lse[reached] * x.dlse[reached]).sum()).backward()
    assert q.grad is not None and k.grad is not None and v.grad is not None
    found = Result(out.detach(), lse.detach(), q.grad, k.grad, v.grad)
    return found if sink is None else SinkResult(*found, sink.grad)


def split(
    x: Inputs,
    plan: tw.Plan,
    layout: tw.Layout,
    mask: tw.Mask,
    dtype: torch.dtype = torch.float64,
    uses: tuple[bool, bool] = (True, True),
    sink: Tensor | None = None,
    **options,
) -> Any:
    """The same through tw.attention on every rank of a loopback.

    Args:
        uses: whether the loss contains out, and lse.
    """
    kv_layout = options.get("kv_layout") or layout
    replicated = plan.replicated_queries

    def local(tensor: Tensor, rank: int, side: tw.Layout | None, dim: int) -> Tensor:
        return tensor if side is None else side.shard(tensor, rank, dim=dim)

    q_layout = None if replicated else layout
    dim = x.q.ndim - 3

    def on_rank(rank: int, group) -> tuple[Tensor, ...]:
        q = local(x.q, rank, q_layout, dim).to(dtype).clone().requires_grad_()
        k, v = (local(t, rank, kv_layout, dim).to(dtype).clone().requires_grad_() for t in x[1:3])
        dout, dlse = (local(t, rank, q_layout, dim) for t in x[3:])
        given = options
        if sink is not None:
            given = {**options, "sink": sink.detach().clone().requires_grad_()}
        out, lse = tw.attention(
            q, k, v, plan=plan, layout=layout, mask=mask, group=group, return_lse=True, **given
        )
        loss = out.new_zeros((), dtype=torch.float64)
        if uses[0]:
            loss = loss + (out * dout.to(dtype)).sum()
        if uses[1]:
            reached = lse != -torch.inf
            loss = loss + (lse[reached] * dlse[reached]).sum()
        loss.backward()
        assert q.grad is not None and k.grad is not None and v.grad is not None
        dsink = () if sink is None else (given["sink"].grad,)
        return out.detach(), lse.detach(), q.grad, k.grad, v.grad, *dsink

    ranks = list(zip(*tw.loopback(plan.world_size, on_rank), strict=True))
    if replicated:
        for tensors in (*ranks[:3], *ranks[5:]):
            assert all(torch.equal(tensors[0], t) for t in tensors), "ranks differ on q's results"
        whole = [tensors[0] for tensors in ranks[:3]]
    else:
        whole = [layout.unshard(tensors, dim=dim) for tensors in ranks[:3]]
    found = Result(*whole, *(kv_layout.unshard(tensors, dim=dim) for tensors in ranks[3:5]))
    if sink is None:
        return found
    return SinkResult(*found, ranks[5][0] if replicated else torch.stack(ranks[5]).sum(0))


def error(x: Tensor, y: Tensor) -> float:
    """max |x - y| / max(1, max |y|); -inf must be where -inf is."""
    assert x.shape == y.shape, (x.shape, y.shape)
    infinite = y == -torch.inf
    assert torch.equal(x == -torch.inf, infinite), "-inf is elsewhere"
    x, y = x.double().masked_fill(infinite, 0), y.double().masked_fill(infinite, 0)
    if y.numel() == 0:
        return 0.0
    assert torch.isfinite(x).all()
    return float((x - y).abs().max() / y.abs().max().clamp_min(1))


def assert_close(got: Any, want: Any, tolerance: float = 1e-12) -> None:
    errors = {name: error(a, b) for name, a, b in zip(want._fields, got, want, strict=True)}
    assert max(errors.values()) <= tolerance, errors
