"""A trace for Perfetto: the measured lanes of every rank beside the simulated ones."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from tilewise.simulation.timeline import Timeline
from tilewise_tools.explain.explanation import PARTS, Explanation
from tilewise_tools.explain.rows import PassRow
from tilewise_tools.explain.waiting import OUTSIDE, Piece

LANES = ("measured", "simulated", "simulated links")


def trace_text(explanation: Explanation) -> str:
    """The last recorded step as JSON that Perfetto and Chrome's tracing page read.

    A process per rank. Each simulated pass begins where the measured one did, on the rank that was
    first; a rank that was simulated by another one that is like it has measured lanes alone.
    """
    events = [*_names(explanation), *_measured(explanation), *_simulated(explanation)]
    return json.dumps({"traceEvents": events, "displayTimeUnit": "ns"})


def _names(explanation: Explanation) -> Iterator[dict[str, Any]]:
    for rows in explanation.run.ranks:
        rank, host = rows.rank, rows.head["host"]
        args = {"name": f"rank {rank} on {host}"}
        yield {"ph": "M", "name": "process_name", "pid": rank, "args": args}
        for lane, name in enumerate(LANES):
            args = {"name": name}
            yield {"ph": "M", "name": "thread_name", "pid": rank, "tid": lane, "args": args}


def _begin(explanation: Explanation) -> float:
    return min(pieces[0].start for pieces in explanation.steps[-1].pieces)


def _measured(explanation: Explanation) -> Iterator[dict[str, Any]]:
    begin = _begin(explanation)
    for rank, pieces in enumerate(explanation.steps[-1].pieces):
        for piece in pieces:
            yield {
                "ph": "X",
                "name": _name(piece),
                "cat": PARTS[piece.kind],
                "pid": rank,
                "tid": 0,
                "ts": round(1e6 * (piece.start - begin), 3),
                "dur": round(1e6 * piece.seconds, 3),
            }


def _name(piece: Piece) -> str:
    if piece.kind == OUTSIDE:
        return "outside of attention"
    if piece.cause is None:
        return piece.label
    kind, rank, peer = piece.cause
    whom = f"rank {rank} -> rank {peer}" if peer >= 0 else f"rank {rank}: {PARTS[kind]}"
    return f"{piece.label}: {whom}"


def _simulated(explanation: Explanation) -> Iterator[dict[str, Any]]:
    """The passes of the first subject, each from where the measured one began."""
    simulation, step = explanation.simulation, explanation.steps[-1]
    if simulation is None:
        return
    main, begin = explanation.subjects[0].case, _begin(explanation)
    for place, one in enumerate(explanation.run.ranks[0].steps[step.number].passes):
        if _kind(one) != main.identity[1:]:
            continue
        start = min(
            piece.start for pieces in step.pieces for piece in pieces if piece.place[0] == place
        )
        timeline = simulation.backward if one.case.backward else simulation.forward
        yield from _spans(timeline, start - begin)


def _kind(one: PassRow) -> tuple[Any, ...]:
    return one.case.identity[1:]


def _spans(timeline: Timeline, start: float) -> Iterator[dict[str, Any]]:
    links = {id(span) for span in timeline.messages}
    for span in timeline.spans:
        if span.seconds:
            yield {
                "ph": "X",
                "name": span.name,
                "cat": span.lane,
                "pid": span.rank,
                "tid": 2 if id(span) in links else 1,
                "ts": round(1e6 * (start + span.start), 3),
                "dur": round(1e6 * span.seconds, 3),
            }
