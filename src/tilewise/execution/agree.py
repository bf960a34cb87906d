"""Agreement on a call: every rank resolves it and compares it with the others' before a pass.

Eager code does so before torch sees anything of the call. In a compiled graph the ranks have not
agreed yet when it is made: the operator lets them, at every run.
"""

from functools import partial

import torch
from torch import Tensor

from tilewise.arguments import Validate, dtype_name, is_word, of_kind
from tilewise.execution.call import Call, ResolvedCall
from tilewise.execution.resolve import agreement_fields, resolve_once
from tilewise.execution.sinks import values_of
from tilewise.execution.validation import check_numbers, named_operands
from tilewise.transport.agreement import PASS, CallKind, agreement_of
from tilewise.transport.cooperative_threads import DeadlockError
from tilewise.transport.lost_rank import LostRankError
from tilewise.transport.protocol import Transport
from tilewise.transport.resolve import transport_for
from tilewise.transport.streams import is_capturing
from tilewise.wires.wire import Plain, wires_of

VAIN_WAITS = LostRankError, DeadlockError
"""Errors that end a wait for ranks, which may be in another call."""
PLAIN = frozenset((Tensor, torch.nn.Parameter, type(None)))


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

            check_tensors_beside(sink, bias, watched(q, k, v, sink))
        if bias is not None and watched(q, k, v, bias):
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
    if not is_word(call.validate, "never") or (call.wire is None and call.wire_dtype is None):
        return call.validate if isinstance(call.validate, str) else "always"  # others are refused
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
        explain(raised, call)
        raise


def explain(error: Exception, call: Call) -> None:
    """Add to an error that ended a wait that the ranks may be in different calls, if nobody
    checked.
    """
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


def watched(*tensors: Tensor | None) -> bool:
    """Return whether operators are followed outside of a compiler: by a mode (selective
    checkpointing, a counter of FLOPs), or a tensor's own class.
    """
    if torch._C._len_torch_dispatch_stack():
        return True
    return not PLAIN.issuperset(map(type, tensors))


def agree_backward(
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
