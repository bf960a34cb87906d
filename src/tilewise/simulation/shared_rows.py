"""The rows of out that every rank holds, after a forward pass, and their dout before a backward
pass, in seconds: what a joint layout adds to a pass of attention.
"""

from __future__ import annotations

from dataclasses import replace

from tilewise.arguments import ITEM_BYTES
from tilewise.layouts.layout import Layout
from tilewise.plan.shifts import Symmetry
from tilewise.simulation.engine import EventLoop
from tilewise.simulation.machine import Machine
from tilewise.simulation.row_moves import RankRows, run_exchanges
from tilewise.simulation.timeline import Timeline
from tilewise.workload import Workload


def with_shared_rows(
    timeline: Timeline,
    symmetry: Symmetry,
    layout: Layout,
    work: Workload,
    machine: Machine,
    backward: bool,
) -> Timeline:
    """A pass and the exchange of the rows that every rank holds.

    Ranks that stand for others send as much as the rank that owns most such rows.

    Args:
        layout: a joint one, of the workload on the ranks of the plan.
    """
    loop = _exchange(layout, work, machine, symmetry, backward)
    exchange_uses = {use.rank: use for use in loop.uses(symmetry.members)}
    uses = tuple(use.plus(exchange_uses[use.rank]) for use in timeline.ranks)
    seconds = max(loop.end_seconds, default=0.0)
    recording = timeline.recording
    if recording is not None:
        # Exchanges of a forward pass follow it, those of a backward pass come first.
        shift = 0.0 if backward else timeline.seconds
        exchange_messages = [span._replace(start=span.start + shift) for span in loop.messages]
        begins = recording.begins
        if backward:
            begins = tuple(tuple(x + seconds for x in row) for row in begins)
            pass_messages = [
                span._replace(start=span.start + seconds) for span in recording.messages
            ]
        else:
            pass_messages = [*recording.messages]
        recording = replace(recording, begins=begins, messages=(*pass_messages, *exchange_messages))
    return Timeline(timeline.seconds + seconds, uses, recording)


def _exchange(
    layout: Layout, work: Workload, machine: Machine, symmetry: Symmetry, backward: bool
) -> EventLoop:
    """Simulate the exchange of rows that every rank holds.

    Owners send them to all other ranks; in backward all other ranks send theirs to the owners.
    """
    n = symmetry.world_size
    row_bytes = work.num_heads * work.widths[1] * ITEM_BYTES(work.dtype)
    num_shared = len(layout.replicated)
    owned = [
        num_owned - (num_held - num_shared)
        for num_owned, num_held in zip(layout.owned.sizes, layout.sizes, strict=True)
    ]
    if symmetry.members > 1:
        owned = [max(owned)] * n

    def rows(rank: int) -> RankRows:
        peers = [peer for peer in range(n) if peer != rank]
        num_mine, num_others = owned[rank], num_shared - owned[rank]
        if backward:
            sends = tuple((peer, owned[peer]) for peer in peers if owned[peer])
            return RankRows(sends, len(peers) if num_mine else 0, num_others, layout.sizes[rank])
        sends = tuple((peer, num_mine) for peer in peers if num_mine)
        return RankRows(sends, sum(owned[peer] > 0 for peer in peers), num_mine, layout.sizes[rank])

    call_seconds = machine.call_seconds[backward]
    call_seconds += 0.0 if backward else machine.agree_seconds * (n - 1)
    name = f"{'dout' if backward else 'out'} of shared rows"
    rounds = [{rank: rows(rank) for rank in symmetry.representatives()}]
    return run_exchanges(rounds, row_bytes, machine, symmetry, name, call_seconds)
