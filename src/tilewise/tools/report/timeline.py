"""Who computes, waits and sends when: a simulation as bars in rows."""

from __future__ import annotations

from collections.abc import Iterable

from tilewise.simulation.engine import Span
from tilewise.simulation.network import LINKS
from tilewise.simulation.simulator import Simulation
from tilewise.tools.report.chart import LINK_NAMES, OWN, Bar, Figure, Table, TimelineChart, quantity

MOST_ROWS = 12
FINEST = 1500  # bars closer than this part of the pass are drawn as one
LANES = (*OWN, *LINKS)


def timeline(simulation: Simulation, most: int = MOST_ROWS) -> TimelineChart:
    """The bars of a simulation, of the ranks that are not alike or of some evenly spread."""
    uses = simulation.forward.ranks
    if len(uses) > most:
        uses = [uses[i * (len(uses) - 1) // (most - 1)] for i in range(most)]
    bars: list[Bar] = []
    begin = 0.0
    passes = (simulation.forward, simulation.backward)
    for part, symmetry in zip(passes, simulation.symmetries, strict=True):
        by_lane: dict[tuple[int, str], list[Span]] = {}
        for span in part.spans:
            by_lane.setdefault((span.rank, span.lane), []).append(span)
        for row, use in enumerate(uses):
            for lane in LANES:
                spans = by_lane.get((symmetry.first(use.rank), lane), ())
                joined = _joined(spans, part.seconds / FINEST)
                bars += [bar._replace(row=row, start=begin + bar.start) for bar in joined]
        begin += part.seconds
    ranks = tuple((use.rank, use.members) for use in uses)
    lanes = tuple(lane for lane in LANES if any(bar.lane == lane for bar in bars))
    return TimelineChart(ranks, lanes, tuple(bars), simulation.forward_seconds, begin)


def _joined(spans: Iterable[Span], gap: float) -> list[Bar]:
    made: list[Bar] = []
    names: list[str] = []
    busy = 0.0
    for span in sorted(spans, key=lambda span: span.start):
        end = span.start + span.seconds
        if made and span.start - (made[-1].start + made[-1].seconds) < gap:
            last = made.pop()
            start, end = last.start, max(end, last.start + last.seconds)
        else:
            start, busy, names = span.start, 0.0, []
        busy += span.seconds
        names.append(span.name)
        made.append(Bar(0, span.lane, start, end - start, _note(span.lane, names, busy)))
    return made


def _note(lane: str, names: list[str], busy: float) -> str:
    what = LINK_NAMES.get(lane, lane)
    if len(names) > 1:
        return f"{what}: {len(names)} in {quantity(busy, 's')}"
    return f"{what} {names[0]}: {quantity(busy, 's')}".replace(f"{lane} {lane}", lane)


def figure(simulation: Simulation) -> Figure:
    """The timeline as a figure that can be zoomed."""
    drawn = timeline(simulation)
    shown, world_size = len(drawn.ranks), simulation.world_size
    alike = len(simulation.forward.ranks)
    if alike == world_size:
        which = "all ranks" if shown == world_size else f"{shown} of {world_size} ranks"
    elif alike == 1:
        which = f"one rank, which stands for all {world_size}"
    else:
        which = f"{shown} of the {alike} ranks that stand for all {world_size}"
    caption = (
        f"The upper bar of a rank is itself: computing, or waiting for messages. The thin bars "
        f"below are its messages on each kind of link. Shown: {which}. Good plans have little "
        "waiting, and messages that end while something is computed. Drag across to zoom, "
        "double-click or take the buttons to see all."
    )
    jumps = (
        ("Both passes", 0.0, drawn.end),
        ("Forward", 0.0, drawn.turn),
        ("Backward", drawn.turn, drawn.end),
        ("First steps", 0.0, drawn.turn / 10),
    )
    title = "Timeline per rank, forward then backward"
    return Figure("timeline", title, caption, drawn, _table(simulation, drawn), jumps)


def _table(simulation: Simulation, drawn: TimelineChart) -> Table:
    rows = []
    for rank, like in drawn.ranks:
        both = simulation.use(rank)
        compute, wait, idle = (
            quantity(sum(getattr(use, f"{what}_seconds") for use in both), "s")
            for what in ("compute", "exposed", "idle")
        )
        sent = sum(sum(use.bytes_by_link.values()) for use in both)
        peak = simulation.rank_peak_bytes(rank)
        spent = (compute, wait, idle, quantity(sent, "B"), quantity(peak, "B"))
        rows.append((str(rank), str(like), *spent))
    header = ("rank", "ranks like it", "compute", "wait", "idle", "sent", "peak memory")
    return Table(header, tuple(rows))
