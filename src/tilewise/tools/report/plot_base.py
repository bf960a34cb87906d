"""What all figures of plotly share: axes, ground, legend, ticks."""

from __future__ import annotations

import math
import textwrap
from typing import Any

import plotly.graph_objects as go

from tilewise.tools.report.chart import Axis
from tilewise.tools.report.palette import FRAME, GRID, INK, SOFT

__all__ = ["axis", "layout", "wrapped"]

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
