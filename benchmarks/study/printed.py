"""Tables of studies in a terminal: one that is too wide continues below, with its names again."""

from collections.abc import Iterator

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from benchmarks.study.table import StudyTable

WIDTH = 100  # where the output is no terminal
MOST_NAME = 30
"""Columns of a name; longer ones wrap."""
PADDING = 3  # between columns


def print_study(table: StudyTable, console: Console) -> None:
    """Print a table's title, what it is about, and its rows, in parts that fit the console."""
    console.print(f"[bold]{table.title}[/]")
    console.print(table.about, markup=False, highlight=False)
    texts, names = table.texts(), [*table.units]
    num_names = _num_names(table)
    for part in _parts(table, texts, num_names, console.width):
        drawn = Table(box=SIMPLE_HEAD, padding=(0, 1), show_edge=False)
        for i in part:
            is_name = i < num_names
            most = MOST_NAME if is_name else None
            drawn.add_column(
                names[i],
                justify="left" if is_name else "right",
                overflow="fold",
                min_width=min(_width(names[i], [row[i] for row in texts]), most or console.width),
                max_width=most,
            )
        for row in texts:
            drawn.add_row(*(row[i] for i in part))
        console.print(drawn)


def _num_names(table: StudyTable) -> int:
    """Leading columns that say what a row is about: texts and counts."""
    for i, (name, unit) in enumerate(table.units.items()):
        values = [dict(table.records(row))[name] for row in table.rows]
        if unit or any(isinstance(x, float) for x in values):
            return max(1, i)
    return 1


def _parts(
    table: StudyTable, texts: list[list[str]], num_names: int, width: int
) -> Iterator[list[int]]:
    """Columns of each part, the names among them; of later parts those that tell rows apart."""
    widths = [
        min(_width(name, [row[i] for row in texts]), MOST_NAME if i < num_names else width)
        + PADDING
        for i, name in enumerate(table.units)
    ]
    part, again = [*range(num_names)], [*range(_num_telling(texts, num_names))]
    figures = 0
    for i in range(num_names, len(widths)):
        if figures and sum(widths[j] for j in (*part, i)) > width:
            yield part
            part, figures = [*again], 0
        part.append(i)
        figures += 1
    yield part


def _num_telling(texts: list[list[str]], num_names: int) -> int:
    """Names that tell rows apart."""
    counts = range(1, num_names)
    distinct = (n for n in counts if len({tuple(row[:n]) for row in texts}) == len(texts))
    return next(distinct, num_names)


def _width(name: str, values: list[str]) -> int:
    """Columns that a column needs: its header may wrap between words, values may not."""
    return max(map(len, (*name.split(), *values)), default=1)
