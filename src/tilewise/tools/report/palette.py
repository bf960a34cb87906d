"""The colours of charts on light and on dark ground: one is replaced by the other in the page."""

from __future__ import annotations

from types import MappingProxyType
from typing import NamedTuple

__all__ = [
    "DARK",
    "FRAME",
    "GRID",
    "INK",
    "LANES",
    "LINKS",
    "LINK_NAMES",
    "SERIES",
    "SOFT",
    "colour",
]


class Colour(NamedTuple):
    """The same colour on either ground."""

    light: str
    dark: str


SERIES = (
    Colour("#2463c9", "#6fa8ff"),
    Colour("#d9622b", "#ff9a62"),
    Colour("#12866a", "#45c9a2"),
    Colour("#7e4fc0", "#b99af7"),
    Colour("#c22d5c", "#ff7f9f"),
    Colour("#0b8793", "#4dd0dc"),
    Colour("#a8740f", "#efc04c"),
    Colour("#66707d", "#a4afbd"),
)
INK = Colour("#1d2733", "#e6ebf2")
GRID = Colour("#e2e7ee", "#2d3846")
SOFT = Colour("#f3f5f9", "#1c2530")
FRAME = Colour("#b8c1cd", "#465465")
LANES = MappingProxyType({"compute": 0, "wait": 1, "inside": 5, "between": 3, "across": 6})
"""The palette's numbers of what a rank does."""
LINKS = ("inside", "between", "across")
LINK_NAMES = MappingProxyType(
    {"inside": "inside the node", "between": "between nodes", "across": "between racks"}
)
DARK = MappingProxyType({one.light: one.dark for one in (*SERIES, INK, GRID, SOFT, FRAME)})
"""What the page's script replaces on dark ground."""


def colour(number: int) -> str:
    """A colour of the palette, on light ground; after the last comes the first."""
    return SERIES[number % len(SERIES)].light
