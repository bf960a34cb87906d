"""A call without tensor values: both passes on shapes, alone or to have ready what a rank needs.

Tensors are on torch's device "meta": they have shapes and no values. The kernel computes nothing,
the transport moves nothing, and all else is the code that runs on a GPU.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from tilewise.arguments import require_range
from tilewise.compiler.resolved import ResolvedPass
from tilewise.execution.expansion import Expansion
from tilewise.execution.forward_backward import backward_pass, empty_results, forward_pass
from tilewise.execution.pass_run import calls_of, incoming, lifetimes_of, program_of
from tilewise.execution.problem import Problem
from tilewise.kernels.protocol import Accumulators, Gradients, Kernel, accumulator_dtype
from tilewise.kernels.registry import given_kernel, kernel_for
from tilewise.kernels.scores import Scores
from tilewise.plan.ir import NO_TRAITS, Side
from tilewise.plan.rank_plan import RankPlan
from tilewise.transport.nodes import local_world_size, node_size_of

Passes = tuple[ResolvedPass, ResolvedPass]
SENT = program_of, incoming, lifetimes_of, calls_of
"""Functions whose values go to another process with the plan."""


def prepare(
    passes: Passes, rank: int, batch: str = "", kernel: Kernel | str | None = None
) -> RankPlan:
    """All that one rank needs to run a call, as a value that pickles.

    Args:
        passes: of a call with one plan; they are run once on shapes.
        batch: words for the batch, on which ranks are to agree.
        kernel: for which tiles are cut; None: the first choices of the devices that torch knows.
    Raises:
        ValueError: if there is no such rank, or no such kernel.
    """
    whole, pruned = passes[0].plan, passes[0].pruned
    require_range("rank", rank, 0, whole.world_size - 1)
    mask, layouts = passes[0].mask, passes[0].layouts
    made_for = whole.made_for or (mask, layouts[0])
    traits = NO_TRAITS._replace(made_for=made_for, proven=True, exchanges=pruned.traits.exchanges)
    plan = RankPlan(
        rank,
        batch,
        whole.fingerprint,
        pruned.rank_steps(rank),
        dict.fromkeys(SENT, ()),
        name=whole.name,
        world_size=whole.world_size,
        num_head_groups=whole.num_head_groups,
        owners=whole.owners,
        cuts=whole.cuts,
        default_save=whole.default_save,
        traits=traits,
    )
    # The ranks' agreement asks for these.
    _ = made_for[1].is_partition, made_for[1].fingerprint
    forward, backward = passes
    passes = forward._replace(plan=plan), backward._replace(plan=plan)
    for transport, square_causal, whole_tile in _uses(passes, rank, kernel):
        run_on_shapes(passes, transport, NoKernel(square_causal, whole_tile))
    return plan


def _uses(
    passes: Passes, rank: int, kernel: Kernel | str | None
) -> Iterator[tuple[NoTransport, bool, bool]]:
    """Transports, and how kernels want tiles cut, that a call may meet: of gloo and of NCCL."""
    payload, n = passes[0].payload, passes[0].plan.world_size
    known = {"cpu": NoTransport(rank, n, receives_ahead=1)}
    if torch.version.cuda is not None:
        node_size = node_size_of(range(n), local_world_size())
        known["cuda"] = NoTransport(rank, n, node_size=node_size)
    width = max(payload.head_dim, payload.v_head_dim)
    for device, transport in known.items():
        found = kernel_for(device, getattr(torch, payload.dtype), width)
        found = found if kernel is None else given_kernel(kernel)
        yield transport, found.square_causal, found.whole_tile


def run_on_shapes(passes: Passes, transport: NoTransport, kernel: NoKernel) -> None:
    """Run both passes of one rank on shapes: the host's work of a call, and nothing else."""
    scores = Scores(1.0, max_logit=passes[0].payload.max_logit)
    problem = Problem(passes, scores, prune=True, kernel=kernel)
    problem = problem._replace(expansion=expansion_on_shapes(passes))
    q, *kv = operands_on_shapes(problem, transport.rank)
    out, lse, kept = forward_pass(problem, transport, q, *kv, keep=True)
    dout = torch.empty_like(out)
    kept = kept[scores.max_logit :]
    backward_pass(problem, transport, (q, *kv, out, lse), kept, (dout, None))


def expansion_on_shapes(passes: Passes) -> Expansion | None:
    """Of a call with latents; what expand takes beside its results is nowhere."""
    payload = passes[0].payload
    if payload.wires.latent is None:
        return None
    like = torch.empty(0, dtype=getattr(torch, payload.dtype), device="meta")
    return Expansion(payload.wires.latent, like, learns=False)


def operands_on_shapes(problem: Problem, rank: int) -> list[Tensor]:
    """A rank's q, k, v, or its q and latents."""
    (plan, _, layouts, groups, payload), tensors = problem.passes[0], []
    heads_of = groups.num_heads, 1 if payload.wires.latent else groups.num_kv_heads
    for side, width in [(of, width) for of in Side for _, width in payload.inputs(of)]:
        heads, owners, layout = heads_of[side], plan.owners[side], layouts[side]
        rows = sum(layout.size(shard) for shard, ranks in enumerate(owners) if rank in ranks)
        dtype = getattr(torch, payload.dtype)
        tensors.append(torch.empty(rows, heads, width, dtype=dtype, device="meta"))
    return tensors


class NoKernel:
    """A kernel that computes nothing; see kernels.protocol.Kernel."""

    name = "none"

    def __init__(self, square_causal: bool = False, whole_tile: bool = False):
        self.square_causal, self.whole_tile = square_causal, whole_tile

    def supports(self, *_: Any, **__: Any) -> None:
        return None

    def forward(self, *args: Any, **_: Any) -> Accumulators:
        q, _, v, _, _, into, *told = args
        if into:
            return into
        out, lse = empty_results(q, v.shape[-1])
        return out, lse, *[lse] * sum(scores.max_logit for scores in told)

    def backward(self, *args: Any, **_: Any) -> Gradients:
        # Adopted are only results of its own; else into are buffers of the pass.
        if args[8]:
            return args[8]
        dq, dk, dv = (x.new_empty(x.shape, dtype=accumulator_dtype(x.dtype)) for x in args[:3])
        return dq, dk, dv


class NoTransport:
    """A transport that moves nothing; by default as NCCL, which posts no receive ahead."""

    bytes_sent = messages_sent = 0

    def __init__(
        self, rank: int, world_size: int, receives_ahead: int = 0, node_size: int | None = None
    ):
        self.rank, self.world_size = rank, world_size
        self.receives_ahead, self.node_size = receives_ahead, node_size

    def exchange(self, *_: Any, **__: Any) -> NoTransport:
        return self

    def wait(self) -> None:
        return

    def gather_records(self, record: Tensor) -> list[Tensor]:
        return [record] * self.world_size

    def finish(self) -> None:
        return
