"""Charts and grids as figures of plotly."""

from __future__ import annotations

from types import MappingProxyType

import plotly.graph_objects as go

from tilewise.tools.report.chart import Chart, Grid, Series
from tilewise.tools.report.palette import SERIES, colour
from tilewise.tools.report.plot_base import layout, wrapped
from tilewise.tools.report.units import quantity

__all__ = ["plot_chart", "plot_grid"]

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


def plot_grid(grid: Grid) -> go.Figure:
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


def _only(level: int, grid: Grid) -> list[list[str]]:
    """The texts of one kind of cell."""
    return [
        [text if cell == level else "" for cell, text in zip(cells, texts, strict=True)]
        for cells, texts in zip(grid.cells, grid.texts, strict=True)
    ]
