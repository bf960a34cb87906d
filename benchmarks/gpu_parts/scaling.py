"""Loopback on one device: the same sequence over more and more ranks.

One device does the work of all, so that time for one rank's worth of ranks is the ideal, and what
is more is what splitting costs.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

import tilewise as tw
from benchmarks.gpu_parts.correctness import looped
from benchmarks.gpu_parts.session import Row, Session, captured, normal


def run(session: Session) -> None:
    num_tokens, width = (64, 16) if session.tiny else (32768, 128)
    torch.manual_seed(0)
    for plan in plans(session.tiny):
        for graph in (False, True):
            case = {"plan": plan.name, "ranks": plan.world_size, "num_tokens": num_tokens}
            session.measure(
                "scaling",
                {**case, "heads": "16:16", "graph": graph},
                lambda p=plan, g=graph: figures(session, p, (num_tokens, 16, width), g),
            )


def plans(tiny: bool) -> Iterator[tw.Plan]:
    for n in (1, 2) if tiny else (1, 2, 4, 8):
        yield tw.ring(n)
    if tiny:
        return
    yield tw.mesh(4, q_tile=2)
    yield tw.mesh(8, q_tile=4)
    yield tw.ulysses(8)
    yield tw.double_ring(2, 4)


def figures(session: Session, plan: tw.Plan, shape: tuple[int, int, int], graph: bool) -> Row:
    before = session.allocated()
    layout = tw.zigzag(shape[0], plan.world_size)
    shards = [
        [normal(session, layout.size(rank), *shape[1:]) for _ in range(4)]
        for rank in range(plan.world_size)
    ]
    call = looped(plan, layout, tw.Causal(), shards)
    call()
    run = captured(call, session.device) if graph else call
    seconds = session.seconds(run)
    return {
        "both_passes_ms": round(seconds * 1e3, 3),
        "peak_bytes": max(session.peak_bytes(run) - before, 0),
    }
