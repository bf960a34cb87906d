"""The charts of a plan's page: times, bytes, other clusters, the assignment of cells to ranks."""

from collections.abc import Iterable, Mapping
from types import MappingProxyType

import numpy as np

from tilewise.compiler.pruning import everything_needed, table_cells
from tilewise.compiler.resolved import ResolvedPass
from tilewise.plan.ir import Plan
from tilewise.simulation.network import LINKS
from tilewise_tools.mask_report.view import assigned
from tilewise_tools.report.drawing import Drawing, Series, Words, axis, bars, lines, log_axis, tiles
from tilewise_tools.report.page import Figure, TextTable
from tilewise_tools.report.studies import LONGEST_RING, Placed, Studies, StudyEntry
from tilewise_tools.report.timeline import LANE_NAMES, LANES
from tilewise_tools.report.words import CROSS, count, quantity, short, times

THIS = "this plan"
BUSY = "compute, copies and merges"
COLOURS = MappingProxyType(
    {"mesh": 0, "ring": 1, "hybrid": 2, "ulysses": 3, THIS: 4, "double ring": 6, "all-gather": 7}
)
NAMES = MappingProxyType({"mesh": "usual mesh", "hybrid": "usual hybrid", "ulysses": "Ulysses"})


def _name(entry: StudyEntry) -> str:
    return NAMES.get(entry.family, entry.family)


def _note(entry: StudyEntry, text: str = "") -> str:
    """Return the note at an entry's mark: its plan's name, and a text or else its time."""
    return f"{short(entry.plan.name)}\n{text or quantity(entry.simulation.seconds, 's')}"


def _cells(entry: StudyEntry) -> tuple[str, ...]:
    """An entry's columns in tables: strategy, plan, both passes, waiting."""
    simulation = entry.simulation
    times = quantity(simulation.seconds, "s"), quantity(simulation.exposed_seconds, "s")
    return _name(entry), short(entry.plan.name), *times


CELLS = ("strategy", "plan", "both passes", "waiting")


def _stacked(
    entries: list[StudyEntry],
    title: str,
    unit: str,
    values_by_lane: Mapping[str, list[float]],
    lane_names: Mapping[str, str] = LANE_NAMES,
) -> Drawing:
    """Lying bars, a name each; parts are values of each entry, by lane."""
    names, series = list(map(_name, entries)), []
    for lane, values in values_by_lane.items():
        lane_name = lane_names.get(lane, lane)
        both = zip(entries, values, strict=True)
        notes = [_note(entry, f"{quantity(value, unit)} {lane_name}") for entry, value in both]
        series.append(Series(lane_name, names, values, notes, LANES[lane]))
    return bars(axis(title), unit, series)


def seconds(entries: Iterable[StudyEntry]) -> Figure:
    """Chart of the parts of each strategy's time."""
    entries = sorted(entries, key=lambda entry: entry.simulation.seconds)
    waiting = [entry.simulation.exposed_seconds for entry in entries]
    whole = [entry.simulation.seconds for entry in entries]
    parts = {
        "compute": [one - wait for one, wait in zip(whole, waiting, strict=True)],
        "wait": waiting,
    }
    caption = (
        "Forward and backward. Waiting for messages is that of the rank that waits longest, as in "
        "the tables and the card; the rest of the time is computing, copies and merges. The usual "
        "mesh and hybrid are those that one would try by hand."
    )
    drawing = _stacked(entries, "time", "s", parts, LANE_NAMES | {"compute": BUSY})
    table = TextTable(CELLS, (*map(_cells, entries),))
    return Figure("seconds", "Time by strategy, fastest first", caption, drawing, table)


def bytes_by_link(entries: Iterable[StudyEntry]) -> Figure:
    """Chart of the bytes of the rank that sends most, by class of link, by strategy."""
    entries = sorted(entries, key=lambda entry: entry.simulation.sent_bytes)
    sent = [entry.simulation.most_sent_by_link for entry in entries]
    bytes_of_links = {link: [float(part.get(link, 0)) for part in sent] for link in LINKS}
    rows = tuple(
        (*_cells(entry)[:2], *(quantity(values[i], "B") for values in bytes_of_links.values()))
        for i, entry in enumerate(entries)
    )
    header = ("strategy", "plan", *(LANE_NAMES[link] for link in LINKS))
    caption = (
        "Bytes of the rank that sends most in forward and backward, over each kind of link. Bytes "
        "between nodes cost most: the ranks of a node share its network cards."
    )
    parts = {link: values for link, values in bytes_of_links.items() if any(values)}
    drawing = _stacked(entries, "sent by one rank", "B", parts)
    title = "Bytes by kind of link, fewest first"
    return Figure("bytes", title, caption, drawing, TextTable(header, rows))


def _against(
    placed_entries: list[Placed], x: Words, further_series: Iterable[Series] = ()
) -> Drawing:
    """Seconds of each family against something, with their plans as notes."""
    parts: list[Series] = []
    for family in dict.fromkeys(entry.family for _, entry in placed_entries):
        family_entries = [
            (place, entry) for place, entry in placed_entries if entry.family == family
        ]
        places, entries = zip(*family_entries, strict=True)
        took = [entry.simulation.seconds for entry in entries]
        notes = list(map(_note, entries))
        parts.append(Series(_name(entries[0]), places, took, notes, COLOURS[family]))
    parts += further_series
    y = log_axis("forward + backward", "s", (value for series in parts for value in series.y))
    return lines(x, y, parts)


def _by_place(placed_entries: list[Placed], column_name: str) -> TextTable:
    return TextTable(
        (column_name, *CELLS), tuple((f"{at:g}", *_cells(entry)) for at, entry in placed_entries)
    )


def scaling(studies: Studies, this: StudyEntry) -> Figure:
    """Time of the same sequence on 8 to 4096 devices."""
    every, placed_entries = studies.sizes(), studies.scaled()
    world_size, simulation = this.simulation.world_size, this.simulation
    ideal = [simulation.compute_seconds * world_size / n for n in every]
    notes = [f"compute alone, perfectly shared\n{quantity(t, 's')}" for t in ideal]
    extra = (
        Series("compute alone", every, ideal, notes, 7, "dash"),
        Series(THIS, [world_size], [simulation.seconds], [_note(this)], COLOURS[THIS], "points"),
    )
    x = axis("devices", ticks=[(n, count(n)) for n in every], log=True)
    longest = f" Rings are simulated up to {LONGEST_RING} devices." if every[-1] > 512 else ""
    caption = (
        f"The same {count(studies.work.num_tokens)} tokens on more and more devices of this kind. "
        "Where a line leaves the dotted one, messages are no longer hidden behind compute; where "
        f"it turns flat, more devices no longer help.{longest}"
    )
    title, table = "Time against devices", _by_place(placed_entries, "devices")
    return Figure("scaling", title, caption, _against(placed_entries, x, extra), table)


def sensitivity(placed_entries: list[Placed]) -> Figure:
    """Time against the bandwidth of all links, as a multiple of the machine's."""
    factors = sorted({factor for factor, _ in placed_entries})
    ticks = [(p, f"{CROSS}{p:g}" if p >= 1 else f"{CROSS}1/{1 / p:g}") for p in factors]

    def spread(factor: float) -> str:
        took = [entry.simulation.seconds for other, entry in placed_entries if other == factor]
        return times(max(took) / min(took))

    caption = (
        "If the links were slower or faster than assumed. The strategies differ by "
        f"{spread(factors[0])} at {ticks[0][1]} and by {spread(factors[-1])} at {ticks[-1][1]}: "
        "where lines meet, the choice no longer matters."
    )
    drawing = _against(placed_entries, axis("bandwidth of every link", ticks=ticks, log=True))
    table = _by_place(placed_entries, "bandwidth")
    return Figure("sensitivity", "Time against bandwidth", caption, drawing, table)


MOST_CELLS = 256  # a side
MOST_GROUPS = 2
FEW_SHARDS = 32  # a side, to zoom in on
MOST_RANKS = 1024  # of larger plans some ranks' cells are shown
SHOWN_RANKS = 64


def assignments(resolved: ResolvedPass) -> tuple[Figure, ...]:
    """One figure per group of heads, for a few of them."""
    plan, mask, layouts, *_ = resolved
    num_shown = min(plan.num_head_groups, MOST_GROUPS)
    n = plan.world_size
    ranks = range(n) if n <= MOST_RANKS else range(0, n, n // SHOWN_RANKS)
    tables = assigned(plan, num_shown, ranks)
    if plan.world_size <= MOST_CELLS and not everything_needed(mask, *layouts):
        needed = np.zeros(tables[0].shape, bool)
        pairs = np.array(list(table_cells(plan, mask, *layouts)), np.int64).reshape(-1, 2)
        needed[pairs[:, 0], pairs[:, 1]] = True
        tables = [np.where(needed, table, -1) for table in tables]
    return tuple(_assignment(plan, table, group) for group, table in enumerate(tables))


def _thinned(table: np.ndarray) -> tuple[np.ndarray, tuple[int, ...], tuple[int, ...]]:
    """Shrink a table to at most a number of cells a side; each shows the last of its ranks."""
    steps = [-(-size // MOST_CELLS) for size in table.shape]
    rows, columns = (
        tuple(range(0, size, step)) for size, step in zip(table.shape, steps, strict=True)
    )
    for side, starts in enumerate((rows, columns)):
        table = np.maximum.reduceat(table, starts, axis=side)
    return table, rows, columns


def _assignment(plan: Plan, table: np.ndarray, group: int) -> Figure:
    n, groups, shape = plan.world_size, plan.num_head_groups, table.shape
    table, rows, columns = _thinned(table)
    heads = f", head group {group} of {groups}" if groups > 1 else ""
    sides = f" {CROSS} ".join(str(size) for size in shape)
    ranks = f"{len(set(table[table >= 0].tolist()))} of {n}"
    caption = (
        f"{sides} cells, one colour per rank ({ranks} ranks compute here). "
        + (
            "A wide block reads few queries and many keys, a tall one many queries and few keys. "
            if group == 0
            else ""
        )
        + ("Blank cells are not needed under the mask. " if (table < 0).any() and n <= 256 else "")
        + ("Each cell stands for several. " if table.shape != shape else "")
    )
    drawing_and_table = tiles(table, rows, columns), _owners(table)
    side = max(shape)
    jumps = (("All", -0.5, side - 0.5), (f"First {FEW_SHARDS} shards", -0.5, FEW_SHARDS - 0.5))
    title = f"Who computes what{heads}"
    zoomed = jumps if side > 1.5 * FEW_SHARDS else ()
    return Figure(f"assignment-{group}", title, caption.strip(), *drawing_and_table, zoomed)


def _owners(table: np.ndarray) -> TextTable | None:
    """TextTable of how many cells each rank computes, unless the table is too large to say."""
    if table.size > MOST_CELLS**2 or not (table >= 0).any():
        return None
    ranks, cells = np.unique(table[table >= 0], return_counts=True)
    rows = zip(map(str, ranks.tolist()), map(str, cells.tolist()), strict=True)
    return TextTable(("rank", "cells"), tuple(rows))
