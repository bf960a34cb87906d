"""The operators tilewise::attention and tilewise::attention_backward of torch.

What follows operators sees them whole: a compiler, selective checkpointing and other modes, classes
of tensors. What they compute is fixed by a Call, a constant to the compiler: another one compiles
anew. The seed of dropout stands beside it, so that another one does not.
"""

import logging
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch._library import opaque_object

from tilewise.compiler.rank_plan import RankPlan
from tilewise.execution.agree import VAIN_WAITS, agreed_call, explain
from tilewise.execution.autograd import (
    Results,
    agreed_backward,
    once_differentiable,
    through_operator,
)
from tilewise.execution.call import Call
from tilewise.execution.forward_backward import empty_results, forward_pass
from tilewise.execution.resolve import resolve_once
from tilewise.kernels.bias import Alibi
from tilewise.layouts.layout import Layout
from tilewise.masks.base import And, Causal, Document, Full, Mask, Or, Window
from tilewise.masks.sequences import Growing
from tilewise.masks.tables import Blocks, PerHead, Slices
from tilewise.opaque import OpaqueType
from tilewise.plan.ir import Plan
from tilewise.transport.resolve import transport_for
from tilewise.wires.wire import latent_of

# torch 2.11 looks up the very class, later ones a base class too.
MASKS = (Mask, Full, Causal, Window, Document, And, Or, Slices, Blocks, PerHead, Growing)


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
    # The expand of latents is no constant, and uses what it likes.
    if call.wire is not None and latent_of(call.wire) is not None:
        raise ValueError(
            "attention with latents runs outside compiled code; wrap the function that calls "
            "it in torch.compiler.disable"
        )
    if bias is not None:
        raise ValueError(
            "bias (a tensor) is not supported in compiled code; take tw.alibi, or wrap the "
            "function that calls attention in torch.compiler.disable"
        )
    return through_operator(q, k, v, call, seed)


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
        return *once_differentiable(grads, q, k, v, dout, dlse), None, None, None


def _autograd(q: Tensor, k: Tensor, v: Tensor, call: Call, *rest: Any) -> Results:
    out, lse, *kept = _Operator.apply(q, k, v, call, *_filled(rest))  # pyright: ignore[reportGeneralTypeIssues]
    return out, lse, kept


def _forward(q: Tensor, k: Tensor, v: Tensor, call: Call, *rest: Any) -> Results:
    seed, _ = _filled(rest)
    problem, transport = agreed_call(q, k, v, _seeded(call, seed))
    try:
        return forward_pass(problem, transport, q, k, v, keep=call.needs_grad)
    except VAIN_WAITS as raised:
        explain(raised, call)
        raise


def _fake_forward(q: Tensor, k: Tensor, v: Tensor, call: object, *rest: Any) -> Results:
    """Return empty tensors of the right shapes for torch's tracer.

    Nothing is kept for backward, because a compiler cannot read the call.
    """
    _, largest = _filled(rest)
    kept = [q.new_empty(q.shape[-2:-1], dtype=torch.float32)] * largest
    return *empty_results(q, v.shape[-1]), kept


def _filled(rest: tuple[Any, ...]) -> tuple[int | None, bool]:
    """Return the seed and whether the largest scores are asked for; torch leaves out arguments that
    have their default.
    """
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
    return agreed_backward(resolved, transport, call, saved, kept, (dout, dlse))


def _seeded(call: Call, seed: int | None = None) -> Call:
    """Return the call with its seed of dropout, which compiled code passes as an argument of its
    own.
    """
    return call if call.resolved or seed is None else replace(call, dropout_seed=seed)


def _fake_backward(
    dout: Tensor | None, dlse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, *_: Any
) -> tuple[Tensor, Tensor, Tensor]:
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)


def _tells(record: logging.LogRecord) -> bool:
    """Return whether to show a log record: not inductor's warning that it cannot cache our calls on
    disk.
    """
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
