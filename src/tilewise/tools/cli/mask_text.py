"""A view of a mask on a terminal: colours where there are any, else a sign for each rank."""

from __future__ import annotations

import numpy as np
from rich.color import Color
from rich.style import Style
from rich.text import Text

from tilewise.tools.mask_report.mask_picture import colours, painted
from tilewise.tools.mask_report.mask_view import View

SIGNS = "0123456789abcdefghijklmnopqrstuvwxyz"
NUMBERED = 16
WHITE = 1.0


def as_signs(seen: View) -> str:
    """Queries downward, keys to the right; two rows of cells a line, as letters are tall.

    The sign of the rank that computes a cell, "." where nothing is allowed. Beyond 36 ranks signs
    come again.
    """
    lines = [f"    {_signs(seen.owners)}", ""]
    for i in range(0, len(seen.owners), 2):
        upper, lower = seen.ranks[i : i + 2][[0, -1]]
        row = np.where(upper < 0, lower, upper)
        lines.append(f"{_signs(seen.owners[i : i + 1])}   {_signs(row)}")
    return "\n".join(lines) + "\n"


def as_blocks(seen: View, n: int) -> Text:
    """The same in colours, each letter two cells one above the other."""
    cells = painted(seen, n)
    owned = colours(n)[seen.owners]
    gap = np.full((len(owned), 1, 3), WHITE)
    table = np.concatenate([owned[:, None], gap, cells], 1)
    if len(table) % 2:
        table = np.concatenate([table, np.full_like(table[:1], WHITE)])
    text = Text()
    for upper, lower in zip(table[::2], table[1::2], strict=True):
        for above, below in zip(upper, lower, strict=True):
            text.append("▀", Style(color=_color(above), bgcolor=_color(below)))
        text.append("\n")
    if n <= NUMBERED:
        for rank, colour in enumerate(colours(n)):
            text.append(f" {rank} ", Style(color="black", bgcolor=_color(colour)))
        text.append("\n")
    return text


def _signs(ranks: np.ndarray) -> str:
    return "".join("." if rank < 0 else SIGNS[rank % len(SIGNS)] for rank in ranks.tolist())


def _color(rgb: np.ndarray) -> Color:
    red, green, blue = (int(255 * part + 0.5) for part in rgb.tolist())
    return Color.from_rgb(red, green, blue)
