"""A table of attended pairs as a picture: text, or SVG that needs nothing to be drawn."""

from itertools import groupby

import numpy as np

Array = np.ndarray
PIXELS = 256
KINDS = (  # attended, wanted: a colour, a sign, a word
    ((True, True), "#4e79a7", "#", "attended"),
    ((True, False), "#e15759", "!", "attended, but forbidden"),
    ((False, True), "#f2c14e", "-", "allowed, but missed"),
)


def text_picture(got: Array, cells: int = 32) -> str:
    """Queries downward, keys to the right: "#" where all pairs of a cell are attended, "+" some."""
    n = len(got)
    edges = np.unique(np.linspace(0, n, min(n, cells) + 1).astype(int))
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
    kinds = np.full(got.shape, -1)
    for i, ((attended, allowed), *_) in enumerate(KINDS):
        kinds[(got == attended) & (wanted == allowed)] = i
    parts = []
    for y, row in enumerate(kinds.tolist()):
        x = 0
        for kind, cells in groupby(row):
            width = len(list(cells))
            if kind >= 0:
                box = f'x="{x}" y="{y}" width="{width}" height="1"'
                parts.append(f'<rect {box} fill="{KINDS[kind][1]}"/>')
            x += width
    words = ", ".join(f"{word}: {int((kinds == i).sum()):,}" for i, (*_, word) in enumerate(KINDS))
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{PIXELS}" height="{PIXELS}" '
        f'viewBox="0 0 {columns} {rows}" preserveAspectRatio="none" shape-rendering="crispEdges">'
        f"<title>{title + ': ' if title else ''}{words}</title>"
        f'<rect width="{columns}" height="{rows}" fill="#f4f4f4"/>{"".join(parts)}</svg>\n'
    )
