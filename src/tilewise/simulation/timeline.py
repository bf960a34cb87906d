"""Timelines: what every rank of a simulated pass did and when, also as a trace for a browser."""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

from tilewise.compiler.lowering import lower
from tilewise.compiler.program import AttendTile, Operation, operations
from tilewise.plan.ir import Plan
from tilewise.plan.payload import Payload
from tilewise.simulation.network import LINKS

LANES = ("compute", "wait", "call", *LINKS)


class Span(NamedTuple):
    """Something that a rank did, and for how long.

    Attributes:
        lane: "compute" for tiles, with the merging that follows; "wait" for all other operations;
            "call" for a rank's own time before its program, and for sends of its own that have
            not left when the program ends; the class of a link for messages.
        name: of an operation its label, as a listing of the rank's code and a profile have it.
    """

    rank: int
    lane: str
    name: str
    start: float
    seconds: float


class RankUse(NamedTuple):
    """Time that one rank spent in a pass; compute + exposed + idle seconds make up the pass.

    Attributes:
        exposed_seconds: waiting for messages, its own sends at the end included, or packing,
            posting and merging them, and what a call takes around its program.
    """

    rank: int
    members: int  # ranks that did the same
    compute_seconds: float  # of kernels
    exposed_seconds: float
    idle_seconds: float  # nothing left to do while others went on
    bytes_by_link: dict[str, int]  # sent, by the class of the link

    def plus(self, other: "RankUse") -> "RankUse":
        """The use of this and another pass together."""
        links = {*self.bytes_by_link, *other.bytes_by_link}
        return self._replace(
            compute_seconds=self.compute_seconds + other.compute_seconds,
            exposed_seconds=self.exposed_seconds + other.exposed_seconds,
            idle_seconds=self.idle_seconds + other.idle_seconds,
            bytes_by_link={
                link: self.bytes_by_link.get(link, 0) + other.bytes_by_link.get(link, 0)
                for link in links
            },
        )


@dataclass(frozen=True)
class Recording:
    """Beginnings of the operations of a pass, and their labels.

    Args:
        plan: whose programs ran.
        begins: of every rank of the timeline: when each operation began, then when the last ended.
        messages: spans in the lanes of links.
    """

    plan: Plan
    payload: Payload
    begins: tuple[tuple[float, ...], ...]
    messages: tuple[Span, ...]


@dataclass(frozen=True)
class Timeline:
    """One pass: how long, by whom, and what happened when.

    Attributes:
        recording: None: only sums are known.
        parts: timelines that follow each other, of which this is the sum; none: it is one run.
    """

    seconds: float
    ranks: tuple[RankUse, ...]
    recording: Recording | None = None
    parts: tuple["Timeline", ...] = ()

    def then(self, other: "Timeline") -> "Timeline":
        """The timeline of this, and then of another one of the same ranks."""
        uses = {use.rank: use for use in other.ranks}
        ranks = tuple(use.plus(uses[use.rank]) for use in self.ranks)
        parts = (*(self.parts or (self,)), other)
        return Timeline(self.seconds + other.seconds, ranks, self.recording, parts)

    @property
    def spans(self) -> tuple[Span, ...]:
        """Return the operations of every rank in order, those of no duration too; then all
        messages.

        Labels are written now, from the ranks' programs: few who simulate look at them.
        """
        operation_spans = (span for use in self.ranks for span in self.rank_spans(use.rank))
        return (*operation_spans, *self.messages)

    @property
    def messages(self) -> tuple[Span, ...]:
        if self.parts and self.recording:
            return tuple(
                span._replace(start=span.start + start)
                for start, part in self._starts()
                for span in part.messages
            )
        return self.recording.messages if self.recording else ()

    def _starts(self) -> Iterator[tuple[float, "Timeline"]]:
        """The parts, each with the seconds before it."""
        start = 0.0
        for part in self.parts:
            yield start, part
            start += part.seconds

    def rank_spans(self, rank: int) -> Iterator[Span]:
        """The operations of a rank, in order, and its call around them."""
        if self.recording is None:
            return
        if self.parts:
            for start, part in self._starts():
                for span in part.rank_spans(rank):
                    yield span._replace(start=span.start + start)
            return
        index_of_rank = {use.rank: index for index, use in enumerate(self.ranks)}
        if rank not in index_of_rank:
            raise ValueError(
                f"rank ({rank}) must be one that was simulated for itself, not by one that is like "
                f"it: one of {', '.join(map(str, index_of_rank))}"
            )
        index = index_of_rank[rank]
        use, (*begins, last_end) = self.ranks[index], self.recording.begins[index]
        ended = use.compute_seconds + use.exposed_seconds
        first_begin = begins[0] if begins else last_end
        if first_begin:
            yield Span(rank, "call", "call", 0.0, first_begin)
        ends = (*begins[1:], last_end)
        rank_program = rank_operations(self.recording.plan, self.recording.payload, rank)
        for operation, start, end in zip(rank_program, begins, ends, strict=True):
            lane = "compute" if isinstance(operation, AttendTile) else "wait"
            yield Span(rank, lane, str(operation), start, end - start)
        if ended > last_end:
            yield Span(rank, "call", "wait for sends", last_end, ended - last_end)


def rank_operations(plan: Plan, payload: Payload, rank: int) -> Iterator[Operation]:
    """The operations that one rank runs in a pass."""
    program = lower(plan, rank, carries=payload.carries)
    return operations(program, payload, packs_alone=plan.num_head_groups > 1)


def trace_text(passes: tuple[Timeline, Timeline]) -> str:
    """Timelines for Chrome's tracing page and Perfetto, a process per rank that was simulated."""
    events = [*_names(passes), *_events(passes)]
    return json.dumps({"traceEvents": events, "displayTimeUnit": "ns"})


def _names(passes: tuple[Timeline, Timeline]) -> Iterator[dict[str, Any]]:
    members = {use.rank: use.members for timeline in passes for use in timeline.ranks}
    for rank, number in sorted(members.items()):
        name = f"rank {rank}" + f" and {number - 1} like it" * (number > 1)
        yield {"ph": "M", "name": "process_name", "pid": rank, "args": {"name": name}}
        for lane, lane_name in enumerate(LANES):
            args = {"name": lane_name}
            yield {"ph": "M", "name": "thread_name", "pid": rank, "tid": lane, "args": args}


def _events(passes: tuple[Timeline, Timeline]) -> Iterator[dict[str, Any]]:
    pass_start = 0.0
    for pass_name, timeline in zip(("forward", "backward"), passes, strict=True):
        for rank, lane, name, start, seconds in timeline.spans:
            yield {
                "ph": "X",
                "name": name,
                "cat": pass_name,
                "pid": rank,
                "tid": LANES.index(lane),
                "ts": round((pass_start + start) * 1e6, 6),
                "dur": round(seconds * 1e6, 6),
            }
        pass_start += timeline.seconds
