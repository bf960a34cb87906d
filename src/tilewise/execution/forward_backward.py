"""The two passes of one checked call on this rank: tensors in, its program run, tensors out."""

from collections.abc import Sequence

import torch
from torch import Tensor

from tilewise.execution.allocator import Allocator
from tilewise.execution.call import ResolvedCall
from tilewise.execution.executor import execute
from tilewise.execution.packing import loadable
from tilewise.execution.pass_run import PassRun, pass_run
from tilewise.execution.work import Backward, Forward
from tilewise.kernels.protocol import accumulator_dtype
from tilewise.plan.ir import Side
from tilewise.transport.protocol import Transport


def forward_pass(
    problem: ResolvedCall, transport: Transport, q: Tensor, *kv: Tensor, keep: bool
) -> tuple[Tensor, Tensor, list[Tensor]]:
    """out, lse, and the operands that backward is to find again (none unless keep).

    Before these stands the largest score of every head over this rank's rows, if it is asked for.

    Args:
        kv: k and v, or latents [(batch,) tokens, 1, width].
        keep: a backward pass follows; save="gathered" then keeps what was received.
    """
    batched = q.ndim == 4
    rows = [rows_first(loadable(x), batched) for x in (q, *kv)]
    run = pass_run(problem, transport, backward=False, batch=rows[0].shape[1], device=q.device)
    keep = keep and problem.gathered
    allocator = run.allocator(rows, keep)
    named = {"q": rows[0]}, _named_kv(run, rows[1:])
    work = Forward(run, problem, allocator, named, keep=keep)
    execute(run.program, work, transport)
    out, lse = results = empty_results(q, run.payload.v_head_dim)
    if run.payload.max_logit:
        results = *results, torch.empty_like(lse)
    work.collect(Side.Q, [rows_first(x, batched) for x in results])
    kept = work.kept() if keep else []
    allocator.end()
    return out, lse, [*map(_largest, results[2:]), *kept]


def empty_results(q: Tensor, v_head_dim: int) -> tuple[Tensor, Tensor]:
    """out and lse, of any content."""
    lse = q.new_empty(q.shape[:-1], dtype=accumulator_dtype(q.dtype))
    return q.new_empty((*q.shape[:-1], v_head_dim)), lse


def _largest(scores: Tensor) -> Tensor:
    """The largest score of every head, fp32; -inf where there is no row."""
    scores = scores.flatten(0, -2)
    scores = scores if len(scores) else scores.new_full((1, scores.shape[-1]), -torch.inf)
    return scores.amax(0).float()


def backward_pass(
    problem: ResolvedCall,
    transport: Transport,
    saved: Sequence[Tensor],
    kept: Sequence[Tensor],
    grads: tuple[Tensor | None, Tensor | None],
) -> tuple[Tensor, ...]:
    """dq, dk, dv; or dq and that of latents.

    Args:
        saved: q, k, v (or latents), out, lse of the forward pass.
        kept: what forward_pass kept.
        grads: dout and dlse; None: zero.
    """
    batched = saved[0].ndim == 4
    q, *kv, out, lse = (rows_first(loadable(x), batched) for x in saved)
    dout, dlse = (None if x is None else rows_first(loadable(x), batched) for x in grads)
    batch, device = q.shape[1], q.device
    run = pass_run(problem, transport, backward=True, batch=batch, device=device)
    allocator = run.allocator((q, *kv, out, lse, dout, dlse))
    gathered = {}
    if problem.gathered:
        before = pass_run(problem, transport, backward=False, batch=batch, device=device)
        gathered = before.found(kept, allocator)
    if dout is None:
        dout = allocator.take(out.shape, q.dtype).zero_()
    delta = _delta(out, dout, dlse, lse.dtype, allocator)
    named = {"q": q, "dout": dout, "lse": lse, "delta": delta}, _named_kv(run, kv)
    work = Backward(run, problem, allocator, named, gathered)
    execute(run.program, work, transport)
    dq, *dkv = (x.new_empty(x.shape) for x in saved[:-2])
    work.collect(Side.Q, [rows_first(dq, batched)])
    work.collect(Side.KV, [rows_first(x, batched) for x in dkv])
    allocator.end()
    return dq, *dkv


def _named_kv(run: PassRun, tensors: Sequence[Tensor]) -> dict[str, Tensor]:
    """k and v, or latents, by the names of their fields."""
    names = [name for name, _ in run.payload.inputs(Side.KV)]
    return dict(zip(names, tensors, strict=True))


def _delta(
    out: Tensor, dout: Tensor, dlse: Tensor | None, dtype: torch.dtype, allocator: Allocator
) -> Tensor:
    """rowsum(out * dout) - dlse."""
    product = allocator.take(out.shape, dtype).copy_(out).mul_(dout)
    delta = torch.sum(product, -1, out=allocator.take(out.shape[:-1], dtype))
    allocator.give(product)
    return delta if dlse is None else delta.sub_(dlse)


def rows_first(x: Tensor, batched: bool) -> Tensor:
    """[(batch,) tokens, heads, ...] as [tokens, batch, heads, ...]."""
    return x.transpose(0, 1) if batched else x.unsqueeze(1)


def rows_last(x: Tensor, batched: bool) -> Tensor:
    """The inverse of rows_first."""
    return x.transpose(0, 1) if batched else x.squeeze(1)
