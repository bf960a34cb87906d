"""What a study gives: a table of numbers with units, which a terminal, a file or a page shows."""

from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

from tilewise_tools.report.drawing import Series, axis, bars, lines, log_axis
from tilewise_tools.report.page import Figure, Page, Section, TextTable
from tilewise_tools.report.words import quantity

Value = str | int | float | None
Row = tuple[Value, ...]
EVERY_ROW: Mapping[str, Value] = MappingProxyType({})


class Chart(NamedTuple):
    """Lines over columns of a table.

    Attributes:
        along, height, by: columns of the x axis, of the y axis, and of the names of the lines; by
            with several columns, joined by commas.
        only: rows alone that have these values.
        points: nothing joins them.
    """

    along: str
    height: str
    by: str
    only: Mapping[str, Value] = EVERY_ROW
    points: bool = False

    def title(self) -> str:
        chosen = ", ".join(shown(x, "") for x in self.only.values())
        return f"{self.height}, by {self.along}" + (f": {chosen}" if chosen else "")


class StudyTable(NamedTuple):
    """One table of a study.

    Attributes:
        about: what was run, and what a column means where its name does not say it.
        units: of the columns, by name, in order: "s", "B", "%", "x" (a ratio), "" for a number or
            a text.
        rows: a value for each column; None: it is not there, or not known.
        charts: of its columns.
        figures: more of them, which the study has drawn.
    """

    name: str
    title: str
    about: str
    units: dict[str, str]
    rows: list[Row]
    charts: tuple[Chart, ...] = ()
    figures: tuple[Figure, ...] = ()

    def as_json(self) -> dict[str, Any]:
        about = {"name": self.name, "title": self.title, "about": self.about, "units": self.units}
        return {**about, "rows": [dict(self.records(row)) for row in self.rows]}

    def texts(self) -> list[list[str]]:
        """The rows as people read them."""
        return [[shown(x, self.units[name]) for name, x in self.records(row)] for row in self.rows]

    def records(self, row: Row) -> Iterable[tuple[str, Value]]:
        return zip(self.units, row, strict=True)

    def section(self) -> Section:
        """Its part of a page."""
        drawn = (self._figure(chart, i) for i, chart in enumerate(self.charts))
        table = TextTable(tuple(self.units), tuple(map(tuple, self.texts())))
        return Section(self.name, self.title, self.about, (*drawn, *self.figures), table)

    def _figure(self, chart: Chart, number: int) -> Figure:
        found: dict[str, dict[float, float]] = {}
        for row in (dict(self.records(row)) for row in self.rows):
            x, y = row[chart.along], row[chart.height]
            chosen = all(row[name] == value for name, value in chart.only.items())
            if chosen and isinstance(x, int | float) and isinstance(y, int | float):
                line = ", ".join(str(row[name]) for name in chart.by.split(", "))
                found.setdefault(line, {})[x] = y
        unit, y_unit = self.units[chart.along], self.units[chart.height]
        style = "points" if chart.points else "line"
        series = [
            Series(name, [*line], [*line.values()], [shown(y, y_unit) for y in line.values()], i,
                   style)
            for i, (name, line) in enumerate(found.items())
        ]  # fmt: skip
        places = sorted({x for line in found.values() for x in line})
        if chart.points:
            x_axis = log_axis(chart.along, unit, places)
        else:
            ticks = [(place, shown(place, unit)) for place in places]
            x_axis = axis(chart.along, ticks=ticks, log=True)
        heights = (y for line in found.values() for y in line.values())
        drawing = lines(x_axis, log_axis(chart.height, y_unit, heights), series)
        return Figure(f"{self.name}-chart-{number}", chart.title(), "", drawing)


def bar_chart(
    name: str, title: str, unit: str, parts: Mapping[str, Mapping[str, float]], caption: str = ""
) -> Figure:
    """Lying bars, each of stacked parts.

    Args:
        parts: by the part's name, its size in each bar.
    """
    series = [
        Series(part, [*sizes], [*sizes.values()], [quantity(x, unit) for x in sizes.values()], i)
        for i, (part, sizes) in enumerate(parts.items())
    ]
    return Figure(name, title, caption, bars(axis(""), unit, series))


def shown(value: Value, unit: str) -> str:
    """A value of a column of this unit."""
    if value is None or isinstance(value, str):
        return value or ""
    if unit in ("", "x"):
        return (f"{value:,}" if isinstance(value, int) else f"{value:.3g}") + unit
    return quantity(value, unit)


def page_of(tables: Iterable[StudyTable]) -> Page:
    """A page of several studies."""
    sections = tuple(table.section() for table in tables)
    names = ", ".join(section.name for section in sections)
    return Page("Studies of the papers", "What the papers measure, here", names, (), sections)
