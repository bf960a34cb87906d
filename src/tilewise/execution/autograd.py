"""The autograd of attention in eager code, past torch's dispatcher: two passes and their gradients.

What follows operators (selective checkpointing and other modes, classes of tensors) sees one,
tilewise::attention, of operator.py.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor

from tilewise.execution.agree import (
    VAIN_WAITS,
    agree_backward,
    agreed_call,
    explain,
    watched,
)
from tilewise.execution.call import (
    NO_CONTEXT,
    Call,
    ResolvedCall,
    autocast_dtype,
    without_autocast,
)
from tilewise.execution.forward_backward import backward_pass, forward_pass
from tilewise.execution.sinks import one_sink
from tilewise.kernels.bias import DenseBias
from tilewise.kernels.protocol import accumulator_dtype
from tilewise.transport.protocol import Transport
from tilewise.wires.wire import latent_of

Results = tuple[Tensor, Tensor, list[Tensor]]
"""out, lse, and the largest score of every head if it is asked for."""


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor | None,
    call: Call,
    sink: Tensor | None = None,
    bias: Tensor | None = None,
) -> Results:
    """out, lse, and the largest score of every head if it is asked for, in eager code.

    Args:
        k, v: where the call has a latent, latents [(batch,) tokens, width] and None.
        sink: only to be compared among ranks, and for canonical calls.
        bias: a dense one; ALiBi stands in the call.
    """
    latent = call.wire is not None and latent_of(call.wire) is not None
    if latent and isinstance(k, Tensor) and k.ndim:
        k = k.unsqueeze(-2)
    resolved, transport = agreed_call(q, k, v, call, sink, bias)
    if not latent and watched(q, k, v):
        return through_operator(q, k, v, call.with_resolved(resolved, transport), None)
    kv = (k,) if v is None else (k, v)
    leaves = resolved.expansion.leaves if resolved.expansion else ()
    logit = None
    if sink is not None and resolved.whole_rows:
        logit = one_sink(sink, accumulator_dtype(q.dtype))
        logit = logit.squeeze(-2) if logit.ndim == 3 else logit
    asked = _Asked(call, resolved, transport, 1 + len(kv))
    out, lse, *kept = _Attention.apply(asked, bias, logit, q, *kv, *leaves)  # pyright: ignore[reportGeneralTypeIssues]
    return out, lse, kept


def through_operator(
    q: Tensor, k: Tensor, v: Tensor | None, call: Call, seed: int | None
) -> Results:
    """Run attention as one torch operator, for modes and tensor classes that follow operators."""
    largest = call.return_max_logit
    out, lse, kept = torch.ops.tilewise.attention(q, k, v, call, seed, largest)
    return out, lse, kept[:1] if largest else []


class _Asked(NamedTuple):
    """The arguments of attention that are not tensors.

    num_operands: how many of the tensors are q, k, v.
    """

    call: Call
    resolved: ResolvedCall
    transport: Transport
    num_operands: int


class _Gradients(NamedTuple):
    """The gradients of a call, by what they belong to; None: it has none.

    Attributes:
        operands: of q, k and v, or of q and latents.
        leaves: of what the expand of latents learns.
    """

    operands: tuple[Tensor, ...]
    leaves: tuple[Tensor | None, ...] = ()
    bias: Tensor | None = None
    sink: Tensor | None = None

    def once_differentiable(self, *made_of: Tensor | None) -> "_Gradients":
        """Return these gradients so that differentiating them again raises an error.

        Args:
            made_of: the tensors that they were computed from.
        """
        if not torch.is_grad_enabled():
            return self
        flat = *self.operands, *self.leaves, self.bias, self.sink
        there = [x for x in flat if x is not None]
        made = iter(once_differentiable(there, *made_of))
        flat = [x if x is None else next(made) for x in flat]
        n = len(self.operands)
        return _Gradients(tuple(flat[:n]), tuple(flat[n:-2]), *flat[-2:])  # pyright: ignore


class _Attention(torch.autograd.Function):
    """The autograd of a resolved call, past torch's dispatcher."""

    @staticmethod
    def forward(
        ctx: Any, asked: _Asked, bias: Tensor | None, sink: Tensor | None, *tensors: Tensor
    ) -> tuple[Tensor, ...]:
        """Args: bias: a dense one. sink: one a head, of a canonical call. tensors: q, k and v (or
        latents), then what expand uses and learns."""
        call, resolved, transport, num_operands = asked
        operands, leaves = tensors[:num_operands], tensors[num_operands:]
        keep = call.needs_grad or bool(leaves)
        # An expand may ask torch for gradients of what it makes.
        below = NO_CONTEXT if resolved.expansion else torch._C._AutoDispatchBelowAutograd()
        given = None if bias is None else DenseBias(bias)
        try:
            with below:
                out, lse, kept = forward_pass(resolved, transport, *operands, keep=keep, bias=given)
                if sink is not None:
                    from tilewise.exact.call import with_sink

                    with_sink(out, lse, sink)
        except VAIN_WAITS as raised:
            explain(raised, call)
            raise
        largest = kept[: resolved.scores.max_logit]
        ctx.set_materialize_grads(False)
        if largest:
            ctx.mark_non_differentiable(*largest)
        ctx.save_for_backward(bias, sink, *operands, out, lse, *leaves, *kept)
        ctx.asked, ctx.num_leaves = asked, len(leaves)
        return out, lse, *largest

    @staticmethod
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, dout: Tensor | None, dlse: Tensor | None, *_: None
    ) -> tuple[Tensor | None, ...]:
        call, resolved, transport, num_operands = ctx.asked
        bias, sink, *tensors = ctx.saved_tensors  # read once: checkpointing allows no more
        dense = None if bias is None else _with_room(bias, ctx.needs_input_grad[1])
        saved, rest = tensors[: num_operands + 2], tensors[num_operands + 2 :]
        leaves, kept = rest[: ctx.num_leaves], rest[ctx.num_leaves :]
        expansion, grads = resolved.expansion, (dout, dlse)
        if expansion is not None:
            expansion.begin_backward()
        followed = torch.compiler.is_compiling() or watched(*grads, *saved)
        with torch.no_grad() if torch.is_grad_enabled() else NO_CONTEXT:
            if expansion is None and dense is None and followed:
                resolved_call = call.with_resolved(resolved, transport)
                found = torch.ops.tilewise.attention_backward(*grads, *saved, kept, resolved_call)
            else:
                found = agreed_backward(resolved, transport, call, saved, kept, grads, dense)
            gradients = _Gradients(tuple(found))
            if sink is not None and ctx.needs_input_grad[2]:
                from tilewise.exact.call import sink_gradient

                dsink = sink_gradient(resolved, transport, saved[-2:], grads, sink)
                gradients = gradients._replace(sink=dsink)
        if expansion is not None:
            gradients = gradients._replace(leaves=tuple(expansion.gradients()))
        if bias is not None and dense is not None and dense.grad is not None:
            gradients = gradients._replace(bias=dense.grad.to(bias.dtype))
        made_of = *saved[:num_operands], *leaves, bias, sink, *grads
        operands, leaves, dbias, dsink = gradients.once_differentiable(*made_of)
        return None, dbias, dsink, *operands, *leaves


def _with_room(bias: Tensor, learns: bool) -> DenseBias:
    """Return a dense bias with zeros for its gradient (fp32 or wider), if a gradient is wanted."""
    dtype = accumulator_dtype(bias.dtype)
    return DenseBias(bias, torch.zeros_like(bias, dtype=dtype) if learns else None)


class _OnceDifferentiable(torch.autograd.Function):
    """Gradients as they are, and an error for who differentiates them.

    torch's once_differentiable leaves gradients without a graph where the incoming gradient has
    none, as that of out.sum(): a second derivative would then lack a term, and nobody would know.
    """

    @staticmethod
    def forward(ctx: Any, count: int, *tensors: Any) -> tuple[Tensor, ...]:
        """Return the first `count` tensors; the others are what they were made of."""
        return tuple(x.view_as(x) for x in tensors[:count])

    @staticmethod
    def backward(ctx: Any, *_: Tensor | None) -> NoReturn:
        raise RuntimeError(
            "attention has no second derivative: its gradients can be computed, but not be "
            "differentiated (create_graph=True, hvp, hessian); take dense attention for that"
        )


def once_differentiable(grads: Sequence[Tensor], *made_of: Tensor | None) -> Sequence[Tensor]:
    if not torch.is_grad_enabled():
        return grads
    return _OnceDifferentiable.apply(len(grads), *grads, *made_of)  # pyright: ignore[reportReturnType]


def agreed_backward(  # noqa: PLR0913 - all that backward reads
    resolved: ResolvedCall,
    transport: Transport,
    call: Call,
    saved: Sequence[Tensor],
    kept: Sequence[Tensor],
    grads: tuple[Tensor | None, Tensor | None],
    bias: DenseBias | None = None,
) -> tuple[Tensor, ...]:
    """The backward pass, on which the ranks agree first.

    Args:
        saved, grads: as backward_pass takes them.
        kept: what forward_pass gave beside out and lse: the largest scores before all else.
    """
    q, *kv, _, _ = saved
    agree_backward(resolved, transport, call, q, grads[0], *kv)
    kept = kept[resolved.scores.max_logit :]
    try:
        with without_autocast(q, autocast_dtype(q)):
            return backward_pass(resolved, transport, saved, kept, grads, bias)
    except VAIN_WAITS as raised:
        explain(raised, call)
        raise
