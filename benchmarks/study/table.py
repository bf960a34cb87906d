"""What a study gives: a table of numbers with units, which a terminal, a file or a page shows."""

from collections.abc import Iterable
from typing import Any, NamedTuple

from tilewise.tools.report.drawing import Series, axis, lines, log_axis
from tilewise.tools.report.page import Figure, Page, Section, Table
from tilewise.tools.report.words import quantity

Value = str | int | float | None


class StudyTable(NamedTuple):
    """One table of a study.

    Attributes:
        about: what was run, and what a column means where its name does not say it.
        units: of the columns, by name, in order: "s", "B", "%", "x" (a ratio), "" for a number or
            a text.
        rows: a value for each column; None: it is not there, or not known.
        along, by, height: columns of a chart's x, lines and y; "": no chart.
        figures: more of them, which the study has drawn.
    """

    name: str
    title: str
    about: str
    units: dict[str, str]
    rows: list[tuple[Value, ...]]
    along: str = ""
    by: str = ""
    height: str = ""
    figures: tuple[Figure, ...] = ()

    def as_json(self) -> dict[str, Any]:
        rows = [dict(zip(self.units, row, strict=True)) for row in self.rows]
        shown = {name: value for name, value in self._asdict().items() if name != "figures"}
        return {**shown, "rows": rows}

    def texts(self) -> list[list[str]]:
        """The rows as people read them."""
        return [[shown(x, self.units[name]) for name, x in self.records(row)] for row in self.rows]

    def records(self, row: tuple[Value, ...]) -> Iterable[tuple[str, Value]]:
        return zip(self.units, row, strict=True)

    def section(self) -> Section:
        """Its part of a page."""
        figures = (*((self._figure(),) if self.along else ()), *self.figures)
        table = Table(tuple(self.units), tuple(map(tuple, self.texts())))
        return Section(self.name, self.title, self.about, figures, table)

    def _figure(self) -> Figure:
        columns = [list(self.units).index(name) for name in (self.along, self.height, self.by)]
        found: dict[Value, dict[float, float]] = {}
        for x, y, line in ([row[column] for column in columns] for row in self.rows):
            if isinstance(x, int | float) and isinstance(y, int | float):
                found.setdefault(line, {})[x] = y
        unit, y_unit = self.units[self.along], self.units[self.height]
        series = [
            Series(
                str(name), [*line], [*line.values()], [shown(y, y_unit) for y in line.values()], i
            )
            for i, (name, line) in enumerate(found.items())
        ]
        places = sorted({x for line in found.values() for x in line})
        x = axis(self.along, ticks=[(place, shown(place, unit)) for place in places], log=True)
        y = log_axis(self.height, y_unit, (y for line in found.values() for y in line.values()))
        title = f"{self.height}, by {self.along}"
        return Figure(f"{self.name}-chart", title, "", lines(x, y, series))


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
