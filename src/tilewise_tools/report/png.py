"""The charts of a page as PNG files: matplotlib draws what plotly draws on the page."""

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np

from tilewise_tools.doctor import require
from tilewise_tools.report.drawing import LINES, Cells, Drawing, Words
from tilewise_tools.report.page import Figure, Page
from tilewise_verify.palette import chart_style, ink_on, rank_colours, rgb

INCH, WIDTH, POINT, TALL = 100, 10.0, 0.72, 0.32  # pixels; inches; points of a pixel; a row, inches
ABOVE = 1.8  # inches: title, names of columns, key
MARKERS: Mapping[str, str] = MappingProxyType(
    {"circle": "o", "diamond": "D", "square": "s", "triangle-up": "^", "x": "X", "star": "*"}
    | {"cross": "P", "hexagon": "h"}
)
DASHES: Mapping[str, str] = MappingProxyType(
    {"solid": "-", "dash": "--", "longdashdot": "-.", "dot": ":"}
)


def write_pngs(page: Page, folder: Path) -> list[Path]:
    """Write each chart that a page shows at once as NAME.png, on light ground; return the files.

    Args:
        folder: it is made if it is missing.
    """
    require("matplotlib", "--png")
    from matplotlib import rc_context
    from matplotlib.figure import Figure as Canvas

    folder.mkdir(parents=True, exist_ok=True)
    paths: list[Path] = []
    for figure in (figure for section in page.sections for figure in section.figures):
        with rc_context(chart_style()):
            canvas = Canvas(figsize=(WIDTH, _height(figure)), dpi=INCH, layout="constrained")
            axes = canvas.subplots()
            axes.set_title(figure.title, loc="left")
            if isinstance(figure.drawing, Cells):
                _draw_cells(axes, figure.drawing)
            else:
                draw(axes, figure.drawing)
            paths.append(folder / f"{figure.name}.png")
            canvas.savefig(paths[-1])
    return paths


def _height(figure: Figure) -> float:
    drawing = figure.drawing
    if isinstance(drawing, Cells):
        return TALL * len(drawing.rows) + ABOVE
    return (drawing.height or 1.6 * LINES) / INCH + 0.6


def _draw_cells(axes: Any, cells: Cells) -> None:
    """A table of coloured cells, with a key of the colours that it has."""
    shades = [[cells.levels[level][1] if level >= 0 else "#ffffff" for level, *_ in line]
              for line in cells.lines]  # fmt: skip
    axes.imshow([[rgb(shade) for shade in line] for line in shades], aspect="auto")
    axes.grid(False)
    for y, line in enumerate(cells.lines):
        for x, (_, text, _) in enumerate(line):
            where = {"ha": "center", "va": "center", "fontsize": 7}
            axes.text(x, y, text.replace(", ", "\n"), color=ink_on(shades[y][x]), **where)
    columns = [name.replace("_", "_\n") for name in cells.columns]
    axes.set_xticks(range(len(columns)), columns, fontsize=7)
    axes.set_yticks(range(len(cells.rows)), cells.rows, fontsize=8)
    used = sorted({level for line in cells.lines for level, *_ in line if level >= 0})
    for name, shade in (cells.levels[level] for level in used):
        axes.bar([0], [0], color=shade, label=name)
    axes.set_xlim(-0.5, len(columns) - 0.5)
    axes.set_ylim(len(cells.rows) - 0.5, -0.5)
    axes.figure.legend(loc="outside lower center", ncols=4, frameon=False)


def draw(axes: Any, drawing: Drawing) -> None:
    """Draw a chart of bars, lines, points or tiles."""
    layout = drawing.layout
    for trace in drawing.data:
        if trace["type"] == "heatmap":
            _tiles(axes, trace)
        elif trace["type"] == "bar":
            _bars(axes, trace, is_stacked=layout.get("barmode") == "stack")
        elif trace["mode"] == "text":  # the totals of bars
            for x, y, text in zip(trace["x"], trace["y"], trace["text"], strict=True):
                axes.text(x, y, text, va="center")
        else:
            _line(axes, trace)
    _scale(axes, "x", layout["xaxis"])
    _scale(axes, "y", layout["yaxis"])
    if layout["yaxis"].get("scaleanchor"):
        axes.set_aspect("equal")
    for label in layout.get("annotations", ()):
        if label.get("name") == "line":
            axes.annotate(
                label["text"],
                (1, 10 ** label["y"]),
                (POINT * label["ax"], -POINT * label["ay"]),
                xycoords=("axes fraction", "data"),
                textcoords="offset points",
                va="center",
                annotation_clip=False,
                arrowprops={"arrowstyle": "-", "color": label["arrowcolor"], "shrinkB": 0},
            )
    if layout.get("showlegend", True) and axes.get_legend_handles_labels()[1]:
        axes.figure.legend(loc="outside lower center", ncols=4, frameon=False)


def _tiles(axes: Any, trace: Words) -> None:
    from matplotlib.colors import ListedColormap

    places, ranks = np.asarray(trace["z"]), np.asarray(trace["customdata"])
    num_ranks = int(places.max()) + 1
    colours = ListedColormap(rank_colours(num_ranks))
    shown = np.ma.masked_less(places, 0)
    (x, last_x), (y, last_y) = ((trace[side][0], trace[side][-1]) for side in "xy")
    extent = (x - 0.5, last_x + 0.5, last_y + 0.5, y - 0.5)
    image = axes.imshow(shown, cmap=colours, vmin=-0.5, vmax=num_ranks - 0.5, extent=extent)
    axes.grid(False)
    ticks = [place for place in trace["colorbar"]["tickvals"] if place >= 0]
    bar = axes.figure.colorbar(image, ax=axes, label="rank", ticks=ticks)
    names = {int(place): str(rank) for place, rank in zip(places.flat, ranks.flat, strict=True)}
    bar.set_ticklabels([names[place] for place in ticks])


def _bars(axes: Any, trace: Words, *, is_stacked: bool) -> None:
    style = {"color": trace["marker"]["color"], "label": trace["name"]}
    style |= {"hatch": trace["marker"].get("pattern", {}).get("shape", ""), "edgecolor": "white"}
    if not is_stacked:
        axes.barh(trace["y"], trace["x"], height=trace["width"], left=trace["base"], **style)
        return
    ends = _ends(axes)
    left = [ends.get(name, 0.0) for name in trace["y"]]
    bars = axes.barh(trace["y"], trace["x"], height=0.65, left=left, **style)
    for name, patch in zip(trace["y"], bars, strict=True):
        patch.set_gid(name)


def _ends(axes: Any) -> dict[str, float]:
    """Return the place up to which the bars of each name reach so far."""
    ends: dict[str, float] = {}
    for patch in axes.patches:
        ends[patch.get_gid()] = max(
            ends.get(patch.get_gid(), 0.0), patch.get_x() + patch.get_width()
        )
    return ends


def _line(axes: Any, trace: Words) -> None:
    has_line, has_points = (part in trace["mode"] for part in ("lines", "markers"))
    axes.plot(
        trace["x"],
        trace["y"],
        color=trace["line"]["color"],
        linestyle=DASHES[trace["line"]["dash"]] if has_line else "",
        marker=MARKERS[trace["marker"]["symbol"]] if has_points else "",
        label=trace["name"],
    )


def _scale(axes: Any, side: str, words: Words) -> None:
    """An axis as the page has it: scale, ticks, range and title."""
    from matplotlib.ticker import NullLocator

    axis, is_log = getattr(axes, f"{side}axis"), words.get("type") == "log"
    if is_log:
        axes.set(**{f"{side}scale": "log"})
        axis.set_minor_locator(NullLocator())
    if "tickvals" in words:
        axis.set_ticks([*words["tickvals"]], [*map(str, words["ticktext"])])
    if "range" in words:
        axes.set(**{f"{side}lim": [10**end if is_log else end for end in words["range"]]})
    elif words.get("autorange") == "reversed":
        axis.set_inverted(True)
    axis.set_label_text(words.get("title", {}).get("text", ""))
