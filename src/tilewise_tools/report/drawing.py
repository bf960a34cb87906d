"""Drawings of a page: charts, which plotly's script draws there, and tables of coloured cells.

What all charts share (ground, fonts, grid, legend) is in page.js; colours are in the palette.
"""

import math
import textwrap
from collections.abc import Callable, Iterable, Mapping, Sequence
from html import escape
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np

from tilewise_tools.report.words import prefixed, quantity
from tilewise_verify.palette import SERIES, rank_colours, rgb

NUMBERED = 16  # cells a side up to which each names its rank
LINES, BAR, AROUND, WIDEST_NAME = 420, 46, 140, 26  # pixels; letters
MODES = MappingProxyType({"line": "lines+markers", "dash": "lines", "points": "markers"})
MARKERS = ("circle", "diamond", "square", "triangle-up", "x", "star", "cross", "hexagon")
DASHES, FILLINGS = ("solid", "dash", "longdashdot"), ("", "/", "x")
"""Of the first, second and third series with the same colour."""
LABEL, LETTER, PLANE = 17, 7, 290  # pixels: height of a label, width of a letter, a chart's plane
WIDEST_LABEL, LEADER = 170, 18  # pixels: of a label, of the line from a series' end to its label
MOST_TICKS = 7
# Of logarithmic axes: room around the values, a least span so that small differences look small.
ROOM, LEAST_SPAN, FEWEST_TICKS = 1.15, 1.6, 3

Words = dict[str, Any]  # as plotly's script takes them
TEMPLATES = ("hovertemplate", "texttemplate")  # of this module's own, with tags


class Drawing(NamedTuple):
    """A figure of plotly and its size."""

    data: Sequence[Words]
    layout: Words
    height: int = LINES  # pixels; 0: as high as it is wide


class Cells(NamedTuple):
    """A table of coloured cells with texts, which needs no script.

    Attributes:
        levels: what a colour says, with the colour, "#rrggbb".
        lines: of each row its cells: the level, -1 for nothing; the text; the note.
    """

    rows: Sequence[str]
    columns: Sequence[str]
    levels: Sequence[tuple[str, str]]
    lines: Sequence[Sequence[tuple[int, str, str]]]


class Series(NamedTuple):
    """One line, one kind of bar, or one kind of point."""

    name: str
    x: Sequence[float | str]  # numbers, or the names of bars
    y: Sequence[float]
    notes: Sequence[str]  # what is said of each point when pointed at
    colour: int  # a number of the palette
    style: str = "line"  # "line", "dash" or "points"; bars ignore it


def as_texts(value: Any) -> Any:
    """Words whose texts are shown letter by letter, but for the ends of their lines.

    plotly reads tags and entities in names, notes and the titles of axes.
    """
    if isinstance(value, str):
        return escape(value, quote=False).replace("\n", "<br>")
    if isinstance(value, Mapping):
        return {name: x if name in TEMPLATES else as_texts(x) for name, x in value.items()}
    return [as_texts(x) for x in value] if isinstance(value, list | tuple) else value


def colour(number: int) -> str:
    """Return a colour of the palette on light ground; after the last comes the first."""
    return SERIES[number % len(SERIES)][0]


def axis(title: str, ticks: Sequence[tuple[float, str]] = (), log: bool = False) -> Words:
    """An axis, of chosen ticks or of those that plotly takes."""
    axis_words: Words = {"title": {"text": title}, "type": "log" if log else "-"}
    if ticks:
        places, texts = zip(*ticks, strict=True)
        return axis_words | {"tickvals": places, "ticktext": texts}
    return axis_words


def time_axis(seconds: float) -> tuple[Words, float]:
    """Return an axis of time that can be zoomed, and its unit in seconds.

    Args:
        seconds: the latest time; it chooses the unit.
    """
    unit, unit_seconds = prefixed(seconds, "s")
    return axis(f"time ({unit})"), unit_seconds


def log_axis(title: str, unit: str, values: Iterable[float]) -> Words:
    """An axis for positive values; others are left out."""
    values = [value for value in values if value > 0] or [1.0]
    low, high = min(values) / ROOM, max(values) * ROOM
    missing = math.sqrt(max(1.0, LEAST_SPAN / (high / low)))
    low, high = low / missing, high * missing
    ticks = [(place, quantity(place, unit)) for place in _places(low, high)]
    return axis(title, ticks=ticks, log=True) | {"range": [math.log10(low), math.log10(high)]}


def _places(low: float, high: float) -> list[float]:
    """Powers of ten; where these are few 1, 2, 5 of each decade; or else even steps."""
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    for digits in ((1,), (1, 2, 5)):
        places = [digit * 10.0**power for power in powers for digit in digits]
        places = [place for place in places if low <= place <= high]
        if len(places) >= FEWEST_TICKS:
            return places
    rough = (high - low) / FEWEST_TICKS
    unit = 10.0 ** math.floor(math.log10(rough))
    step = next(digit * unit for digit in (10, 5, 2, 1) if digit * unit <= rough * 1.001)
    return [step * i for i in range(math.ceil(low / step), math.floor(high / step) + 1)]


def lines(x: Words, y: Words, series: Iterable[Series]) -> Drawing:
    """Lines and points over a plane; what has a line is named at its end."""
    series = list(series)
    layout: Words = {"xaxis": x, "yaxis": y}
    if labels := _end_labels(y, [part for part in series if part.style != "points" and part.name]):
        widest = max(len(str(label["text"])) for label in labels)
        margin = {"r": min(WIDEST_LABEL, 16 + LETTER * widest) + LEADER}
        shows_names = any(part.style == "points" for part in series)
        layout |= {"annotations": labels, "margin": margin, "showlegend": shows_names}
    return Drawing([_line(part) for part in series], layout)


def _end_labels(y: Words, series: Sequence[Series]) -> list[Words]:
    """Names beside the last points of lines, moved apart where they would lie on each other.

    On a phone page.js leaves them out, by their name, and shows the legend.
    """
    if "range" not in y or not series:
        return []
    low, high = y["range"]
    last = max(float(part.x[-1]) for part in series)
    at_end = [part for part in series if float(part.x[-1]) == last and part.y[-1] > 0]
    heights = sorted((PLANE * (math.log10(part.y[-1]) - low) / (high - low), i)
                     for i, part in enumerate(at_end))  # fmt: skip
    places = [height for height, _ in heights]
    for i in range(1, len(places)):
        places[i] = max(places[i], places[i - 1] + LABEL)
    over = max(0.0, places[-1] - PLANE) if places else 0.0
    for i in reversed(range(len(places))):  # down again from the plane's upper edge
        limit = places[i + 1] - LABEL if i + 1 < len(places) else places[i] - over
        places[i] = min(places[i], limit)
    return [
        {
            "name": "line",
            "text": at_end[i].name,
            "x": 1,
            "xref": "x domain",
            "xanchor": "left",
            "y": math.log10(at_end[i].y[-1]),
            "showarrow": True,  # a line from the end to its name
            "arrowhead": 0,
            "arrowwidth": 2,
            "arrowcolor": colour(at_end[i].colour),
            "ax": LEADER,
            "ay": round(height - place),
        }
        for (height, i), place in zip(heights, places, strict=True)
    ]


def _line(series: Series) -> Words:
    shade, turn = colour(series.colour), series.colour // len(SERIES)
    # Colours come again after the last, each with another symbol and dash.
    symbol = MARKERS[(series.colour + turn) % len(MARKERS)]
    dash = "dot" if series.style == "dash" else DASHES[turn % len(DASHES)]
    return {
        "type": "scatter",
        "name": series.name,
        "mode": MODES[series.style],
        "x": series.x,
        "y": series.y,
        "line": {"color": shade, "dash": dash},
        "marker": {"color": shade, "size": 8, "symbol": symbol},
        **hover(series.notes),
    }


def bars(x: Words, unit: str, series: Iterable[Series]) -> Drawing:
    """Horizontal bars, stacked, with the total beside each."""
    totals: dict[str, float] = {}
    data: list[Words] = []
    for bar_series in series:
        names = [_wrapped(str(name)) for name in bar_series.x]
        for name, value in zip(names, bar_series.y, strict=True):
            totals[name] = totals.get(name, 0) + value
        bar = {
            "type": "bar",
            "name": bar_series.name,
            "orientation": "h",
            "x": bar_series.y,
            "y": names,
        }
        filling = FILLINGS[bar_series.colour // len(SERIES) % len(FILLINGS)]
        marker = {"color": colour(bar_series.colour), "pattern": {"shape": filling}}
        data.append(bar | {"marker": marker} | hover(bar_series.notes))
    amounts = {
        "type": "scatter",
        "x": list(totals.values()),
        "y": list(totals),
        "mode": "text",
        "text": [f" {quantity(total, unit)}" for total in totals.values()],
        "textposition": "middle right",
        "cliponaxis": False,
        "hoverinfo": "skip",
        "showlegend": False,
    }
    high = 1.18 * max(totals.values(), default=1) or 1.0
    layout = {
        "barmode": "stack",
        "bargap": 0.35,
        "legend": {"traceorder": "normal"},
        "xaxis": x | from_zero(high, unit) | {"range": [0, high]},
        "yaxis": {"autorange": "reversed", "showgrid": False},
    }
    return Drawing([*data, amounts], layout, AROUND + BAR * len(totals))


def from_zero(high: float, unit: str) -> Words:
    """Return the ticks of a linear axis from 0 on, in steps of 1, 2 or 5."""
    power = 10.0 ** math.floor(math.log10(high / MOST_TICKS))
    step = next(x * power for x in (1, 2, 5, 10, 20) if high / (x * power) < MOST_TICKS)
    places = [step * i for i in range(math.floor(high / step) + 1)]
    return {"tickvals": places, "ticktext": [quantity(place, unit) for place in places]}


def heat_map(
    rows: Sequence[str],
    columns: Sequence[str],
    levels: Sequence[tuple[str, str]],
    cell: Callable[[str, str], tuple[int, str, str]],
) -> Cells:
    """Coloured cells with words; the fewer names go across.

    Args:
        levels: the name and the colour of each kind of cell.
        cell: of a row and a column the level, -1 for nothing, the text, and the note.
    """
    if len(columns) > len(rows):
        return Cells(columns, rows, levels, [[cell(x, y) for x in rows] for y in columns])
    return Cells(rows, columns, levels, [[cell(x, y) for y in columns] for x in rows])


def tiles(table: np.ndarray, rows: Sequence[int], columns: Sequence[int]) -> Drawing:
    """Cells coloured by rank, queries downward.

    A colour goes with a rank's place among those that have a cell: the colours of a few ranks are
    farther apart than those of all.

    Args:
        table: int [rows, columns], the rank, -1 for nothing.
        rows, columns: the shard that each begins with.
    """
    ranks = np.unique(table[table >= 0])
    places = np.where(table >= 0, np.searchsorted(ranks, table), -1).astype(np.int16)
    ticks = np.unique(np.linspace(0, len(ranks) - 1, 9).round().astype(int))
    has_blanks = bool((table < 0).any())
    numbered = max(table.shape) <= NUMBERED
    cells = {
        "type": "heatmap",
        "z": places,
        "customdata": table,
        "text": np.where(table < 0, "", table.astype(str)) if numbered else None,
        "x": columns,
        "y": rows,
        "zmin": -0.5 - has_blanks,
        "zmax": len(ranks) - 0.5,
        "colorscale": _rank_colours(len(ranks), has_blanks),
        "showscale": not numbered,
        "colorbar": {
            "title": {"text": "rank"},
            "thickness": 12,
            "tickvals": [-1] * has_blanks + ticks.tolist(),
            "ticktext": ["none"] * has_blanks + ranks[ticks].astype(str).tolist(),
        },
        "xgap": int(numbered),
        "ygap": int(numbered),
        "texttemplate": "%{text}" if numbered else "",
        "hovertemplate": "rank %{customdata}<br>query shard %{y}, KV shard %{x}<extra></extra>",
    }
    grid_words = {"showgrid": False, "zeroline": False, "constrain": "domain"}
    has_equal_scale = min(table.shape) * 4 >= max(table.shape)
    y_words = {"autorange": "reversed", "scaleanchor": "x" if has_equal_scale else None}
    x, y = axis("KV shard") | grid_words, axis("query shard") | grid_words | y_words
    return Drawing([cells], {"xaxis": x, "yaxis": y, "dragmode": "zoom"}, height=0)


def _rank_colours(num_ranks: int, has_blanks: bool) -> list[tuple[float, str]]:
    """Steps of a colour scale: none for -1 if there are blank cells, then one for every rank."""
    steps = ["rgba(0,0,0,0)"] * has_blanks
    for shade in rank_colours(num_ranks):
        steps.append(f"rgb({','.join(str(round(255 * part)) for part in rgb(shade))})")
    return [((i + end) / len(steps), shade) for i, shade in enumerate(steps) for end in (0, 1)]


def hover(notes: Sequence[str]) -> Words:
    return {"hovertext": notes, "hovertemplate": "%{hovertext}<extra></extra>"}


def _wrapped(text: str) -> str:
    """A long name in lines, broken after commas and between words."""
    return "\n".join(textwrap.wrap(text, WIDEST_NAME, break_long_words=False)) or text
