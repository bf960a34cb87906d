"""The charts of a benchmark's page."""

import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
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
from tilewise.tools.report.drawing import Series, axis, bars, heat_map, lines, log_axis
from tilewise.tools.report.page import Figure, Table
from tilewise.tools.report.words import count, quantity, times

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
Colours = Mapping[str, int]  # of contenders


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


def by_contender(rows: Iterable[Row], colours: Colours) -> dict[str, list[Row]]:
    """Rows of each contender, in the order of their colours."""
    found: dict[str, list[Row]] = {}
    for row in sorted(rows, key=lambda row: colours[row["contender"]]):
        found.setdefault(row["contender"], []).append(row)
    return found


def _masks(rows: Iterable[Row]) -> list[str]:
    return list(dict.fromkeys(row["mask"] for row in rows))


def winners(kind: str, every: list[ReportCase], colours: Colours) -> Figure:
    """Chart of how many cases of each mask each contender wins."""
    sizes = Counter(case.fields["mask"] for case in every)
    fastest = [case.done[0] for case in every if case.done]
    won = by_contender(fastest, colours)
    parts = []
    for name, rows in won.items():
        wins = Counter(row["mask"] for row in rows)
        notes = [f"{name}\n{mask}: wins {wins[mask]}" for mask in sizes]
        parts.append(Series(name, [*sizes], [wins[mask] for mask in sizes], notes, colours[name]))
    most = max(sizes.values())
    ticks = [(place, str(place)) for place in range(0, most + 1, max(1, most // 5))]
    best = max(won, key=lambda name: len(won[name]))
    caption = (
        f"Who is fastest in how many cases (lengths, passes, numbers of ranks) of each mask. "
        f"{best} wins most: {len(won[best])} of {len(fastest)}."
    )
    drawing = bars(axis("cases won", ticks=ticks), "", parts)
    title = f"Winners per mask: {kind}"
    return Figure(f"winners-{kind}", title, caption, drawing, row_table(fastest))


def support(kind: str, every: list[ReportCase], colours: Colours) -> Figure:
    """Masks by contenders: how much slower than the fastest, or why there is no figure."""
    rows = [row for case in every for row in case.rows]
    names = [name for name in colours if any(row["contender"] == name for row in rows)]

    def cell(mask: str, name: str) -> tuple[int, str, str]:
        return _support(mask, name, [case for case in every if case.fields["mask"] == mask])

    caption = (
        "How many times slower than the fastest contender of the same case (geometric mean over "
        "the cases of a mask); otherwise why there is no time. Blank: not run."
    )
    drawing = heat_map(_masks(rows), names, LEVELS, cell)
    title = f"Supported, slow or failed: {kind}"
    return Figure(f"heat-{kind}", title, caption, drawing, row_table(rows))


def _support(mask: str, name: str, mine: list[ReportCase]) -> tuple[int, str, str]:
    """Level, text and note of a contender in a mask's cases."""
    rows = [row for case in mine for row in case.rows if row["contender"] == name]
    if not rows:
        return -1, "", f"{name}\n{mask}: not run"
    slow = slowdowns(mine).get(name)
    if not slow:
        end = next((row["outcome"] for row in rows if row["outcome"] != "ok"), "failed")
        level, text = ENDS.get(end, (FAILED, "failed"))
        reason = next((str(row["message"]) for row in rows if row.get("message")), text)
        return level, text, f"{name}\n{mask}: {reason[:120]}"
    ratio = geometric_mean(slow)
    note = f"{name}\n{mask}: {times(ratio)} the fastest, {len(slow)} of {len(rows)} cases done"
    if any(row.get("is_exact") is False for row in rows):
        return WRONG, times(ratio), f"{note}\nresults beyond the tolerance"
    return sum(ratio > bound for bound in BOUNDS), times(ratio), note


def speeds(kind: str, every: list[ReportCase], colours: Colours) -> Figure | None:
    """Masks by contenders: TFLOP/s of a device, beside the best of the same mask."""
    rows = [row for case in every for row in case.done if row.get("tflops")]
    if not rows:
        return None
    found: dict[tuple[str, str], list[float]] = {}
    for row in rows:
        found.setdefault((row["mask"], row["contender"]), []).append(row["tflops"])
    medians = {place: median(values) for place, values in found.items()}

    def cell(mask: str, name: str) -> tuple[int, str, str]:
        if (mask, name) not in medians:
            return -1, "", f"{name}\n{mask}: no figure"
        speed, best = medians[mask, name], max(x for (m, _), x in medians.items() if m == mask)
        text = quantity(speed * 1e12, "FLOP/s")
        note = f"{name}\n{mask}: {text}, {len(found[mask, name])} cases"
        return sum(best / speed > bound for bound in BOUNDS), text, note

    names = [name for name in colours if any(row["contender"] == name for row in rows)]
    caption = (
        "Operations of the allowed pairs over the time of the slowest device: median over the "
        "cases of a mask. Colours compare within a mask."
    )
    drawing = heat_map(_masks(rows), names, LEVELS, cell)
    return Figure(f"speed-{kind}", f"Speed per mask: {kind}", caption, drawing, row_table(rows))


def memory(rows: Iterable[Row], colours: Colours) -> Figure | None:
    """Chart of the most memory that a device allocates, in the case that most contenders ran."""
    every = cases(row for row in rows if row.get("peak_bytes") and row["outcome"] == "ok")
    if not every:
        return None
    case = max(every, key=lambda case: (len(case.rows), *_size(case)))
    mine = sorted(case.rows, key=lambda row: float(row["peak_bytes"]))
    parts = []
    for row in mine:
        name, found, planned = row["contender"], row["peak_bytes"], row.get("predicted_peak_bytes")
        said = f", planned {quantity(planned, 'B')}" if planned is not None else ""
        note = f"{name}\n{quantity(found, 'B')}{said}"
        parts.append(Series(name, [name], [found], [note], colours[name]))
    names = ("contender", "peak_bytes", "predicted_peak_bytes", "median_seconds")
    drawing = bars(axis("peak above the inputs", "B"), "B", parts)
    caption = f"{described(case.fields)}. Of the device that needs most, kernels included."
    table = row_table(mine, names)
    return Figure("memory", "Memory beside each other", caption, drawing, table)


def along(field: str, shown: Facet, number: int, colours: Colours) -> Figure:
    """Seconds of all contenders against tokens or ranks; FLOP/s where there are no seconds."""
    timed = is_timed(shown.rows[0])
    title, unit, name, scale = (
        ("time", "s", "median_seconds", 1.0)
        if timed
        else ("speed of a device", "FLOP/s", "tflops", 1e12)
    )
    what = "tokens" if field == "num_tokens" else "ranks"
    parts = []
    for contender, rows in by_contender(shown.rows, colours).items():
        figures: dict[int, list[float]] = {}
        for row in rows:
            figures.setdefault(int(row[field]), []).append(scale * row[name])
        line = {place: median(values) for place, values in sorted(figures.items())}
        notes = [f"{contender}\n{count(p)} {what}: {quantity(v, unit)}" for p, v in line.items()]
        parts.append(Series(contender, [*line], [*line.values()], notes, colours[contender]))
    places = sorted({int(row[field]) for row in shown.rows})
    x = axis(what, ticks=[(place, count(place)) for place in places], log=True)
    y = log_axis(title, unit, (scale * row[name] for row in shown.rows))
    good = "Lower is faster." if timed else "Higher is faster."
    caption = f"{shown.about}. {good} Both axes are logarithmic: parallel lines keep their ratio."
    place = f"{what}-{shown.rows[0]['kind']}-{number}"
    title = f"{'Time' if timed else 'Speed'} against {what}"
    return Figure(place, title, caption, lines(x, y, parts), row_table(shown.rows))


def bytes_against_time(rows: Iterable[Row], colours: Colours) -> Figure | None:
    """Chart of what the busiest rank sends and how long it takes, in the case that most contenders
    ran.
    """
    every = cases(row for row in rows if is_timed(row) and row.get("bytes_max_rank"))
    every = [case for case in every if len(case.done) > 1]
    if not every:
        return None
    case = max(every, key=_size)
    parts = _points(case.done, "bytes_max_rank", "B", colours)
    x = log_axis("sent by the busiest rank", "B", (row["bytes_max_rank"] for row in case.done))
    y = log_axis("time", "s", (row["median_seconds"] for row in case.done))
    caption = (
        f"{described(case.fields)}. Further left is less traffic, further down is faster. Where "
        "points lie on a rising line the network decides; on a level one, compute does."
    )
    table = row_table(case.done)
    return Figure("traffic", "Bytes against time", caption, lines(x, y, parts), table)


def _size(case: ReportCase) -> tuple[int, ...]:
    sizes = (int(case.fields[name] or 0) for name in ("world_size", "num_tokens"))
    return len(case.done), *sizes


def _points(rows: Iterable[Row], field: str, unit: str, colours: Colours) -> list[Series]:
    """A series of points per contender: a field and the seconds measured."""
    parts = []
    for name, mine in by_contender(rows, colours).items():
        notes = [
            f"{name}\n{described(row)}\n{quantity(row[field], unit)}, "
            f"{quantity(row['median_seconds'], 's')} measured"
            for row in mine
        ]
        xs, ys = ([row[what] for row in mine] for what in (field, "median_seconds"))
        parts.append(Series(name, xs, ys, notes, colours[name], "points"))
    return parts


def predictions(rows: Iterable[Row], colours: Colours) -> Figure | None:
    """Measured against simulated time of every row that has both."""
    both = [r for r in rows if is_timed(r) and cost(r) and (r.get("predicted_seconds") or 0) > 0]
    if not both:
        return None
    values = [row[name] for row in both for name in ("predicted_seconds", "median_seconds")]
    x, y = (log_axis(what, "s", values) for what in ("predicted", "measured"))
    ends = [10**end for end in x["range"]]
    equal = Series("equal", ends, ends, ("", ""), 7, "dash")
    errors = [abs(row["predicted_seconds"] / row["median_seconds"] - 1) for row in both]
    machines = sorted({str(row["machine"]) for row in both if row.get("machine")})
    on = f" Predicted for {', '.join(machines)}." if machines else ""
    caption = (
        f"{len(both)} rows. On the dotted line the simulator is right; above it the run took "
        f"longer than predicted. Median error {100 * median(errors):.0f} %.{on}"
    )
    drawing = lines(x, y, [*_points(both, "predicted_seconds", "s", colours), equal])
    title = "Measured against predicted"
    return Figure("predictions", title, caption, drawing, row_table(both))
