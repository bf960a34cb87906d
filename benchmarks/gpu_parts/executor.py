"""One rank of a plan, a mesh of 256 devices or another: both passes against one kernel call of the
same area.

All messages are there at once, so what is more than the one call is the executor's: smaller
tiles, merges, copies into messages, launches. Peak memory stands beside the planner's figure, and
the bytes that are counted beside kernels: over the time beside the one call they are a bandwidth.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable
from typing import Any, NamedTuple

import tilewise as tw
from benchmarks.gpu_parts.case import Row
from benchmarks.gpu_parts.correctness import num_heads
from benchmarks.gpu_parts.instant import Instant
from benchmarks.gpu_parts.session import Run, Session, captured
from benchmarks.gpu_parts.sizes import mask_named
from tilewise.execution.call import Call
from tilewise.execution.forward_backward import backward_pass, bound_code, forward_pass
from tilewise.execution.resolve import resolve_once
from tilewise.kernels.protocol import Kernel
from tilewise.kernels.registry import kernel_named
from tilewise.tiles.calls import KernelCall as KernelCall
from tilewise.tiles.calls import Kind

TIMES = 5  # passes in a row, where one takes little


def plan_of(options: Row) -> tw.Plan:
    """The plan that options describe.

    Args:
        options: `world_size`; `q_tile` of a mesh, else it is a ring; `schedule` of the mesh;
            `head_groups`: of a Ulysses around it.
    """
    groups, q_tile = options.get("head_groups", 1), options.get("q_tile")
    world = options["world_size"] // groups
    schedule = options.get("schedule", "greedy")
    inner = tw.mesh(world, q_tile=q_tile, schedule=schedule) if q_tile else tw.ring(world)
    return tw.ulysses(groups, inner=inner) if groups > 1 else inner


class Shape(NamedTuple):
    """A plan, its sequence and mask."""

    plan: tw.Plan
    num_tokens: int
    heads: tuple[int, int]
    head_dim: int
    mask: tw.masks.Mask

    @classmethod
    def of(cls, options: Row) -> Shape:
        tokens = options["num_tokens"]
        mask = mask_named(options["mask"], tokens)
        return cls(plan_of(options), tokens, num_heads(options), options["head_dim"], mask)

    @property
    def call_heads(self) -> tuple[int, int]:
        """Query and KV heads of one kernel call."""
        groups = self.plan.num_head_groups
        return self.heads[0] // groups, max(1, self.heads[1] // groups)


class Watched:
    """A kernel that counts its calls and their area."""

    def __init__(self, kernel: Kernel):
        self.kernel, self.calls, self.area = kernel, 0, 0
        self.name, self.square_causal = kernel.name, kernel.square_causal
        self.whole_tile, self.supports = kernel.whole_tile, kernel.supports

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        self._count(args[3])
        return self.kernel.forward(*args, **kwargs)

    def backward(self, *args: Any, **kwargs: Any) -> Any:
        self._count(args[6])
        return self.kernel.backward(*args, **kwargs)

    def _count(self, call: KernelCall) -> None:
        self.calls += 1
        self.area += call.area


class Rank:
    """One rank's tensors, transport and passes."""

    def __init__(self, session: Session, shape: Shape, kernel: Any):
        plan, num_tokens, heads, width, mask = shape
        world = plan.world_size
        layout = tw.zigzag(num_tokens, world)
        self.rank, rows = world // 3, layout.size(world // 3)
        self.q, self.dout = session.normal(2, rows, heads[0], width)
        self.k, self.v = session.normal(2, rows, heads[1], width)
        call = Call(plan=plan, layout=layout, mask=mask, needs_grad=True, kernel=kernel)
        # as attention does: without it every pass would compile and bind its code anew
        self.problem = resolve_once(self.q, self.k, self.v, call, self.rank, world)
        row_bytes = max(heads) * (4 * width + 16)  # at least an item's
        self.transport = Instant(self.rank, world, session.device, rows * row_bytes)
        self.out, self.lse, self.kept = self.forward()
        # Of messages that are no real partials: gradients take any finite lse.
        self.lse.fill_(math.log(num_tokens))

    def forward(self) -> Any:
        return forward_pass(self.problem, self.transport, self.q, self.k, self.v, keep=True)

    def backward(self) -> Any:
        saved = self.q, self.k, self.v, self.out, self.lse
        return backward_pass(self.problem, self.transport, saved, self.kept, (self.dout, None))


def run(session: Session, options: Row) -> Row:
    shape, kernel = Shape.of(options), kernel_named(options["kernel"])
    before, watched = session.allocated(), Watched(kernel)
    rank = Rank(session, shape, watched)
    row: Row = {"forward_calls": watched.calls, "forward_area": watched.area}
    row |= memory(session, rank, before, backward=False)
    area, watched.calls, watched.area = row["forward_area"], 0, 0
    rank.backward()
    row |= {"backward_calls": watched.calls, "backward_area": watched.area}
    row |= memory(session, rank, before, backward=True)
    flops = 4 * area * shape.call_heads[0] * shape.head_dim
    ones = one_call(session, shape, kernel, area)
    passes = (("forward", rank.forward, flops), ("backward", rank.backward, 2.5 * flops))
    for (what, run, work), single in zip(passes, ones, strict=True):
        runs = {"rank": run, "one call": single}
        if "graph" in options.get("beside", ()):
            try:
                runs["graph"] = captured(run, session.device)
            except RuntimeError as error:  # the rank's own figures are worth having
                row[f"{what}_graph_missing"] = str(error).partition("\n")[0][:200]
        times = session.compare(runs)
        row |= times["rank"].row(what) | times["one call"].row(f"{what}_one_call")
        row |= times["rank"].share(what, times["one call"])
        row |= times["graph"].row(f"{what}_graph") if "graph" in times else {}
        beside = times["rank"].median - times["one call"].median
        if beside > 0:
            row[f"{what}_beside_tbps"] = round(row[f"{what}_traffic_bytes"] / beside / 1e12, 3)
        row[f"{what}_tflops"] = times["rank"].tflops(work)
        row[f"{what}_one_call_tflops"] = times["one call"].tflops(work)
        row[f"{what}_host_ms"] = round(statistics.median(times["rank"].host) * 1e3, 3)
        row |= session.steadiness(what, run)
    return row


def one_call(session: Session, shape: Shape, kernel: Kernel, area: int) -> tuple[Run, Run]:
    """Both passes of one rectangle, or one triangle, of so many cells."""
    if isinstance(shape.mask, tw.Causal):
        rows = keys = math.isqrt(2 * area)
        kind = Kind.CAUSAL
    else:
        rows, kind = math.isqrt(area), Kind.FULL
        keys = area // rows
    return single(session, kernel, (rows, keys), kind, shape.call_heads, shape.head_dim)


def single(
    session: Session,
    kernel: Kernel,
    sizes: tuple[int, int],
    kind: Kind,
    heads: tuple[int, int],
    width: int,
) -> tuple[Run, Run]:
    """Both passes of a kernel on one call of so many rows and keys."""
    rows, keys = sizes
    call = KernelCall(((0, rows),), ((0, keys),), kind)
    return call_passes(session, kernel, call, heads, width)


def call_passes(
    session: Session, kernel: Kernel, call: KernelCall, heads: tuple[int, int], width: int
) -> tuple[Run, Run]:
    """Both passes of a kernel on a call, with operands of its own."""
    q, dout = session.normal(2, call.num_q, 1, heads[0], width)
    k, v = session.normal(2, call.num_k, 1, heads[1], width)
    scale = width**-0.5
    out, lse = kernel.forward(q, k, v, call, scale)
    delta = (out.float() * dout.float()).sum(-1)
    return (
        lambda: kernel.forward(q, k, v, call, scale),
        lambda: kernel.backward(q, k, v, dout, lse, delta, call, scale),
    )


def memory(session: Session, rank: Rank, before: int, *, backward: bool) -> Row:
    """A pass's peak bytes, those that the planner counts for the rank, and what it moves.

    The first includes kernels' own workspaces, the others do not.
    """
    what = "backward" if backward else "forward"
    later = () if backward else (rank.out, rank.lse, rank.dout)
    apart = before + rank.transport.num_bytes + sum(x.nbytes for x in later)
    peak = session.peak_bytes(rank.backward if backward else rank.forward)
    keep = rank.problem.gathered and not backward
    code = bound_code(
        rank.problem, rank.transport, rank.q[:, None], backward=backward, keep=keep
    ).code
    return {
        f"{what}_peak_bytes": max(peak - apart, 0),
        f"{what}_planned_bytes": code.peak_bytes,
        f"{what}_traffic_bytes": code.traffic_bytes,
    }


def graphs(session: Session, options: Row) -> Row:
    """What a captured graph saves, where launches take longer than kernels."""
    rank = Rank(session, Shape.of(options), kernel_named(options["kernel"]))
    row: Row = {}
    for what, run in (("forward", rank.forward), ("backward", rank.backward)):
        runs: dict[str, Callable[[], object]] = {
            "eager": run,
            "graph": captured(run, session.device),
        }
        times = session.compare(runs, times=TIMES, cold=False)
        row |= times["eager"].row(f"{what}_eager") | times["graph"].row(f"{what}_graph")
        row[f"{what}_gain"] = round(times["eager"].median / times["graph"].median, 3)
    return row
