"""The rows of out that every rank holds, after a forward pass, and their dout before a backward
pass, in seconds: what a joint layout adds to a pass of attention.
"""

from __future__ import annotations

from dataclasses import replace

from tilewise.arguments import ITEM_BYTES
from tilewise.plan.ir import Plan
from tilewise.plan.shifts import Symmetry
from tilewise.simulation.engine import EventLoop
from tilewise.simulation.machine import Machine
from tilewise.simulation.row_moves import RankRows, run_exchanges
from tilewise.simulation.timeline import RankUse, Timeline
from tilewise.workload import Workload


def with_shared_rows(
    timeline: Timeline,
    symmetry: Symmetry,
    plan: Plan,
    work: Workload,
    machine: Machine,
    backward: bool,
) -> Timeline:
    """A pass and the exchange of the rows that every rank holds; without such, as it is.

    Ranks that stand for others send as much as the rank that owns most such rows.
    """
    layout = work.layout_for(plan.world_size)
    if plan.replicated_queries or not len(layout.replicated):
        return timeline
    loop = _exchange(work, machine, symmetry, backward)
    more = {use.rank: use for use in loop.uses(symmetry.members)}
    uses = tuple(_sum(use, more[use.rank]) for use in timeline.ranks)
    seconds = max(loop.ended, default=0.0)
    recording = timeline.recording
    if recording is not None:
        # Exchanges of a forward pass follow it, those of a backward pass come first.
        shift = 0.0 if backward else timeline.seconds
        late = [span._replace(start=span.start + shift) for span in loop.messages]
        begins = recording.begins
        if backward:
            begins = tuple(tuple(x + seconds for x in row) for row in begins)
            own = [span._replace(start=span.start + seconds) for span in recording.messages]
        else:
            own = [*recording.messages]
        recording = replace(recording, begins=begins, messages=(*own, *late))
    return Timeline(timeline.seconds + seconds, uses, recording)


def _sum(one: RankUse, other: RankUse) -> RankUse:
    links = {*one.bytes_by_link, *other.bytes_by_link}
    return one._replace(
        exposed_seconds=one.exposed_seconds + other.exposed_seconds,
        idle_seconds=one.idle_seconds + other.idle_seconds,
        bytes_by_link={
            link: one.bytes_by_link.get(link, 0) + other.bytes_by_link.get(link, 0)
            for link in links
        },
    )


def _exchange(work: Workload, machine: Machine, symmetry: Symmetry, backward: bool) -> EventLoop:
    """Owners send their rows to all others; backward, all others send theirs to the owners."""
    n, layout = symmetry.world_size, work.layout_for(symmetry.world_size)
    row_bytes = work.num_heads * work.widths[1] * ITEM_BYTES(work.dtype)
    num_shared = len(layout.replicated)
    owned = [
        own - (held - num_shared)
        for own, held in zip(layout.owned.sizes, layout.sizes, strict=True)
    ]
    if symmetry.members > 1:
        owned = [max(owned)] * n

    def rows(rank: int) -> RankRows:
        peers = [peer for peer in range(n) if peer != rank]
        mine, others = owned[rank], num_shared - owned[rank]
        if backward:
            sends = tuple((peer, owned[peer]) for peer in peers if owned[peer])
            return RankRows(sends, len(peers) if mine else 0, others, layout.sizes[rank])
        sends = tuple((peer, mine) for peer in peers if mine)
        return RankRows(sends, sum(owned[peer] > 0 for peer in peers), mine, layout.sizes[rank])

    begin = machine.call_seconds[backward]
    begin += 0.0 if backward else machine.agree_seconds * (n - 1)
    name = f"{'dout' if backward else 'out'} of shared rows"
    rounds = [{rank: rows(rank) for rank in symmetry.firsts()}]
    return run_exchanges(rounds, row_bytes, machine, symmetry, name, begin)
