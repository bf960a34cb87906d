"""The replay: every rank runs its program in order while messages share the network.

A discrete simulation of three events: a kernel ends, a message's latency is over, flows end. It
knows neither plans nor payloads, and what happens together is one event.
"""

import heapq
import json
from collections import defaultdict
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np

from tilewise.compiler.program import Compute, wait_label
from tilewise.simulation.fair_share import CLOSE, FairShare, Route
from tilewise.simulation.network import LINKS
from tilewise.simulation.timeline_ops import LOST, HostOp, KernelOp, PricedPrograms, SendOp, WaitOp


class Span(NamedTuple):
    """What a rank did for how long: lane "compute", "wait" or the class of a link."""

    rank: int
    lane: str
    name: str
    start: float
    seconds: float


class RankUse(NamedTuple):
    """How a rank spent a pass; compute + exposed + idle seconds make up the pass.

    Attributes:
        exposed_seconds: waiting for messages, its own sends at the end included, or packing,
            posting and merging them, and what a call takes around its program.
    """

    rank: int
    members: int  # ranks that did the same
    compute_seconds: float
    exposed_seconds: float
    idle_seconds: float  # nothing left to do while others went on
    bytes_by_link: dict[str, int]  # sent, by the class of the link


class Timeline(NamedTuple):
    """One pass: how long, by whom, and what happened when."""

    seconds: float
    ranks: tuple[RankUse, ...]
    spans: tuple[Span, ...]


class EventLoop:
    """Runs a score once. Messages from one rank to another go one after the other, in order.

    Args:
        routes, num_resources: the network's.
    """

    def __init__(self, score: PricedPrograms, routes: list[Route], num_resources: int):
        self.score = score
        self.fluid = FairShare(routes, num_resources)
        num = len(score.tracks)
        self.track_of = {track.rank: index for index, track in enumerate(score.tracks)}
        self.place, self.missing, self.ended = [0] * num, [0] * num, [np.nan] * num
        self.busy = [0.0] * num
        self.done = bytearray(len(score.flows) + 1)  # the last one: LOST
        self.waiting: dict[int, list[int]] = defaultdict(list)
        self.following: dict[int, list[int]] = defaultdict(list)
        self.blocked: list[tuple[float, str, str]] = [(0.0, "", "")] * num
        self.started: dict[int, float] = {}
        self.events: list[tuple[float, int]] = []  # a flow, or -1 - track
        self.starting: list[int] = []
        self.kernels: list[tuple[int, int, float]] = []  # track, route, seconds
        self.spans: list[Span] = []
        self.now = 0.0

    def run(self) -> None:
        """Replay to the end.

        Raises:
            RuntimeError: if no rank can go on.
        """
        ready = list(range(len(self.score.tracks)))
        while True:
            for index in ready:
                self._go_on(index)
            self._start()
            at = self.events[0][0] if self.events else np.inf
            self.now = min(at, self.fluid.next_end)
            if self.now == np.inf:
                break
            ready = []
            for flow in self.fluid.advance(self.now):
                if flow < 0:
                    ready.append(self._wake(-1 - flow))
                else:
                    ready += self._arrived(flow)
            while self.events and self.events[0][0] <= self.now * (1 + CLOSE):
                _, number = heapq.heappop(self.events)
                if number < 0:
                    ready.append(self._wake(-1 - number))
                else:
                    self._begin(number)
        if any(np.isnan(end) for end in self.ended):
            raise RuntimeError(self._deadlock())

    def _go_on(self, index: int) -> None:
        """Run a rank until it has to wait."""
        track = self.score.tracks[index]
        while self.place[index] < len(track.ops):
            op = track.ops[self.place[index]]
            self.place[index] += 1
            match op:
                case KernelOp(seconds, route, tile):
                    if seconds:
                        self._work(index, seconds, route, ("compute", str(Compute(tile))))
                        return
                case HostOp(seconds, route, name):
                    self._work(index, seconds, route, ("wait", name))
                    return
                case SendOp(flows):
                    for flow in flows:
                        self._launch(flow)
                case WaitOp(flows, hops):
                    late = {flow for flow in flows if not self.done[flow]}
                    if late:
                        self.missing[index] = len(late)
                        for flow in late:
                            self.waiting[flow].append(index)
                        self.blocked[index] = self.now, "wait", wait_label(hop for _, hop in hops)
                        return
        self.ended[index] = self.now

    def _work(self, index: int, seconds: float, route: int | None, what: tuple[str, str]) -> None:
        """Keep a rank busy, and the cores that its route names."""
        self.blocked[index] = self.now, *what
        if route is None:
            heapq.heappush(self.events, (self.now + seconds, -1 - index))
        else:
            self.kernels.append((index, route, seconds))

    def _wake(self, index: int) -> int:
        start, lane, name = self.blocked[index]
        seconds = self.now - start
        if lane == "compute":
            self.busy[index] += seconds
        if seconds:
            self.spans.append(Span(self.score.tracks[index].rank, lane, name, start, seconds))
        return index

    def _launch(self, flow: int) -> None:
        latency = self.score.flows[flow].latency
        heapq.heappush(self.events, (self.now + latency, flow))

    def _begin(self, flow: int) -> None:
        """A message's first byte leaves, once those before it to the same peer are through."""
        before = self.score.flows[flow].after
        if before != LOST and not self.done[before]:
            self.following[before].append(flow)
            return
        self.started[flow] = self.now
        self.starting.append(flow)

    def _arrived(self, flow: int) -> list[int]:
        """All of a flow's messages are there; the tracks that can go on."""
        self.done[flow] = 1
        sent = self.score.flows[flow]
        start = self.started.pop(flow)
        self.spans.append(Span(sent.rank, sent.link, sent.name, start, self.now - start))
        for later in self.following.pop(flow, ()):
            self._begin(later)
        woken = []
        for index in self.waiting.pop(flow, ()):
            self.missing[index] -= 1
            if not self.missing[index]:
                woken.append(self._wake(index))
        return woken

    def _start(self) -> None:
        """Hand what begins now to the network, together."""
        if not (self.starting or self.kernels):
            return
        flows = [self.score.flows[flow] for flow in self.starting]
        ids = [*self.starting, *(-1 - index for index, _, _ in self.kernels)]
        routes = [*(f.route for f in flows), *(route for _, route, _ in self.kernels)]
        counts = [*(f.messages for f in flows), *(1 for _ in self.kernels)]
        amounts = [*(f.seconds for f in flows), *(seconds for _, _, seconds in self.kernels)]
        self.fluid.add(ids, np.array(routes), np.array(counts), np.array(amounts, float))
        self.starting, self.kernels = [], []

    def _deadlock(self) -> str:
        stuck = [index for index, end in enumerate(self.ended) if np.isnan(end)]
        track = self.score.tracks[stuck[0]]
        op = track.ops[self.place[stuck[0]] - 1]
        what = "its sends"
        if isinstance(op, WaitOp):
            for flow, (step, hop) in zip(op.flows, op.hops, strict=False):
                if flow == LOST or not self.done[flow]:
                    what = f"step {step}, {hop.item} from rank {hop.src}"
                    break
        ended = len(self.ended) - len(stuck)
        return (
            f"no rank can go on: rank {track.rank} waits for {what}; "
            f"{ended} of {len(self.ended)} ranks have ended"
        )

    def timeline(self, members: int) -> Timeline:
        """What was recorded; each track stands for so many ranks."""
        total = max(self.ended, default=0.0)
        sent: list[dict[str, int]] = [defaultdict(int) for _ in self.score.tracks]
        for flow in self.score.flows:
            sent[self.track_of[flow.rank]][flow.link] += flow.num_bytes * flow.messages
        ranks = (
            RankUse(rank, members, busy, end - busy, total - end, dict(links))
            for rank, busy, end, links in zip(
                (track.rank for track in self.score.tracks),
                self.busy,
                self.ended,
                sent,
                strict=True,
            )
        )
        return Timeline(total, tuple(ranks), tuple(self.spans))


LANES = ("compute", "wait", *LINKS)


def trace_text(passes: tuple[Timeline, Timeline]) -> str:
    """Timelines for Chrome's tracing page and Perfetto, a process per rank that was replayed."""
    events = [*_names(passes), *_events(passes)]
    return json.dumps({"traceEvents": events, "displayTimeUnit": "ns"})


def _names(passes: tuple[Timeline, Timeline]) -> Iterator[dict[str, Any]]:
    members = {use.rank: use.members for timeline in passes for use in timeline.ranks}
    for rank, number in sorted(members.items()):
        name = f"rank {rank}" + f" and {number - 1} like it" * (number > 1)
        yield {"ph": "M", "name": "process_name", "pid": rank, "args": {"name": name}}
        for lane, what in enumerate(LANES):
            args = {"name": what}
            yield {"ph": "M", "name": "thread_name", "pid": rank, "tid": lane, "args": args}


def _events(passes: tuple[Timeline, Timeline]) -> Iterator[dict[str, Any]]:
    begin = 0.0
    for what, timeline in zip(("forward", "backward"), passes, strict=True):
        for rank, lane, name, start, seconds in timeline.spans:
            yield {
                "ph": "X",
                "name": name or lane,
                "cat": what,
                "pid": rank,
                "tid": LANES.index(lane),
                "ts": round((begin + start) * 1e6, 6),
                "dur": round(seconds * 1e6, 6),
            }
        begin += timeline.seconds
