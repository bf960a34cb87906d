"""The two passes of one checked call on this rank: tensors in, its code run, tensors out."""

from collections.abc import Mapping, Sequence
from functools import lru_cache
from types import MappingProxyType
from typing import TypeAlias

import torch
from torch import Tensor

from tilewise.compiler.codegen import pass_code
from tilewise.compiler.facts import CallTraits, CodeTraits
from tilewise.compiler.rank_plan import PassKind, RankPlan
from tilewise.compiler.row_moves import RowMoves
from tilewise.execution.call import ResolvedCall
from tilewise.execution.row_moves import moved
from tilewise.execution.run import BoundCode, Pass
from tilewise.execution.workspace import WorkspacePool
from tilewise.kernels.bias import DenseBias
from tilewise.kernels.binned import folded, rounded
from tilewise.kernels.canonical import row_sum, sink_sums
from tilewise.kernels.protocol import Scores, accumulator_dtype, call_style
from tilewise.layouts.layout import Run, contiguous
from tilewise.plan.ir import Plan
from tilewise.plan.kept import kept_with_plan
from tilewise.plan.sums import MANY_TERMS
from tilewise.transport.protocol import Transport

Leaves: TypeAlias = tuple[RowMoves, RowMoves] | None


_NAMES = MappingProxyType({2: ("q", "latent"), 3: ("q", "k", "v")})
"""Names that a code has for the operands, by their number."""
_RESULTS: tuple[str, ...] = ("out", "lse", "largest")
_OF_QUERIES = frozenset(("q", "out", "lse", "largest", "dout", "dlse", "dq"))


def forward_pass(
    problem: ResolvedCall,
    transport: Transport,
    q: Tensor,
    *kv: Tensor,
    keep: bool,
    bias: DenseBias | None = None,
    sink: Tensor | None = None,
) -> tuple[Tensor, Tensor, list[Tensor]]:
    """out, lse, and the operands that backward is to find again (none unless keep).

    Before these stands the largest score of every head over this rank's rows, if it is asked for.

    Args:
        kv: k and v, or latents [(batch,) tokens, 1, width].
        keep: a backward pass follows; save="gathered" then keeps what was received.
        bias: a dense one, if the call has one.
        sink: one a head, which a canonical pass takes in itself.
    """
    payload = problem.bare_passes[0].payload
    out, lse = empty_results(q, payload.v_head_dim)
    largest = [torch.empty_like(lse) for _ in range(payload.max_logit)]
    results = dict(zip(_RESULTS, (out, lse, *largest), strict=False))
    given = dict(zip(_NAMES[1 + len(kv)], (q, *kv), strict=True))
    if q.ndim == 4:
        given, results = _tokens_first(given), _tokens_first(results)
    bound = bound_code(
        problem, transport, given["q"], backward=False, keep=keep and problem.gathered
    )
    work = Pass(transport, _scores(problem, bias), expansion=problem.expansion)
    kept = _run(problem, bound, given, results, work)
    return out, lse, [*map(_largest, largest), *kept]


def backward_pass(
    problem: ResolvedCall,
    transport: Transport,
    saved: Sequence[Tensor],
    kept: Sequence[Tensor],
    grads: tuple[Tensor | None, Tensor | None],
    bias: DenseBias | None = None,
) -> tuple[Tensor, ...]:
    """dq, dk, dv; or dq and that of latents.

    Args:
        saved: q, k, v (or latents), out, lse of the forward pass.
        kept: what forward_pass kept.
        grads: dout and dlse; None: zero.
        bias: a dense one, with room for its gradient if it gets one.
    """
    *operands, out, lse = saved
    (dout, dlse), names = grads, _NAMES[len(operands)]
    results = {f"d{name}": x.new_empty(x.shape) for name, x in zip(names, operands, strict=True)}
    given = dict(zip(names, operands, strict=True))
    given |= {"out": out, "lse": lse, "dout": torch.zeros_like(out) if dout is None else dout}
    if dlse is not None:
        given["dlse"] = dlse
    elif problem.q_leaves is not None:  # another rank may have a gradient of lse
        given["dlse"] = torch.zeros_like(lse)
    found = tuple(results.values())
    if out.ndim == 4:
        given, results = _tokens_first(given), _tokens_first(results)
    bound = bound_code(problem, transport, given["q"], backward=True)
    work = Pass(transport, _scores(problem, bias), expansion=problem.expansion)
    _run(problem, bound, given, results, work, kept)
    return found


def _tokens_first(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Tensors [batch, tokens, ...] as a code takes them."""
    return {name: x.transpose(0, 1) for name, x in tensors.items()}


def _run(
    problem: ResolvedCall,
    bound: BoundCode,
    given: Mapping[str, Tensor],
    results: Mapping[str, Tensor],
    work: Pass,
    kept: Sequence[Tensor] = (),
) -> list[Tensor]:
    """Run a pass on tensors by rows, or on the rows of whole leaves where the call moves these.

    Args:
        results: to write to.
        kept: what the forward pass kept.
    """
    saved = {f"kept{number}": x for number, x in enumerate(kept)}
    if problem.q_leaves is None and problem.kv_leaves is None:
        work.dlse = given.get("dlse")
        return bound.run({**given, **results, **saved}, work)
    transport, sides = work.transport, {True: problem.q_leaves, False: problem.kv_leaves}
    leaves = {name: sides[name in _OF_QUERIES] for name in (*given, *results)}
    there = {name: _there(x, leaves[name], transport) for name, x in given.items()}
    written = {name: _room(x, leaves[name], transport.rank) for name, x in results.items()}
    work.dlse = there.get("dlse")
    kept_there = bound.run({**there, **written, **saved}, work)
    for name, x in results.items():
        moves = leaves[name]
        if moves is not None:
            x.copy_(moved(written[name], moves[1], transport))
    return kept_there


def _there(x: Tensor, leaves: Leaves, transport: Transport) -> Tensor:
    """Rows as the call has them, moved to the ranks that have their leaves."""
    return x if leaves is None else moved(x, leaves[0], transport)


def _room(x: Tensor, leaves: Leaves, rank: int) -> Tensor:
    """Room for the rows of whole leaves that become these."""
    return x if leaves is None else x.new_empty((leaves[0].num_wanted[rank], *x.shape[1:]))


def sink_gradient(
    problem: ResolvedCall,
    transport: Transport,
    saved: Sequence[Tensor],
    grads: tuple[Tensor | None, Tensor | None],
    sink: Tensor,
) -> Tensor:
    """Return this rank's share of the gradient of a canonical call's sink: one rank has all of it.

    Args:
        saved: out and lse of the forward pass.
        grads: dout and dlse; None: zero.
        sink: [num_heads], or [batch, num_heads].
    """
    batched = saved[0].ndim == 4
    out, lse = (rows_first(x, batched) for x in saved)
    dout, dlse = (None if x is None else rows_first(x, batched) for x in grads)
    delta = torch.zeros_like(lse)
    if dout is not None:
        delta += row_sum(out.to(lse.dtype) * dout)
    if dlse is not None:
        delta -= dlse
    sums = sink_sums(lse, delta, sink)
    if problem.passes[0].plan.replicated_queries or transport.world_size == 1:
        return rounded(sums, MANY_TERMS, sink.dtype).squeeze(-1)
    parts = moved(sums.unsqueeze(0), sink_moves(transport.world_size), transport)
    if not len(parts):
        return torch.zeros_like(sink)
    return rounded(folded(parts, MANY_TERMS), MANY_TERMS, sink.dtype).squeeze(-1)


@lru_cache(maxsize=64)
def sink_moves(world_size: int) -> RowMoves:
    """The first rank wants what every rank has, one row each."""
    wanted = [[Run(0, world_size)], *[[]] * (world_size - 1)]
    return RowMoves("sum of sink gradients", contiguous(world_size, world_size), wanted)


def _scores(problem: ResolvedCall, bias: DenseBias | None) -> Scores:
    """The scores of one pass: bound codes outlive it, and hold no tensor of a call."""
    return problem.scores if bias is None else problem.scores._replace(bias=bias)


def bound_code(
    problem: ResolvedCall, transport: Transport, q: Tensor, *, backward: bool, keep: bool = False
) -> BoundCode:
    """The code of a pass, bound to the device and the kernel; made at the first call.

    Args:
        q: [rows, (batch,) num_heads, head_dim].
    """
    batch, device, scores = int(q.shape[1]) if q.ndim == 4 else 1, q.device, problem.scores

    def make() -> BoundCode:
        call = CallTraits(batch, problem.prune, keep, places=scores.by_place)
        traits = code_traits(problem, transport)
        passes, rank, code = problem.passes, transport.rank, None
        own = passes[backward]
        if isinstance(own.plan, RankPlan):
            kind = PassKind(backward, own.payload, own.groups, call)
            code = own.plan.code_for(kind, traits)
        if code is None:
            code = pass_code(passes, rank, backward=backward, call=call, traits=traits)
        if code.rank != rank:
            raise ValueError(f"the code is for rank {code.rank}, but this is rank {rank}")
        pool = _pool_of(passes[0].plan, rank, device)
        return BoundCode(code, device, problem.kernel, scores, pool)

    if problem.kept is None:
        return make()
    key = backward, batch, device, keep, transport_traits(transport), problem.kernel
    return problem.kept.codes.get(key, make)


def transport_traits(transport: Transport) -> tuple[int, int | None, bool, int | None]:
    """Return the facts of the transport that a code depends on, as CodeTraits has them."""
    return (
        transport.receives_ahead,
        transport.node_size,
        bool(getattr(transport, "takes_teams", False)),
        getattr(transport, "sends_in_flight", None),
    )


def code_traits(problem: ResolvedCall, transport: Transport) -> CodeTraits:
    """Return the facts of the transport and the kernel that a code depends on."""
    return CodeTraits(*transport_traits(transport), call_style(problem.kernel))


@kept_with_plan(4, each_rank=True)
def _pool_of(plan: Plan, rank: int, device: torch.device) -> WorkspacePool:
    """The workspaces of a plan on a rank."""
    return WorkspacePool()


def empty_results(q: Tensor, v_head_dim: int) -> tuple[Tensor, Tensor]:
    """out and lse, of any content."""
    lse = q.new_empty(q.shape[:-1], dtype=accumulator_dtype(q.dtype))
    return q.new_empty((*q.shape[:-1], v_head_dim)), lse


def _largest(scores: Tensor) -> Tensor:
    """The largest score of every head, fp32; -inf where there is no row."""
    scores = scores.flatten(0, -2)
    scores = scores if len(scores) else scores.new_full((1, scores.shape[-1]), -torch.inf)
    return scores.amax(0).float()


def rows_first(x: Tensor, batched: bool) -> Tensor:
    """[(batch,) tokens, heads, ...] as [tokens, batch, heads, ...]."""
    return x.transpose(0, 1) if batched else x.unsqueeze(1)


def rows_last(x: Tensor, batched: bool) -> Tensor:
    """The inverse of rows_first."""
    return x.transpose(0, 1) if batched else x.squeeze(1)
