"""A bound for every row of how far attention may be from exact where what travels is rounded.

docs/float8.md derives every formula.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from tilewise.arguments import dtype_name
from tilewise.compiler.codegen import pass_code
from tilewise.compiler.facts import CallTraits
from tilewise.execution.call import ResolvedCall
from tilewise.execution.forward_backward import rows_first, rows_last
from tilewise.functional import attention
from tilewise.plan.ir import Item, Plan, Role, Side
from tilewise.plan.kept import kept_with_plan
from tilewise.plan.payload import Payload, accumulator
from tilewise.transport.protocol import Transport
from tilewise.wires.wire import Plain, Wires
from tilewise_verify.rounding_errors import (
    Keys,
    Norms,
    errors,
    keys,
    norms,
    stochastic,
    wire_of,
)

_SLACK = 1 + 1e-5
"""For the rounding of the bounds themselves."""


class ScoreShift(NamedTuple):
    """The most by which a score may be off, [num_rows, batch, num_heads]."""

    by_keys: Tensor  # where keys are rounded
    by_queries: Tensor  # where queries are
    by_arithmetic: Tensor

    @property
    def others(self) -> Tensor:
        return self.by_queries + self.by_arithmetic

    @property
    def total(self) -> Tensor:
        return self.by_keys + self.others


def shift(scale: float, q: Norms, key_norms: Keys, dtype: str, head_dim: int) -> ScoreShift:
    """|scale q k - scale q' k'| <= scale (|q| |k - k'| + |q - q'| |k'|), and arithmetic."""
    arithmetic = (head_dim + 16) * _unit(accumulator(dtype))
    scaled_key_norm = scale * (key_norms.k.norm + key_norms.k.error)
    by_arithmetic = arithmetic * (q.norm + q.error) * scaled_key_norm
    return ScoreShift(scale * q.norm * key_norms.k.error, q.error * scaled_key_norm, by_arithmetic)


def rounding(problem: ResolvedCall, backward: bool, side: Side) -> float:
    """Relative error of partials of a side: of kernels, merging and each transfer of a partial."""
    resolved = problem.passes[backward]
    payload, wire = resolved.payload, resolved.payload.wires.partials
    if isinstance(wire, Plain):
        transfer = _unit(wire.dtype or payload.dtype)
    else:
        transfer = 2.0**-3 if stochastic(wire) else 2.0**-4
    rows = sum(layout.num_tokens for layout in resolved.layouts)
    plan = resolved.pruned if problem.prune else resolved.plan
    transfers = _transfers(plan, side)
    return (
        transfers * transfer
        + 8 * _unit(payload.dtype)
        + (rows + 32) * _unit(accumulator(payload.dtype))
    )


def _unit(dtype: str) -> float:
    """The largest relative error of rounding to a dtype."""
    return torch.finfo(getattr(torch, dtype)).eps / 2


@kept_with_plan()
def _transfers(plan: Plan, side: Side) -> int:
    """The most transfers that any share of a partial of a side makes one after the other."""
    transfers_so_far: dict[tuple[int, Item], int] = {}
    for step in plan.steps:
        arrived = []
        for item, src, dst, _ in step.transfers:
            if item.side is side and item.role is not Role.OPERAND:
                item = item._replace(role=Role.PARTIAL)
                arrived.append(((dst, item), transfers_so_far.get((src, item), 0) + 1))
        for rank_and_item, transfers in arrived:
            transfers_so_far[rank_and_item] = max(transfers_so_far.get(rank_and_item, 0), transfers)
    return max(transfers_so_far.values(), default=0)


class Spread(NamedTuple):
    """Sums over a row's weights p that came of rounded scores, and over its values.

    Attributes:
        weights: the root of the sum of p^2 over keys, [num_rows, batch, num_heads].
        values: at least that of p^2 (v - middle)^2, [..., v_head_dim].
    """

    weights: Tensor
    values: Tensor


@torch.no_grad()
def attention_bound(
    problem: ResolvedCall,
    transport: Transport,
    tensors: tuple[Tensor, Tensor, Tensor, Tensor, Tensor],
    options: dict[str, Any],
) -> Tensor:
    """The largest |out - exact| of every row of a call, as lse.

    Args:
        problem: the checked call.
        tensors: q, k, v, out and lse.
        options: the keyword arguments of the call.
    """
    q, k, v, out, lse = tensors
    batched, forward = q.ndim == 4, problem.passes[0]
    rows = [rows_first(x, batched) for x in (q, k, v, out)]
    call = CallTraits(rows[0].shape[1], problem.prune)
    code = pass_code(problem.passes, transport.rank, backward=False, call=call)
    tensors_by_side = {"q": rows[0]}, {"k": rows[1], "v": rows[2]}
    error_by_name = errors(code, tensors_by_side)
    zero = options.get("sink") is not None or problem.scores.dropout_p > 0
    key_norms = keys(forward, transport, tensors_by_side[1], error_by_name, q.shape[-2], zero)
    spread = None
    if wire_of(forward.payload) != Plain(dtype_name(forward.payload.dtype)):
        distances = rows_last((rows[2].double() - key_norms.middle) / key_norms.reach, batched)
        spread = _spread(problem, (q, k, distances.square()), key_norms, lse, options)
    bound = output_bound(
        problem, (rows[0], error_by_name["q"]), key_norms, rows[3].double(), spread
    )
    return rows_last(bound, batched).to(lse.dtype).masked_fill(lse == -torch.inf, 0.0)


def _spread(
    problem: ResolvedCall,
    qkv: tuple[Tensor, Tensor, Tensor],
    key_norms: Keys,
    lse: Tensor,
    options: dict[str, Any],
) -> Spread:
    """Run another pass, of twice the scores, which are rounded as those of the call were.

    Args:
        qkv: with squares of (v - middle) / reach as v.
        options: the keyword arguments of the call.
    """
    scores, forward = problem.scores, problem.passes[0]
    wire = forward.payload.wires.forward
    doubled: dict[str, Any] = {
        **options,
        "softmax_scale": 2 * scores.scale,
        "softcap": scores.softcap and 2 * scores.softcap,
        "kernel": None,
        "sink": None,
        "dropout_p": 0.0,
        "wire": Wires(wire),
        "wire_dtype": None,
    }
    q, k, v = (x.to(lse.dtype) for x in qkv)
    squares, logs = attention(q, k, v, **doubled, return_lse=True)
    # Arithmetic, and what arrives of a square x: at least (1 - relative) x - least.
    unit, tokens = 4 * _unit(dtype_name(lse.dtype)), forward.layouts[1].num_tokens
    relative, smallest = (1 + stochastic(wire)) * 2.0**-4, (1 + stochastic(wire)) * 2.0**-17
    if isinstance(wire, Plain):
        relative = smallest = _unit(wire.dtype or dtype_name(q.dtype))
    squares = (squares.double() * (1 + (tokens + 64) * unit) + smallest) / (1 - relative)
    log_margin = unit * (logs.abs() + 2 * lse.abs() + 1)
    weights = torch.exp((logs - 2 * lse + log_margin).double() / 2).nan_to_num(0.0)
    weights, squares = (rows_first(x, q.ndim == 4) for x in (weights, squares.clamp_max(1.0)))
    reach = key_norms.reach.repeat_interleave(q.shape[-2] // k.shape[-2], 2)
    return Spread(weights, squares.sqrt() * weights[..., None] * reach)


def output_bound(
    problem: ResolvedCall,
    q: tuple[Tensor, Tensor],
    key_norms: Keys,
    out: Tensor,
    spread: Spread | None,
) -> Tensor:
    """The largest |out - exact| of every row, float64 [num_rows, batch, num_heads]; inf: unknown.

    A bound that overflows (exp of large scores times weights of 0 is no number) says nothing, so
    that fmin takes the other one.

    Args:
        q, out: this rank's rows, of q with their errors.
        spread: None where no operand is rounded.
    """
    scores, forward, keep = problem.scores, problem.passes[0], 1 - problem.scores.dropout_p
    payload: Payload = forward.payload
    q_norms = norms(*q)
    score_shift = shift(scores.scale, q_norms, key_norms, payload.dtype, payload.head_dim)
    rounded_values = rounding(problem, False, Side.Q) * (key_norms.v.most + key_norms.v.error_most)
    by_scores = torch.tanh(score_shift.total / 2) * key_norms.spread
    by_values = key_norms.v.error_most
    if spread is not None:
        weight_margin = torch.exp(8 * score_shift.by_arithmetic)  # the two passes' weights
        weights, values = weight_margin * spread.weights, weight_margin[..., None] * spread.values
        by_values = torch.fmin(by_values, weights * key_norms.v_columns)
        middle = key_norms.middle.repeat_interleave(out.shape[2] // key_norms.middle.shape[2], 2)
        by_other_scores = torch.tanh(score_shift.by_arithmetic / 2) * key_norms.spread
        distances = (keep * out - middle).abs() + (by_values + rounded_values + by_other_scores)[
            ..., None
        ]
        distances = distances + (middle.abs() if keep < 1 else 0.0)
        # the root of the sum of p^2 (v - sum p v)^2
        column = (values + distances * weights[..., None]).amax(-1)
        # the norm of a row's errors of scores, as the matrix of keys and that of errors allow
        shift_norm = scores.scale * q_norms.norm * key_norms.errors
        shift_norm += scores.scale * q_norms.error * (key_norms.matrix + key_norms.errors)
        shifted = score_shift.by_keys + score_shift.by_queries
        moved_weight = shift_norm * column * _steepest(shifted)
        moved_weight = moved_weight * torch.exp(torch.fmin(shift_norm * weights, shifted))
        by_scores = torch.fmin(by_scores, moved_weight + by_other_scores)
    bound = _SLACK / keep * (by_scores + by_values + rounded_values)
    bounded = torch.isfinite(score_shift.total + key_norms.v.error_most) & ~bound.isnan()
    return torch.where(bounded, bound, torch.inf)


def _steepest(largest: Tensor) -> Tensor:
    """The largest |exp(x) - 1| / |x| of any |x| up to it."""
    return torch.where(largest > 0, torch.expm1(largest) / largest, 1.0)
