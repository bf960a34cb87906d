"""Printing that all commands share, and how they end on bad input."""

import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import is_dataclass
from itertools import count
from os.path import isdir
from pathlib import Path
from threading import Timer
from types import MappingProxyType
from typing import Any, TypeVar

import typer
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    SpinnerColumn,
    TextColumn,
    TimeElapsedColumn,
)
from rich.table import Table

from tilewise_tools.doctor import MissingExtraError, require
from tilewise_tools.naming import in_one_line
from tilewise_tools.outside import is_outside
from tilewise_tools.report.words import quantity

T = TypeVar("T")
FAILED, BAD_INPUT = 1, 2
PIPED_WIDTH = 120
PATIENCE = 2.0  # seconds without a word where nobody watches a terminal


@contextmanager
def refusing_bad_input(names: Mapping[str, str] = MappingProxyType({})) -> Iterator[None]:
    """End with code 2 and the message in one line on ValueError, or where an extra is missing; with
    code 1 where memory does not do.

    Args:
        names: options by the library's names, as in {"world_size": "--world-size"}.
    """
    try:
        yield
    except (ValueError, MissingExtraError) as error:
        print_error(f"tilewise: {in_one_line(error, names)}")
        raise typer.Exit(BAD_INPUT) from None
    except MemoryError as error:
        print_error(f"tilewise: out of memory; take fewer tokens or ranks ({error})")
        raise typer.Exit(FAILED) from None


@contextmanager
def ending_on(*errors: type[Exception], before: str = "tilewise: ") -> Iterator[None]:
    """End with code 1 and the message on one of these errors."""
    try:
        yield
    except errors as error:
        print_error(f"{before}{error}")
        raise typer.Exit(FAILED) from None


@contextmanager
def refusing_unwritable() -> Iterator[None]:
    """Name the file that cannot be written in a ValueError."""
    try:
        yield
    except OSError as error:
        path = error.filename or "the output"
        raise ValueError(f"{path} cannot be written: {error.strerror}") from None


def write_output(path: Path, text: str) -> None:
    """Write what a command made, or end with the reason."""
    with refusing_bad_input(), refusing_unwritable():
        path.write_text(text, encoding="utf-8")


def check_writable(
    option: str, path: Path | None, given: Any = (), *, makes_folders: bool = False
) -> None:
    """Refuse a file that could not be written in the end, before the work begins.

    Args:
        option: the option that names the file, for messages.
        given: the command's arguments, in tuples and dataclasses, path among them or not: a file
            that another one names is not written over.
        makes_folders: folders that are missing will be made.
    """
    if path is None:
        return
    if any(other.resolve() == path.resolve() for other in _named_files(given, path)):
        raise ValueError(
            f"{option} would write over {path}, which another argument names; name another file"
        )
    if makes_folders and not path.parent.exists():
        return check_writable(option, path.parent, makes_folders=True)
    if not path.parent.is_dir():
        raise ValueError(
            f"{option}: {path.parent} is no folder; make it, or write {path.name} elsewhere"
        )
    if path.is_dir() or not os.access(path if path.exists() else path.parent, os.W_OK):
        raise ValueError(
            f"{option}: {path} cannot be written: it is a folder, or not yours; name a file"
        )


def _named_files(given: Any, but: Path) -> Iterator[Path]:
    """Yield what arguments name that may be a file: paths, FILE.py of FILE.py:name, and rows of a
    folder.
    """
    if given is but:
        return
    if is_dataclass(given):
        given = tuple(vars(given).values())
    if isinstance(given, list | tuple):
        for one in given:
            yield from _named_files(one, but)
    elif isinstance(given, str | Path):
        text = str(given)
        path = Path(text.rpartition(":")[0] if is_outside(text) else text)
        yield path
        if isdir(path):
            yield from path.glob("*.jsonl")


def check_folder(option: str, folder: Path | None) -> None:
    """Refuse a folder of pictures that could not be filled in the end, before the work begins."""
    if folder is not None:
        require("matplotlib", option)
        check_writable(option, folder / "chart.png", makes_folders=True)


def print_error(text: str) -> None:
    Console(stderr=True).print(text, markup=False, soft_wrap=True)


def table_console(piped_width: int = PIPED_WIDTH) -> Console:
    """The terminal; where the output is none, lines of a fixed width."""
    console = Console()
    return console if console.is_terminal else Console(width=piped_width)


def counting_bar() -> Progress:
    """Return a progress bar on the error stream: how much is done of how much."""
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn()
    return Progress(*columns, TimeElapsedColumn(), console=Console(stderr=True))


@contextmanager
def working(what: str) -> Iterator[Callable[[str], None]]:
    """Show what is done and since when, on the error stream; call it to say what comes next.

    Where the error stream is no terminal, it shows lines, of work that takes PATIENCE or more.
    """
    columns = SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn()
    console = Console(stderr=True)
    if not console.is_terminal:
        with _printing_late(what) as progress:
            yield progress
        return
    with Progress(*columns, console=console, transient=True) as progress_bar:
        task = progress_bar.add_task(what, total=None)
        yield lambda text: progress_bar.update(task, description=text)


@contextmanager
def _printing_late(what: str) -> Iterator[Callable[[str], None]]:
    """Print lines on the error stream, the first after PATIENCE seconds."""
    latest = [what]
    timer = Timer(PATIENCE, lambda: print_error(latest[-1]))
    timer.daemon = True
    timer.start()

    def progress(text: str) -> None:
        latest.append(text)
        if not timer.is_alive():
            print_error(text)

    try:
        yield progress
    finally:
        timer.cancel()


@contextmanager
def steps(total: int) -> Iterator[Callable[[str], None]]:
    """Show a bar of the steps that are done; call the value to name the step that begins."""
    with counting_bar() as progress:
        task = progress.add_task("starting", total=total)
        begun = count()
        yield lambda name: progress.update(task, completed=next(begun), description=name)
        progress.update(task, completed=total, description="done")


def counted(results: Iterable[T], names: Sequence[str]) -> Iterator[T]:
    """Results one after the other, under a bar that names the one at work."""
    with steps(len(names)) as begin:
        arriving = iter(results)
        for name in names:
            begin(name)
            yield next(arriving)
        yield from arriving


def table_of(first: str, *columns: str, no_wrap: bool = True) -> Table:
    """A table without frames: a name, then figures to the right."""
    table = Table(box=SIMPLE_HEAD, padding=(0, 1), show_edge=False)
    table.add_column(first, overflow="fold", no_wrap=not no_wrap)
    for name in columns:
        table.add_column(name, justify="right", no_wrap=no_wrap)
    return table


def print_json(value: Any) -> None:
    """Print a value as JSON, whatever the width of the terminal."""
    typer.echo(json.dumps(value, indent=2))


def print_plain(text: str) -> None:
    """Text whose lines must not wrap or be coloured."""
    typer.echo(text, nl=not text.endswith("\n"))


def as_seconds(seconds: float) -> str:
    """A time as people compare it, in the unit that suits it: "1.234 ms", "139.6 s". Less than a
    picosecond, which is rounding's, is 0 s."""
    return quantity(seconds if abs(seconds) >= 1e-12 else 0.0, "s", figures=4)


def as_bytes(count: float) -> str:
    """A number of bytes as people read it, in powers of 1000."""
    return quantity(round(count), "B")
