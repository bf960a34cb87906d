"""The two passes of one checked call on this rank: tensors in, its code run, tensors out."""

from collections.abc import Callable, Sequence
from types import MappingProxyType

import torch
from torch import Tensor

from tilewise.compiler.code import Code
from tilewise.compiler.codegen import pass_code
from tilewise.compiler.facts import CallTraits, CodeTraits, kernel_traits
from tilewise.compiler.rank_plan import PassKind, RankPlan
from tilewise.execution.call import ResolvedCall
from tilewise.execution.run import BoundCode, Pass
from tilewise.execution.workspace import WorkspacePool
from tilewise.kernels.bias import DenseBias
from tilewise.kernels.protocol import Scores, accumulator_dtype, call_style
from tilewise.plan.ir import Plan
from tilewise.plan.kept import kept_with_plan
from tilewise.transport.agreement import agreement_of
from tilewise.transport.protocol import Transport

_NAMES = MappingProxyType({2: ("q", "latent"), 3: ("q", "k", "v")})
"""Names that a code has for the operands, by their number."""
_RESULTS: tuple[str, ...] = ("out", "lse", "largest")


def forward_pass(
    problem: ResolvedCall,
    transport: Transport,
    q: Tensor,
    *kv: Tensor,
    keep: bool,
    bias: DenseBias | None = None,
) -> tuple[Tensor, Tensor, list[Tensor]]:
    """out, lse, and the operands that backward is to find again (none unless keep).

    Before these stands the largest score of every head over this rank's rows, if it is asked for.

    Args:
        kv: k and v, or latents [(batch,) tokens, 1, width].
        keep: a backward pass follows; save="gathered" then keeps what was received.
        bias: a dense one, if the call has one.
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
    if transport.world_size > 1:
        work.mark = _mark(problem, bound.code, transport, q.device, keep=keep)
    kept = bound.run({**given, **results}, work)
    return out, lse, [*map(_largest, largest), *kept]


def backward_pass(
    problem: ResolvedCall,
    transport: Transport,
    saved: Sequence[Tensor],
    kept: Sequence[Tensor],
    grads: tuple[Tensor | None, Tensor | None],
    bias: DenseBias | None = None,
) -> tuple[Tensor, ...]:
    """Run the backward pass: dq, dk and dv, or dq and the gradient of latents.

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
    found = tuple(results.values())
    if out.ndim == 4:
        given, results = _tokens_first(given), _tokens_first(results)
    bound = bound_code(problem, transport, given["q"], backward=True)
    work = Pass(transport, _scores(problem, bias), expansion=problem.expansion)
    work.dlse = given.get("dlse")
    if transport.world_size > 1:
        work.mark = _mark(problem, bound.code, transport, out.device, keep=True)
    bound.run({**given, **results, **{f"kept{i}": x for i, x in enumerate(kept)}}, work)
    return found


def _tokens_first(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Tensors [batch, tokens, ...] as a code takes them."""
    return {name: x.transpose(0, 1) for name, x in tensors.items()}


def _scores(problem: ResolvedCall, bias: DenseBias | None) -> Scores:
    """The scores of one pass: bound codes outlive it, and hold no tensor of a call."""
    return problem.scores if bias is None else problem.scores._replace(bias=bias)


def _mark(
    problem: ResolvedCall, code: Code, transport: Transport, device: torch.device, *, keep: bool
) -> Callable[[], object] | None:
    """Return the function that notes the times of a pass; None: nobody records it.

    Args:
        keep: a backward pass follows, or this is one.
    """
    recorder = agreement_of(transport).recorder
    return None if recorder is None else recorder.begin(problem, code, transport, device, keep)


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
        traits = code_traits(problem, transport, device)
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


def code_traits(problem: ResolvedCall, transport: Transport, device: torch.device) -> CodeTraits:
    """Return the facts of the transport, the device and the kernel that a code depends on."""
    kernel = kernel_traits(device.type, call_style(problem.kernel))
    return CodeTraits(*transport_traits(transport), *kernel)


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
