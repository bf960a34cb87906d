"""Drawings of plotly, whose script draws them in the page: the one renderer of reports.

What all drawings share (ground, fonts, grid, legend) is in page.js, in the colours of page.css.
"""

import math
import textwrap
from collections.abc import Callable, Iterable, Mapping, Sequence
from colorsys import hls_to_rgb
from html import escape
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np

from tilewise_tools.mask_report.view import colours
from tilewise_tools.report.words import quantity

SERIES = (
    ("#2463c9", "#6fa8ff"),
    ("#d9622b", "#ff9a62"),
    ("#12866a", "#45c9a2"),
    ("#7e4fc0", "#b99af7"),
    ("#c22d5c", "#ff7f9f"),
    ("#0b8793", "#4dd0dc"),
    ("#a8740f", "#efc04c"),
    ("#66707d", "#a4afbd"),
)
"""The palette: each colour on light and on dark ground."""
NUMBERED = 16  # cells a side up to which each names its rank
LINES, BAR, CELL, AROUND = 420, 46, 40, 140  # pixels
NAMES, COLUMN, WIDEST_NAME = 130, 52, 26  # pixels, letters
MODES = MappingProxyType({"line": "lines+markers", "dash": "lines", "points": "markers"})
MARKERS = ("circle", "diamond", "square", "triangle-up", "x", "star", "cross", "hexagon")
# Of logarithmic axes: room around the values, a least span so that small differences look small.
ROOM, LEAST_SPAN, FEWEST_TICKS = 1.15, 1.6, 3

Words = dict[str, Any]  # as plotly's script takes them
TEMPLATES = ("hovertemplate", "texttemplate")  # of this module's own, with tags


class Drawing(NamedTuple):
    """A figure of plotly and its size."""

    data: Sequence[Words]
    layout: Words
    height: int = LINES  # pixels; 0: as high as it is wide
    width: int = 0  # pixels below which it scrolls


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
    """A colour of the palette, on light ground; after the last comes the first."""
    return SERIES[number % len(SERIES)][0]


def axis(
    title: str, unit: str = "", ticks: Sequence[tuple[float, str]] = (), log: bool = False
) -> Words:
    """An axis of a unit that SI prefixes go with, or of chosen ticks."""
    axis_words: Words = {"title": {"text": title}, "type": "log" if log else "-"}
    if ticks:
        places, texts = zip(*ticks, strict=True)
        return axis_words | {"tickvals": places, "ticktext": texts}
    return axis_words | ({"tickformat": "~s", "ticksuffix": unit} if unit else {})


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
    """Lines and points over a plane."""
    return Drawing([_line(line_series) for line_series in series], {"xaxis": x, "yaxis": y})


def _line(series: Series) -> Words:
    shade = colour(series.colour)
    # Colours come again after the last, each with another symbol.
    symbol = MARKERS[(series.colour + series.colour // len(SERIES)) % len(MARKERS)]
    return {
        "type": "scatter",
        "name": series.name,
        "mode": MODES[series.style],
        "x": series.x,
        "y": series.y,
        "line": {"color": shade, "dash": "dot" if series.style == "dash" else "solid"},
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
        data.append(
            bar | {"marker": {"color": colour(bar_series.colour)}} | hover(bar_series.notes)
        )
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
    layout = {
        "barmode": "stack",
        "bargap": 0.35,
        "legend": {"traceorder": "normal"},
        "xaxis": x | {"range": [0, 1.18 * max(totals.values(), default=1)]},
        "yaxis": {"autorange": "reversed", "showgrid": False},
    }
    return Drawing([*data, amounts], layout, AROUND + BAR * len(totals))


def heat_map(
    rows: Sequence[str],
    columns: Sequence[str],
    levels: Sequence[tuple[str, int]],
    cell: Callable[[str, str], tuple[int, str, str]],
) -> Drawing:
    """Coloured cells with words, one trace for each level that there is.

    Args:
        levels: the name and the palette's number of each kind of cell.
        cell: of a row and a column the level, -1 for nothing, the text, and the note.
    """
    cells = [[cell(row, column) for column in columns] for row in rows]
    shared: Words = {
        "type": "heatmap",
        "x": columns,
        "y": [_wrapped(row) for row in rows],
        "customdata": [[note for _, _, note in line] for line in cells],
        "hovertemplate": "%{customdata}<extra></extra>",
        "texttemplate": "%{text}",
        "showscale": False,
        "showlegend": True,
        "xgap": 3,
        "ygap": 3,
    }
    data = [
        shared
        | {
            "name": levels[level][0],
            "z": [
                [1 if cell_level == level else None for cell_level, _, _ in line] for line in cells
            ],
            "text": [
                [text if cell_level == level else "" for cell_level, text, _ in line]
                for line in cells
            ],
            "colorscale": [[end, colour(levels[level][1])] for end in (0, 1)],
        }
        for level in sorted({level for line in cells for level, _, _ in line if level >= 0})
    ]
    layout = {
        "xaxis": {"showgrid": False, "side": "top", "type": "category", "tickangle": -45},
        "yaxis": {"showgrid": False, "autorange": "reversed", "type": "category"},
        "legend": {"y": -0.02, "yanchor": "top"},
    }
    return Drawing(data, layout, AROUND + 60 + CELL * len(rows), NAMES + COLUMN * len(columns))


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
    numbered = max(table.shape) <= NUMBERED
    cells = {
        "type": "heatmap",
        "z": places,
        "customdata": table,
        "text": np.where(table < 0, "", table.astype(str)) if numbered else None,
        "x": columns,
        "y": rows,
        "zmin": -1.5,
        "zmax": len(ranks) - 0.5,
        "colorscale": _rank_colours(len(ranks)),
        "showscale": not numbered,
        "colorbar": {
            "title": {"text": "rank"},
            "thickness": 12,
            "tickvals": ticks,
            "ticktext": ranks[ticks].astype(str),
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


def _rank_colours(num_ranks: int) -> list[tuple[float, str]]:
    """Steps of a colour scale: none for -1, then one for every rank.

    Many go round the colours in order, so that the bar beside them tells which is which; every
    other one is darker.
    """
    shades = colours(num_ranks)
    if num_ranks > NUMBERED:
        hues = np.linspace(0, 0.85, num_ranks)
        shades = [hls_to_rgb(hue, 0.6 - 0.2 * (i % 2), 0.6) for i, hue in enumerate(hues)]
    parts = [[str(round(255 * part)) for part in rgb] for rgb in shades]
    steps = ["rgba(0,0,0,0)", *(f"rgb({','.join(three)})" for three in parts)]
    return [((i + end) / len(steps), shade) for i, shade in enumerate(steps) for end in (0, 1)]


def hover(notes: Sequence[str]) -> Words:
    return {"hovertext": notes, "hovertemplate": "%{hovertext}<extra></extra>"}


def _wrapped(text: str) -> str:
    """A long name in lines, broken after commas and between words."""
    return "\n".join(textwrap.wrap(text, WIDEST_NAME, break_long_words=False)) or text
