"""Figures as PNG, for places that show no pages."""

from __future__ import annotations

from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING

import numpy as np

from tilewise.simulation.simulator import Simulation
from tilewise.tools.mask_report.view import colours
from tilewise.tools.report.chart import (
    FRAME,
    GRID,
    INK,
    LANES,
    LINK_NAMES,
    Axis,
    Chart,
    Figure,
    HeatMap,
    Tiles,
    TimelineChart,
    colour,
    quantity,
)
from tilewise.tools.report.timeline import timeline

if TYPE_CHECKING:
    from matplotlib.axes import Axes


INCHES, DPI = 9.0, 110
LINES, BAR, CELL, ROW, AROUND = 5.0, 0.42, 0.34, 0.5, 1.5  # inches
STYLES = MappingProxyType({"line": "o-", "dash": ":", "points": "D"})
MOST_NAMES = 6  # of a legend's line


def draw(figure: Figure, path: str | Path) -> None:
    """Write a figure with its title."""
    from matplotlib.figure import Figure as Canvas

    canvas = Canvas(figsize=(INCHES, _inches(figure)), dpi=DPI, layout="constrained")
    axes = canvas.add_subplot()
    axes.spines[["top", "right"]].set_visible(False)
    axes.tick_params(colors=INK.light, labelsize=8)
    match figure.drawing:
        case Chart(bars=True):
            _bars(axes, figure.drawing)
        case Chart():
            _lines(axes, figure.drawing)
        case HeatMap():
            _grid(axes, figure.drawing)
        case Tiles():
            _tiles(axes, figure.drawing)
        case TimelineChart():
            _timeline(axes, figure.drawing)
    canvas.suptitle(figure.title, fontsize=11, fontweight="bold", x=0.01, ha="left")
    if axes.get_legend_handles_labels()[0]:
        canvas.legend(loc="outside lower left", ncols=MOST_NAMES, fontsize=8, frameon=False)
    canvas.savefig(path, metadata={"Software": None})


def draw_timeline(simulation: Simulation, path: str | Path, title: str = "Timeline") -> None:
    """Write who computes, waits and sends when, forward then backward, of up to 12 ranks."""
    draw(Figure("timeline", title, "", timeline(simulation)), path)


def _inches(figure: Figure) -> float:
    match figure.drawing:
        case Chart(bars=True):
            return AROUND + BAR * len({x for one in figure.drawing.series for x in one.x})
        case HeatMap():
            return AROUND + 0.8 + CELL * len(figure.drawing.rows)
        case TimelineChart():
            return AROUND + ROW * len(figure.drawing.ranks)
        case Tiles():
            return INCHES * 0.75
    return LINES


def _scale(axes: Axes, which: str, one: Axis) -> None:
    from matplotlib.ticker import FuncFormatter

    axes.set(**{f"{which}label": one.title})
    line = getattr(axes, f"{which}axis")
    if one.log:
        axes.set(**{f"{which}scale": "log"})
        line.set_minor_locator(_nothing())
    if one.ticks:
        places, names = zip(*one.ticks, strict=True)
        line.set_ticks(places, names)
    elif one.unit:
        line.set_major_formatter(FuncFormatter(lambda value, _: quantity(value, one.unit)))
    if one.bounds:
        axes.set(**{f"{which}lim": one.bounds})
    axes.grid(color=GRID.light, linewidth=0.8)
    axes.set_axisbelow(True)


def _nothing():
    from matplotlib.ticker import NullLocator

    return NullLocator()


def _lines(axes: Axes, chart: Chart) -> None:
    for one in chart.series:
        style = {"color": colour(one.colour), "markersize": 5, "linewidth": 1.8}
        axes.plot(one.x, one.y, STYLES[one.style], label=one.name, **style)
    _scale(axes, "x", chart.x)
    _scale(axes, "y", chart.y)


def _bars(axes: Axes, chart: Chart) -> None:
    names = [str(name) for name in chart.series[0].x]
    left = np.zeros(len(names))
    for one in chart.series:
        axes.barh(names, one.y, left=left, color=colour(one.colour), height=0.62, label=one.name)
        left += one.y
    for place, total in enumerate(left):
        said = f" {quantity(total, chart.x.unit)}"
        axes.text(total, place, said, va="center", fontsize=8, color=INK.light)
    axes.invert_yaxis()
    _scale(axes, "x", chart.x)
    axes.grid(visible=False, axis="y")


def _grid(axes: Axes, grid: HeatMap) -> None:
    from matplotlib.colors import to_rgb
    from matplotlib.patches import Patch

    shades = np.array([*(to_rgb(colour(number)) for _, number in grid.levels), (1, 1, 1)])
    axes.imshow(shades[np.array(grid.cells)], aspect="auto", interpolation="nearest")
    for row, texts in enumerate(grid.texts):
        for column, text in enumerate(texts):
            axes.text(column, row, text, ha="center", va="center", fontsize=7, color="white")
    axes.set_xticks(range(len(grid.columns)), grid.columns, rotation=30, ha="right")
    axes.set_yticks(range(len(grid.rows)), grid.rows)
    axes.set_xticks(np.arange(len(grid.columns) + 1) - 0.5, minor=True)
    axes.set_yticks(np.arange(len(grid.rows) + 1) - 0.5, minor=True)
    axes.grid(which="minor", color="white", linewidth=2)
    axes.tick_params(which="both", length=0)
    handles = [Patch(color=colour(number), label=name) for name, number in grid.levels]
    axes.legend(handles=handles, loc="upper left", bbox_to_anchor=(0, -0.12), ncols=4, fontsize=8)


def _tiles(axes: Axes, tiles: Tiles) -> None:
    ranks, places = tiles.coloured()
    shades = np.vstack([colours(len(ranks)), [1, 1, 1]])
    extent = (-0.5, tiles.columns[-1] + 0.5, tiles.rows[-1] + 0.5, -0.5)
    axes.imshow(shades[places], extent=extent, interpolation="nearest", aspect="auto")
    axes.set(xlabel="KV shard", ylabel="query shard")


def _timeline(axes: Axes, drawn: TimelineChart) -> None:
    for lane in drawn.lanes:
        mine = [bar for bar in drawn.bars if bar.lane == lane]
        middles, heights = zip(*(drawn.place(bar) for bar in mine), strict=True)
        axes.barh(
            middles,
            [bar.seconds for bar in mine],
            height=heights,
            left=[bar.start for bar in mine],
            color=colour(LANES[lane]),
            label=LINK_NAMES.get(lane, lane),
        )
    axes.axvline(drawn.turn, color=FRAME.light, linestyle=":", linewidth=1.2)
    for place, name in ((0.0, " forward"), (drawn.turn, " backward")):
        axes.text(place, -0.55, name, fontsize=8, color=INK.light, va="center")
    num = len(drawn.ranks)
    _scale(axes, "x", Axis("time", "s", bounds=(0, drawn.end)))
    _scale(axes, "y", Axis("", ticks=tuple(enumerate(drawn.names("\n"))), bounds=(num - 0.4, -0.8)))
    axes.grid(visible=False, axis="y")
    axes.spines["left"].set_visible(False)
    axes.tick_params(axis="y", length=0)
