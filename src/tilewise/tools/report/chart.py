"""Charts as values: what is drawn, in which units, with the rows behind it, and not with what.

One value is drawn twice, on the page and as a picture, and its table is the CSV.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from tilewise.tools.report.units import CROSS

__all__ = [
    "Axis",
    "Bar",
    "Chart",
    "Drawing",
    "Figure",
    "Grid",
    "Section",
    "Series",
    "Table",
    "Tiles",
    "Timeline",
]

OWN = ("compute", "wait")  # lanes of which a rank is in one at a time


class Axis(NamedTuple):
    """A title, and a unit that SI prefixes go with ("s", "B"), "%" or none.

    Attributes:
        ticks: the places and texts of ticks; empty: chosen.
        bounds: the first and the last place; empty: chosen.
    """

    title: str
    unit: str = ""
    log: bool = False
    ticks: tuple[tuple[float, str], ...] = ()
    bounds: tuple[float, ...] = ()


class Series(NamedTuple):
    """One line, one kind of bar, or one kind of point.

    Attributes:
        x: numbers, or the names of bars.
        notes: what is said of each point when pointed at.
        colour: a number of the palette.
        style: "line", "dash" or "points"; bars ignore it.
    """

    name: str
    x: tuple[float | str, ...]
    y: tuple[float, ...]
    notes: tuple[str, ...]
    colour: int
    style: str = "line"


class Chart(NamedTuple):
    """Lines and points over a plane; or bars, lying and stacked, if bars is set."""

    x: Axis
    y: Axis
    series: tuple[Series, ...]
    bars: bool = False


class Grid(NamedTuple):
    """A table of coloured cells.

    Attributes:
        levels: the name and the palette's number of each kind of cell.
        cells: per row and column the place of its level, -1 for nothing.
        texts: per row and column what is written in it.
        notes: per row and column what is said when pointed at.
    """

    x: Axis
    y: Axis
    columns: tuple[str, ...]
    rows: tuple[str, ...]
    levels: tuple[tuple[str, int], ...]
    cells: tuple[tuple[int, ...], ...]
    texts: tuple[tuple[str, ...], ...]
    notes: tuple[tuple[str, ...], ...]


class Tiles(NamedTuple):
    """A table of cells coloured by rank.

    Attributes:
        cells: int [rows, columns], the rank, -1 for nothing.
        rows, columns: the shard that each begins with.
    """

    cells: np.ndarray
    rows: tuple[int, ...]
    columns: tuple[int, ...]

    def coloured(self) -> tuple[np.ndarray, np.ndarray]:
        """The ranks that have a cell, and the place among these of each cell's, -1 for none.

        A colour goes with a place: those of a few ranks are farther apart than those of all.
        """
        ranks = np.unique(self.cells[self.cells >= 0])
        places = np.searchsorted(ranks, self.cells)
        return ranks, np.where(self.cells >= 0, places, -1).astype(np.int16)


class Bar(NamedTuple):
    """Something that a rank did; several that followed at once are one."""

    row: int
    lane: str
    start: float
    seconds: float
    note: str


class Timeline(NamedTuple):
    """Both passes of a few ranks.

    Attributes:
        ranks: of the rows: which, and how many do the same.
        lanes: what is drawn: a rank's own ones, then links.
        turn, end: when backward begins and ends.
    """

    ranks: tuple[tuple[int, int], ...]
    lanes: tuple[str, ...]
    bars: tuple[Bar, ...]
    turn: float
    end: float

    def names(self, newline: str) -> list[str]:
        """Of the rows."""
        return [
            f"rank {rank}" + f"{newline}{CROSS}{like}" * (like > 1) for rank, like in self.ranks
        ]

    def place(self, bar: Bar) -> tuple[float, float]:
        """Middle and height of a bar, of a row: its rank's own above, the links below."""
        if bar.lane in OWN:
            return bar.row - 0.16, 0.44
        links = [lane for lane in self.lanes if lane not in OWN]
        return bar.row + 0.16 + 0.16 * links.index(bar.lane), 0.14


Drawing = Chart | Grid | Tiles | Timeline


class Table(NamedTuple):
    """Texts in columns."""

    header: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


class Figure(NamedTuple):
    """A chart with its words.

    Attributes:
        name: of its place on the page and of its picture's file.
        caption: what to see in it; read out where it cannot be seen.
        rows: what it was drawn from.
        jumps: parts of the horizontal axis to zoom in on, by name.
    """

    name: str
    title: str
    caption: str
    drawing: Drawing
    rows: Table | None = None
    jumps: tuple[tuple[str, float, float], ...] = ()


class Section(NamedTuple):
    """A part of the page.

    Attributes:
        intro: sentences before the figures.
        figures: side by side where there is room and narrow is set.
        table: shown as it is.
    """

    name: str
    title: str
    intro: str = ""
    figures: tuple[Figure, ...] = ()
    table: Table | None = None
    narrow: bool = False
