"""The charts of a benchmark's page."""

import json
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from statistics import geometric_mean, median
from types import MappingProxyType
from typing import Any

from tilewise.tools.report.bench_cases import (
    Facet,
    ReportCase,
    Row,
    cases,
    cost,
    described,
    is_timed,
    slowdowns,
)
from tilewise.tools.report.chart import (
    Axis,
    Chart,
    Figure,
    HeatMap,
    Series,
    Table,
    count,
    log_axis,
    quantity,
    times,
)

LEVELS = (
    ("fastest, or within 5 %", 2),
    ("up to 1.5 times slower", 0),
    ("up to 3 times slower", 6),
    ("slower still", 1),
    ("wrong results", 4),
    ("failed or timed out", 3),
    ("out of memory", 5),
    ("unsupported", 7),
)
BOUNDS = (1.05, 1.5, 3.0)
WRONG, FAILED, MEMORY, UNSUPPORTED = 4, 5, 6, 7
ENDS = MappingProxyType(
    {
        "failed": (FAILED, "failed"),
        "timed_out": (FAILED, "timed out"),
        "out_of_memory": (MEMORY, "memory"),
        "unsupported": (UNSUPPORTED, "n/a"),
    }
)
SHOWN = (
    *("contender", "mask", "pass", "num_tokens", "world_size", "dtype", "outcome"),
    *("median_seconds", "tflops", "bytes_max_rank", "predicted_seconds", "message"),
)
UNITS = MappingProxyType(
    {"median_seconds": "s", "predicted_seconds": "s", "bytes_max_rank": "B", "peak_bytes": "B"}
    | {"predicted_peak_bytes": "B"}
)


def row_table(rows: Iterable[Row], names: Sequence[str] = SHOWN) -> Table:
    """Rows as text, without columns that are empty in all."""
    rows = list(rows)
    used = [name for name in names if any(row.get(name) not in (None, "") for row in rows)]
    return Table(
        tuple(name.replace("_", " ") for name in used),
        tuple(tuple(_text(name, row.get(name)) for name in used) for row in rows),
    )


def _text(name: str, value: Any) -> str:
    if value is None:
        return ""
    if name == "tflops":
        return quantity(value * 1e12, "FLOP/s")
    if isinstance(value, bool) or not isinstance(value, int | float):
        return value if isinstance(value, str) else json.dumps(value)
    if name in UNITS:
        return quantity(value, UNITS[name])
    return f"{value:,}" if isinstance(value, int) else f"{value:.4g}"


def by_contender(rows: Iterable[Row], colours: dict[str, int]) -> dict[str, list[Row]]:
    """Rows of each contender, in the order of their colours."""
    found: dict[str, list[Row]] = {}
    for row in sorted(rows, key=lambda row: colours[str(row["contender"])]):
        found.setdefault(str(row["contender"]), []).append(row)
    return found


def _masks(every: list[ReportCase]) -> list[str]:
    return list(dict.fromkeys(str(dict(case.fields)["mask"]) for case in every))


def winners(kind: str, every: list[ReportCase], colours: dict[str, int]) -> Figure:
    """How many cases of each mask each contender wins."""
    masks = _masks(every)
    won = by_contender((row for case in every for row in case.done[:1]), colours)
    parts = []
    for name, rows in won.items():
        wins = Counter(str(row["mask"]) for row in rows)
        notes = tuple(f"{name}<br>{mask}: wins {wins[mask]}" for mask in masks)
        counts = tuple(float(wins[mask]) for mask in masks)
        parts.append(Series(name, tuple(masks), counts, notes, colours[name]))
    most = max(Counter(str(dict(case.fields)["mask"]) for case in every).values())
    step = max(1, most // 5)
    ticks = tuple((float(place), str(place)) for place in range(0, most + 1, step))
    chart = Chart(Axis("cases won", ticks=ticks), Axis(""), tuple(parts), bars=True)
    best = max(won, key=lambda name: len(won[name]))
    caption = (
        f"Who is fastest in how many cases (lengths, passes, numbers of ranks) of each mask. "
        f"{best} wins most: {len(won[best])} of {sum(map(len, won.values()))}."
    )
    rows = row_table(row for case in every for row in case.done[:1])
    return Figure(f"winners-{kind}", f"Winners per mask: {kind}", caption, chart, rows)


def heat_map(kind: str, every: list[ReportCase], colours: dict[str, int]) -> Figure:
    """Masks by contenders: how much slower than the fastest, or why there is no figure."""
    masks = _masks(every)
    names = [n for n in colours if any(r.get("contender") == n for c in every for r in c.rows)]
    grid = _grid(masks, names, lambda mask, name: _cell(mask, name, every))
    caption = (
        "How many times slower than the fastest contender of the same case (geometric mean over "
        "the cases of a mask); otherwise why there is no time. Blank: not run."
    )
    rows = row_table(row for case in every for row in case.rows)
    title = f"Supported, slow or failed: {kind}"
    return Figure(f"heat-{kind}", title, caption, grid, rows)


def _grid(
    masks: list[str], names: list[str], cell: Callable[[str, str], tuple[int, str, str]]
) -> HeatMap:
    """Masks by contenders, and the levels that there are; cell: its level, text and note."""
    found = [[cell(mask, name) for name in names] for mask in masks]
    used = sorted({level for line in found for level, _, _ in line if level >= 0})
    places = {level: place for place, level in enumerate(used)} | {-1: -1}
    columns = (list(zip(*line, strict=True)) for line in found)
    levels, texts, notes = zip(*columns, strict=True)
    cells = tuple(tuple(places[level] for level in line) for line in levels)
    shown = tuple(LEVELS[level] for level in used)
    return HeatMap(tuple(names), tuple(masks), shown, cells, texts, notes)


def _cell(mask: str, name: str, every: list[ReportCase]) -> tuple[int, str, str]:
    """Level, text and note of a mask and a contender."""
    mine = [case for case in every if dict(case.fields)["mask"] == mask]
    rows = [row for case in mine for row in case.rows if row.get("contender") == name]
    if not rows:
        return -1, "", f"{name}<br>{mask}: not run"
    ends = [row["outcome"] for row in rows if row.get("outcome") != "ok"]
    slow = slowdowns(mine).get(name)
    if not slow:
        level, text = ENDS.get(ends[0] if ends else "failed", (FAILED, "failed"))
        reason = next((str(row["message"]) for row in rows if row.get("message")), text)
        return level, text, f"{name}<br>{mask}: {reason[:120]}"
    ratio = geometric_mean(slow)
    note = f"{name}<br>{mask}: {times(ratio)} the fastest, {len(slow)} of {len(rows)} cases done"
    if any(row.get("is_exact") is False for row in rows):
        return WRONG, times(ratio), f"{note}<br>results beyond the tolerance"
    return sum(ratio > bound for bound in BOUNDS), times(ratio), note


def speeds(kind: str, every: list[ReportCase], colours: dict[str, int]) -> Figure | None:
    """Masks by contenders: TFLOP/s of a device, beside the best of the same mask."""
    rows = [row for case in every for row in case.done if row.get("tflops")]
    masks = list(dict.fromkeys(str(row["mask"]) for row in rows))
    names = [n for n in colours if any(row["contender"] == n for row in rows)]
    if not rows:
        return None
    found: dict[tuple[str, str], list[float]] = {}
    for row in rows:
        found.setdefault((str(row["mask"]), str(row["contender"])), []).append(row["tflops"])
    medians = {place: median(values) for place, values in found.items()}
    best = {mask: max(v for (m, _), v in medians.items() if m == mask) for mask in masks}

    def cell(mask: str, name: str) -> tuple[int, str, str]:
        if (mask, name) not in medians:
            return -1, "", f"{name}<br>{mask}: no figure"
        speed = medians[mask, name]
        text, level = quantity(speed * 1e12, "FLOP/s"), best[mask] / speed
        note = f"{name}<br>{mask}: {text}, {len(found[mask, name])} cases"
        return sum(level > bound for bound in BOUNDS), text, note

    grid = _grid(masks, names, cell)
    caption = (
        "Operations of the allowed pairs over the time of the slowest device: median over the "
        "cases of a mask. Colours compare within a mask."
    )
    return Figure(f"speed-{kind}", f"Speed per mask: {kind}", caption, grid, row_table(rows))


def memory(rows: list[Row], colours: dict[str, int]) -> Figure | None:
    """What a device allocates at most, in the case that most contenders ran."""
    counted = [row for row in rows if row.get("peak_bytes") and row.get("outcome") == "ok"]
    every = cases(counted)
    if not every:
        return None
    case = max(every, key=lambda case: (len(case.rows), *_size(case)))
    mine = sorted(case.rows, key=lambda row: float(row["peak_bytes"]))
    parts = [
        Series(
            str(row["contender"]),
            (str(row["contender"]),),
            (float(row["peak_bytes"]),),
            (f"{row['contender']}<br>{quantity(row['peak_bytes'], 'B')}{_planned(row)}",),
            colours[str(row["contender"])],
        )
        for row in mine
    ]
    chart = Chart(Axis("allocated at most, above the inputs", "B"), Axis(""), tuple(parts), True)
    caption = f"{described(dict(case.fields))}. Of the device that needs most, kernels included."
    names = ("contender", "peak_bytes", "predicted_peak_bytes", "median_seconds")
    return Figure("memory", "Memory beside each other", caption, chart, row_table(mine, names))


def _planned(row: Row) -> str:
    """What the planner said of the memory, where it did."""
    found = row.get("predicted_peak_bytes")
    return f", planned {quantity(found, 'B')}" if isinstance(found, int | float) else ""


def _figure_of(row: Row) -> float:
    """Seconds, or FLOP/s where there are none."""
    return float(row["median_seconds"]) if is_timed(row) else float(row["tflops"]) * 1e12


def along(field: str, shown: Facet, number: int, colours: dict[str, int]) -> Figure:
    """Figures of all contenders against tokens or ranks."""
    timed = is_timed(shown.rows[0])
    title, unit = ("time", "s") if timed else ("speed of a device", "FLOP/s")
    y = log_axis(title, unit, (_figure_of(row) for row in shown.rows))
    places = sorted({int(row[field]) for row in shown.rows})
    what = "tokens" if field == "num_tokens" else "ranks"
    x = Axis(what, log=True, ticks=tuple((place, count(place)) for place in places))
    parts = []
    for name, rows in by_contender(shown.rows, colours).items():
        figures: dict[int, list[float]] = {}
        for row in rows:
            figures.setdefault(int(row[field]), []).append(_figure_of(row))
        mine = sorted((place, median(values)) for place, values in figures.items())
        notes = tuple(f"{name}<br>{count(p)} {what}: {quantity(v, unit)}" for p, v in mine)
        line = tuple(p for p, _ in mine), tuple(v for _, v in mine)
        parts.append(Series(name, *line, notes, colours[name]))
    good = "Lower is faster." if timed else "Higher is faster."
    caption = f"{shown.about}. {good} Both axes are logarithmic: parallel lines keep their ratio."
    name = f"{what}-{shown.rows[0].get('kind')}-{number}"
    title = f"{'Time' if timed else 'Speed'} against {what}"
    return Figure(name, title, caption, Chart(x, y, tuple(parts)), row_table(shown.rows))


def bytes_against_time(rows: list[Row], colours: dict[str, int]) -> Figure | None:
    """What the busiest rank sends and how long it takes, in the case that most contenders ran."""
    counted = [row for row in rows if is_timed(row) and row.get("bytes_max_rank")]
    every = [case for case in cases(counted) if len(case.done) > 1]
    if not every:
        return None
    case = max(every, key=_size)
    parts = _points(case.done, "bytes_max_rank", "B", colours)
    x = log_axis("sent by the busiest rank", "B", (float(x) for one in parts for x in one.x))
    y = log_axis("time", "s", (y for one in parts for y in one.y))
    about = described(dict(case.fields))
    caption = (
        f"{about}. Further left is less traffic, further down is faster. Where points lie on a "
        "rising line the network decides; on a level one, compute does."
    )
    chart = Chart(x, y, tuple(parts))
    return Figure("traffic", "Bytes against time", caption, chart, row_table(case.done))


def _size(case: ReportCase) -> tuple[int, ...]:
    sizes = (int(dict(case.fields).get(name) or 0) for name in ("world_size", "num_tokens"))
    return len(case.done), *sizes


def _points(rows: Iterable[Row], field: str, unit: str, colours: dict[str, int]) -> list[Series]:
    """A series of points per contender: a field and the seconds measured."""
    parts = []
    for name, mine in by_contender(rows, colours).items():
        notes = tuple(
            f"{name}<br>{described(row)}<br>{quantity(row[field], unit)}, "
            f"{quantity(row['median_seconds'], 's')} measured"
            for row in mine
        )
        xs = tuple(float(row[field]) for row in mine)
        ys = tuple(float(row["median_seconds"]) for row in mine)
        parts.append(Series(name, xs, ys, notes, colours[name], "points"))
    return parts


def predictions(rows: list[Row], colours: dict[str, int]) -> Figure | None:
    """Measured against simulated time of every row that has both."""
    both = [r for r in rows if is_timed(r) and (r.get("predicted_seconds") or 0) > 0]
    both = [row for row in both if cost(row)]
    if not both:
        return None
    parts = _points(both, "predicted_seconds", "s", colours)
    values = [float(value) for one in parts for value in (*one.x, *one.y)]
    x, y = log_axis("predicted", "s", values), log_axis("measured", "s", values)
    equal = Series("equal", x.bounds, x.bounds, ("", ""), 7, "dash")
    errors = [abs(row["predicted_seconds"] / row["median_seconds"] - 1) for row in both]
    machines = sorted({str(row["machine"]) for row in both if row.get("machine")})
    on = f" Predicted for {', '.join(machines)}." if machines else ""
    caption = (
        f"{len(both)} rows. On the dotted line the simulator is right; above it the run took "
        f"longer than predicted. Median error {100 * median(errors):.0f} %.{on}"
    )
    chart = Chart(x, y, (*parts, equal))
    return Figure("predictions", "Measured against predicted", caption, chart, row_table(both))
