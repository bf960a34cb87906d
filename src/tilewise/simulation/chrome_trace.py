"""Timelines as a file that Chrome's tracing page and Perfetto read."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from tilewise.simulation.engine import Timeline
from tilewise.simulation.network import LINKS

LANES = ("compute", "wait", *LINKS)


def trace_text(passes: tuple[Timeline, Timeline]) -> str:
    """The text of the file: a process per rank, or per rank that stands for others."""
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
