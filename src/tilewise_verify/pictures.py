"""A table of attended pairs as a picture: text, or SVG that needs nothing to be drawn."""

from itertools import groupby

import numpy as np

from tilewise_verify.palette import ATTENDED, EMPTY, FORBIDDEN, GROUNDS, MISSED

Array = np.ndarray
PIXELS, LEFT, LINE = 256, 34, 18  # of the table, beside it, of a line of words below it
KINDS = (  # of a pair, by attended + 2 * wanted: a colour, a word
    ("", ""),
    (FORBIDDEN, "attended, but forbidden"),
    (MISSED, "allowed, but missed"),
    (ATTENDED, "attended"),
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
    """Return an SVG: what is attended rightly, wrongly, and missed, with axes and a key.

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
    counts = [(i, f"{KINDS[i][1]}: {int((kinds == i).sum()):,}") for i in (3, 1, 2)]
    tall = round(PIXELS * min(2.0, max(0.25, rows / columns)))
    below, ink = tall + LINE, GROUNDS["ink"][0]
    key = [
        f'<rect x="{LEFT}" y="{below + LINE * line - 1}" width="12" height="12" '
        f'fill="{KINDS[i][0]}"/><text x="{LEFT + 18}" y="{below + LINE * line + 9}">{words}</text>'
        for line, (i, words) in enumerate((one for one in counts if (kinds == one[0]).any()), 1)
    ]
    wide, high = LEFT + PIXELS + 2, below + 4 * LINE
    middle = LEFT + PIXELS / 2, tall / 2
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{wide}" height="{high}" '
        f'viewBox="0 0 {wide} {high}" font-family="system-ui, sans-serif" font-size="12" '
        f'fill="{ink}">'
        f"<title>{title + ': ' if title else ''}{', '.join(words for _, words in counts)}</title>"
        f'<rect width="{wide}" height="{high}" fill="#ffffff"/>'
        f'<g transform="translate({LEFT} 0) scale({PIXELS / columns:.6g} {tall / rows:.6g})" '
        'shape-rendering="crispEdges">'
        f'<rect width="{columns}" height="{rows}" fill="{EMPTY}"/>{"".join(parts)}</g>'
        f'<text x="{middle[0]}" y="{tall + 14}" text-anchor="middle">'
        f"keys, 0 to {columns - 1:,}</text>"
        f'<text transform="translate(22 {middle[1]}) rotate(-90)" text-anchor="middle">'
        f"queries, 0 to {rows - 1:,}</text>{''.join(key)}</svg>\n"
    )
