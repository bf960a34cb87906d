"""How far attention may be from exact where what travels is rounded: a bound for every row.

Every rank measures what rounding does to the rows that it sends; the maxima over keys are gathered
from all ranks. docs/float8.md derives every formula.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import islice
from typing import Any, NamedTuple, TypeGuard

import torch
from torch import Tensor

from tilewise.arguments import dtype_name
from tilewise.compiler.program import Launch
from tilewise.execution.allocator import FreshAllocator
from tilewise.execution.pass_run import PassRun
from tilewise.execution.problem import AttentionCall, Problem
from tilewise.execution.torch_op import resolve_call
from tilewise.kernels.float8 import spacing
from tilewise.plan.ir import Item, Plan, Role, Side
from tilewise.plan.payload import accumulator
from tilewise.transport.gather_shards import on_every_rank
from tilewise.transport.protocol import Transport
from tilewise.transport.resolve import transport_for
from tilewise.wires.float8 import Float8
from tilewise.wires.wire import Plain, Wire, Wires

FAILURE = 1e-9
"""The probability with which a row may exceed its bound under stochastic rounding."""
_SLACK = 1 + 1e-5
"""For the rounding of the bounds themselves."""

Named = Mapping[str, Tensor]


class Norms(NamedTuple):
    """Euclidean norm, largest number and sum of a row's absolute values, and those of its error.

    The error is that of what travelled, 0 where nothing did.
    """

    norm: Tensor
    most: Tensor
    total: Tensor
    error: Tensor
    error_most: Tensor


class Steps(NamedTuple):
    """Of the distances of the numbers between which stochastic rounding chooses: norms."""

    norm: Tensor
    norm_4: Tensor
    most: Tensor


class Keys(NamedTuple):
    """Largest over all keys: float64 [1, batch, num_heads] each.

    Attributes:
        matrix, errors: the spectral norms of the matrix of all keys and of that of their errors.
        v_columns: the largest norm of a column of values' errors.
        spread: of a number of v, the largest less the least.
        middle: the mean of v, [1, batch, num_kv_heads, v_head_dim].
        reach: above every |v - middle|, [1, batch, num_kv_heads, 1].
    """

    matrix: Tensor
    errors: Tensor
    v_columns: Tensor
    spread: Tensor
    k: Norms
    v: Norms
    k_steps: Steps
    v_steps: Steps
    middle: Tensor
    reach: Tensor


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


def errors(run: PassRun, named: Sequence[Named]) -> dict[str, Tensor]:
    """x - x' of each of a rank's tensors [rows, batch, heads, width], float64, by name.

    x' is what arrives elsewhere; of several that differ the error is the largest, number by number.
    """
    sent = {
        hop.item
        for instruction in run.program.instructions
        if isinstance(instruction, Launch)
        for hop in instruction.sends
    }
    found = [
        {name: torch.zeros_like(x, dtype=torch.float64) for name, x in of.items()} for of in named
    ]
    allocator = FreshAllocator(run.device)
    places = run.own.operands(found)
    for item, block in run.own.operands(named).items():
        packing = run.packing[item.side, item.role]
        names = [field.name for field in run.payload.fields(item.side, item.role) if field.wire]
        if item not in sent or not names or not block.fields[names[0]].numel():
            continue
        given = [block.fields.get(name, block.fields[names[0]][..., 0]) for name in packing.names]
        arrives = packing.unpack(packing.pack(given, allocator, item))
        for name in names:
            error = block.fields[name].double() - arrives[name].double()
            place = places[item].fields[name]
            place.copy_(torch.where(error.abs() > place.abs(), error, place))
    return {name: x for of in found for name, x in of.items()}


def norms(x: Tensor, error: Tensor) -> Norms:
    """Row by row: [rows, batch, heads] of [rows, batch, heads, width]."""
    x = x.double().abs()
    return Norms(_norm(x), x.amax(-1), x.sum(-1), _norm(error), error.abs().amax(-1))


def keys(
    run: PassRun, transport: Transport, named: Named, error: Named, num_heads: int, zero: bool
) -> Keys:
    """Over the keys of all ranks, for each of so many query heads.

    Args:
        named: k and v of this rank; error: theirs, as errors gives it.
        zero: values that are 0 take part.
    """
    wire, columns = wire_of(run), []
    for name in ("k", "v"):
        columns += norms(named[name], error[name])
    for name in ("k", "v"):
        columns += _steps(wire, named[name], error[name])
    v = named["v"].double()
    rows = torch.cat([torch.stack(columns, -1), v, -v], -1)
    start = rows.new_full((1, *rows.shape[1:]), -torch.inf)
    # A key that several groups of heads get is rounded at random in each.
    copies = run.groups.groups * run.payload.heads(Side.KV) > run.groups.num_kv_heads
    spectra = _spectrum(named["k"].double()), _spectrum(error["k"], stochastic(wire) and copies)
    sums = torch.cat([v.sum(0), error["v"].square().sum(0), torch.stack(spectra, -1)], -1)
    own = torch.cat([torch.cat([rows, start]).amax(0), sums], -1)
    split = len(columns), *[v.shape[-1]] * 4, 2
    everyone = torch.stack(on_every_rank(transport, own)).split(split, -1)
    singles, high, low = (x.amax(0, keepdim=True) for x in everyone[:3])
    middle, v_columns, spectra = (x.sum(0, keepdim=True) for x in everyone[3:])
    middle = middle / max(1, run.layouts[Side.KV].num_tokens)
    v_columns, spectra = v_columns.amax(-1, keepdim=True).sqrt(), spectra.sqrt()
    if zero:
        high, low = high.clamp_min(0.0), low.clamp_min(0.0)
    wide = (high + low).amax(-1, keepdim=True).clamp_min(0.0)
    reach = torch.maximum(high - middle, low + middle).amax(-1, keepdim=True)
    reach = reach.clamp_min(torch.finfo(torch.float32).tiny)
    every = torch.cat([spectra, v_columns, wide, singles.clamp_min(0.0)], -1)
    every = every.repeat_interleave(num_heads // every.shape[2], 2)
    matrix, of_errors, v_columns, spread = every[..., :4].unbind(-1)
    singles = iter(every[..., 4:].unbind(-1))
    k_norms, v_norms = (Norms(*islice(singles, len(Norms._fields))) for _ in range(2))
    k_steps, v_steps = (Steps(*islice(singles, len(Steps._fields))) for _ in range(2))
    return Keys(
        *(matrix, of_errors, v_columns, spread), k_norms, v_norms, k_steps, v_steps, middle, reach
    )


def wire_of(run: PassRun) -> Wire:
    """Of the operands of a pass."""
    wires = run.payload.wires
    return wires.backward if run.payload.backward else wires.forward


def _spectrum(rows: Tensor, unsigned: bool = False) -> Tensor:
    """The squared spectral norm of rows [n, batch, heads, width], or what bounds it.

    Args:
        unsigned: that of the numbers in question is at most as large, the signs are not known.
    """
    if unsigned:
        return rows.square().sum((0, -1))
    gram = torch.einsum("nbhx,nbhy->bhxy", rows, rows)
    if not gram.isfinite().all():
        return torch.full(gram.shape[:2], torch.inf).to(gram)
    return torch.linalg.eigvalsh(gram)[..., -1].clamp_min(0.0)


def _steps(wire: Wire, x: Tensor, error: Tensor) -> Steps:
    if not stochastic(wire) or not error.any():
        return Steps(*[error.sum(-1) * 0.0] * 3)
    apart = spacing(wire, x).double()
    return Steps(_norm(apart), _norm(apart, 4), apart.amax(-1))


def stochastic(wire: Wire) -> TypeGuard[Float8]:
    return isinstance(wire, Float8) and wire.stochastic


def _norm(x: Tensor, order: int = 2) -> Tensor:
    return torch.linalg.vector_norm(x, order, -1)


def shift(scale: float, q: Norms, of: Keys, dtype: str, head_dim: int) -> ScoreShift:
    """|scale q k - scale q' k'| <= scale (|q| |k - k'| + |q - q'| |k'|), and arithmetic."""
    arithmetic = (head_dim + 16) * _unit(accumulator(dtype))
    of_keys = scale * (of.k.norm + of.k.error)
    by_arithmetic = arithmetic * (q.norm + q.error) * of_keys
    return ScoreShift(scale * q.norm * of.k.error, q.error * of_keys, by_arithmetic)


def rounding(problem: Problem, run: PassRun, side: Side) -> float:
    """Relative error of partials of a side: of kernels, of merging, of every hop of a partial."""
    payload, wire = run.payload, run.payload.wires.partials
    if isinstance(wire, Plain):
        hop = _unit(wire.dtype or payload.dtype)
    else:
        hop = 2.0**-3 if stochastic(wire) else 2.0**-4
    rows = sum(layout.num_tokens for layout in run.layouts)
    resolved = problem.passes[payload.backward]
    plan = resolved.pruned if problem.prune else resolved.plan
    hops = plan.memo("partial hops", side, lambda: _hops(plan, side))
    return hops * hop + 8 * _unit(payload.dtype) + (rows + 32) * _unit(accumulator(payload.dtype))


def _unit(dtype: str) -> float:
    """The largest relative error of rounding to a dtype."""
    return torch.finfo(getattr(torch, dtype)).eps / 2


def _hops(plan: Plan, side: Side) -> int:
    """The most hops that any share of a partial of a side makes one after the other."""
    made: dict[tuple[int, Item], int] = {}
    for step in plan.steps:
        arrived = []
        for item, src, dst, _ in step.transfers:
            if item.side is side and item.role is not Role.OPERAND:
                item = item._replace(role=Role.PARTIAL)
                arrived.append(((dst, item), made.get((src, item), 0) + 1))
        for place, hops in arrived:
            made[place] = max(made.get(place, 0), hops)
    return max(made.values(), default=0)


class Spread(NamedTuple):
    """Of a row's weights p that came of rounded scores, and of its values.

    Attributes:
        weights: the root of the sum of p^2 over keys, [num_rows, batch, num_heads].
        values: at least that of p^2 (v - middle)^2, [..., v_head_dim].
    """

    weights: Tensor
    values: Tensor


@torch.no_grad()
def attention_bound(
    call: AttentionCall, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor
) -> Tensor:
    """The largest |out - exact| of every row of a checked call, as lse."""
    problem, transport, batched = call.problem, transport_for(call.group), q.ndim == 4
    assert problem is not None
    rows = [rows_first(x, batched) for x in (q, k, v, out)]
    run = PassRun(problem, transport, backward=False, batch=rows[0].shape[1], device=q.device)
    named = {"q": rows[0]}, {"k": rows[1], "v": rows[2]}
    found = errors(run, named)
    zero = call.sink is not None or problem.scores.dropout_p > 0
    of, spread = keys(run, transport, named[1], found, q.shape[-2], zero), None
    if wire_of(run) != Plain(dtype_name(run.payload.dtype)):
        away = rows_last((rows[2].double() - of.middle) / of.reach, batched)
        spread = _spread(call, (q, k, away.square()), of, lse)
    bound = output_bound(problem, run, (rows[0], found["q"]), of, rows[3].double(), spread)
    return rows_last(bound, batched).to(lse.dtype).masked_fill(lse == -torch.inf, 0.0)


def rows_first(x: Tensor, batched: bool) -> Tensor:
    """[(batch,) tokens, heads, ...] as [tokens, batch, heads, ...]."""
    return x.transpose(0, 1) if batched else x.unsqueeze(1)


def rows_last(x: Tensor, batched: bool) -> Tensor:
    """The inverse of rows_first."""
    return x.transpose(0, 1) if batched else x.squeeze(1)


def _spread(
    call: AttentionCall, qkv: tuple[Tensor, Tensor, Tensor], of: Keys, lse: Tensor
) -> Spread:
    """By another pass, of twice the scores, which are rounded as those of the call were.

    Args:
        qkv: with squares of (v - middle) / reach as v.
    """
    assert call.problem is not None
    scores, wire = call.problem.scores, call.problem.passes[0].payload.wires.forward
    asked: dict[str, Any] = {"softmax_scale": 2 * scores.scale, "kernel": None, "dropout_p": 0.0}
    asked |= {"softcap": scores.softcap and 2 * scores.softcap, "max_logit": False}
    asked |= {"wire": Wires(wire), "wire_dtype": None, "error_bound": False}
    again = replace(call, **asked, needs_grad=False, problem=None)
    q, k, v = (x.to(lse.dtype) for x in qkv)
    again = replace(again, problem=resolve_call(q, k, v, again)[0])
    squares, logs, _ = torch.ops.tilewise.attention(q, k, v, again)
    # Arithmetic, and what arrives of a square x: at least (1 - relative) x - least.
    unit, tokens = 4 * _unit(dtype_name(lse.dtype)), call.problem.passes[0].layouts[1].num_tokens
    relative, least = (1 + stochastic(wire)) * 2.0**-4, (1 + stochastic(wire)) * 2.0**-17
    if isinstance(wire, Plain):
        relative = least = _unit(wire.dtype or dtype_name(q.dtype))
    squares = (squares.double() * (1 + (tokens + 64) * unit) + least) / (1 - relative)
    sure = unit * (logs.abs() + 2 * lse.abs() + 1)
    weights = torch.exp((logs - 2 * lse + sure).double() / 2).nan_to_num(0.0)
    weights, squares = (rows_first(x, q.ndim == 4) for x in (weights, squares.clamp_max(1.0)))
    reach = of.reach.repeat_interleave(q.shape[-2] // k.shape[-2], 2)
    return Spread(weights, squares.sqrt() * weights[..., None] * reach)


def output_bound(
    problem: Problem,
    run: PassRun,
    q: tuple[Tensor, Tensor],
    of: Keys,
    out: Tensor,
    spread: Spread | None,
) -> Tensor:
    """The largest |out - exact| of every row, float64 [num_rows, batch, num_heads].

    Args:
        q, out: this rank's rows, of q with their errors.
        spread: None where no operand is rounded.
    """
    scores, payload, keep = problem.scores, run.payload, 1 - problem.scores.dropout_p
    row = norms(*q)
    off = shift(scores.scale, row, of, payload.dtype, payload.head_dim)
    sizes = rounding(problem, run, Side.Q) * (of.v.most + of.v.error_most)
    by_scores, by_values = torch.tanh(off.total / 2) * of.spread, of.v.error_most
    if spread is not None:
        sure = torch.exp(8 * off.by_arithmetic)  # the two passes' weights
        weights, values = sure * spread.weights, sure[..., None] * spread.values
        tokens, width = run.layouts[Side.KV].num_tokens, payload.v_head_dim
        events = math.log((2 * tokens + 5 * width + 4) / FAILURE)
        by_values = torch.minimum(by_values, weights * of.v_columns)
        if stochastic(wire_of(run)):
            by_values = torch.minimum(by_values, math.sqrt(events / 2) * weights * of.v_steps.most)
        middle = of.middle.repeat_interleave(out.shape[2] // of.middle.shape[2], 2)
        others = torch.tanh(off.by_arithmetic / 2) * of.spread
        away = (keep * out - middle).abs() + (by_values + sizes + others)[..., None]
        away = away + (middle.abs() if keep < 1 else 0.0)
        # the root of the sum of p^2 (v - sum p v)^2
        column = (values + away * weights[..., None]).amax(-1)
        # the norm of a row's errors of scores, as the matrix of keys and that of errors allow
        of_keys = scores.scale * row.norm * of.errors
        together = of_keys + scores.scale * row.error * (of.matrix + of.errors)
        shifted = off.by_keys + off.by_queries
        moved = together * column * _steepest(shifted)
        moved = moved * torch.exp(torch.minimum(together * weights, shifted))
        by_scores = torch.minimum(by_scores, moved + others)
        if stochastic(wire_of(run)) and scores.softcap is None:
            likely = _by_likely_errors(scores.scale, q[0], off, of, events)
            by_scores = likely(weights, column, of_keys, by_scores)
    bound = _SLACK / keep * (by_scores + by_values + sizes)
    return torch.where(torch.isfinite(off.total + of.v.error_most), bound, torch.inf)


def _steepest(most: Tensor) -> Tensor:
    """The largest |exp(x) - 1| / |x| of any |x| up to it."""
    return torch.where(most > 0, torch.expm1(most) / most, 1.0)


def _by_likely_errors(
    scale: float, q: Tensor, off: ScoreShift, of: Keys, events: float
) -> Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]:
    """By errors of keys that are rounded at random, but for a probability of FAILURE a row."""
    q = q.double().abs()
    # Hoelder: of the products of q's numbers and spacings, the norm
    products = (
        q.amax(-1) * of.k_steps.norm,
        _norm(q, 4) * of.k_steps.norm_4,
        _norm(q) * of.k_steps.most,
    )
    sigma = scale / 2 * torch.stack(products).amin(0)
    deviations = math.sqrt(2 * events) * sigma
    most = torch.minimum(deviations, off.by_keys)  # of all scores
    others = torch.tanh(off.others / 2) * of.spread

    def bound(weights: Tensor, column: Tensor, together: Tensor, near: Tensor) -> Tensor:
        """weights, column: of rounded scores; together: errors' norm; near: what is proven."""
        exact, found = torch.ones_like(most), near  # exact: sum p^2 without rounding
        for _ in range(4):  # the bounds make each other smaller
            mean = torch.minimum(deviations * exact.sqrt(), most)
            squared = sigma**2 * (1 + 2 * (events * exact).sqrt() + 2 * events * exact.sqrt())
            grown = 1 + mean + torch.exp(most) / 2 * torch.minimum(most**2, squared)
            grown = grown * torch.exp(most + 2 * off.others)  # a weight
            exact = torch.minimum(exact, (weights * grown) ** 2)
            width = torch.minimum(exact, exact.sqrt() / 4).sqrt() * of.spread
            width = torch.minimum(width, grown * (column + found * weights))
            curved = sigma**2 * (of.spread / 2 + 2 * (math.sqrt(events) + events) * width)
            proven = torch.minimum(most * of.spread / 2, together * width) * most
            curved = torch.minimum(curved, proven)
            by_keys = (deviations * width + torch.exp(most) / 2 * curved) * torch.exp(mean)
            found = torch.minimum(found, by_keys + others)
        return found

    return bound
