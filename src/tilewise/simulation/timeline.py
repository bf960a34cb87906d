"""Timelines: what every rank of a simulated pass did and when, also as a trace for a browser."""

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from tilewise.simulation.network import LINKS

SENDS = "wait for sends"
"""The name of a rank's span after its program."""

LANES = ("compute", "copy", "wait", "call", *LINKS)


class Span(NamedTuple):
    """Something that a rank did, and for how long.

    Attributes:
        lane: "compute" for kernel calls, with what they add in place; "wait" for arrivals; "copy"
            for all other operations; "call" for a rank's own time before its program, and for sends
            of its own that have not left when the program ends; the class of a link for messages.
        name: of an operation its label, as a listing of the rank's code and a profile have it.
        kind: of an operation its name: "Attend", "Copy", "Fill", "Merge", "Post", ...
        traffic_bytes: that it reads and writes in memory, as of `Code.traffic_bytes`.
    """

    rank: int
    lane: str
    name: str
    start: float
    seconds: float
    kind: str = ""
    traffic_bytes: int = 0


class SpannedOperation(Protocol):
    """The fields of an operation that its span repeats, beside the time."""

    @property
    def label(self) -> str: ...
    @property
    def lane(self) -> str: ...
    @property
    def kind(self) -> str: ...
    @property
    def traffic_bytes(self) -> int: ...


class RankUse(NamedTuple):
    """Time that one rank spent in a pass; compute, overhead, exposed and idle seconds make it up.

    Attributes:
        overhead_seconds: of copying, merging, encoding, posting messages, and of what a call takes
            around its program.
        exposed_seconds: of waiting for messages, its own sends at the end included.
    """

    rank: int
    members: int  # ranks that did the same
    compute_seconds: float  # of kernels
    overhead_seconds: float
    exposed_seconds: float
    idle_seconds: float  # nothing left to do while others went on
    bytes_by_link: dict[str, int]  # sent, by the class of the link

    def plus(self, other: "RankUse") -> "RankUse":
        """The use of this and another pass together."""
        links = {*self.bytes_by_link, *other.bytes_by_link}
        return self._replace(
            compute_seconds=self.compute_seconds + other.compute_seconds,
            overhead_seconds=self.overhead_seconds + other.overhead_seconds,
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
        operations: of every rank of the timeline.
        begins: of every rank of the timeline: when each operation began, then when the last ended.
        messages: spans in the lanes of links.
        relabelled: ranks whose operations have the labels of a rank that is like them.
        labels: writes the labels of such a rank's own: few who simulate look at them.
    """

    operations: tuple[Sequence[SpannedOperation], ...]
    begins: tuple[tuple[float, ...], ...]
    messages: tuple[Span, ...]
    relabelled: frozenset[int] = frozenset()
    labels: Callable[[int], Sequence[str]] | None = None


@dataclass(frozen=True)
class Timeline:
    """One pass: how long, by whom, and what happened when.

    Attributes:
        recording: None: only sums are known.
    """

    seconds: float
    ranks: tuple[RankUse, ...]
    recording: Recording | None = None

    @property
    def spans(self) -> tuple[Span, ...]:
        """Return the operations of every rank in order, those of no duration too; then all
        messages.
        """
        operation_spans = (span for use in self.ranks for span in self.rank_spans(use.rank))
        return (*operation_spans, *self.messages)

    @property
    def messages(self) -> tuple[Span, ...]:
        return self.recording.messages if self.recording else ()

    def rank_spans(self, rank: int) -> tuple[Span, ...]:
        """The operations of a rank, in order, and its call around them.

        Raises:
            ValueError: if the rank was simulated by another one that is like it.
        """
        return tuple(self._rank_spans(rank))

    def _rank_spans(self, rank: int) -> Iterator[Span]:
        if self.recording is None:
            return
        index_of_rank = {use.rank: index for index, use in enumerate(self.ranks)}
        if rank not in index_of_rank:
            raise ValueError(
                f"rank ({rank}) must be one that was simulated for itself, not by one that is like "
                f"it: one of {', '.join(map(str, index_of_rank))}"
            )
        index = index_of_rank[rank]
        use, (*begins, last_end) = self.ranks[index], self.recording.begins[index]
        ended = use.compute_seconds + use.overhead_seconds + use.exposed_seconds
        first_begin = begins[0] if begins else last_end
        if first_begin:
            yield Span(rank, "call", "call", 0.0, first_begin)
        ends = (*begins[1:], last_end)
        operations = self.recording.operations[index]
        labels = [operation.label for operation in operations]
        if rank in self.recording.relabelled and self.recording.labels is not None:
            own = self.recording.labels(rank)
            labels = own if len(own) == len(labels) else labels
        for operation, label, start, end in zip(operations, labels, begins, ends, strict=True):
            lane, kind, traffic = operation.lane, operation.kind, operation.traffic_bytes
            yield Span(rank, lane, label, start, end - start, kind, traffic)
        if ended > last_end:
            yield Span(rank, "call", SENDS, last_end, ended - last_end)


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
        for rank, lane, name, start, seconds, kind, traffic in timeline.spans:
            more = {"args": {"bytes in memory": traffic}} if kind and traffic else {}
            yield {
                "ph": "X",
                "name": name,
                "cat": pass_name,
                "pid": rank,
                "tid": LANES.index(lane),
                "ts": round((pass_start + start) * 1e6, 6),
                "dur": round(seconds * 1e6, 6),
                **more,
            }
        pass_start += timeline.seconds
