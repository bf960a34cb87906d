"""Tables of a page of docs, and whether their figures are those that a command found."""

import re
from pathlib import Path
from typing import NamedTuple

from support.docs_blocks import ROOT

NUMBER = re.compile(r"[-+]?\d[\d,]*(?:\.\d+)?")


class DocsTable(NamedTuple):
    """Texts of a table."""

    header: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


def table_of(page: str, first: str) -> DocsTable:
    """The one table of a page in docs/ whose header line contains a text."""
    lines = (ROOT / "docs" / page).read_text(encoding="utf-8").splitlines()
    (start,) = (i for i, line in enumerate(lines[:-1]) if first in line and "|--" in lines[i + 1])
    end = next((i for i in range(start, len(lines)) if not lines[i].startswith("|")), len(lines))
    cells = [tuple(x.strip() for x in line.strip()[1:-1].split("|")) for line in lines[start:end]]
    return DocsTable(cells[0], tuple(cells[2:]))


def numbers_after(page: Path | str, words: str) -> list[float]:
    """The numbers of a page's sentence that begins with words, up to its end; lines are joined.

    Args:
        page: of docs/, or a path in the checkout.
    """
    path = page if isinstance(page, Path) else ROOT / "docs" / page
    text = " ".join(path.read_text(encoding="utf-8").split())
    (after,) = text.split(words)[1:]
    sentence = re.split(r"[.;:](?=\s|$)", after, maxsplit=1)[0]
    return [float(number.replace(",", "")) for number in NUMBER.findall(sentence)]


def shows(cell: str, *figures: float) -> bool:
    """Return whether the numbers of a cell are these, to the digits that it has."""
    numbers = [text.replace(",", "") for text in NUMBER.findall(cell)]
    return len(numbers) == len(figures) and all(
        abs(float(text) - figure) <= 0.505 * 10.0 ** -len(text.partition(".")[2])
        for text, figure in zip(numbers, figures, strict=True)
    )
