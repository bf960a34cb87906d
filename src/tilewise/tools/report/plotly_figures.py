"""Charts as figures of plotly, whose script draws them in the page: the one renderer of reports."""

import math
import textwrap
from collections.abc import Sequence
from colorsys import hls_to_rgb
from types import MappingProxyType
from typing import Any

import numpy as np

from tilewise.tools.mask_report.view import colours
from tilewise.tools.report.chart import (
    CROSS,
    FRAME,
    GRID,
    GROUND,
    INK,
    LANES,
    LINK_NAMES,
    OWN,
    SERIES,
    SOFT,
    Axis,
    Chart,
    Drawing,
    HeatMap,
    Series,
    Tiles,
    TimelineChart,
    colour,
    quantity,
)

Figure = dict[str, Any]  # data: the traces, layout: all else; both as plotly's script takes them

SI_UNITS = ("s", "B", "FLOP/s", "B/s")
WIDEST_NAME = 26  # letters
NUMBERED = 16  # cells a side up to which each names its rank
LINES, BAR, CELL, ROW, AROUND = 420, 46, 40, 64, 140  # pixels
NAMES, COLUMN = 130, 52
MODES = MappingProxyType({"line": "lines+markers", "dash": "lines", "points": "markers"})
DASHES = MappingProxyType({"line": "solid", "dash": "dot", "points": "solid"})
MARKERS = ("circle", "diamond", "square", "triangle-up", "x", "star", "cross", "hexagon")
CLEAR, FONT = "rgba(0,0,0,0)", "system-ui, -apple-system, Segoe UI, Roboto, sans-serif"


def as_plotly(drawing: Drawing) -> Figure:
    """A drawing as JSON's values: plotly packs arrays and refuses words it does not know."""
    import plotly.graph_objects as go

    match drawing:
        case Chart(bars=True):
            figure = _bars(drawing)
        case Chart():
            figure = _lines(drawing)
        case HeatMap():
            figure = _grid(drawing)
        case Tiles():
            figure = _tiles(drawing)
        case TimelineChart():
            figure = _timeline(drawing)
    return go.Figure(figure).to_plotly_json()


def width(drawing: Drawing) -> int:
    """Pixels below which a figure would be too narrow, so that it scrolls; 0: none."""
    return NAMES + COLUMN * len(drawing.columns) if isinstance(drawing, HeatMap) else 0


def height(drawing: Drawing) -> int | None:
    """Pixels that a figure needs; None: as wide as it is."""
    match drawing:
        case Tiles():
            return None
        case HeatMap():
            return AROUND + 60 + CELL * len(drawing.rows)
        case TimelineChart():
            return AROUND + 30 + ROW * len(drawing.ranks)
        case Chart():
            names = {name for series in drawing.series for name in series.x}
            return AROUND + BAR * len(names) if drawing.bars else LINES


def _lines(chart: Chart) -> Figure:
    """Lines and points."""
    return {"data": [_line(series) for series in chart.series], "layout": _layout(chart.x, chart.y)}


def _line(series: Series) -> dict[str, Any]:
    shade = colour(series.colour)
    # Colours come again after the last, each with another symbol.
    symbol = MARKERS[(series.colour + series.colour // len(SERIES)) % len(MARKERS)]
    return {
        "type": "scatter",
        "name": series.name,
        "mode": MODES[series.style],
        "x": series.x,
        "y": series.y,
        "line": {"color": shade, "width": 2.2, "dash": DASHES[series.style]},
        "marker": {"color": shade, "size": 8, "symbol": symbol},
        **_hover(series.notes),
    }


def _bars(chart: Chart) -> Figure:
    """Lying bars, stacked, and beside each what it amounts to."""
    names = [_wrapped(str(name)) for name in chart.series[0].x]
    totals = [sum(parts) for parts in zip(*(series.y for series in chart.series), strict=True)]
    layout = _layout(chart.x, chart.y) | {"barmode": "stack", "bargap": 0.35}
    layout["legend"] |= {"traceorder": "normal"}
    layout["xaxis"] |= {"range": [0, 1.18 * max(totals, default=1)]}
    layout["yaxis"] |= {"autorange": "reversed", "showgrid": False}
    amounts = {
        "type": "scatter",
        "x": totals,
        "y": names,
        "mode": "text",
        "text": [f" {quantity(total, chart.x.unit)}" for total in totals],
        "textposition": "middle right",
        "cliponaxis": False,
        "hoverinfo": "skip",
        "showlegend": False,
    }
    return {"data": [*(_bar(series, names) for series in chart.series), amounts], "layout": layout}


def _bar(series: Series, names: Sequence[str]) -> dict[str, Any]:
    return {
        "type": "bar",
        "name": series.name,
        "orientation": "h",
        "x": series.y,
        "y": names,
        "marker": {"color": colour(series.colour), "line": {"width": 0}},
        **_hover(series.notes),
    }


def _grid(grid: HeatMap) -> Figure:
    """Coloured cells with words, one trace for each kind of cell."""
    layout = _layout(Axis(""), Axis(""))
    layout["xaxis"] |= {"showgrid": False, "side": "top", "type": "category", "tickangle": -45}
    layout["yaxis"] |= {"showgrid": False, "autorange": "reversed", "type": "category"}
    layout["legend"] |= {"y": -0.02, "yanchor": "top"}
    return {"data": [_cells(grid, level) for level in range(len(grid.levels))], "layout": layout}


def _cells(grid: HeatMap, level: int) -> dict[str, Any]:
    """The cells of one kind."""
    name, number = grid.levels[level]
    shade = colour(number)
    return {
        "type": "heatmap",
        "name": name,
        "x": grid.columns,
        "y": [_wrapped(row) for row in grid.rows],
        "z": [[1 if cell == level else None for cell in row] for row in grid.cells],
        "text": [
            [text if cell == level else "" for cell, text in zip(cells, texts, strict=True)]
            for cells, texts in zip(grid.cells, grid.texts, strict=True)
        ],
        "texttemplate": "%{text}",
        "textfont": {"size": 12},
        "customdata": grid.notes,
        "hovertemplate": "%{customdata}<extra></extra>",
        "colorscale": [[0, shade], [1, shade]],
        "showscale": False,
        "showlegend": True,
        "xgap": 3,
        "ygap": 3,
    }


def _tiles(tiles: Tiles) -> Figure:
    """Cells coloured by rank, queries downward.

    A colour goes with a rank's place among those that have a cell: the colours of a few ranks are
    farther apart than those of all.
    """
    ranks = np.unique(tiles.cells[tiles.cells >= 0])
    places = np.where(tiles.cells >= 0, np.searchsorted(ranks, tiles.cells), -1).astype(np.int16)
    numbered = max(tiles.cells.shape) <= NUMBERED
    cells = {
        "type": "heatmap",
        "z": places,
        "customdata": tiles.cells,
        "text": np.where(tiles.cells < 0, "", tiles.cells.astype(str)) if numbered else None,
        "x": tiles.columns,
        "y": tiles.rows,
        "zmin": -1.5,
        "zmax": len(ranks) - 0.5,
        "colorscale": _rank_colours(len(ranks)),
        "showscale": not numbered,
        "colorbar": {"title": {"text": "rank"}, "thickness": 12, **_ticks(ranks)},
        "xgap": 1 if numbered else 0,
        "ygap": 1 if numbered else 0,
        "texttemplate": "%{text}" if numbered else "",
        "hovertemplate": "rank %{customdata}<br>query shard %{y}, KV shard %{x}<extra></extra>",
    }
    layout = _layout(Axis("KV shard"), Axis("query shard"))
    for name in ("xaxis", "yaxis"):
        layout[name] |= {"showgrid": False, "zeroline": False, "constrain": "domain"}
    even = min(tiles.cells.shape) * 4 >= max(tiles.cells.shape)
    layout["yaxis"] |= {"autorange": "reversed", "scaleanchor": "x" if even else None}
    return {"data": [cells], "layout": layout | {"dragmode": "zoom"}}


def _ticks(ranks: np.ndarray) -> dict[str, Any]:
    """A few ranks beside the colour bar, at their places."""
    places = np.unique(np.linspace(0, len(ranks) - 1, 9).round().astype(int))
    return {"tickvals": places, "ticktext": ranks[places].astype(str)}


def _rank_colours(num_ranks: int) -> list[tuple[float, str]]:
    """Steps of a colour scale: none for -1, then one for every rank.

    Many go round the colours in order, so that the bar beside them tells which is which; every
    other one is darker.
    """
    found = colours(num_ranks)
    if num_ranks > NUMBERED:
        hues = np.linspace(0, 0.85, num_ranks)
        found = [hls_to_rgb(hue, 0.6 - 0.2 * (i % 2), 0.6) for i, hue in enumerate(hues)]
    parts = [[str(round(255 * part)) for part in rgb] for rgb in found]
    steps = [CLEAR, *(f"rgb({','.join(three)})" for three in parts)]
    return [((i + end) / len(steps), shade) for i, shade in enumerate(steps) for end in (0, 1)]


def _timeline(drawn: TimelineChart) -> Figure:
    """Lying bars in rows, one trace per lane."""
    names = [f"rank {rank}" + f"<br>{CROSS}{like}" * (like > 1) for rank, like in drawn.ranks]
    layout = _layout(Axis("time", "s"), Axis("", ticks=tuple(enumerate(names))))
    layout["xaxis"] |= {"range": [0, drawn.end], "zeroline": False}
    bounds = [len(drawn.ranks) - 0.4, -0.95]
    layout["yaxis"] |= {"showgrid": False, "zeroline": False, "range": bounds, "fixedrange": True}
    turn = {"type": "line", "line": {"color": FRAME.light, "width": 1.5, "dash": "dot"}}
    turn |= {"xref": "x", "x0": drawn.turn, "x1": drawn.turn, "yref": "y domain", "y0": 0, "y1": 1}
    said = {"font": {"size": 12, "color": INK.light}, "showarrow": False}
    said |= {"y": -0.68, "xanchor": "left"}
    backward = {"x": drawn.turn, "text": "backward", "xshift": 4}
    layout |= {"barmode": "overlay", "dragmode": "zoom", "shapes": [turn]}
    layout["annotations"] = [said | {"x": 0, "text": "forward"}, said | backward]
    return {"data": [_lane(drawn, lane) for lane in drawn.lanes], "layout": layout}


def _lane(drawn: TimelineChart, lane: str) -> dict[str, Any]:
    """The bars of one lane: a rank's own above, below them each kind of link."""
    mine = [bar for bar in drawn.bars if bar.lane == lane]
    links = [name for name in drawn.lanes if name not in OWN]
    shift, thick = (-0.16, 0.44) if lane in OWN else (0.16 + 0.16 * links.index(lane), 0.14)
    return {
        "type": "bar",
        "name": LINK_NAMES.get(lane, lane),
        "orientation": "h",
        "y": [bar.row + shift for bar in mine],
        "width": thick,
        "base": [bar.start for bar in mine],
        "x": [bar.seconds for bar in mine],
        "marker": {"color": colour(LANES[lane]), "line": {"width": 0.5, "color": GROUND.light}},
        **_hover([bar.note for bar in mine]),
    }


def _hover(notes: Sequence[str]) -> dict[str, Any]:
    return {"hovertext": notes, "hovertemplate": "%{hovertext}<extra></extra>"}


def _layout(x: Axis, y: Axis) -> dict[str, Any]:
    """What all figures share: the card's ground, quiet grid, the legend above."""
    ink = {"color": INK.light}
    return {
        "paper_bgcolor": GROUND.light,
        "plot_bgcolor": CLEAR,
        "font": {"family": FONT, "size": 13, **ink},
        "margin": {"l": 12, "r": 16, "t": 16, "b": 12},
        "legend": {"orientation": "h", "x": 0, "y": 1.02, "yanchor": "bottom", "xanchor": "left"},
        "hoverlabel": {"bgcolor": SOFT.light, "bordercolor": FRAME.light, "font": ink},
        "hovermode": "closest",
        "dragmode": False,
        "template": "none",
        "modebar": {"bgcolor": CLEAR, "color": FRAME.light, "activecolor": INK.light},
        "xaxis": _axis(x),
        "yaxis": _axis(y),
    }


def _axis(axis: Axis) -> dict[str, Any]:
    """An axis with its title, unit and ticks."""
    made: dict[str, Any] = {
        "title": {"text": axis.title, "standoff": 8, "font": {"size": 13}},
        "gridcolor": GRID.light,
        "linecolor": FRAME.light,
        "zerolinecolor": GRID.light,
        "automargin": True,
        "type": "log" if axis.log else "-",
    }
    if axis.ticks:
        places, texts = zip(*axis.ticks, strict=True)
        made |= {"tickmode": "array", "tickvals": places, "ticktext": texts}
    elif axis.unit in SI_UNITS:
        made |= {"tickformat": "~s", "ticksuffix": axis.unit}
    elif axis.unit:
        made |= {"ticksuffix": f" {axis.unit}"}
    if axis.bounds:
        made["range"] = [math.log10(x) if axis.log else x for x in axis.bounds]
    return made


def _wrapped(text: str) -> str:
    """A long name in lines, broken after commas and between words."""
    return "<br>".join(textwrap.wrap(text, WIDEST_NAME, break_long_words=False)) or text
