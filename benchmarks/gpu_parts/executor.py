"""One rank of a mesh plan of 256 devices: both passes against one kernel call of the same area.

All messages are there at once, so what is more than the one call is the executor's: smaller
tiles, merges, copies into messages, launches. Peak memory stands beside the planner's figure.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch

import tilewise as tw
from benchmarks.gpu_parts.instant import Instant
from benchmarks.gpu_parts.session import Row, Session, captured, normal
from tilewise.calls import Call as KernelCall
from tilewise.calls import Kind
from tilewise.kernels.protocol import Kernel
from tilewise.kernels.providers import PROVIDERS, kernel_named
from tilewise.problem import Call, Problem, make_problem
from tilewise.simulator import simulate_pass
from tilewise.two_passes import backward_pass, forward_pass

HEAD_DIM = 128


class Shape(NamedTuple):
    """A world, its mesh and its sequence."""

    world_size: int
    q_tile: int
    num_tokens: int
    heads: tuple[int, int]
    head_dim: int = HEAD_DIM


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


def run(session: Session) -> None:
    full = Shape(256, 16, 1 << 20, (32, 32))
    shapes = [full, full._replace(heads=(64, 8))]
    if session.tiny:
        shapes = [Shape(16, 4, 16 * 24, (4, 2), 16)]
    for shape in shapes:
        for mask in (tw.Causal(), tw.Full()):
            for name in able(session, shape.head_dim):
                case = {"kernel": name, "mask": str(mask), **described(shape)}
                body = partial(against_one_call, session, shape, mask, name)
                session.measure("executor", case, body)


def graphs(session: Session) -> None:
    """What a captured graph saves, where launches take longer than kernels."""
    for tokens in (16,) if session.tiny else (64, 512, 4096):
        for world_size, q_tile in ((16, 4),) if session.tiny else ((256, 16), (64, 8)):
            width = 16 if session.tiny else HEAD_DIM
            shape = Shape(world_size, q_tile, tokens * world_size, (8, 8), width)
            for name in able(session, width):
                case = {"kernel": name, **described(shape)}
                body = partial(graph_gain, session, shape, name)
                session.measure("graphs", case, body)


def able(session: Session, head_dim: int) -> list[str]:
    """Providers of both passes without quadratic memory."""
    return [
        name
        for name in PROVIDERS
        if name not in ("reference", "efficient", "flex")
        and kernel_named(name).supports(session.device.type, torch.bfloat16, head_dim) is None
    ]


def described(shape: Shape) -> Row:
    row = shape._asdict()
    return {**row, "heads": f"{shape.heads[0]}:{shape.heads[1]}"}


class Rank:
    """One rank's tensors, transport and passes."""

    def __init__(self, session: Session, shape: Shape, mask: tw.Mask, kernel: Any):
        world, a, num_tokens, heads, width = shape
        layout = tw.zigzag(num_tokens, world)
        self.rank, rows = world // 3, layout.size(world // 3)
        self.q, self.dout = normal(session, 2, rows, heads[0], width)
        self.k, self.v = normal(session, 2, rows, heads[1], width)
        forward, backward = (
            tw.mesh(world, q_tile=a, kv_bytes=2 * heads[1] / heads[0], backward=b)
            for b in (False, True)
        )
        call = Call(forward, layout, mask, backward, needs_grad=True)
        made = make_problem(self.q, self.k, self.v, call, self.rank, world)
        self.problem: Problem = made._replace(kernel=kernel)
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


def against_one_call(session: Session, shape: Shape, mask: tw.Mask, name: str) -> Row:
    torch.manual_seed(0)
    before, kernel = session.allocated(), kernel_named(name)
    watched = Watched(kernel)
    rank = Rank(session, shape, mask, watched)
    row: Row = {"forward_calls": watched.calls, "forward_area": watched.area}
    row |= memory(session, (shape, mask), rank, before, backward=False)
    area, watched.calls, watched.area = row["forward_area"], 0, 0
    rank.backward()
    row |= {"backward_calls": watched.calls, "backward_area": watched.area}
    row |= memory(session, (shape, mask), rank, before, backward=True)
    one = one_call(session, shape, mask, kernel, area)
    passes = (("forward", rank.forward, one[0]), ("backward", rank.backward, one[1]))
    for what, run, single in passes:
        seconds, alone = session.seconds(run), session.seconds(single)
        row[f"{what}_ms"] = round(seconds * 1e3, 3)
        row[f"{what}_host_ms"] = round(session.host_seconds(run) * 1e3, 3)
        row[f"{what}_one_call_ms"] = round(alone * 1e3, 3)
        row[f"{what}_share"] = round(alone / seconds, 4)
    return row


def one_call(
    session: Session, shape: Shape, mask: tw.Mask, kernel: Kernel, area: int
) -> tuple[Callable[[], object], Callable[[], object]]:
    """Both passes of one rectangle, or one triangle, of so many cells."""
    if isinstance(mask, tw.Causal):
        rows = keys = math.isqrt(2 * area)
        kind = Kind.CAUSAL
    else:
        rows, kind = shape.num_tokens // shape.world_size * shape.q_tile, Kind.FULL
        keys = area // rows
    call = KernelCall(((0, rows),), ((0, keys),), kind)
    heads, width = shape.heads, shape.head_dim
    q, dout = normal(session, 2, rows, 1, heads[0], width)
    k, v = normal(session, 2, keys, 1, heads[1], width)
    scale = width**-0.5
    out, lse = kernel.forward(q, k, v, call, scale)
    delta = (out.float() * dout.float()).sum(-1)
    return (
        lambda: kernel.forward(q, k, v, call, scale),
        lambda: kernel.backward(q, k, v, dout, lse, delta, call, scale),
    )


def memory(
    session: Session, given: tuple[Shape, tw.Mask], rank: Rank, before: int, *, backward: bool
) -> Row:
    """A bound pass's peak bytes and the planner's figure.

    The first includes the pass's new results and kernels' own workspaces, the second does not.
    """
    shape, mask = given
    work = tw.Workload(
        num_tokens=shape.num_tokens,
        num_heads=shape.heads[0],
        num_kv_heads=shape.heads[1],
        head_dim=shape.head_dim,
        mask=mask,
    )
    what = "backward" if backward else "forward"
    later = () if backward else (rank.out, rank.lse, rank.dout)
    apart = before + rank.transport.num_bytes + sum(x.nbytes for x in later)
    peak = session.peak_bytes(rank.backward if backward else rank.forward)
    plan = rank.problem.plans[backward]
    timeline, _ = simulate_pass(plan, work, tw.Machine.preset("h100x8"), backward)
    planned = max(use.peak_bytes for use in timeline.ranks)
    return {f"{what}_peak_bytes": max(peak - apart, 0), f"{what}_planned_bytes": planned}


def graph_gain(session: Session, shape: Shape, name: str) -> Row:
    rank = Rank(session, shape, tw.Causal(), kernel_named(name))
    row: Row = {}
    for what, run in (("forward", rank.forward), ("backward", rank.backward)):
        eager, replayed = session.seconds(run), session.seconds(captured(run, session.device))
        row[f"{what}_eager_ms"], row[f"{what}_graph_ms"] = (
            round(x * 1e3, 4) for x in (eager, replayed)
        )
        row[f"{what}_gain"] = round(eager / replayed, 3)
    return row
