"""Timeline of a simulated plan: what its ranks do and when, both passes drawn as bars."""

from collections.abc import Collection, Iterable, Mapping
from types import MappingProxyType
from typing import NamedTuple

from tilewise.simulation.network import LINKS
from tilewise.simulation.simulator import Simulation
from tilewise.simulation.timeline import SENDS, Span
from tilewise_tools.report.drawing import AROUND, Drawing, Words, axis, colour, hover, time_axis
from tilewise_tools.report.page import Figure, TextTable
from tilewise_tools.report.words import CROSS, quantity

MOST_ROWS = 12
FIRST_KERNELS = 8  # shown first, each a bar of its own
FINEST = 1500  # bars closer than this part of the pass are drawn as one
ROW = 64  # pixels
OWN = ("compute", "copy", "wait")  # a rank is in one at a time
LANES = MappingProxyType(
    {"compute": 0, "copy": 2, "wait": 1, "inside": 5, "between": 3, "across": 6}
)
"""The palette's numbers of what a rank does."""
LANE_NAMES = MappingProxyType(
    {
        **{"copy": "copy and merge", "inside": "inside the node"},
        **{"between": "between nodes", "across": "between racks", "wait": "waiting"},
    }
)


NO_NAMES: Mapping[int, str] = MappingProxyType({})


class Bar(NamedTuple):
    """Something that a rank did; several that followed at once are one."""

    row: int
    lane: str
    start: float
    seconds: float
    note: str


class TimelineBars(NamedTuple):
    """Both passes of a few ranks.

    Attributes:
        turn, end: when backward begins and ends.
    """

    ranks: tuple[tuple[int, int], ...]  # of the rows: which, and how many do the same
    lanes: tuple[str, ...]  # what is drawn: a rank's own ones, then links
    bars: tuple[Bar, ...]
    turn: float
    end: float


CLASSES = ("waits longest", "typical", "waits least")


def classes(simulation: Simulation) -> dict[int, str]:
    """Return the ranks that wait longest, as most do, and least; {} where no more than three
    differ.
    """
    ranks = [use.rank for use in simulation.forward.ranks]
    if len(ranks) <= len(CLASSES):
        return {}
    waits = {rank: sum(use.exposed_seconds for use in simulation.use(rank)) for rank in ranks}
    ranks.sort(key=lambda rank: -waits[rank])
    return dict(zip((ranks[0], ranks[len(ranks) // 2], ranks[-1]), CLASSES, strict=True))


def timeline(simulation: Simulation, chosen: Collection[int] = ()) -> TimelineBars:
    """The bars of a simulation, of the ranks that are not alike or of some evenly spread.

    Args:
        chosen: which of these ranks; none: all, up to MOST_ROWS.
    """
    uses, first = simulation.forward.ranks, _first_steps(simulation)
    if chosen:
        uses = [next(use for use in uses if use.rank == rank) for rank in chosen]
    elif len(uses) > MOST_ROWS:
        uses = [uses[i * (len(uses) - 1) // (MOST_ROWS - 1)] for i in range(MOST_ROWS)]
    bars: list[Bar] = []
    begin = 0.0
    passes = (simulation.forward, simulation.backward)
    for pass_timeline, symmetry in zip(passes, simulation.symmetries, strict=True):
        messages: dict[int, list[Span]] = {}
        for span in pass_timeline.messages:
            messages.setdefault(span.rank, []).append(span)
        for row, use in enumerate(uses):
            rank = symmetry.representative(use.rank)
            by_lane: dict[str, list[Span]] = {}
            for span in (*pass_timeline.rank_spans(rank), *messages.get(rank, ())):
                if span.seconds:
                    lane = span.lane
                    if lane == "call":
                        lane = "wait" if span.name == SENDS else "copy"
                    by_lane.setdefault(lane, []).append(span._replace(lane=lane))
            for lane in (*OWN, *LINKS):
                spans = by_lane.get(lane, ())
                joined = _joined(spans, pass_timeline.seconds / FINEST, 0.0 if begin else first)
                bars += [bar._replace(row=row, start=begin + bar.start) for bar in joined]
        begin += pass_timeline.seconds
    ranks = tuple((use.rank, use.members) for use in uses)
    lanes = tuple(lane for lane in (*OWN, *LINKS) if any(bar.lane == lane for bar in bars))
    return TimelineBars(ranks, lanes, tuple(bars), simulation.forward_seconds, begin)


def _first_steps(simulation: Simulation) -> float:
    """Return the time at which the first rank shown has finished a number of kernels."""
    timeline = simulation.forward
    rank = timeline.ranks[0].rank
    ends = [x.start + x.seconds for x in timeline.rank_spans(rank) if x.lane == "compute"]
    return ends[min(FIRST_KERNELS, len(ends)) - 1] if ends else timeline.seconds


def _joined(spans: Iterable[Span], gap: float, first: float) -> list[Bar]:
    """Bars of spans; those that begin after the first steps are joined over small gaps."""
    bars: list[Bar] = []
    names: list[str] = []
    busy = 0.0
    for span in sorted(spans, key=lambda span: span.start):
        start, end = span.start, span.start + span.seconds
        last = bars[-1] if bars else None
        if last and start > first and start - (last.start + last.seconds) < gap:
            start, end = last.start, max(end, last.start + last.seconds)
            bars.pop()
        else:
            busy, names = 0.0, []
        busy += span.seconds
        names.append(span.name)
        bars.append(Bar(0, span.lane, start, end - start, _note(span.lane, names, busy)))
    return bars


def _note(lane: str, names: list[str], busy: float) -> str:
    lane_name = LANE_NAMES.get(lane, lane)
    if len(names) > 1:
        return f"{lane_name}: {len(names)} in {quantity(busy, 's')}"
    return f"{lane_name} {names[0]}: {quantity(busy, 's')}".replace(f"{lane} {lane}", lane)


def timeline_figure(simulation: Simulation, names: Mapping[int, str] = NO_NAMES) -> Figure:
    """The timeline as a figure that can be zoomed.

    Args:
        names: of the ranks to show, in words; none: all ranks that differ, up to MOST_ROWS.
    """
    timeline_bars = timeline(simulation, names)
    num_shown, world_size = len(timeline_bars.ranks), simulation.world_size
    alike = len(simulation.forward.ranks)
    if alike == world_size:
        which = "all ranks" if num_shown == world_size else f"{num_shown} of {world_size} ranks"
    elif alike == 1:
        which = f"one rank, which stands for all {world_size}"
    else:
        which = f"{num_shown} of the {alike} ranks that stand for all {world_size}"
    caption = HOW_TO_READ.format(which)
    turn, end = timeline_bars.turn, timeline_bars.end
    _, unit_seconds = time_axis(end)
    parts = (
        ("First steps", 0.0, _first_steps(simulation)),
        ("Forward", 0.0, turn),
        ("Backward", turn, end),
        ("Both passes", 0.0, end),
    )
    jumps = tuple((name, start / unit_seconds, stop / unit_seconds) for name, start, stop in parts)
    rows = tuple(_row(simulation, *rank) for rank in timeline_bars.ranks)
    header = ("rank", "ranks like it", "compute", "copy and merge", "waiting", "idle", "sent")
    table = TextTable(header, rows)
    name, title = "timeline", "Timeline per rank, forward then backward"
    if not names and classes(simulation):
        name, title = "timeline-ranks", "Timeline of more ranks"
    return Figure(name, title, caption, _drawn(timeline_bars, names), table, jumps)


HOW_TO_READ = (
    "Thick bars are the rank itself: it computes (merging included), copies and merges, or waits. "
    "Thin bars are its messages on each kind of link. A good plan has little waiting: messages end "
    "while something is computed. Shown: {}; first the first steps, others by the buttons or by "
    "dragging."
)


def _row(simulation: Simulation, rank: int, members: int) -> tuple[str, ...]:
    both = simulation.use(rank)
    seconds = (
        quantity(sum(getattr(use, f"{name}_seconds") for use in both), "s")
        for name in ("compute", "overhead", "exposed", "idle")
    )
    num_bytes = sum(sum(use.bytes_by_link.values()) for use in both)
    return str(rank), str(members), *seconds, quantity(num_bytes, "B")


def _drawn(timeline_bars: TimelineBars, in_words: Mapping[int, str]) -> Drawing:
    """Lying bars in rows, one trace per lane."""
    names = [
        f"rank {rank}" + f"\n{in_words.get(rank) or f'{CROSS}{like}' * (like > 1)}".rstrip("\n")
        for rank, like in timeline_bars.ranks
    ]
    x, unit_seconds = time_axis(timeline_bars.end)
    turn, end = timeline_bars.turn / unit_seconds, timeline_bars.end / unit_seconds
    bounds = [len(names) - 0.4, -0.95]
    rows = {"showgrid": False, "zeroline": False, "range": bounds, "fixedrange": True}
    above = {"y": -0.68, "xanchor": "left"}
    layout = {
        "xaxis": x | {"range": [0, end], "zeroline": False},
        "yaxis": axis("", ticks=tuple(enumerate(names))) | rows,
        "barmode": "overlay",
        "dragmode": "zoom",
        "shapes": [
            {
                "x0": turn,
                "x1": turn,
                "yref": "y domain",
                "y0": 0,
                "y1": 1,
            }
        ],
        "annotations": [
            above | {"x": 0, "text": "forward"},
            above | {"x": turn, "text": "backward", "xshift": 4},
        ],
    }
    height = AROUND + 30 + ROW * len(names)
    lanes = [_lane(timeline_bars, lane, unit_seconds) for lane in timeline_bars.lanes]
    return Drawing(lanes, layout, height)


def _lane(timeline_bars: TimelineBars, lane: str, unit_seconds: float) -> Words:
    """The bars of one lane: a rank's own above, below them each kind of link."""
    lane_bars = [bar for bar in timeline_bars.bars if bar.lane == lane]
    links = [name for name in timeline_bars.lanes if name not in OWN]
    shift, thick = (-0.16, 0.44) if lane in OWN else (0.16 + 0.16 * links.index(lane), 0.14)
    return {
        "type": "bar",
        "name": LANE_NAMES.get(lane, lane),
        "orientation": "h",
        "y": [bar.row + shift for bar in lane_bars],
        "width": thick,
        "base": [bar.start / unit_seconds for bar in lane_bars],
        "x": [bar.seconds / unit_seconds for bar in lane_bars],
        "marker": {"color": colour(LANES[lane])},
        **hover([bar.note for bar in lane_bars]),
    }
