"""Charts drawn by plotly."""

from __future__ import annotations

import math
import textwrap
from types import MappingProxyType
from typing import Any

import numpy as np
import plotly.graph_objects as go

from tilewise.tools.mask_report.view import colours
from tilewise.tools.report.chart import (
    FRAME,
    GRID,
    INK,
    LANES,
    LINK_NAMES,
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

WIDEST_NAME = 26
SI_UNITS = ("s", "B", "FLOP/s", "B/s")
TITLE_SIZE = 13


def layout(x: Axis, y: Axis) -> go.Layout:
    """What all figures share: transparent ground, quiet grid, the legend above."""
    return go.Layout(
        paper_bgcolor="rgba(0,0,0,0)",
        plot_bgcolor="rgba(0,0,0,0)",
        font={"family": "system-ui, -apple-system, Segoe UI, Roboto, sans-serif", "size": 13},
        font_color=INK.light,
        margin={"l": 12, "r": 16, "t": 16, "b": 12},
        legend={"orientation": "h", "x": 0, "y": 1.02, "yanchor": "bottom", "xanchor": "left"},
        hoverlabel={"bgcolor": SOFT.light, "bordercolor": FRAME.light, "font_color": INK.light},
        hovermode="closest",
        dragmode=False,
        template="none",
        modebar={"bgcolor": "rgba(0,0,0,0)", "color": FRAME.light, "activecolor": INK.light},
        xaxis=axis(x),
        yaxis=axis(y),
    )


def axis(one: Axis, **more: Any) -> dict[str, Any]:
    """An axis with its title, unit and ticks."""
    made: dict[str, Any] = {
        "title": {"text": one.title, "standoff": 8, "font": {"size": TITLE_SIZE}},
        "gridcolor": GRID.light,
        "linecolor": FRAME.light,
        "zerolinecolor": GRID.light,
        "automargin": True,
        "type": "log" if one.log else "-",
    }
    if one.ticks:
        made |= {
            "tickmode": "array",
            "tickvals": [place for place, _ in one.ticks],
            "ticktext": [text for _, text in one.ticks],
        }
    elif one.unit in SI_UNITS:
        made |= {"tickformat": "~s", "ticksuffix": one.unit}
    elif one.unit:
        made |= {"ticksuffix": f" {one.unit}"}
    if one.bounds:
        made["range"] = [math.log10(x) if one.log else x for x in one.bounds]
    return made | more


def wrapped(text: str, width: int = WIDEST_NAME) -> str:
    """A long name in lines, broken after commas and between words."""
    return "<br>".join(textwrap.wrap(text, width, break_long_words=False)) or text


NUMBERED = 16  # cells a side up to which each names its rank


def plot_tiles(tiles: Tiles) -> go.Figure:
    """Cells coloured by rank, queries downward."""
    ranks, places = tiles.coloured()
    shades = [
        f"rgb({','.join(str(round(255 * part)) for part in rgb)})" for rgb in colours(len(ranks))
    ]
    steps = ["rgba(0,0,0,0)", *shades]  # -1 first
    scale = [((i + end) / len(steps), shade) for i, shade in enumerate(steps) for end in (0, 1)]
    numbered = max(tiles.cells.shape) <= NUMBERED
    figure = go.Figure(layout=layout(Axis("KV shard"), Axis("query shard")))
    figure.add_trace(
        go.Heatmap(
            z=places,
            customdata=tiles.cells,
            text=np.where(tiles.cells < 0, "", tiles.cells.astype(str)) if numbered else None,
            x=tiles.columns,
            y=tiles.rows,
            zmin=-1.5,
            zmax=len(ranks) - 0.5,
            colorscale=scale,
            showscale=False,
            xgap=1 if numbered else 0,
            ygap=1 if numbered else 0,
            texttemplate="%{text}" if numbered else "",
            hovertemplate="rank %{customdata}<br>query shard %{y}, KV shard %{x}<extra></extra>",
        )
    )
    plain = {"showgrid": False, "zeroline": False, "constrain": "domain"}
    figure.update_xaxes(**plain)
    even = min(tiles.cells.shape) * 4 >= max(tiles.cells.shape)
    figure.update_yaxes(autorange="reversed", scaleanchor="x" if even else None, **plain)
    return figure


def plot_timeline(drawn: TimelineChart) -> go.Figure:
    """Lying bars in rows, one trace per lane."""
    time = Axis("time", "s")
    rows = Axis("", ticks=tuple(enumerate(drawn.names("<br>"))))
    figure = go.Figure(layout=layout(time, rows))
    for lane in drawn.lanes:
        mine = [bar for bar in drawn.bars if bar.lane == lane]
        places = [drawn.place(bar) for bar in mine]
        figure.add_trace(
            go.Bar(
                name=LINK_NAMES.get(lane, lane),
                orientation="h",
                y=[middle for middle, _ in places],
                width=[high for _, high in places],
                base=[bar.start for bar in mine],
                x=[bar.seconds for bar in mine],
                hovertext=[bar.note for bar in mine],
                hovertemplate="%{hovertext}<extra></extra>",
                marker={"color": colour(LANES[lane]), "line": {"width": 0}},
            )
        )
    bounds = [len(drawn.ranks) - 0.4, -0.95]
    figure.update_yaxes(showgrid=False, zeroline=False, range=bounds, fixedrange=True)
    figure.update_xaxes(**axis(time, range=[0, drawn.end], zeroline=False))
    figure.add_vline(drawn.turn, line={"color": FRAME.light, "width": 1.5, "dash": "dot"})
    said = {"font": {"size": 12, "color": INK.light}, "showarrow": False, "y": -0.68}
    figure.add_annotation(x=0, text="forward", xanchor="left", **said)
    figure.add_annotation(x=drawn.turn, text="backward", xanchor="left", xshift=4, **said)
    figure.update_layout(barmode="overlay", dragmode="zoom")
    return figure


MODES = MappingProxyType({"line": "lines+markers", "dash": "lines", "points": "markers"})
MARKERS = ("circle", "diamond", "square", "triangle-up", "x", "star", "cross", "hexagon")


def plot_chart(chart: Chart) -> go.Figure:
    """Lines and points, or lying bars."""
    figure = go.Figure(layout=layout(chart.x, chart.y))
    for series in chart.series:
        figure.add_trace(_bar(series) if chart.bars else _line(series))
    if chart.bars:
        _total(figure, chart)
    return figure


def _bar(series: Series) -> go.Bar:
    return go.Bar(
        name=series.name,
        orientation="h",
        x=series.y,
        y=[wrapped(str(name)) for name in series.x],
        marker={"color": colour(series.colour), "line": {"width": 0}},
        hovertext=series.notes,
        hovertemplate="%{hovertext}<extra></extra>",
    )


def _total(figure: go.Figure, chart: Chart) -> None:
    """Stack the bars, and write beside each what it amounts to."""
    names = chart.series[0].x
    totals = [sum(parts) for parts in zip(*(series.y for series in chart.series), strict=True)]
    figure.add_trace(
        go.Scatter(
            x=totals,
            y=[wrapped(str(name)) for name in names],
            mode="text",
            text=[f" {quantity(total, chart.x.unit)}" for total in totals],
            textposition="middle right",
            cliponaxis=False,
            hoverinfo="skip",
            showlegend=False,
        )
    )
    figure.update_layout(barmode="stack", bargap=0.35, legend_traceorder="normal")
    figure.update_xaxes(range=[0, 1.18 * max(totals, default=1)])
    figure.update_yaxes(autorange="reversed", showgrid=False, automargin=True)


def _line(series: Series) -> go.Scatter:
    shade = colour(series.colour)
    # Colours come again after the last, each with another symbol.
    symbol = MARKERS[(series.colour + series.colour // len(SERIES)) % len(MARKERS)]
    return go.Scatter(
        name=series.name,
        mode=MODES[series.style],
        x=series.x,
        y=series.y,
        line={"color": shade, "width": 2.2, "dash": "dot" if series.style == "dash" else "solid"},
        marker={"color": shade, "size": 8, "symbol": symbol},
        hovertext=series.notes,
        hovertemplate="%{hovertext}<extra></extra>",
    )


def plot_grid(grid: HeatMap) -> go.Figure:
    """Coloured cells with words, one trace for each kind of cell."""
    figure = go.Figure(layout=layout(grid.x, grid.y))
    for level, (name, number) in enumerate(grid.levels):
        shade = colour(number)
        figure.add_trace(
            go.Heatmap(
                name=name,
                x=grid.columns,
                y=[wrapped(row) for row in grid.rows],
                z=[[1 if cell == level else None for cell in row] for row in grid.cells],
                text=_only(level, grid),
                texttemplate="%{text}",
                textfont={"size": 12},
                customdata=grid.notes,
                hovertemplate="%{customdata}<extra></extra>",
                colorscale=[[0, shade], [1, shade]],
                showscale=False,
                showlegend=True,
                xgap=3,
                ygap=3,
            )
        )
    figure.update_xaxes(showgrid=False, side="top", type="category", tickangle=-45)
    figure.update_yaxes(showgrid=False, autorange="reversed", type="category")
    figure.update_layout(legend={"y": -0.02, "yanchor": "top"})
    return figure


def _only(level: int, grid: HeatMap) -> list[list[str]]:
    """The texts of one kind of cell."""
    return [
        [text if cell == level else "" for cell, text in zip(cells, texts, strict=True)]
        for cells, texts in zip(grid.cells, grid.texts, strict=True)
    ]


LINES, BAR, CELL, ROW, AROUND = 420, 46, 40, 64, 140  # pixels
NAMES, COLUMN = 130, 52


def as_plotly(drawing: Drawing) -> dict[str, Any]:
    """A figure as JSON's values."""
    match drawing:
        case Chart():
            return plot_chart(drawing).to_plotly_json()
        case HeatMap():
            return plot_grid(drawing).to_plotly_json()
        case Tiles():
            return plot_tiles(drawing).to_plotly_json()
        case TimelineChart():
            return plot_timeline(drawing).to_plotly_json()


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
