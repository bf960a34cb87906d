"""Loopback on one device: the same sequence over more and more ranks.

One device does the work of all, so that time for one rank's worth of ranks is the ideal, and what
is more is what splitting costs.
"""

from __future__ import annotations

import tilewise as tw
from benchmarks.gpu_parts.case import Row
from benchmarks.gpu_parts.correctness import looped, num_heads
from benchmarks.gpu_parts.session import Session, captured
from benchmarks.gpu_parts.sizes import SCALED_PLANS


def run(session: Session, options: Row) -> Row:
    before, plan = session.allocated(), SCALED_PLANS[options["plan"]]()
    layout = tw.zigzag(options["num_tokens"], plan.world_size)
    q_heads, kv_heads = num_heads(options)
    shards = [
        [
            session.normal(layout.size(rank), heads, options["head_dim"])
            for heads in (q_heads, kv_heads, kv_heads, q_heads)
        ]
        for rank in range(plan.world_size)
    ]
    call = looped(plan, layout, tw.Causal(), shards)
    call()
    run = captured(call, session.device) if options["graph"] else call
    times = session.seconds(run)
    peak = session.peak_bytes(run) - before
    return {**times.row("both_passes"), "peak_bytes": max(peak, 0)}
