"""How far attention may be from exact where what travels is rounded: a bound for every row.

Every rank measures what rounding does to the rows that it sends; the maxima over keys are gathered
from all ranks. docs/float8.md derives every formula.
"""

import math
from collections.abc import Mapping, Sequence
from itertools import islice
from typing import NamedTuple, TypeGuard

import torch
from torch import Tensor

from tilewise.compiler.program import Launch
from tilewise.execution.allocator import FreshAllocator
from tilewise.execution.pass_run import PassRun
from tilewise.execution.problem import Problem
from tilewise.kernels.float8 import spacing
from tilewise.plan.ir import Item, Plan, Role, Side
from tilewise.plan.payload import accumulator
from tilewise.transport.gather_shards import on_every_rank
from tilewise.transport.protocol import Transport
from tilewise.wires.float8 import Float8
from tilewise.wires.wire import Plain, Wire

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
        spread: of a number of v, the largest less the least.
    """

    k: Norms
    v: Norms
    k_steps: Steps
    v_steps: Steps
    spread: Tensor


class ScoreShift(NamedTuple):
    """The most by which a score may be off, [num_rows, batch, num_heads]."""

    by_keys: Tensor  # where keys are rounded
    by_queries: Tensor  # where queries are, and by arithmetic

    @property
    def total(self) -> Tensor:
        return self.by_keys + self.by_queries


def errors(run: PassRun, named: Sequence[Named]) -> dict[str, Tensor]:
    """|x - x'| of each of a rank's tensors [rows, batch, heads, width], float64, by name.

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
    places = run.own(found)
    for item, block in run.own(named).items():
        packing = run.packing[item.side, item.role]
        names = [field.name for field in run.payload.fields(item.side, item.role) if field.wire]
        if item not in sent or not names or not block.fields[names[0]].numel():
            continue
        given = [block.fields.get(name, block.fields[names[0]][..., 0]) for name in packing.names]
        arrives = packing.unpack(packing.pack(given, allocator, item))
        for name in names:
            error = (block.fields[name].double() - arrives[name].double()).abs()
            place = places[item].fields[name]
            place.copy_(torch.maximum(place, error))
    return {name: x for of in found for name, x in of.items()}


def norms(x: Tensor, error: Tensor) -> Norms:
    """Row by row: [rows, batch, heads] of [rows, batch, heads, width]."""
    x = x.double().abs()
    return Norms(_norm(x), x.amax(-1), x.sum(-1), _norm(error), error.amax(-1))


def keys(
    transport: Transport,
    wire: Wire,
    named: Named,
    error: Named,
    num_heads: int,
    zero: bool,
) -> Keys:
    """Over the keys of all ranks, for each of so many query heads.

    Args:
        named: k and v of this rank; error: theirs, as errors gives it.
        zero: values that are 0 take part.
    """
    columns = []
    for name in ("k", "v"):
        columns += norms(named[name], error[name])
    for name in ("k", "v"):
        columns += _steps(wire, named[name], error[name])
    v = named["v"].double()
    rows = torch.cat([torch.stack(columns, -1), v, -v], -1)
    start = rows.new_full((1, *rows.shape[1:]), -torch.inf)
    everyone = torch.stack(on_every_rank(transport, torch.cat([rows, start]).amax(0))).amax(0)
    group = num_heads // everyone.shape[1]
    everyone = everyone.repeat_interleave(group, 1)[None]
    singles, high, low = everyone.split([len(columns), v.shape[-1], v.shape[-1]], -1)
    singles = iter(singles.clamp_min(0.0).unbind(-1))
    if zero:
        high, low = high.clamp_min(0.0), low.clamp_min(0.0)

    k_norms, v_norms = (Norms(*islice(singles, len(Norms._fields))) for _ in range(2))
    k_steps, v_steps = (Steps(*islice(singles, len(Steps._fields))) for _ in range(2))
    spread = (high + low).amax(-1).clamp_min(0.0)
    return Keys(k_norms, v_norms, k_steps, v_steps, spread)


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
    by_queries = (q.error + arithmetic * (q.norm + q.error)) * (of.k.norm + of.k.error)
    return ScoreShift(scale * q.norm * of.k.error, scale * by_queries)


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


def attention_bound(
    problem: Problem,
    transport: Transport,
    tensors: tuple[Tensor, Tensor, Tensor],
    known: tuple[Tensor, Tensor | None],
    zero: bool,
) -> Tensor:
    """The largest |out - exact| of every row, as lse.

    Args:
        tensors: q, k, v of this rank.
        known: lse and, for stochastic rounding, the sum of every row's squared weights.
        zero: a sink takes part.
    """
    (lse, squares), batched = known, tensors[0].ndim == 4
    q, k, v = (rows_first(x, batched) for x in tensors)
    run = PassRun(problem, transport, backward=False, batch=q.shape[1], device=q.device)
    named = {"q": q}, {"k": k, "v": v}
    found = errors(run, named)
    wire, zero = run.payload.wires.forward, zero or problem.scores.dropout_p > 0
    of = keys(transport, wire, named[1], found, q.shape[2], zero)
    squares = None if squares is None else rows_first(squares, batched)
    bound = output_bound(problem, run, (q, found["q"]), of, squares)
    bound = bound.squeeze(1) if not batched else bound.transpose(0, 1)
    return bound.to(lse.dtype).masked_fill(lse == -torch.inf, 0.0)


def rows_first(x: Tensor, batched: bool) -> Tensor:
    """[(batch,) tokens, heads, ...] as [tokens, batch, heads, ...]."""
    return x.transpose(0, 1) if batched else x.unsqueeze(1)


def output_bound(
    problem: Problem,
    run: PassRun,
    q: tuple[Tensor, Tensor],
    of: Keys,
    squares: Tensor | None,
) -> Tensor:
    """The largest |out - exact| of every row, float64 [num_rows, batch, num_heads].

    Weights move by tanh(shift / 2) at most in total variation, values by their own error.

    Args:
        q: this rank's rows and their errors.
        squares: the sum of every row's squared weights, for stochastic rounding.
    """
    scores, payload = problem.scores, run.payload
    row = norms(*q)
    off = shift(scores.scale, row, of, payload.dtype, payload.head_dim)
    by_scores, v_error = torch.tanh(off.total / 2) * of.spread, of.v.error_most
    if squares is not None:
        by_keys, by_values = _likely(scores.scale, run, q[0], squares, off, of)
        by_queries = torch.tanh(off.by_queries / 2) * of.spread
        by_scores = torch.minimum(by_scores, by_keys + by_queries)
        v_error = torch.minimum(v_error, by_values)
    sizes = rounding(problem, run, Side.Q) * (of.v.most + of.v.error_most)
    bound = _SLACK / (1 - scores.dropout_p) * (by_scores + v_error + sizes)
    return torch.where(torch.isfinite(off.total + of.v.error_most), bound, torch.inf)


def _likely(
    scale: float, run: PassRun, q: Tensor, squares: Tensor, off: ScoreShift, of: Keys
) -> tuple[Tensor, Tensor]:
    """By keys' and by values' errors, but for a probability of FAILURE a row."""
    width = run.payload.v_head_dim
    events = math.log((2 * run.layouts[Side.KV].num_tokens + 4 * width + 4) / FAILURE)
    deviations, q = math.sqrt(2 * events), q.double()
    # Hoelder: of the products of q's numbers and spacings, the norm
    products = (
        q.abs().amax(-1) * of.k_steps.norm,
        _norm(q, 4) * of.k_steps.norm_4,
        _norm(q) * of.k_steps.most,
    )
    sigma = scale / 2 * torch.stack(products).amin(0)
    most = torch.minimum(deviations * sigma, off.by_keys)  # of all scores
    exact = torch.ones_like(most)  # the sum of squared weights without rounding

    def of_scores() -> tuple[Tensor, Tensor]:
        mean = torch.minimum(deviations * sigma * exact.sqrt(), most)
        variance = 1 + 2 * (events * exact).sqrt() + 2 * events * exact.sqrt()
        return mean, torch.exp(most) / 2 * torch.minimum(most**2, sigma**2 * variance)

    for _ in range(4):  # the bounds make each other smaller
        grown = squares * torch.exp(2 * most + 4 * off.by_queries) * (1 + sum(of_scores())) ** 2
        exact = torch.minimum(exact, grown)
    mean, second = of_scores()
    # of sum p d (v - out): v differs from out by the spread, its variance is at most a fourth of it
    first = deviations * sigma * torch.minimum(exact, exact.sqrt() / 4).sqrt()
    by_keys = (first + second) * of.spread / torch.exp(-mean)
    return by_keys, deviations / 2 * squares.sqrt() * of.v_steps.most
