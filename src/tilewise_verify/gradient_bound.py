"""error_bound: how far gradients may be from exact where what travels is rounded."""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from tilewise.arguments import DtypeName, dtype_name, of_kind, require_dense, require_type
from tilewise.compiler.codegen import pass_code
from tilewise.compiler.facts import CallTraits
from tilewise.execution.agree import agreed_call
from tilewise.execution.call import Call, ResolvedCall, known_of
from tilewise.execution.forward_backward import rows_first, rows_last
from tilewise.execution.sinks import kind_of, one_sink
from tilewise.functional import attention
from tilewise.kernels.protocol import accumulator_dtype
from tilewise.plan.ir import Side
from tilewise.transport.agreement import agree
from tilewise.transport.protocol import Transport
from tilewise.transport.resolve import transport_for
from tilewise.wires.float8 import Float8
from tilewise.wires.wire import Plain
from tilewise_verify.output_bound import attention_bound, rounding, shift
from tilewise_verify.rounding_errors import Keys, Norms, errors, keys, norms

_STEEPEST = 0.77
"""No slope of 1 - tanh(x)^2 is larger."""
_SLACK = 1 + 1e-4
"""For the rounding of the bounds themselves."""


class ErrorBound(NamedTuple):
    """The largest |x - exact| of every row and head, [(batch,) tokens, heads]; of dk and dv
    num_kv_heads."""

    out: Tensor
    dq: Tensor
    dk: Tensor
    dv: Tensor


def error_bound(q: Tensor, k: Tensor, v: Tensor, dout: Tensor, **call: Any) -> ErrorBound:
    """Bound how far attention and its gradients may be from exact, for wires that round.

    Exact is attention of these q, k, v and dout in real numbers. The bounds are proven, also under
    stochastic rounding; docs/float8.md derives them. It runs the forward pass (twice if there is a
    sink), and a forward and a backward pass of two numbers a value whose operands are not rounded:
    to find out what a wire costs, not for every step.

    Args:
        q, k, v: of attention, this rank's rows.
        dout: the gradient of out.
        call: the keyword arguments of the attention in question.
    Raises:
        ValueError: as attention, the same on every rank; partials travel in Float8 or float16.
    """
    transport = transport_for(call.get("group"))
    try:
        for name, x in {"q": q, "k": k, "v": v, "dout": dout}.items():
            if not require_type(Tensor, name, x, "this rank's rows").ndim:
                raise ValueError(f"{name} has no dimensions, but must be this rank's rows")
            require_dense(name, x)
        of_kind("dtype of dout", dtype_name(dout.dtype), DtypeName)
        if call.get("bias") is not None:
            raise ValueError("bias is not supported: no bound of gradients is proven with one")
        if dout.shape != (*q.shape[:-1], v.shape[-1]):
            wanted = (*q.shape[:-1], v.shape[-1])
            raise ValueError(f"dout {tuple(dout.shape)} must be {wanted}, as out")
    except ValueError as error:  # the other ranks, in their call of attention, learn of it
        if call.get("validate") != "never":
            agree(transport, None, str(error), call.get("validate", "first"))
        raise
    q, k, v, dout = (x.detach() for x in (q, k, v, dout))
    out, lse = attention(q, k, v, return_lse=True, **call)
    sink, share = call.get("sink"), torch.ones_like(lse)
    layout, mask = known_of(call["plan"], call.get("layout"), call.get("mask"))
    options = {**call, "layout": layout, "mask": mask, "sink": kind_of(sink), "needs_grad": True}
    problem, transport = agreed_call(q, k, v, Call(**options))
    payload = problem.passes[1].payload
    partials = payload.wires.partials
    partial_dtype = partials.dtype or payload.dtype if isinstance(partials, Plain) else ""
    if isinstance(partials, Float8) or partial_dtype == "float16":
        raise ValueError(
            f"no bound of gradients is proven for partials in {partials} of {payload.dtype}: "
            "numbers far below the largest lose more than a share of themselves; send partials in "
            "Plain('float32')"
        )
    of_out = attention_bound(problem, transport, (q, k, v, out, lse), {**call})
    if sink is not None:
        options_without_sink: Any = {**call, "sink": None, "return_lse": True}
        share = torch.sigmoid(
            attention(q, k, v, **options_without_sink)[1] - one_sink(sink.detach(), lse.dtype)
        )
    batched, accumulated = q.ndim == 4, accumulator_dtype(q.dtype)
    tensors = [rows_first(x, batched) for x in (q, k, v, dout, of_out, share)]
    sizes = _sizes(problem, transport, tensors, sink is not None)
    dq, *shares = (rows_last(x, batched) for x in sizes)
    # Columns of weights: the gradient of v is their sum, weighted by dout.
    exact_options = {"wire": None, "wire_dtype": None, "kernel": None, "dropout_p": 0.0}
    exact_call: Any = {**call, **exact_options}
    two_columns = k.new_zeros((*k.shape[:-1], 2), dtype=accumulated).requires_grad_()
    with torch.enable_grad():
        column_output = attention(q.to(accumulated), k.to(accumulated), two_columns, **exact_call)
    douts = torch.stack(shares, -1).to(accumulated)
    (columns,) = torch.autograd.grad(column_output, two_columns, douts)
    dq = dq.to(lse.dtype).masked_fill(lse == -torch.inf, 0.0)
    # What overflows on its way is no number; inf is always a bound.
    gradients = (x.nan_to_num(torch.inf, torch.inf) for x in (dq, *columns.unbind(-1)))
    return ErrorBound(of_out, *gradients)


def _sizes(
    problem: ResolvedCall, transport: Transport, tensors: list[Tensor], sink: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Return for every query row the bound of dq, and what a weight of 1 adds to those of dk and
    dv.
    """
    q, k, v, dout, of_out, share = tensors
    # A sink takes its share of dout before that travels.
    share = share[..., None]
    travels, share = (dout * share).to(dout.dtype), share.double()
    scores, of_out = problem.scores, of_out.double()
    zero, kept = sink or scores.dropout_p > 0, 1 / (1 - scores.dropout_p)
    norms_by_pass: list[tuple[Keys, Norms]] = []
    for backward in (False, True):
        call = CallTraits(q.shape[1], problem.prune)
        code = pass_code(problem.passes, transport.rank, backward=backward, call=call)
        statistics = {"lse": of_out, "delta": of_out} if backward else {}
        tensors_by_side = (
            {"q": q, **({"dout": travels} if backward else {}), **statistics},
            {"k": k, "v": v},
        )
        resolved = problem.passes[backward]
        error = errors(code, tensors_by_side)
        key_norms = keys(resolved, transport, tensors_by_side[1], error, q.shape[2], zero)
        norms_by_pass.append((key_norms, norms(q, error["q"])))
    dout_error = error["dout"].abs() + (dout.double() * share - travels.double()).abs()
    douts = norms(dout, torch.where(share > 0, dout_error / share, 0.0))
    payload = problem.passes[1].payload
    # Weights come of scores and of lse, which are rounded in either pass.
    key_norms, q_norms = (_larger(one, other) for one, other in zip(*norms_by_pass, strict=True))
    score_shift = shift(scores.scale, q_norms, key_norms, payload.dtype, payload.head_dim).total
    grow = torch.expm1(2 * score_shift)  # of a weight
    size = 2 * kept * douts.norm * (key_norms.v.norm + key_norms.v.error)  # of dout v - delta
    size_spread = torch.minimum(
        kept * douts.total * key_norms.spread, size
    )  # and its spread over keys
    product = douts.norm * key_norms.v.error + douts.error * (key_norms.v.norm + key_norms.v.error)
    product = kept * product + douts.total * of_out
    slope = 0.0 if scores.softcap is None else _STEEPEST * score_shift * (1 + grow) / scores.softcap
    r = rounding(problem, True, Side.Q), rounding(problem, True, Side.KV)
    k_most, q_most = key_norms.k.most + key_norms.k.error_most, q_norms.most + q_norms.error_most

    def moved(size_spread: Tensor) -> Tensor:
        """Return a bound of the error of a score's gradient, for a weight of 1.

        Args:
            size_spread: bound of the spread of dout . v - delta over keys.
        """
        return (1 + grow) * product + (grow + slope) * size_spread

    dq = (moved(size_spread / 2) + r[0] * size) * k_most + size_spread / 2 * key_norms.k.error_most
    dk = (moved(size_spread) + r[1] * size) * q_most + size_spread * q_norms.error_most
    dv = kept * ((grow + r[1]) * (douts.most + douts.error_most) + douts.error_most)
    return _SLACK * scores.scale * dq, _SLACK * scores.scale * dk, _SLACK * dv


def _larger(first: Any, second: Any) -> Any:
    """Number by number, of tensors or of tuples of them."""
    if isinstance(first, Tensor):
        return torch.maximum(first, second)
    return type(first)(*map(_larger, first, second))
