"""A table of attended pairs as a picture: text, or SVG that needs nothing to be drawn."""

from itertools import groupby

import numpy as np

Array = np.ndarray
PIXELS = 256
KINDS = (  # of a pair, by attended + 2 * wanted: a colour, a word
    ("", ""),
    ("#e15759", "attended, but forbidden"),
    ("#f2c14e", "allowed, but missed"),
    ("#4e79a7", "attended"),
)


CELLS = 32
"""Cells of a text picture on each side, at most."""


def text_picture(got: Array) -> str:
    """Queries downward, keys to the right: "#" where all pairs of a cell are attended, "+" some."""
    n = len(got)
    edges = np.unique(np.linspace(0, n, min(n, CELLS) + 1).astype(int))
    sums = np.add.reduceat(np.add.reduceat(got.astype(int), edges[:-1], 0), edges[:-1], 1)
    shares = sums / np.outer(np.diff(edges), np.diff(edges))
    signs = np.where(shares == 1, "#", np.where(shares > 0, "+", "."))
    return "\n".join("".join(row) for row in signs.tolist())


def drawn(got: Array, wanted: Array, title: str = "") -> str:
    """An SVG: what is attended rightly, wrongly, and missed.

    Args:
        got, wanted: bool [num_queries, num_keys].
    """
    rows, columns = got.shape
    kinds, parts = got + 2 * wanted, []
    for y, row in enumerate(kinds.tolist()):
        x = 0
        for kind, cells in groupby(row):
            width = len(list(cells))
            if kind:
                box = f'x="{x}" y="{y}" width="{width}" height="1"'
                parts.append(f'<rect {box} fill="{KINDS[kind][0]}"/>')
            x += width
    words = ", ".join(f"{KINDS[i][1]}: {int((kinds == i).sum()):,}" for i in (3, 1, 2))
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{PIXELS}" height="{PIXELS}" '
        f'viewBox="0 0 {columns} {rows}" preserveAspectRatio="none" shape-rendering="crispEdges">'
        f"<title>{title + ': ' if title else ''}{words}</title>"
        f'<rect width="{columns}" height="{rows}" fill="#f4f4f4"/>{"".join(parts)}</svg>\n'
    )
