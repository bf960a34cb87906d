"""tilewise::attention, an operator of torch: compiling, checkpointing and DTensor see one call.

What it computes is fixed by a Call, a constant to the compiler: another one compiles anew. The seed
of dropout stands beside it, so that another one does not. Where the ranks have not agreed yet (in a
compiled graph), the operator itself lets them, at every run.
"""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch._library import opaque_object

from tilewise.arguments import Validate, dtype_name
from tilewise.execution.forward_backward import backward_pass, empty_results, forward_pass
from tilewise.execution.problem import (
    AttentionCall,
    Problem,
    agreement_fields,
    agreement_values,
    known_problem,
)
from tilewise.execution.validation import check_numbers, named_operands
from tilewise.layouts.layout import Layout
from tilewise.masks.base import And, Causal, Document, Full, Mask, Or, Window
from tilewise.masks.sequences import Growing
from tilewise.masks.tables import Blocks, PerHead, Slices
from tilewise.opaque import OpaqueType
from tilewise.plan.ir import Plan
from tilewise.plan.rank_plan import RankPlan
from tilewise.transport.agreement import PASS, Kind, agreement_of
from tilewise.transport.cooperative_threads import DeadlockError
from tilewise.transport.lost_rank import LostRankError
from tilewise.transport.protocol import Transport
from tilewise.transport.resolve import transport_for
from tilewise.transport.streams import is_capturing
from tilewise.wires.wire import Plain, wires_of

Results = tuple[Tensor, Tensor, list[Tensor]]
# torch 2.11 looks up the very class, later ones a base class too.
MASKS = (Mask, Full, Causal, Window, Document, And, Or, Slices, Blocks, PerHead, Growing)


def resolve_call(
    q: Tensor, k: Tensor, v: Tensor | None, call: AttentionCall
) -> tuple[Problem, Transport]:
    """The checked call, which all ranks have agreed on.

    Raises:
        ValueError: the same on every rank, before any tensor is sent.
    """
    transport = transport_for(call.group)
    if call.problem is not None:
        return call.problem, transport
    problem, error = None, None
    try:
        if call.validate not in ("always", "first", "never"):
            raise ValueError(f"validate ({call.validate!r}) must be 'always', 'first' or 'never'")
        problem = _checked(q, k, v, call, transport)
    except Exception as raised:  # whatever it is, the other ranks must learn of it
        if _mode(q, call) == "never":
            raise
        error = str(raised)
    number = _agree(q, call, transport, problem, error)
    assert problem is not None
    return problem._replace(number=number), transport


def _mode(q: Tensor, call: AttentionCall) -> Validate:
    """How ranks compare their calls.

    Wires that round are compared also where that is to be left out, unless a graph is captured:
    bytes of other wires would be read as numbers, and nobody would know.
    """
    if call.validate != "never" or (call.wire is None and call.wire_dtype is None):
        return call.validate
    rounds = wires_of(call.wire, call.wire_dtype).rounds(dtype_name(q.dtype))
    return "first" if rounds and not is_capturing(q.device) else "never"


def _agree(
    q: Tensor,
    call: AttentionCall,
    transport: Transport,
    problem: Problem | None,
    error: str | None,
    backward: bool = False,
) -> int | None:
    """Let ranks compare what they are about to run; returns its number among the group's calls."""
    if transport.world_size == 1:
        if error is not None:
            raise ValueError(error)
        return None
    mode, kind, values = _mode(q, call), None, {}
    if problem is not None and mode != "never":
        kind, values = _kind(problem, q, call, backward), agreement_values(problem)
        if backward and problem.number is not None:
            # Calls may be alike in all but the order of their passes. Compiled code does not know
            # which forward pass it follows.
            values[PASS] = f"backward of call {problem.number}"
    with _explained(call):
        return agreement_of(transport).call(transport, kind, error, mode, values)


@contextmanager
def _explained(call: AttentionCall) -> Iterator[None]:
    """Adds to what ends a wait without an answer that ranks may not be in the same call."""
    try:
        yield
    except (LostRankError, DeadlockError) as error:
        if call.validate == "never":
            error.args = (
                f"{error} (validate='never' compares only wires that round: others may be in "
                "another call; validate='always' says which)",
            )
        raise


def _checked(
    q: Tensor, k: Tensor, v: Tensor | None, call: AttentionCall, transport: Transport
) -> Problem:
    """The checked call of this rank alone."""
    if call.problem is not None:
        return call.problem
    return known_problem(q, k, v, call, transport.rank, transport.world_size)


def _kind(problem: Problem, q: Tensor, call: AttentionCall, backward: bool) -> Kind:
    """What ranks compare before a pass."""

    def make() -> Kind:
        fields = agreement_fields(problem, q, call)
        return Kind({**fields, PASS: "backward"} if backward else fields)

    return make() if problem.kept is None else problem.kept.get("record", backward, make, 2)


class _Attention(torch.autograd.Function):
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
        if torch.is_grad_enabled():  # create_graph
            grads = _OnceDifferentiable.apply(len(grads), *grads, q, k, v, dout, dlse)
        return *grads, None, None, None


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


class _LatentAttention(torch.autograd.Function):
    """Attention whose keys and values are made of latents; outside of compiled code alone."""

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, x: Tensor, call: AttentionCall, *leaves: Tensor
    ) -> tuple[Tensor, ...]:
        assert call.problem is not None
        transport, keep = transport_for(call.group), call.needs_grad or bool(leaves)
        with _explained(call):
            out, lse, kept = forward_pass(call.problem, transport, q, x, keep=keep)
        largest = kept[: call.problem.scores.max_logit]
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(*largest)
        ctx.save_for_backward(q, x, out, lse, *leaves, *kept[len(largest) :])
        ctx.call, ctx.num_leaves = call, len(leaves)
        return out, lse, *largest

    @staticmethod
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, dout: Tensor | None, dlse: Tensor | None, *_: None
    ) -> tuple[Tensor | None, ...]:
        q, x, out, lse, *rest = ctx.saved_tensors
        leaves, kept = rest[: ctx.num_leaves], rest[ctx.num_leaves :]
        problem, transport = ctx.call.problem, transport_for(ctx.call.group)
        _agree_backward(problem, transport, ctx.call, q, dout, x)
        problem.expansion.begin_backward()
        with torch.no_grad(), _explained(ctx.call):
            saved = q, x, out, lse
            dq, dx = backward_pass(problem, transport, saved, kept, (dout, dlse))
            grads = dq, dx, *problem.expansion.gradients()
        if torch.is_grad_enabled():  # create_graph
            grads = _OnceDifferentiable.apply(len(grads), *grads, q, x, *leaves, dout, dlse)
        return *grads[:2], None, *grads[2:]


def latent_attention(
    q: Tensor, latent: Tensor, v: Tensor | None, call: AttentionCall
) -> tuple[Tensor, Tensor, list[Tensor]]:
    """out, lse and what is asked for besides, of latents [(batch,) tokens, width]."""
    if torch.compiler.is_compiling():  # its expand is no constant, and uses what it likes
        raise ValueError(
            "attention with latents runs outside compiled code; wrap the function that calls it in "
            "torch.compiler.disable"
        )
    latents = latent.unsqueeze(-2) if isinstance(latent, Tensor) and latent.ndim else latent
    problem, _ = resolve_call(q, latents, v, call)
    leaves = problem.expansion.leaves if problem.expansion else ()
    given = q, latents, replace(call, problem=problem), *leaves
    out, lse, *kept = _LatentAttention.apply(*given)  # pyright: ignore[reportGeneralTypeIssues]
    return out, lse, kept


def _autograd(q: Tensor, k: Tensor, v: Tensor, call: AttentionCall, *rest: Any) -> Results:
    out, lse, *kept = _Attention.apply(q, k, v, call, *_filled(rest))  # pyright: ignore[reportGeneralTypeIssues]
    return out, lse, kept


def _forward(q: Tensor, k: Tensor, v: Tensor, call: AttentionCall, *rest: Any) -> Results:
    seed, _ = _filled(rest)
    problem, transport = resolve_call(q, k, v, _seeded(call, seed))
    with _explained(call):
        return forward_pass(problem, transport, q, k, v, keep=call.needs_grad)


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
    problem = _checked(q, k, v, _seeded(call, *seed), transport)
    _agree_backward(problem, transport, call, q, dout, k, v)
    kept = kept[problem.scores.max_logit :]  # the largest scores are before what is kept
    with _explained(call):
        return backward_pass(problem, transport, (q, k, v, out, lse), kept, (dout, dlse))


def _agree_backward(
    problem: Problem,
    transport: Transport,
    call: AttentionCall,
    q: Tensor,
    dout: Tensor | None,
    *kv: Tensor,
) -> None:
    """Check what backward sends, and let ranks agree that they run it."""
    wire, error = problem.passes[1].payload.wires.backward, None
    if transport.world_size > 1 and wire != Plain(dtype_name(q.dtype)):
        try:
            check_numbers(wire, **named_operands(q, *kv), dout=dout)
        except ValueError as raised:
            error = str(raised)
    _agree(q, call, transport, problem, error, backward=True)


def _seeded(call: AttentionCall, seed: int | None = None) -> AttentionCall:
    """The call as it was made outside of compiled code."""
    return call if call.problem or seed is None else replace(call, dropout_seed=seed)


def _fake_backward(
    dout: Tensor | None, dlse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, *_: Any
) -> tuple[Tensor, Tensor, Tensor]:
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)


def _tells(record: logging.LogRecord) -> bool:
    """Not that inductor keeps no code on disk which stands for a call of this process."""
    return not record.exc_info or f"'{AttentionCall.__name__}' object" not in str(
        record.exc_info[1]
    )


def _registered() -> torch.library.Library:
    """Define the operators; they live as long as the library returned."""
    register, kind = getattr(opaque_object, "register_custom_class", None), "constant"
    if register is None:  # before torch 2.14
        # torch 2.11 registers only classes of its own metaclass, which the core must not import
        from torch._opaque_base import OpaqueBaseMeta

        OpaqueType.__bases__ = (OpaqueBaseMeta, *OpaqueType.__bases__)
        register, kind = opaque_object.register_opaque_type, "value"
    for value in (AttentionCall, Plan, RankPlan, Layout, *MASKS):
        register(value, typ=kind, members={"__eq__": opaque_object.MemberType.USE_REAL})
    logging.getLogger("torch._inductor.codecache").addFilter(_tells)
    library = torch.library.Library("tilewise", "DEF")
    call = f"{AttentionCall.__module__}.{AttentionCall.__qualname__} call"
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
