"""The charts of a plan's page: times, bytes, the assignment of cells to ranks, the timeline."""

from collections.abc import Iterable
from types import MappingProxyType

import numpy as np

from tilewise.compiler.resolved import ResolvedPass
from tilewise.compiler.shards import everything_needed, table_cells
from tilewise.plan.ir import Plan
from tilewise.simulation.engine import Span
from tilewise.simulation.network import LINKS
from tilewise.simulation.simulator import Simulation
from tilewise.tools.mask_report.view import assigned
from tilewise.tools.report.chart import (
    CROSS,
    LANES,
    LINK_NAMES,
    OWN,
    Axis,
    Bar,
    Chart,
    Figure,
    Series,
    Table,
    Tiles,
    TimelineChart,
    count,
    log_axis,
    quantity,
    short,
    times,
)
from tilewise.tools.report.studies import LONGEST_RING, Studies, StudyEntry

THIS = "this plan"
COLOURS = MappingProxyType(
    {"mesh": 0, "ring": 1, "hybrid": 2, "ulysses": 3, THIS: 4, "double ring": 6, "all-gather": 7}
)
NAMES = MappingProxyType({"mesh": "best mesh", "hybrid": "best hybrid", "ulysses": "Ulysses"})


def named(entry: StudyEntry) -> str:
    return NAMES.get(entry.family, entry.family)


def _cells(entry: StudyEntry) -> tuple[str, ...]:
    """An entry's columns in tables: strategy, plan, both passes, waiting."""
    found = entry.simulation
    times = quantity(found.seconds, "s"), quantity(found.exposed_seconds, "s")
    return named(entry), short(entry.plan.name), *times


CELLS = ("strategy", "plan", "both passes", "waiting")


def _stacked(
    entries: list[StudyEntry], x: Axis, parts: Iterable[tuple[str, int, Iterable[float]]]
) -> Chart:
    """Lying bars, a name each; parts are a name, a colour and a value for each entry."""
    names = tuple(map(named, entries))
    series = []
    for what, shade, values in parts:
        values = tuple(map(float, values))
        notes = tuple(
            f"{short(entry.plan.name)}<br>{quantity(value, x.unit)} {what}"
            for entry, value in zip(entries, values, strict=True)
        )
        series.append(Series(what, names, values, notes, shade))
    return Chart(x, Axis(""), tuple(series), bars=True)


def seconds(entries: Iterable[StudyEntry]) -> Figure:
    """What each strategy's time is made of."""
    entries = sorted(entries, key=lambda entry: entry.simulation.seconds)
    found = [entry.simulation for entry in entries]
    parts = (
        ("compute", LANES["compute"], (one.compute_seconds for one in found)),
        ("wait", LANES["wait"], (one.exposed_seconds for one in found)),
    )
    rows = tuple(map(_cells, entries))
    caption = (
        "Forward and backward. Compute is that of the busiest rank, waiting that of the rank that "
        "waits longest, so the two may add up to a little more than the time."
    )
    chart, table = _stacked(entries, Axis("time", "s"), parts), Table(CELLS, rows)
    return Figure("seconds", "Time by strategy, fastest first", caption, chart, table)


def bytes_by_link(entries: Iterable[StudyEntry]) -> Figure:
    """What the busiest rank sends, by strategy and class of link."""
    entries = sorted(entries, key=lambda entry: sum(entry.simulation.bytes_by_link.values()))
    sent = [entry.simulation.bytes_by_link for entry in entries]
    parts = (
        (LINK_NAMES[link], LANES[link], (one.get(link, 0) for one in sent))
        for link in LINKS
        if any(link in one for one in sent)
    )
    rows = tuple(
        (*_cells(entry)[:2], *(quantity(one.get(link, 0), "B") for link in LINKS))
        for entry, one in zip(entries, sent, strict=True)
    )
    header = ("strategy", "plan", *(LINK_NAMES[link] for link in LINKS))
    caption = (
        "Bytes that the busiest rank sends in forward and backward. Bytes between nodes cost most: "
        "the ranks of a node share its network cards."
    )
    chart = _stacked(entries, Axis("sent by one rank", "B"), parts)
    title = "Bytes by kind of link, fewest first"
    return Figure("bytes", title, caption, chart, Table(header, rows))


def lines(found: list[tuple[float, StudyEntry]], x: Axis, more: tuple[Series, ...] = ()) -> Chart:
    """Seconds of each family against something, with their plans as notes."""
    parts = []
    for name in dict.fromkeys(entry.family for _, entry in found):
        mine = [(place, entry) for place, entry in found if entry.family == name]
        took = tuple(entry.simulation.seconds for _, entry in mine)
        notes = tuple(
            f"{short(e.plan.name)}<br>{quantity(e.simulation.seconds, 's')}" for _, e in mine
        )
        places = tuple(place for place, _ in mine)
        parts.append(Series(named(mine[0][1]), places, took, notes, COLOURS[name]))
    parts += more
    y = log_axis("forward + backward", "s", (value for series in parts for value in series.y))
    return Chart(x, y, tuple(parts))


def scaling(studies: Studies, this: StudyEntry) -> Figure:
    """Time of the same sequence on 8 to 4096 devices."""
    every, found = studies.sizes(), studies.scaled()
    world_size, mine = this.simulation.world_size, this.simulation.seconds
    ideal = tuple(this.simulation.compute_seconds * world_size / n for n in every)
    said = tuple(f"compute alone, perfectly shared<br>{quantity(t, 's')}" for t in ideal)
    note = f"{short(this.plan.name)}<br>{quantity(mine, 's')}"
    extra = (
        Series("compute alone", tuple(every), ideal, said, 7, "dash"),
        Series(THIS, (world_size,), (mine,), (note,), COLOURS[THIS], "points"),
    )
    ticks = tuple((n, count(n)) for n in every)
    chart = lines(found, Axis("devices", log=True, ticks=ticks), extra)
    longest = f" Rings are simulated up to {LONGEST_RING} devices." if every[-1] > 512 else ""
    caption = (
        f"The same {count(studies.work.num_tokens)} tokens on more and more devices of this kind. "
        "Where a line leaves the dotted one, messages are no longer hidden behind compute; where "
        f"it turns flat, more devices no longer help.{longest}"
    )
    return Figure("scaling", "Time against devices", caption, chart, _by_place(found, "devices"))


def _by_place(found: list[tuple[float, StudyEntry]], what: str) -> Table:
    rows = tuple((f"{place:g}", *_cells(entry)) for place, entry in found)
    return Table((what, *CELLS), rows)


def sensitivity(found: list[tuple[float, StudyEntry]]) -> Figure:
    """Time against the bandwidth of all links, as a multiple of the machine's."""
    places = sorted({place for place, _ in found})
    ticks = tuple((p, f"{CROSS}{p:g}" if p >= 1 else f"{CROSS}1/{1 / p:g}") for p in places)
    chart = lines(found, Axis("bandwidth of every link", log=True, ticks=ticks))

    def spread(place: float) -> str:
        took = [entry.simulation.seconds for other, entry in found if other == place]
        return times(max(took) / min(took))

    caption = (
        "If the links were slower or faster than assumed. The strategies differ by "
        f"{spread(places[0])} at {ticks[0][1]} and by {spread(places[-1])} at {ticks[-1][1]}: "
        "where lines meet, the choice no longer matters."
    )
    title = "Time against bandwidth"
    return Figure("sensitivity", title, caption, chart, _by_place(found, "bandwidth"))


MOST_ROWS = 12
FIRST_KERNELS = 8  # shown first, each a bar of its own
FINEST = 1500  # bars closer than this part of the pass are drawn as one
SHOWN_LANES = (*OWN, *LINKS)


def timeline(simulation: Simulation, most: int = MOST_ROWS) -> TimelineChart:
    """The bars of a simulation, of the ranks that are not alike or of some evenly spread."""
    uses, first = simulation.forward.ranks, _first_steps(simulation)
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
            for lane in SHOWN_LANES:
                spans = by_lane.get((symmetry.first(use.rank), lane), ())
                joined = _joined(spans, part.seconds / FINEST, 0.0 if begin else first)
                bars += [bar._replace(row=row, start=begin + bar.start) for bar in joined]
        begin += part.seconds
    ranks = tuple((use.rank, use.members) for use in uses)
    lanes = tuple(lane for lane in SHOWN_LANES if any(bar.lane == lane for bar in bars))
    return TimelineChart(ranks, lanes, tuple(bars), simulation.forward_seconds, begin)


def _first_steps(simulation: Simulation) -> float:
    """When the rank that is shown first has done so many kernels."""
    timeline = simulation.forward
    rank = timeline.ranks[0].rank
    ends = sorted(
        x.start + x.seconds for x in timeline.spans if x.rank == rank and x.lane == "compute"
    )
    return ends[min(FIRST_KERNELS, len(ends)) - 1] if ends else timeline.seconds


def _joined(spans: Iterable[Span], gap: float, first: float) -> list[Bar]:
    """Bars of spans; those that begin after the first steps are joined over small gaps."""
    made: list[Bar] = []
    names: list[str] = []
    busy = 0.0
    for span in sorted(spans, key=lambda span: span.start):
        end = span.start + span.seconds
        late = span.start > first
        if made and late and span.start - (made[-1].start + made[-1].seconds) < gap:
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


def timeline_figure(entry: StudyEntry) -> Figure:
    """The timeline as a figure that can be zoomed."""
    simulation = entry.simulation
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
        "waiting, and messages that end while something is computed. Shown first: the first steps; "
        "take the buttons, or drag across, to see others."
    )
    jumps = (
        ("First steps", 0.0, _first_steps(simulation)),
        ("Forward", 0.0, drawn.turn),
        ("Backward", drawn.turn, drawn.end),
        ("Both passes", 0.0, drawn.end),
    )
    title = "Timeline per rank, forward then backward"
    return Figure("timeline", title, caption, drawn, _timeline_table(simulation, drawn), jumps)


def _timeline_table(simulation: Simulation, drawn: TimelineChart) -> Table:
    rows = []
    for rank, like in drawn.ranks:
        both = simulation.use(rank)
        compute, wait, idle = (
            quantity(sum(getattr(use, f"{what}_seconds") for use in both), "s")
            for what in ("compute", "exposed", "idle")
        )
        sent = sum(sum(use.bytes_by_link.values()) for use in both)
        rows.append((str(rank), str(like), compute, wait, idle, quantity(sent, "B")))
    header = ("rank", "ranks like it", "compute", "wait", "idle", "sent")
    return Table(header, tuple(rows))


MOST_CELLS = 256  # a side
MOST_GROUPS = 2
FEW_SHARDS = 32  # a side, to zoom in on
MOST_RANKS = 1024  # of larger plans some ranks' cells are shown
SHOWN_RANKS = 64


def assignments(resolved: ResolvedPass) -> tuple[Figure, ...]:
    """One figure per group of heads, for a few of them."""
    plan, mask, layouts, *_ = resolved
    shown = min(plan.num_head_groups, MOST_GROUPS)
    n = plan.world_size
    ranks = range(n) if n <= MOST_RANKS else range(0, n, n // SHOWN_RANKS)
    tables = assigned(plan, shown, ranks)
    if plan.world_size <= MOST_CELLS and not everything_needed(mask, *layouts):
        needed = np.zeros(tables[0].shape, bool)
        pairs = np.array(list(table_cells(plan, mask, *layouts)), np.int64).reshape(-1, 2)
        needed[pairs[:, 0], pairs[:, 1]] = True
        tables = [np.where(needed, table, -1) for table in tables]
    return tuple(_assignment(plan, table, group) for group, table in enumerate(tables))


def _thinned(table: np.ndarray) -> tuple[np.ndarray, tuple[int, ...], tuple[int, ...]]:
    """At most so many cells a side, each the last of the ranks that compute those it is for."""
    steps = [-(-size // MOST_CELLS) for size in table.shape]
    rows, columns = (
        tuple(range(0, size, step)) for size, step in zip(table.shape, steps, strict=True)
    )
    for axis, starts in enumerate((rows, columns)):
        table = np.maximum.reduceat(table, starts, axis=axis)
    return table, rows, columns


def _assignment(plan: Plan, table: np.ndarray, group: int) -> Figure:
    n, groups, whole = plan.world_size, plan.num_head_groups, table.shape
    table, rows, columns = _thinned(table)
    heads = f", head group {group} of {groups}" if groups > 1 else ""
    sides = f" {CROSS} ".join(str(size) for size in whole)
    ranks = f"{len(set(table[table >= 0].tolist()))} of {n}"
    caption = (
        f"{sides} cells, one colour per rank ({ranks} ranks compute here). "
        + ("Wide blocks share keys and values, tall ones queries. " if group == 0 else "")
        + ("Blank cells are not needed under the mask. " if (table < 0).any() and n <= 256 else "")
        + ("Each cell stands for several. " if table.shape != whole else "")
    )
    drawn = Tiles(table, rows, columns), _owners(table)
    side = max(whole)
    jumps = (("All", -0.5, side - 0.5), (f"First {FEW_SHARDS} shards", -0.5, FEW_SHARDS - 0.5))
    title = f"Who computes what{heads}"
    zoomed = jumps if side > 1.5 * FEW_SHARDS else ()
    return Figure(f"assignment-{group}", title, caption.strip(), *drawn, zoomed)


def _owners(table: np.ndarray) -> Table | None:
    """How many cells each rank computes, where the table is not too large to say."""
    if table.size > MOST_CELLS**2 or not (table >= 0).any():
        return None
    ranks, cells = np.unique(table[table >= 0], return_counts=True)
    rows = zip(map(str, ranks.tolist()), map(str, cells.tolist()), strict=True)
    return Table(("rank", "cells"), tuple(rows))
