"""What all commands print with, and how they end on bad input."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated, Any

import typer
from rich.console import Console

from tilewise.tools.doctor import MissingExtraError

AsJson = Annotated[bool, typer.Option("--json", help="Print JSON instead.")]
BAD_INPUT = 2


@contextmanager
def refusing_bad_input() -> Iterator[None]:
    """End with code 2 and the message in one line on ValueError, or where an extra is missing."""
    try:
        yield
    except (ValueError, MissingExtraError) as error:
        message = " ".join(str(error).split())
        Console(stderr=True).print(f"tilewise: {message}", markup=False, soft_wrap=True)
        raise typer.Exit(BAD_INPUT) from None


def print_json(value: Any) -> None:
    """As it is, whatever the width of the terminal."""
    typer.echo(json.dumps(value, indent=2))


def print_plain(text: str) -> None:
    """Text whose lines must not wrap or be coloured."""
    typer.echo(text, nl=not text.endswith("\n"))


def as_bytes(count: float) -> str:
    """A number of bytes as people read it, in powers of 1000."""
    if count < 1000:
        return f"{count:.0f} B"
    power = min(4, int(math.log10(count * 1.0005)) // 3)  # 999.9 kB reads 1 MB
    return f"{count / 1000**power:.3g} {('kB', 'MB', 'GB', 'TB')[power - 1]}"
