"""The charts of a benchmark's page."""

import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from statistics import geometric_mean, median
from types import MappingProxyType
from typing import Any, NamedTuple

from tilewise_tools.report.bench_cases import (
    Facet,
    ReportCase,
    Row,
    cases,
    cost,
    described,
    is_right,
    is_timed,
    slowdowns,
    speed,
)
from tilewise_tools.report.drawing import Series, axis, bars, heat_map, lines, log_axis
from tilewise_tools.report.page import Figure, TextTable
from tilewise_tools.report.words import count, prefixed, quantity, times
from tilewise_verify.palette import FAULTS, RAMP

LEVELS = tuple(
    zip(
        (
            *("fastest, or within 5 %", "up to 1.5 times slower", "up to 3 times slower"),
            *("slower still", "wrong results", "failed or timed out", "out of memory"),
            "unsupported",
        ),
        (*RAMP, *FAULTS),
        strict=True,
    )
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
    *("contender", "mask", "pass", "num_tokens", "world_size", "heads", "dtype", "outcome"),
    *("median_seconds", "tflops", "bytes_max_rank", "predicted_seconds", "message"),
)
UNITS = MappingProxyType(
    {"median_seconds": "s", "predicted_seconds": "s", "bytes_max_rank": "B", "peak_bytes": "B"}
    | {"exposed_seconds": "s"}
    | {"predicted_peak_bytes": "B"}
)
Colours = Mapping[str, int]  # of contenders


def row_table(rows: Iterable[Row], names: Sequence[str] = SHOWN) -> TextTable:
    """Rows as text, without columns that are empty in all."""
    rows = [_shown(row) for row in rows]
    used = [name for name in names if any(row.get(name) not in (None, "") for row in rows)]
    return TextTable(
        tuple(HEADERS.get(name, name.replace("_", " ")) for name in used),
        tuple(tuple(_text(name, row.get(name)) for name in used) for row in rows),
    )


HEADERS = MappingProxyType({"heads": "heads q:kv", "tflops": "speed of a device"})


def _shown(row: Row) -> Row:
    """A row with its heads in one field, whether it is wrong, and the speed that charts show."""
    heads = f"{row['num_heads']}:{row.get('num_kv_heads')}" if row.get("num_heads") else ""
    outcome = "wrong" if row.get("is_exact") is False else row.get("outcome")
    return {**row, "heads": heads, "outcome": outcome, "tflops": speed(row)}


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
    rows_by_contender: dict[str, list[Row]] = {}
    for row in sorted(rows, key=lambda row: colours[row["contender"]]):
        rows_by_contender.setdefault(row["contender"], []).append(row)
    return rows_by_contender


def _masks(rows: Iterable[Row]) -> list[str]:
    return list(dict.fromkeys(row["mask"] for row in rows))


OURS = ("tilewise", "outside")
WON = (
    *("mask", "cases", "fastest most often", "in cases", "a tie with"),
    *("best of other libraries", "its time"),
)


class Winner(NamedTuple):
    """The contender that is fastest in most of some cases, and in how many.

    Attributes:
        ties: contenders within 5 % of it, of those with a figure in every case.
        other: the best contender of another library, with its time over the fastest's and the
            number of its cases.
    """

    name: str
    wins: int
    num_cases: int
    ties: tuple[str, ...]
    other: tuple[str, float, int] | None


def winner(some_cases: Iterable[ReportCase]) -> Winner | None:
    """Return who wins most of the cases that somebody finished; of equals the faster one.

    Rows with wrong results do not count.
    """
    right_cases = (ReportCase([*filter(is_right, case.rows)]) for case in some_cases)
    done_cases = [case for case in right_cases if case.done]
    if not done_cases:
        return None
    wins = Counter(case.done[0]["contender"] for case in done_cases)
    by_name = slowdowns(done_cases)
    ratios = {name: geometric_mean(x) for name, x in by_name.items()}
    best = min(wins, key=lambda name: (-wins[name], ratios[name]))
    library = {row["contender"]: row.get("library") for case in done_cases for row in case.done}
    others = [name for name in ratios if library[name] and library[name] not in OURS]
    others.sort(key=lambda name: ratios[name])
    other = (others[0], ratios[others[0]], len(by_name[others[0]])) if others else None
    everywhere = {name for name, every in by_name.items() if len(every) >= len(done_cases)}
    close = (name for name in everywhere - {best} if ratios[name] <= BOUNDS[0] * ratios[best])
    ties = tuple(sorted(close, key=lambda name: ratios[name]))
    return Winner(best, wins[best], len(done_cases), ties, other)


def winners(by_kind: Mapping[str, list[ReportCase]]) -> TextTable:
    """Table of who wins each mask, by how much, and what other libraries do."""
    lines: list[tuple[str, ...]] = []
    for kind, all_cases in by_kind.items():
        for mask in dict.fromkeys(case.fields["mask"] for case in all_cases):
            won = winner(case for case in all_cases if case.fields["mask"] == mask)
            if won is not None:
                other, ratio, _ = won.other or ("", 0.0, 0)
                lines.append(
                    (
                        f"{kind}: {mask}" if len(by_kind) > 1 else mask,
                        str(won.num_cases),
                        won.name,
                        str(won.wins),
                        ", ".join(won.ties),
                        other,
                        f"{times(ratio)} the fastest" if other else "",
                    )
                )
    return TextTable(WON, tuple(lines))


def verdict(by_kind: Mapping[str, list[ReportCase]]) -> str:
    """Return who wins, in a sentence or two for each kind."""
    sentences: list[str] = []
    for kind, all_cases in by_kind.items():
        won = winner(all_cases)
        if won is None:
            continue
        where = f" of {kind}" if len(by_kind) > 1 else ""
        sentences.append(
            f"{won.name} is fastest in {won.wins} of {won.num_cases} cases{where}"
            + (f"; a tie with {', '.join(won.ties)} (within 5 %)." if won.ties else ".")
        )
        if won.other and won.other[0] != won.name:
            name, ratio, num_cases = won.other
            cases_text = f", in {num_cases} of the cases" * (num_cases < won.num_cases)
            sentences.append(f"The best of other libraries, {name}, takes {times(ratio)} the time "
                             f"of the fastest{cases_text}.")  # fmt: skip
    return " ".join(sentences)


def support(kind: str, all_cases: list[ReportCase], colours: Colours) -> Figure:
    """Masks by contenders: how much slower than the fastest, or why there is no figure."""
    rows = [row for case in all_cases for row in case.rows]
    names = [name for name in colours if any(row["contender"] == name for row in rows)]

    def cell(mask: str, name: str) -> tuple[int, str, str]:
        return _support(mask, name, [case for case in all_cases if case.fields["mask"] == mask])

    caption = (
        "How many times slower than the fastest contender of the same case (geometric mean over "
        "the cases of a mask); otherwise why there is no time. Blank: not run."
    )
    drawing = heat_map(_masks(rows), names, LEVELS, cell)
    title = f"Supported, slow or failed: {kind}"
    return Figure(f"heat-{kind}", title, caption, drawing, row_table(rows))


def _support(mask: str, name: str, mask_cases: list[ReportCase]) -> tuple[int, str, str]:
    """Level, text and note of a contender in a mask's cases."""
    rows = [row for case in mask_cases for row in case.rows if row["contender"] == name]
    if not rows:
        return -1, "", f"{name}\n{mask}: not run"
    ratios = slowdowns(mask_cases).get(name)
    if not ratios:
        outcome = next((row["outcome"] for row in rows if row["outcome"] != "ok"), "failed")
        level, text = ENDS.get(outcome, (FAILED, "failed"))
        reason = next((str(row["message"]) for row in rows if row.get("message")), text)
        return level, text, f"{name}\n{mask}: {reason[:120]}"
    ratio = geometric_mean(ratios)
    note = f"{name}\n{mask}: {times(ratio)} the fastest, {len(ratios)} of {len(rows)} cases done"
    if any(row.get("is_exact") is False for row in rows):
        return WRONG, f"wrong, {times(ratio)}", f"{note}\nresults beyond the tolerance"
    return sum(ratio > bound for bound in BOUNDS), times(ratio), note


def speeds(kind: str, all_cases: list[ReportCase], colours: Colours) -> Figure | None:
    """Masks by contenders: TFLOP/s of a device, beside the best of the same mask."""
    rows = [row for case in all_cases for row in case.done if speed(row)]
    if not rows:
        return None
    values_by_cell: dict[tuple[str, str], list[float]] = {}
    for row in rows:
        values_by_cell.setdefault((row["mask"], row["contender"]), []).append(speed(row) or 0.0)
    medians = {cell_key: median(values) for cell_key, values in values_by_cell.items()}
    unit, scale = prefixed(max(medians.values()) * 1e12, "FLOP/s")

    def cell(mask: str, name: str) -> tuple[int, str, str]:
        if (mask, name) not in medians:
            return -1, "", f"{name}\n{mask}: no figure"
        figure, best = medians[mask, name], max(x for (m, _), x in medians.items() if m == mask)
        text = f"{figure * (1e12 / scale):.3g}"
        note = f"{name}\n{mask}: {text} {unit}, {len(values_by_cell[mask, name])} cases"
        return sum(best / figure > bound for bound in BOUNDS), text, note

    names = [name for name in colours if any(row["contender"] == name for row in rows)]
    caption = (
        f"In {unit} of a device: operations of all allowed pairs, over the number of devices and "
        "the time of the slowest; the median over the cases of a mask. Colours compare within a "
        "mask."
    )
    drawing = heat_map(_masks(rows), names, LEVELS, cell)
    title = f"Speed per mask, {unit}: {kind}"
    return Figure(f"speed-{kind}", title, caption, drawing, row_table(rows))


def memory(rows: Iterable[Row], colours: Colours) -> Figure | None:
    """Chart of the most memory that a device allocates, in the case that most contenders ran."""
    cases_with_memory = cases(
        row for row in rows if row.get("peak_bytes") and row["outcome"] == "ok"
    )
    if not cases_with_memory:
        return None
    case = max(cases_with_memory, key=lambda case: (len(case.rows), *_size(case)))
    case_rows = sorted(case.rows, key=lambda row: float(row["peak_bytes"]))
    parts = []
    for row in case_rows:
        name = row["contender"]
        peak_bytes = row["peak_bytes"]
        planned = row.get("predicted_peak_bytes")
        planned_text = f", planned {quantity(planned, 'B')}" if planned is not None else ""
        note = f"{name}\n{quantity(peak_bytes, 'B')}{planned_text}"
        parts.append(Series(name, [name], [peak_bytes], [note], colours[name]))
    names = ("contender", "peak_bytes", "predicted_peak_bytes", "median_seconds")
    drawing = bars(axis("peak above the inputs"), "B", parts)
    drawing.layout["showlegend"] = False  # each bar has its name
    caption = f"{described(case.fields)}. Of the device that needs most, kernels included."
    table = row_table(case_rows, names)
    return Figure("memory", "Memory beside each other", caption, drawing, table)


class Measure(NamedTuple):
    """A quantity of rows that a chart draws upwards.

    Attributes:
        name: the row's field; times scale it is in the unit.
        good: a sentence that says whether higher or lower is better.
    """

    name: str
    title: str
    unit: str
    scale: float
    good: str


TIME = Measure("median_seconds", "time", "s", 1.0, "Lower is faster.")
SPEED = Measure("tflops", "speed of a device", "FLOP/s", 1e12, "Higher is faster.")
MEMORY = Measure("peak_bytes", "peak above the inputs", "B", 1.0, "Lower needs less.")
FIELDS = MappingProxyType(
    {"num_tokens": "tokens", "world_size": "ranks", "density": "density", "block": "block"}
)
"""Fields along which charts go, in words."""


def waiting_bars(
    name: str, title: str, parts: Iterable[tuple[str, float, float]], caption: str = ""
) -> Figure:
    """A bar for each strategy: seconds of kernels, and of waiting for messages.

    Args:
        parts: name, seconds of computing, seconds of waiting.
    """
    names, computing, waiting = zip(*parts, strict=True)
    series = [
        Series(label, names, seconds, [f"{label}: {quantity(x, 's')}" for x in seconds], number)
        for number, (label, seconds) in enumerate((("computing", computing), ("waiting", waiting)))
    ]
    return Figure(name, title, caption, bars(axis("time"), "s", series))


def waiting(kind: str, all_cases: Iterable[ReportCase]) -> Figure | None:
    """Computing and waiting of the strategies, in the case that most of them ran."""
    timed_rows_by_case = [
        [row for row in case.done if is_timed(row) and row.get("exposed_seconds") is not None]
        for case in all_cases
    ]
    rows = max(
        (rows for rows in timed_rows_by_case if len(rows) > 1),
        key=lambda rows: _size(ReportCase(rows)),
        default=None,
    )
    if rows is None:
        return None
    parts = [
        (row["contender"], max(0.0, row["median_seconds"] - waiting_seconds), waiting_seconds)
        for row in rows
        for waiting_seconds in [row["exposed_seconds"]]
    ]
    caption = (
        f"{described(rows[0])}. Waiting for messages is that of the rank that waits longest; the "
        "rest of the time is computing and all else. Other libraries' waiting is not known."
    )
    figure = waiting_bars(f"waiting-{kind}", f"Computing and waiting: {kind}", parts, caption)
    return figure._replace(rows=row_table(rows, (*SHOWN, "exposed_seconds")))


def along(
    field: str, facet: Facet, number: int, colours: Colours, measure: Measure | None = None
) -> Figure | None:
    """A figure of all contenders against a field of FIELDS; None where no row has the figure.

    Args:
        measure: seconds; FLOP/s where there are no seconds.
    """
    if measure is None:
        measure = TIME if is_timed(facet.rows[0]) else SPEED
    title, unit, name, scale = measure.title, measure.unit, measure.name, measure.scale
    field_words = FIELDS[field]
    rows_with_figure = [row for row in map(_shown, facet.rows) if row.get(measure.name)]
    if not rows_with_figure:
        return None
    parts = []
    for contender, rows in by_contender(rows_with_figure, colours).items():
        figures: dict[float, list[float]] = {}
        for row in rows:
            figures.setdefault(row[field], []).append(scale * row[name])
        line = {figure_name: median(values) for figure_name, values in sorted(figures.items())}
        notes = [
            f"{contender}\n{_place(p)} {field_words}: {quantity(v, unit)}" for p, v in line.items()
        ]
        parts.append(Series(contender, [*line], [*line.values()], notes, colours[contender]))
    places = sorted({row[field] for row in rows_with_figure})
    x = axis(
        field_words,
        ticks=[(figure_name, _place(figure_name)) for figure_name in places],
        log=field != "density",
    )
    y = log_axis(title, unit, (scale * row[name] for row in rows_with_figure))
    axes = "The axis upwards is logarithmic" if field == "density" else "Both axes are logarithmic"
    caption = f"{facet.about}. {measure.good} {axes}: parallel lines keep their ratio."
    kinds = {TIME: "Time", SPEED: "Speed", MEMORY: "Memory"}
    suffix = "" if measure is TIME else f"-{kinds[measure].lower()}"
    figure_name = f"{field_words}-{facet.rows[0]['kind']}-{number}{suffix}"
    title = f"{kinds[measure]} against {field_words}"
    return Figure(figure_name, title, caption, lines(x, y, parts), row_table(rows_with_figure))


def _place(value: float) -> str:
    return f"{value:g}" if value < 1 or value % 1 else count(int(value))


def bytes_against_time(rows: Iterable[Row], colours: Colours) -> Figure | None:
    """Chart of the busiest rank's bytes against time, in the case that most contenders ran."""
    cases_with_bytes = cases(row for row in rows if is_timed(row) and row.get("bytes_max_rank"))
    cases_with_bytes = [case for case in cases_with_bytes if len(case.done) > 1]
    if not cases_with_bytes:
        return None
    case = max(cases_with_bytes, key=_size)
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
    for name, contender_rows in by_contender(rows, colours).items():
        notes = [
            f"{name}\n{described(row)}\n{quantity(row[field], unit)}, "
            f"{quantity(row['median_seconds'], 's')} measured"
            for row in contender_rows
        ]
        xs, ys = (
            [row[name_of_field] for row in contender_rows]
            for name_of_field in (field, "median_seconds")
        )
        parts.append(Series(name, xs, ys, notes, colours[name], "points"))
    return parts


def predictions(rows: Iterable[Row], colours: Colours) -> Figure | None:
    """Measured against simulated time of every row that has both."""
    rows_with_both = [
        r for r in rows if is_timed(r) and cost(r) and (r.get("predicted_seconds") or 0) > 0
    ]
    if not rows_with_both:
        return None
    values = [
        row[name] for row in rows_with_both for name in ("predicted_seconds", "median_seconds")
    ]
    x, y = (log_axis(axis_title, "s", values) for axis_title in ("predicted", "measured"))
    x |= {"constrain": "domain"}
    y |= {"scaleanchor": "x", "constrain": "domain"}  # equal scales: the diagonal has 45 degrees
    ends = [10**end for end in x["range"]]
    equal = Series("equal", ends, ends, ("", ""), 7, "dash")
    errors = [abs(row["predicted_seconds"] / row["median_seconds"] - 1) for row in rows_with_both]
    machines = sorted({str(row["machine"]) for row in rows_with_both if row.get("machine")})
    machines_text = f" Predicted for {', '.join(machines)}." if machines else ""
    caption = (
        f"{len(rows_with_both)} rows. On the dotted line the simulator is right; above it the run "
        f"took longer than predicted. Median error {100 * median(errors):.0f} %.{machines_text}"
    )
    drawing = lines(x, y, [*_points(rows_with_both, "predicted_seconds", "s", colours), equal])
    title = "Measured against predicted"
    return Figure("predictions", title, caption, drawing, row_table(rows_with_both))
