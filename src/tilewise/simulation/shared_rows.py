"""The rows of out that every rank holds, after a forward pass, and their dout before a backward
pass, in seconds: what a joint layout adds to a pass of attention.
"""

from __future__ import annotations

from dataclasses import replace

from tilewise.arguments import ITEM_BYTES
from tilewise.plan.ir import Plan
from tilewise.plan.shifts import Symmetry
from tilewise.simulation.disturbance import disturbed
from tilewise.simulation.engine import LOST, EventLoop, Flow, RankOperation, Track
from tilewise.simulation.machine import Machine
from tilewise.simulation.network import Network
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
    n, network = symmetry.world_size, Network(machine, symmetry)
    layout = work.layout_for(n)
    row_bytes = work.num_heads * work.widths[1] * ITEM_BYTES(work.dtype)
    num_shared = len(layout.replicated)
    owned = [
        own - (held - num_shared)
        for own, held in zip(layout.owned.sizes, layout.sizes, strict=True)
    ]
    if symmetry.members > 1:
        owned = [max(owned)] * n
    flows: list[Flow] = []
    number: dict[tuple[int, int], int] = {}
    for rank in symmetry.firsts():
        for peer in range(n):
            size = owned[peer if backward else rank] * row_bytes
            if peer == rank or not size:
                continue
            link, route = network.link(rank, peer), network.message(rank, peer)
            seconds = size / network.bandwidth(link) + machine.carry_seconds
            number[rank, peer] = len(flows)
            name = f"{'dout' if backward else 'out'} of shared rows to {peer}"
            latency = network.latency(link)
            flows.append(Flow(rank, route, link, seconds, size, 1, latency, LOST, name))
    tracks: list[Track] = []
    for rank in symmetry.firsts():
        # Those of ranks that another stands for arrive with its own.
        sends = tuple(x for (src, _), x in number.items() if src == rank)
        recvs = tuple(x for (_, dst), x in number.items() if dst == rank)
        arriving = (n - 1) * owned[rank] if backward else num_shared - owned[rank]
        leaving = num_shared - owned[rank] if backward else owned[rank]
        posting = machine.message_seconds * (len(sends) + bool(arriving) * (n - 1))
        copied = _copy_seconds(machine, (leaving + layout.sizes[rank]) * row_bytes)
        tracks.append(
            Track(
                rank,
                None,
                machine.call_seconds[backward] + _agree_seconds(machine, n, backward),
                (
                    RankOperation(leaving=sends, own=posting),
                    RankOperation(awaited=(*sends, *recvs), own=copied),
                ),
            )
        )
    disturbed_tracks, late = disturbed(tuple(tracks), tuple(flows), machine)
    loop = EventLoop(disturbed_tracks, late, network.routes, network.num_resources)
    stuck = loop.run()
    assert stuck is None, stuck
    return loop


def _copy_seconds(machine: Machine, num_bytes: int) -> float:
    return num_bytes / machine.pack_bandwidth if machine.pack_bandwidth else 0.0


def _agree_seconds(machine: Machine, world_size: int, backward: bool) -> float:
    return 0.0 if backward else machine.agree_seconds * (world_size - 1)
