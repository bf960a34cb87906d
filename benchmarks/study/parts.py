"""Parts of a study: rows made one part after the other, under a bar, and kept till the end."""

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from hashlib import sha256
from pathlib import Path
from tempfile import gettempdir
from typing import IO, Any

import tilewise as tw
from benchmarks.study.table import Row
from tilewise_tools.cli.output import counted

Parts = Mapping[str, Callable[[], Iterable[Row]]]
"""By a part's name, what makes its rows."""
RowsOf = Callable[[str, Parts], list[Row]]
"""All rows of a study's parts, in their order."""


def at_once(study: str, parts: Parts) -> list[Row]:
    """Make all rows, without a word."""
    return [row for make in parts.values() for row in make()]


class Journal:
    """Rows of parts that are done, in a file, so that a command that was stopped goes on.

    Args:
        path: of the file.
    """

    def __init__(self, path: Path):
        self.path = path
        done = (line for line in read_rows(path) if {"study", "part", "rows"} <= line.keys())
        self.done = {(x["study"], x["part"]): [tuple(row) for row in x["rows"]] for x in done}

    def rows_of(self, study: str, parts: Parts) -> list[Row]:
        """Rows that are known, and those that are not, which are written as they come."""
        missing = [name for name in parts if (study, name) not in self.done]
        if missing:
            made = ((name, [*parts[name]()]) for name in missing)
            with appended(self.path) as file:
                for name, rows in counted(made, [f"{study}: {name}" for name in missing]):
                    line = {"study": study, "part": name, "rows": rows}
                    file.write(json.dumps(line) + "\n")
                    file.flush()
                    self.done[study, name] = rows
        return [row for name in parts for row in self.done[study, name]]


@contextmanager
def journal(*about: Any) -> Iterator[Journal]:
    """Keep rows in a file of this checkout's own until the work within has ended well.

    Args:
        about: what rows depend on beside their study and part; other values have another file.
    """
    folders = Path(tw.__file__).parent, Path(__file__).parents[1]
    newest = max(path.stat().st_mtime_ns for x in folders for path in x.rglob("*.py"))
    key = sha256(repr((*about, newest)).encode()).hexdigest()[:16]
    path = Path(gettempdir()) / f"tilewise-study-{key}.jsonl"
    yield Journal(path)
    path.unlink(missing_ok=True)


def appended(path: Path) -> IO[str]:
    """The file, to add lines to; a last one that was cut is ended."""
    cut = path.exists() and not path.read_text(encoding="utf-8").endswith("\n")
    file = path.open("a", encoding="utf-8")
    file.write("\n" if cut and path.stat().st_size else "")
    return file


def read_rows(path: Path) -> list[dict[str, Any]]:
    """The lines of a file; a last one that was cut is left out."""
    if not path.exists():
        return []
    rows: list[dict[str, Any]] = []
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            rows.append(json.loads(line))
        except ValueError:
            continue
    return rows
