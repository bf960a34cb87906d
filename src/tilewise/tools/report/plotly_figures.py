"""Any drawing as a figure of plotly, whose script draws it in the page."""

from __future__ import annotations

from typing import Any

from tilewise.tools.report.chart import Chart, Drawing, Grid, Tiles, Timeline
from tilewise.tools.report.plot_charts import plot_chart, plot_grid
from tilewise.tools.report.plot_ranks import plot_tiles, plot_timeline

__all__ = ["as_plotly", "height", "width"]

LINES, BAR, CELL, ROW, AROUND = 420, 46, 40, 64, 140  # pixels
NAMES, COLUMN = 130, 52


def as_plotly(drawing: Drawing) -> dict[str, Any]:
    """A figure as JSON's values."""
    match drawing:
        case Chart():
            return plot_chart(drawing).to_plotly_json()
        case Grid():
            return plot_grid(drawing).to_plotly_json()
        case Tiles():
            return plot_tiles(drawing).to_plotly_json()
        case Timeline():
            return plot_timeline(drawing).to_plotly_json()


def width(drawing: Drawing) -> int:
    """Pixels below which a figure would be too narrow, so that it scrolls; 0: none."""
    return NAMES + COLUMN * len(drawing.columns) if isinstance(drawing, Grid) else 0


def height(drawing: Drawing) -> int | None:
    """Pixels that a figure needs; None: as wide as it is."""
    match drawing:
        case Tiles():
            return None
        case Grid():
            return AROUND + 60 + CELL * len(drawing.rows)
        case Timeline():
            return AROUND + 30 + ROW * len(drawing.ranks)
        case Chart():
            names = {name for series in drawing.series for name in series.x}
            return AROUND + BAR * len(names) if drawing.bars else LINES
