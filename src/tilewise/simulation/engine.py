"""The event loop: every rank runs its priced operations in order while messages share the network.

A discrete simulation of three events: a rank's own work ends, a message's latency is over, flows
end. It knows neither plans nor payloads, and what happens together is one event.
"""

import heapq
from collections import defaultdict
from typing import NamedTuple

import numpy as np

from tilewise.simulation.network import CLOSE, FairShare, Route
from tilewise.simulation.timeline import RankUse, Span

LOST = -1
"""The flow of a message that nobody sends."""

ARRIVED = -2
"""The flow of a message without bytes."""


class Flow(NamedTuple):
    """Equal messages that leave a rank at once by one route, to one peer each.

    All that one launch sends to one peer, of one side and role, is one message.
    """

    rank: int
    route: int
    link: str
    seconds: float  # that each takes alone
    num_bytes: int  # of each
    messages: int
    latency: float
    after: int  # the flow before it to the same peers, which is through first; LOST: none
    name: str


class RankOperation(NamedTuple):
    """One operation of a rank: wait for flows, then compute, let flows leave, do its own work.

    Attributes:
        kernel: seconds of kernels.
        own: seconds of the rank's own work: copying, posting, merging.
        leaving, awaited: flows; LOST is waited for in vain.
    """

    kernel: float = 0.0
    own: float = 0.0
    leaving: tuple[int, ...] = ()
    awaited: tuple[int, ...] = ()


class Track(NamedTuple):
    """All that one rank does in a pass.

    Attributes:
        route: of kernels and own work, where ranks share cores.
        call_seconds: own work before the first operation.
    """

    rank: int
    route: int | None
    call_seconds: float
    operations: tuple[RankOperation, ...]


class Deadlock(NamedTuple):
    """A pass in which no rank can go on.

    Attributes:
        rank, operation: the first that waits, and for which of its operations; None: its sends.
        arrived: of every flow that it waits for, whether it is there.
        num_ended: ranks that have done all.
    """

    rank: int
    operation: int | None
    arrived: tuple[bool, ...]
    num_ended: int


AWAIT, COMPUTE, LEAVE = range(3)
"""Parts of an operation that are still to come; own work follows as the last."""


class EventLoop:
    """Runs tracks once. Messages from one rank to another go one after the other, in order.

    Args:
        tracks: one per rank.
        flows: that their operations name.
        routes, num_resources: the network's.
    Attributes:
        begins: of each track when its operations began, then when the last ended.
        messages: spans in the lanes of links.
    """

    def __init__(
        self,
        tracks: tuple[Track, ...],
        flows: tuple[Flow, ...],
        routes: list[Route],
        num_resources: int,
    ):
        self.tracks, self.flows = tracks, flows
        self.bandwidth = FairShare(routes, num_resources)
        num = len(tracks)
        self.index_of_rank = {track.rank: index for index, track in enumerate(tracks)}
        self.place, self.part, self.missing = [-1] * num, [AWAIT] * num, [0] * num
        self.begins: list[list[float]] = [[] for _ in tracks]
        self.computing: list[float | None] = [None] * num  # since when a kernel runs
        self.busy, self.ended = [0.0] * num, [np.nan] * num
        self.done = bytearray(len(flows) + 2)
        self.done[ARRIVED] = 1
        self.waiting: dict[int, list[int]] = defaultdict(list)
        self.following: dict[int, list[int]] = defaultdict(list)
        self.started: dict[int, float] = {}
        self.events: list[tuple[float, int]] = []  # a flow, or -1 - index of a track
        self.starting: list[int] = []
        self.working: list[tuple[int, int, float]] = []  # index of a track, route, seconds
        self.messages: list[Span] = []
        self.now = 0.0

    def run(self) -> Deadlock | None:
        """Run to the end, or until no rank can go on."""
        ready = list(range(len(self.tracks)))
        while True:
            for index in ready:
                self._go_on(index)
            self._start()
            at = self.events[0][0] if self.events else np.inf
            self.now = min(at, self.bandwidth.next_end)
            if self.now == np.inf:
                break
            ready = []
            for flow in self.bandwidth.advance(self.now):
                if flow < 0:
                    ready.append(self._worked(-1 - flow))
                else:
                    ready += self._arrived(flow)
            while self.events and self.events[0][0] <= self.now * (1 + CLOSE):
                _, number = heapq.heappop(self.events)
                if number < 0:
                    ready.append(self._worked(-1 - number))
                else:
                    self._begin(number)
        return self._deadlock() if any(np.isnan(end) for end in self.ended) else None

    def _go_on(self, index: int) -> None:
        """Run a rank until it has to wait."""
        track, begins = self.tracks[index], self.begins[index]
        place, part = self.place[index], self.part[index]
        if place < 0:
            place = 0
            if track.call_seconds:
                self.place[index] = place
                self._work(index, track.call_seconds)
                return
        while place < len(track.operations):
            kernel, own, leaving, awaited = track.operations[place]
            if part == AWAIT:
                begins.append(self.now)
                part = COMPUTE
                if awaited and self._blocked(index, awaited):
                    self.place[index], self.part[index] = place, part
                    return
            if part == COMPUTE:
                part = LEAVE
                if kernel:
                    self.place[index], self.part[index] = place, part
                    self.computing[index] = self.now
                    self._work(index, kernel)
                    return
            for flow in leaving:
                self._launch(flow)
            place, part = place + 1, AWAIT
            if own:
                self.place[index], self.part[index] = place, part
                self._work(index, own)
                return
        if place == len(track.operations):
            begins.append(self.now)
            self.place[index] = place + 1
            if self._blocked(index, [flow for x in track.operations for flow in x.leaving]):
                return
        self.ended[index] = self.now

    def _blocked(self, index: int, flows: tuple[int, ...] | list[int]) -> bool:
        """Return whether a rank has to wait for any of these; if so, it is woken when all are
        there.
        """
        late = {flow for flow in flows if not self.done[flow]}
        self.missing[index] = len(late)
        for flow in late:
            self.waiting[flow].append(index)
        return bool(late)

    def _work(self, index: int, seconds: float) -> None:
        """Keep a rank busy, and the cores that its route names."""
        route = self.tracks[index].route
        if route is None:
            heapq.heappush(self.events, (self.now + seconds, -1 - index))
        else:
            self.working.append((index, route, seconds))

    def _worked(self, index: int) -> int:
        since = self.computing[index]
        if since is not None:
            self.busy[index] += self.now - since
            self.computing[index] = None
        return index

    def _launch(self, flow: int) -> None:
        latency = self.flows[flow].latency
        heapq.heappush(self.events, (self.now + latency, flow))

    def _begin(self, flow: int) -> None:
        """A message's first byte leaves, once those before it to the same peer are through."""
        before = self.flows[flow].after
        if before != LOST and not self.done[before]:
            self.following[before].append(flow)
            return
        self.started[flow] = self.now
        self.starting.append(flow)

    def _arrived(self, flow: int) -> list[int]:
        """All of a flow's messages are there; the tracks that can go on."""
        self.done[flow] = 1
        sent = self.flows[flow]
        start = self.started.pop(flow)
        self.messages.append(Span(sent.rank, sent.link, sent.name, start, self.now - start))
        for later in self.following.pop(flow, ()):
            self._begin(later)
        woken = []
        for index in self.waiting.pop(flow, ()):
            self.missing[index] -= 1
            if not self.missing[index]:
                woken.append(index)
        return woken

    def _start(self) -> None:
        """Hand what begins now to the network, together."""
        if not (self.starting or self.working):
            return
        flows = [self.flows[flow] for flow in self.starting]
        ids = [*self.starting, *(-1 - index for index, _, _ in self.working)]
        routes = [*(f.route for f in flows), *(route for _, route, _ in self.working)]
        counts = [*(f.messages for f in flows), *(1 for _ in self.working)]
        amounts = [*(f.seconds for f in flows), *(seconds for _, _, seconds in self.working)]
        self.bandwidth.add(ids, np.array(routes), np.array(counts), np.array(amounts, float))
        self.starting, self.working = [], []

    def _deadlock(self) -> Deadlock:
        stuck = [index for index, end in enumerate(self.ended) if np.isnan(end)]
        track, place = self.tracks[stuck[0]], self.place[stuck[0]]
        num_ended = len(self.ended) - len(stuck)
        if place >= len(track.operations):
            return Deadlock(track.rank, None, (), num_ended)
        arrived = tuple(bool(self.done[flow]) for flow in track.operations[place].awaited)
        return Deadlock(track.rank, place, arrived, num_ended)

    def uses(self, members: int) -> tuple[RankUse, ...]:
        """Return how each rank spent the pass; each stands for so many ranks."""
        total = max(self.ended, default=0.0)
        sent: list[dict[str, int]] = [defaultdict(int) for _ in self.tracks]
        for flow in self.flows:
            sent[self.index_of_rank[flow.rank]][flow.link] += flow.num_bytes * flow.messages
        return tuple(
            RankUse(track.rank, members, busy, end - busy, total - end, dict(links))
            for track, busy, end, links in zip(
                self.tracks, self.busy, self.ended, sent, strict=True
            )
        )
