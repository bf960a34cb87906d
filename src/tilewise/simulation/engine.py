"""The event loop: every rank runs its priced operations in order while messages share the network.

A discrete simulation of three events: a rank's own work ends, a message's latency is over, flows
end. It knows neither plans nor payloads, and what happens together is one event. A message leaves
when its sender has launched it and its receiver has posted the receive, as gloo's and NCCL's do.
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
        posted: flows of which this operation posts a receive, once for each message. A flow leaves
            when all its receives that any rank posts are posted.
        label, lane, kind, traffic_bytes: as of the Span that it becomes.
    """

    kernel: float = 0.0
    own: float = 0.0
    leaving: tuple[int, ...] = ()
    awaited: tuple[int, ...] = ()
    posted: tuple[int, ...] = ()
    label: str = ""
    lane: str = "copy"
    kind: str = ""
    traffic_bytes: int = 0


class PricedProgram(NamedTuple):
    """The operations of one rank in a pass, with their seconds.

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
"""Stages of an operation, in order; the rank's own work is the last one."""


class EventLoop:
    """Runs programs once. Messages from one rank to another go one after the other, in order.

    Args:
        programs: one per rank.
        flows: that their operations name.
        routes, num_resources: the network's.
    Attributes:
        begins: for each program the times at which its operations began, and the last one ended.
        messages: spans in the lanes of links.
    """

    def __init__(
        self,
        programs: tuple[PricedProgram, ...],
        flows: tuple[Flow, ...],
        routes: list[Route],
        num_resources: int,
    ):
        self.programs, self.flows = programs, flows
        self.bandwidth = FairShare(routes, num_resources)
        num_ranks = len(programs)
        self.index_of_rank = {program.rank: index for index, program in enumerate(programs)}
        self.operation_index = [-1] * num_ranks
        self.stage, self.num_missing = [AWAIT] * num_ranks, [0] * num_ranks
        self.begins: list[list[float]] = [[] for _ in programs]
        self.work_starts = [0.0] * num_ranks  # of the kernel or own work that runs, or ran last
        self.runs_kernel = bytearray(num_ranks)
        self.kernel_seconds, self.own_seconds = [0.0] * num_ranks, [0.0] * num_ranks
        self.end_seconds = [np.nan] * num_ranks
        self.num_unready = [1] * len(flows)  # 1 for the sender, 1 for each receive to be posted
        for program in programs:
            for operation in program.operations:
                for flow in operation.posted:
                    self.num_unready[flow] += 1
        self.flow_done = bytearray(len(flows) + 2)
        self.flow_done[ARRIVED] = 1
        self.ranks_by_missing_flow: dict[int, list[int]] = defaultdict(list)
        self.following_flows: dict[int, list[int]] = defaultdict(list)
        self.flow_starts: dict[int, float] = {}
        self.events: list[tuple[float, int]] = []  # a flow, or -1 - index of a rank
        self.starting_flows: list[int] = []
        self.starting_work: list[tuple[int, int, float]] = []  # index of a rank, route, seconds
        self.messages: list[Span] = []
        self.now = 0.0

    def run(self) -> Deadlock | None:
        """Run to the end, or until no rank can go on."""
        ready = list(range(len(self.programs)))
        while True:
            for index in ready:
                self._go_on(index)
            self._start()
            next_event = self.events[0][0] if self.events else np.inf
            self.now = min(next_event, self.bandwidth.next_end)
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
        return self._deadlock() if any(np.isnan(end) for end in self.end_seconds) else None

    def _go_on(self, index: int) -> None:
        """Run a rank until it has to wait."""
        program, begins = self.programs[index], self.begins[index]
        operation_index, stage = self.operation_index[index], self.stage[index]
        if operation_index < 0:
            operation_index = 0
            if program.call_seconds:
                self.operation_index[index] = operation_index
                self._work(index, program.call_seconds)
                return
        while operation_index < len(program.operations):
            kernel, own, leaving, awaited, posted = program.operations[operation_index][:5]
            if stage == AWAIT:
                begins.append(self.now)
                stage = COMPUTE
                if awaited and self._blocked(index, awaited):
                    self.operation_index[index], self.stage[index] = operation_index, stage
                    return
            if stage == COMPUTE:
                stage = LEAVE
                if kernel:
                    self.operation_index[index], self.stage[index] = operation_index, stage
                    self.runs_kernel[index] = 1
                    self._work(index, kernel)
                    return
            for flow in posted:
                self._ready(flow)
            for flow in leaving:
                self._ready(flow)
            operation_index, stage = operation_index + 1, AWAIT
            if own:
                self.operation_index[index], self.stage[index] = operation_index, stage
                self._work(index, own)
                return
        if operation_index == len(program.operations):
            begins.append(self.now)
            self.operation_index[index] = operation_index + 1
            if self._blocked(index, [flow for x in program.operations for flow in x.leaving]):
                return
        self.end_seconds[index] = self.now

    def _blocked(self, index: int, flows: tuple[int, ...] | list[int]) -> bool:
        """Return whether a rank has to wait for any of these flows.

        If it has to, `_arrived` wakes it when all of them are there.
        """
        missing_flows = {flow for flow in flows if not self.flow_done[flow]}
        self.num_missing[index] = len(missing_flows)
        for flow in missing_flows:
            self.ranks_by_missing_flow[flow].append(index)
        return bool(missing_flows)

    def _work(self, index: int, seconds: float) -> None:
        """Keep a rank busy, and the cores that its route names."""
        self.work_starts[index] = self.now
        route = self.programs[index].route
        if route is None:
            heapq.heappush(self.events, (self.now + seconds, -1 - index))
        else:
            self.starting_work.append((index, route, seconds))

    def _worked(self, index: int) -> int:
        """Note the end of a rank's kernel or own work; return its index."""
        seconds = self.kernel_seconds if self.runs_kernel[index] else self.own_seconds
        seconds[index] += self.now - self.work_starts[index]
        self.runs_kernel[index] = 0
        return index

    def _ready(self, flow: int) -> None:
        """Note that a flow's sender or one of its receivers is ready; the last one launches it."""
        self.num_unready[flow] -= 1
        if not self.num_unready[flow]:
            heapq.heappush(self.events, (self.now + self.flows[flow].latency, flow))

    def _begin(self, flow: int) -> None:
        """Let a message's first byte leave, unless an earlier message to its peer is under way."""
        previous_flow = self.flows[flow].after
        if previous_flow != LOST and not self.flow_done[previous_flow]:
            self.following_flows[previous_flow].append(flow)
            return
        self.flow_starts[flow] = self.now
        self.starting_flows.append(flow)

    def _arrived(self, flow: int) -> list[int]:
        """Note that all of a flow's messages are there; return the ranks that can go on."""
        self.flow_done[flow] = 1
        arrived_flow = self.flows[flow]
        start = self.flow_starts.pop(flow)
        rank, link, name = arrived_flow.rank, arrived_flow.link, arrived_flow.name
        self.messages.append(Span(rank, link, name, start, self.now - start))
        for later in self.following_flows.pop(flow, ()):
            self._begin(later)
        woken_ranks = []
        for index in self.ranks_by_missing_flow.pop(flow, ()):
            self.num_missing[index] -= 1
            if not self.num_missing[index]:
                woken_ranks.append(index)
        return woken_ranks

    def _start(self) -> None:
        """Hand all flows and kernels that begin at this moment to the network, together."""
        if not (self.starting_flows or self.starting_work):
            return
        flows = [self.flows[flow] for flow in self.starting_flows]
        ids = [*self.starting_flows, *(-1 - index for index, _, _ in self.starting_work)]
        routes = [*(f.route for f in flows), *(route for _, route, _ in self.starting_work)]
        counts = [*(f.messages for f in flows), *(1 for _ in self.starting_work)]
        amounts = [*(f.seconds for f in flows), *(seconds for _, _, seconds in self.starting_work)]
        self.bandwidth.add(ids, np.array(routes), np.array(counts), np.array(amounts, float))
        self.starting_flows, self.starting_work = [], []

    def _deadlock(self) -> Deadlock:
        waiting_ranks = [index for index, end in enumerate(self.end_seconds) if np.isnan(end)]
        program = self.programs[waiting_ranks[0]]
        operation_index = self.operation_index[waiting_ranks[0]]
        num_ended = len(self.end_seconds) - len(waiting_ranks)
        if operation_index >= len(program.operations):
            return Deadlock(program.rank, None, (), num_ended)
        arrived = tuple(
            bool(self.flow_done[flow]) for flow in program.operations[operation_index].awaited
        )
        return Deadlock(program.rank, operation_index, arrived, num_ended)

    def uses(self, members: int) -> tuple[RankUse, ...]:
        """Return how each rank spent the pass.

        Args:
            members: number of ranks that each stands for.
        """
        total = max(self.end_seconds, default=0.0)
        sent: list[dict[str, int]] = [defaultdict(int) for _ in self.programs]
        for flow in self.flows:
            sent[self.index_of_rank[flow.rank]][flow.link] += flow.num_bytes * flow.messages
        columns = self.programs, self.kernel_seconds, self.own_seconds, self.end_seconds, sent
        return tuple(
            RankUse(
                program.rank,
                members,
                compute_seconds=kernel,
                overhead_seconds=own,
                exposed_seconds=max(end - kernel - own, 0.0),
                idle_seconds=total - end,
                bytes_by_link=dict(links),
            )
            for program, kernel, own, end, links in zip(*columns, strict=True)
        )
