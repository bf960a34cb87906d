"""A call's way to its two passes: in eager code directly, else as tilewise::attention of torch.

Eager code resolves a call, lets the ranks agree, and runs it. What follows operators (a compiler,
selective checkpointing and other modes, classes of tensors) sees one: tilewise::attention. What it
computes is fixed by a Call, a constant to the compiler: another one compiles anew. The seed of
dropout stands beside it, so that another one does not. In a compiled graph the ranks have not
agreed yet: the operator itself lets them, at every run.
"""

import logging
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor
from torch._library import opaque_object

from tilewise.arguments import Validate, dtype_name, of_kind
from tilewise.compiler.rank_plan import RankPlan
from tilewise.execution.call import (
    NO_CONTEXT,
    Call,
    ResolvedCall,
    autocast_dtype,
    without_autocast,
)
from tilewise.execution.forward_backward import (
    backward_pass,
    empty_results,
    forward_pass,
)
from tilewise.execution.resolve import agreement_fields, resolve_once
from tilewise.execution.sinks import one_sink, values_of
from tilewise.execution.validation import check_numbers, named_operands
from tilewise.kernels.bias import Alibi, DenseBias
from tilewise.kernels.protocol import accumulator_dtype
from tilewise.layouts.layout import Layout
from tilewise.masks.base import And, Causal, Document, Full, Mask, Or, Window
from tilewise.masks.sequences import Growing
from tilewise.masks.tables import Blocks, PerHead, Slices
from tilewise.opaque import OpaqueType
from tilewise.plan.ir import Plan
from tilewise.transport.agreement import PASS, CallKind, agreement_of
from tilewise.transport.cooperative_threads import DeadlockError
from tilewise.transport.lost_rank import LostRankError
from tilewise.transport.protocol import Transport
from tilewise.transport.resolve import transport_for
from tilewise.transport.streams import is_capturing
from tilewise.wires.wire import Plain, latent_of, wires_of

VAIN_WAITS = LostRankError, DeadlockError
"""Errors that end a wait for ranks, which may be in another call."""
PLAIN = frozenset((Tensor, torch.nn.Parameter, type(None)))
Results = tuple[Tensor, Tensor, list[Tensor]]
# torch 2.11 looks up the very class, later ones a base class too.
MASKS = (Mask, Full, Causal, Window, Document, And, Or, Slices, Blocks, PerHead, Growing)


def agreed_call(
    q: Tensor,
    k: Tensor,
    v: Tensor | None,
    call: Call,
    sink: Tensor | None = None,
    bias: Tensor | None = None,
) -> tuple[ResolvedCall, Transport]:
    """The checked call, which all ranks have agreed on.

    Args:
        sink: its values are compared where the call's kind is; None: none is known here.
        bias: a dense one.

    Raises:
        ValueError: the same on every rank, before any tensor is sent.
    """
    transport = transport_for(call.group)
    if call.resolved is not None:
        return call.resolved, transport
    problem, error = None, None
    try:
        of_kind("validate", call.validate, Validate)
        problem = resolve_once(q, k, v, call, transport.rank, transport.world_size)
        if problem.whole_rows:
            from tilewise.exact.call import check_tensors_beside

            check_tensors_beside(sink, bias, _watched(q, k, v, sink))
        if bias is not None and _watched(q, k, v, bias):
            raise ValueError(
                "bias (a tensor) is not supported where operators are followed (selective "
                "checkpointing, modes and classes of tensors); take tw.alibi, or call attention "
                "outside of them"
            )
    except Exception as raised:  # whatever it is, the other ranks must learn of it
        if _mode(q, call) == "never":
            raise
        error = str(raised)
    number = _agree(q, call, transport, problem, error, sink=sink)
    assert problem is not None
    return problem._replace(number=number), transport


def _mode(q: Tensor, call: Call) -> Validate:
    """Return how ranks compare their calls.

    Wires that round are compared also where that is to be left out, unless a graph is captured:
    bytes of other wires would be read as numbers, and nobody would know.
    """
    if call.validate != "never" or (call.wire is None and call.wire_dtype is None):
        return call.validate
    rounds = wires_of(call.wire, call.wire_dtype).rounds(dtype_name(q.dtype))
    return "first" if rounds and not is_capturing(q.device) else "never"


def _agree(  # noqa: PLR0913 - all that is compared
    q: Tensor,
    call: Call,
    transport: Transport,
    problem: ResolvedCall | None,
    error: str | None,
    backward: bool = False,
    sink: Tensor | None = None,
) -> int | None:
    """Let ranks compare what they are about to run; returns its number among the group's calls."""
    if transport.world_size == 1:
        if error is not None:
            raise ValueError(error)
        return None
    mode, kind, values = _mode(q, call), None, {}
    if problem is not None and mode != "never":
        kind = _kind(problem, q, call, backward)
        if problem.scores.dropout_p:
            values["dropout_seed"] = str(problem.scores.dropout_seed)
        if backward and problem.number is not None:
            # Calls may be alike in all but the order of their passes. Compiled code does not know
            # which forward pass it follows.
            values[PASS] = f"backward of call {problem.number}"
    read_sink = None if sink is None else partial(values_of, sink)
    try:
        return agreement_of(transport).call(transport, kind, error, mode, values, read_sink)
    except VAIN_WAITS as raised:
        _explain(raised, call)
        raise


def _explain(error: Exception, call: Call) -> None:
    """Add to what ends a wait without an answer that ranks may not be in the same call."""
    if call.validate == "never":
        error.args = (
            f"{error} (validate='never' compares only wires that round: others may be in "
            "another call; validate='always' says which)",
        )


def _kind(problem: ResolvedCall, q: Tensor, call: Call, backward: bool) -> CallKind:
    """Return the kind of call that ranks compare before a pass."""
    kinds = {} if problem.kept is None else problem.kept.kinds
    kind = kinds.get(backward)
    if kind is None:
        fields = agreement_fields(problem, q, call)
        kind = kinds[backward] = CallKind({**fields, PASS: "backward"} if backward else fields)
    return kind


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
    latent = _has_latent(call)
    if latent and isinstance(k, Tensor) and k.ndim:
        k = k.unsqueeze(-2)
    resolved, transport = agreed_call(q, k, v, call, sink, bias)
    if not latent and _watched(q, k, v):
        return _through_dispatcher(q, k, v, call.with_resolved(resolved, transport), None)
    kv = (k,) if v is None else (k, v)
    leaves = resolved.expansion.leaves if resolved.expansion else ()
    logit = None
    if sink is not None and resolved.whole_rows:
        logit = one_sink(sink, accumulator_dtype(q.dtype))
        logit = logit.squeeze(-2) if logit.ndim == 3 else logit
    asked = _Asked(call, resolved, transport, 1 + len(kv))
    out, lse, *kept = _Attention.apply(asked, bias, logit, q, *kv, *leaves)  # pyright: ignore[reportGeneralTypeIssues]
    return out, lse, kept


def attend_compiled(
    q: Tensor, k: Tensor, v: Tensor | None, call: Call, seed: int | None, bias: Tensor | None
) -> Results:
    """Return what attend does, in code that torch.compile compiles; ranks do not compare sinks.

    Args:
        seed: of dropout, which is no constant, and not in the call.
    """
    if call.reduction != "fast":
        raise ValueError(
            f"reduction ({call.reduction!r}) must be 'fast' in compiled code; wrap the "
            "function that calls attention in torch.compiler.disable"
        )
    if _has_latent(call):  # its expand is no constant, and uses what it likes
        raise ValueError(
            "attention with latents runs outside compiled code; wrap the function that calls "
            "it in torch.compiler.disable"
        )
    if bias is not None:
        raise ValueError(
            "bias (a tensor) is not supported in compiled code; take tw.alibi, or wrap the "
            "function that calls attention in torch.compiler.disable"
        )
    return _through_dispatcher(q, k, v, call, seed)


def _has_latent(call: Call) -> bool:
    return call.wire is not None and latent_of(call.wire) is not None


def _through_dispatcher(
    q: Tensor, k: Tensor, v: Tensor | None, call: Call, seed: int | None
) -> Results:
    largest = call.return_max_logit
    out, lse, kept = torch.ops.tilewise.attention(q, k, v, call, seed, largest)
    return out, lse, kept[:1] if largest else []


def _watched(*tensors: Tensor | None) -> bool:
    """Return whether operators are followed outside of a compiler: by a mode (selective
    checkpointing, a counter of FLOPs), or a tensor's own class.
    """
    if torch._C._len_torch_dispatch_stack():
        return True
    return not PLAIN.issuperset(map(type, tensors))


class _Asked(NamedTuple):
    """A call beside its tensors."""

    call: Call
    resolved: ResolvedCall
    transport: Transport
    num_operands: int


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
            _explain(raised, call)
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
        followed = torch.compiler.is_compiling() or _watched(*grads, *saved)
        with torch.no_grad() if torch.is_grad_enabled() else NO_CONTEXT:
            if expansion is None and dense is None and followed:
                resolved_call = call.with_resolved(resolved, transport)
                found = torch.ops.tilewise.attention_backward(*grads, *saved, kept, resolved_call)
            else:
                found = _agreed_backward(resolved, transport, call, saved, kept, grads, dense)
            dsink = None
            if sink is not None and ctx.needs_input_grad[2]:
                from tilewise.exact.call import sink_gradient

                dsink = sink_gradient(resolved, transport, saved[-2:], grads, sink)
        if expansion is not None:
            found = *found, *expansion.gradients()
        dbias = None
        if bias is not None and dense is not None and dense.grad is not None:
            dbias = dense.grad.to(bias.dtype)
            found = *found, dbias
        if dsink is not None:
            found = *found, dsink
        found = _once_differentiable(found, *saved[:num_operands], *leaves, bias, sink, *grads)
        if dsink is not None:
            *found, dsink = found
        if dbias is not None:
            *found, dbias = found
        return None, dbias, dsink, *found


def _with_room(bias: Tensor, learns: bool) -> DenseBias:
    """A dense bias in a backward pass: sums of its gradient are fp32 or wider."""
    dtype = accumulator_dtype(bias.dtype)
    return DenseBias(bias, torch.zeros_like(bias, dtype=dtype) if learns else None)


class _Operator(torch.autograd.Function):
    """The autograd of the operator: in compiled code, and where it is watched."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> tuple[Tensor, ...]:
        with torch._C._AutoDispatchBelowAutograd():
            out, lse, kept = torch.ops.tilewise.attention(q, k, v, *rest)
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(*kept)
        ctx.save_for_backward(q, k, v, out, lse, *kept)
        ctx.call, ctx.seed, _ = rest
        return out, lse, *kept

    @staticmethod
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, dout: Tensor | None, dlse: Tensor | None, *_: None
    ) -> tuple[Tensor | None, ...]:
        q, k, v, out, lse, *kept = ctx.saved_tensors  # read once: checkpointing allows no more
        saved = q, k, v, out, lse, kept
        with torch.no_grad():
            grads = torch.ops.tilewise.attention_backward(dout, dlse, *saved, ctx.call, ctx.seed)
        return *_once_differentiable(grads, q, k, v, dout, dlse), None, None, None


class _OnceDifferentiable(torch.autograd.Function):
    """Gradients as they are, and an error for who differentiates them.

    torch's once_differentiable leaves gradients without a graph where the incoming gradient has
    none, as that of out.sum(): a second derivative would then lack a term, and nobody would know.
    """

    @staticmethod
    def forward(ctx: Any, count: int, *tensors: Any) -> tuple[Tensor, ...]:
        """The first so many, of all that they were made of."""
        return tuple(x.view_as(x) for x in tensors[:count])

    @staticmethod
    def backward(ctx: Any, *_: Tensor | None) -> NoReturn:
        raise RuntimeError(
            "attention has no second derivative: its gradients can be computed, but not be "
            "differentiated (create_graph=True, hvp, hessian); take dense attention for that"
        )


def _once_differentiable(grads: Sequence[Tensor], *made_of: Tensor | None) -> Sequence[Tensor]:
    if not torch.is_grad_enabled():
        return grads
    return _OnceDifferentiable.apply(len(grads), *grads, *made_of)  # pyright: ignore[reportReturnType]


def _autograd(q: Tensor, k: Tensor, v: Tensor, call: Call, *rest: Any) -> Results:
    out, lse, *kept = _Operator.apply(q, k, v, call, *_filled(rest))  # pyright: ignore[reportGeneralTypeIssues]
    return out, lse, kept


def _forward(q: Tensor, k: Tensor, v: Tensor, call: Call, *rest: Any) -> Results:
    seed, _ = _filled(rest)
    problem, transport = agreed_call(q, k, v, _seeded(call, seed))
    try:
        return forward_pass(problem, transport, q, k, v, keep=call.needs_grad)
    except VAIN_WAITS as raised:
        _explain(raised, call)
        raise


def _fake_forward(q: Tensor, k: Tensor, v: Tensor, call: object, *rest: Any) -> Results:
    """Shapes alone; a compiler does not let it look into the call, hence nothing is kept."""
    _, largest = _filled(rest)
    kept = [q.new_empty(q.shape[-2:-1], dtype=torch.float32)] * largest
    return *empty_results(q, v.shape[-1]), kept


def _filled(rest: tuple[Any, ...]) -> tuple[int | None, bool]:
    """The seed, and whether the largest scores are asked for: torch leaves defaults out."""
    seed, largest = (*rest, *(None, False)[len(rest) :])
    return seed, bool(largest)


def _backward(
    dout: Tensor | None, dlse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, *rest: Any
) -> tuple[Tensor, ...]:
    out, lse, kept, call, *seed = rest
    transport = transport_for(call.group)
    resolved = call.resolved
    if resolved is None:
        asked = _seeded(call, *seed)
        resolved = resolve_once(q, k, v, asked, transport.rank, transport.world_size)
    saved = q, k, v, out, lse
    return _agreed_backward(resolved, transport, call, saved, kept, (dout, dlse))


def _agreed_backward(  # noqa: PLR0913 - all that backward reads
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
    _agree_backward(resolved, transport, call, q, grads[0], *kv)
    kept = kept[resolved.scores.max_logit :]
    try:
        with without_autocast(q, autocast_dtype(q)):
            return backward_pass(resolved, transport, saved, kept, grads, bias)
    except VAIN_WAITS as raised:
        _explain(raised, call)
        raise


def _agree_backward(
    problem: ResolvedCall,
    transport: Transport,
    call: Call,
    q: Tensor,
    dout: Tensor | None,
    *kv: Tensor,
) -> None:
    """Check what backward sends, and let ranks agree that they run it."""
    payload, error = problem.bare_passes[1].payload, None
    wire = payload.wires.backward
    exact = isinstance(wire, Plain) and wire.dtype == payload.dtype
    if transport.world_size > 1 and not exact:
        try:
            check_numbers(wire, **named_operands(q, *kv), dout=dout)
        except ValueError as raised:
            error = str(raised)
    _agree(q, call, transport, problem, error, backward=True)


def _seeded(call: Call, seed: int | None = None) -> Call:
    """The call as it is made outside of compiled code."""
    return call if call.resolved or seed is None else replace(call, dropout_seed=seed)


def _fake_backward(
    dout: Tensor | None, dlse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, *_: Any
) -> tuple[Tensor, Tensor, Tensor]:
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)


def _tells(record: logging.LogRecord) -> bool:
    """Not that inductor keeps no code on disk which stands for a call of this process."""
    return not record.exc_info or f"'{Call.__name__}' object" not in str(record.exc_info[1])


def _registered() -> torch.library.Library:
    """Define the operators; they live as long as the library returned."""
    register, kind = getattr(opaque_object, "register_custom_class", None), "constant"
    if register is None:  # before torch 2.14
        # torch 2.11 registers only classes of its own metaclass, which the core must not import
        from torch._opaque_base import OpaqueBaseMeta

        OpaqueType.__bases__ = (OpaqueBaseMeta, *OpaqueType.__bases__)
        register, kind = opaque_object.register_opaque_type, "value"
    for value in (Call, Plan, RankPlan, Layout, Alibi, *MASKS):
        register(value, typ=kind, members={"__eq__": opaque_object.MemberType.USE_REAL})
    logging.getLogger("torch._inductor.codecache").addFilter(_tells)
    library = torch.library.Library("tilewise", "DEF")
    call = f"{Call.__module__}.{Call.__qualname__} call"
    library.define(
        f"attention(Tensor q, Tensor k, Tensor v, {call}, SymInt? seed=None, "
        "bool largest=False) -> (Tensor out, Tensor lse, Tensor[] kept)"
    )
    library.define(
        "attention_backward(Tensor? dout, Tensor? dlse, Tensor q, Tensor k, Tensor v, Tensor out, "
        f"Tensor lse, Tensor[] kept, {call}, SymInt? seed=None) -> "
        "(Tensor dq, Tensor dk, Tensor dv)"
    )
    library.impl("attention", _forward, "CompositeExplicitAutograd")
    library.impl("attention", _autograd, "Autograd")
    library.impl("attention_backward", _backward, "CompositeExplicitAutograd")
    torch.library.register_fake("tilewise::attention", _fake_forward, lib=library)
    torch.library.register_fake("tilewise::attention_backward", _fake_backward, lib=library)
    return library


LIBRARY = _registered()
