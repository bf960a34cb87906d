"""Tiles and timelines as figures of plotly."""

from __future__ import annotations

import numpy as np
import plotly.graph_objects as go

from tilewise.tools.mask_report.mask_picture import colours
from tilewise.tools.report.chart import Axis, Tiles, Timeline
from tilewise.tools.report.palette import FRAME, INK, LANES, LINK_NAMES, colour
from tilewise.tools.report.plot_base import axis, layout

__all__ = ["plot_tiles", "plot_timeline"]

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


def plot_timeline(drawn: Timeline) -> go.Figure:
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
