"""The charts of a plan's page: bytes by link, time against devices and against bandwidth."""

from __future__ import annotations

from collections.abc import Iterable
from types import MappingProxyType

from tilewise.simulation.network import LINKS
from tilewise.tools.report.chart import (
    CROSS,
    LANES,
    LINK_NAMES,
    Axis,
    Chart,
    Figure,
    Series,
    Table,
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


def seconds(entries: Iterable[StudyEntry]) -> Figure:
    """What each strategy's time is made of."""
    entries = sorted(entries, key=lambda entry: entry.simulation.seconds)
    names = tuple(named(entry) for entry in entries)
    parts = []
    for what, field in (("compute", "compute_seconds"), ("wait", "exposed_seconds")):
        values = tuple(getattr(entry.simulation, field) for entry in entries)
        notes = tuple(
            f"{short(entry.plan.name)}<br>{what} {quantity(value, 's')}, in all "
            f"{quantity(entry.simulation.seconds, 's')}"
            for entry, value in zip(entries, values, strict=True)
        )
        parts.append(Series(what, names, values, notes, LANES[what]))
    rows = tuple(
        (
            named(entry),
            short(entry.plan.name),
            quantity(entry.simulation.seconds, "s"),
            quantity(entry.simulation.exposed_seconds, "s"),
            quantity(entry.simulation.peak_bytes, "B"),
        )
        for entry in entries
    )
    header = ("strategy", "plan", "both passes", "waiting", "peak memory")
    caption = (
        "Forward and backward. Compute is that of the busiest rank, waiting that of the rank that "
        "waits longest, so the two may add up to a little more than the time."
    )
    chart = Chart(Axis("time", "s"), Axis(""), tuple(parts), bars=True)
    return Figure("seconds", "Time by strategy, fastest first", caption, chart, Table(header, rows))


def bytes_by_link(entries: Iterable[StudyEntry]) -> Figure:
    """What the busiest rank sends, by strategy and class of link."""
    entries = sorted(entries, key=lambda entry: sum(entry.simulation.bytes_by_link.values()))
    names = tuple(named(entry) for entry in entries)
    sent = [entry.simulation.bytes_by_link for entry in entries]
    parts = []
    for link in (link for link in LINKS if any(link in one for one in sent)):
        values = tuple(float(one.get(link, 0)) for one in sent)
        notes = tuple(
            f"{short(entry.plan.name)}<br>{quantity(value, 'B')} {LINK_NAMES[link]}"
            for entry, value in zip(entries, values, strict=True)
        )
        parts.append(Series(LINK_NAMES[link], names, values, notes, LANES[link]))
    rows = tuple(
        (named(entry), short(entry.plan.name), *(quantity(one.get(link, 0), "B") for link in LINKS))
        for entry, one in zip(entries, sent, strict=True)
    )
    header = ("strategy", "plan", *(LINK_NAMES[link] for link in LINKS))
    caption = (
        "Bytes that the busiest rank sends in forward and backward. Bytes between nodes cost most: "
        "the ranks of a node share its network cards."
    )
    chart = Chart(Axis("sent by one rank", "B"), Axis(""), tuple(parts), bars=True)
    title = "Bytes by kind of link, fewest first"
    return Figure("bytes", title, caption, chart, Table(header, rows))


def lines(found: list[tuple[float, StudyEntry]], x: Axis, more: tuple[Series, ...] = ()) -> Chart:
    """Seconds of each family against something, with their plans as notes."""
    parts = []
    for name in dict.fromkeys(entry.family for _, entry in found):
        mine = [(place, entry) for place, entry in found if entry.family == name]
        took = tuple(entry.simulation.seconds for _, entry in mine)
        notes = tuple(
            f"{short(entry.plan.name)}<br>{quantity(value, 's')}"
            for (_, entry), value in zip(mine, took, strict=True)
        )
        places = tuple(place for place, _ in mine)
        parts.append(Series(named(mine[0][1]), places, took, notes, COLOURS[name]))
    parts += more
    values = (value for series in parts for value in series.y)
    y = log_axis("forward + backward", "s", values)
    return Chart(x, y, tuple(parts))


def scaling(studies: Studies, this: StudyEntry) -> Figure:
    """Time of the same sequence on 8 to 4096 devices."""
    every, found = studies.sizes(), studies.scaled()
    ticks = tuple((n, count(n)) for n in every)
    world_size = this.simulation.world_size
    perfect = this.simulation.compute_seconds * world_size
    ideal = tuple(perfect / n for n in every)
    mine = this.simulation.seconds
    extra = (
        Series(
            "compute alone",
            tuple(every),
            ideal,
            tuple(f"compute alone, perfectly shared<br>{quantity(t, 's')}" for t in ideal),
            7,
            "dash",
        ),
        Series(
            THIS,
            (world_size,),
            (mine,),
            (f"{short(this.plan.name)}<br>{quantity(mine, 's')}",),
            COLOURS[THIS],
            "points",
        ),
    )
    chart = lines(found, Axis("devices", log=True, ticks=ticks), extra)
    longest = f" Rings are simulated up to {LONGEST_RING} devices." if every[-1] > 512 else ""
    caption = (
        f"The same {count(studies.work.num_tokens)} tokens on more and more devices of this kind. "
        "Where a line leaves the dotted one, messages are no longer hidden behind compute; where "
        f"it turns flat, more devices no longer help.{longest}"
    )
    return Figure("scaling", "Time against devices", caption, chart, _by_place(found, "devices"))


def _by_place(found: list[tuple[float, StudyEntry]], what: str) -> Table:
    rows = tuple(
        (
            f"{place:g}",
            named(entry),
            short(entry.plan.name),
            quantity(entry.simulation.seconds, "s"),
            quantity(entry.simulation.exposed_seconds, "s"),
        )
        for place, entry in found
    )
    return Table((what, "strategy", "plan", "both passes", "waiting"), rows)


def sensitivity(found: list[tuple[float, StudyEntry]]) -> Figure:
    """Time against the bandwidth of all links, as a multiple of the machine's."""
    places = sorted({place for place, _ in found})
    ticks = tuple((p, f"{CROSS}{p:g}" if p >= 1 else f"{CROSS}1/{1 / p:g}") for p in places)
    chart = lines(found, Axis("bandwidth of every link", log=True, ticks=ticks))
    slowest = {p: max(e.simulation.seconds for q, e in found if q == p) for p in places}
    fastest = {p: min(e.simulation.seconds for q, e in found if q == p) for p in places}
    low, high = places[0], places[-1]
    caption = (
        "If the links were slower or faster than assumed. The strategies differ by "
        f"{times(slowest[low] / fastest[low])} at {ticks[0][1]} and by "
        f"{times(slowest[high] / fastest[high])} at {ticks[-1][1]}: where lines meet, the choice "
        "no longer matters."
    )
    title = "Time against bandwidth"
    return Figure("sensitivity", title, caption, chart, _by_place(found, "bandwidth"))
