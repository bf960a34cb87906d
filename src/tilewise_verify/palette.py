"""The colours of every picture: pages, PNG, SVG and terminals take theirs from here.

Any two colours of one list are at least 10 apart (CIEDE2000), to the usual eye and to deutan,
protan and tritan eyes (Machado, Oliveira and Fernandes 2009, severity 1). What stands on a colour
is written in `ink_on` of it. `tests/tools/test_palette.py` measures both.
"""

from types import MappingProxyType
from typing import Any

SERIES = (
    ("#0066e1", "#2885fe"),
    ("#d86a28", "#efa37e"),
    ("#008766", "#09ae34"),
    ("#592a9b", "#c1a9ff"),
    ("#8b0037", "#e75b81"),
    ("#00a2b8", "#9fe1e6"),
    ("#80571b", "#ffd95f"),
    ("#6c7484", "#909eb7"),
)
"""Lines, points and bars: each colour on light and on dark cards, 3 to 1 against them at least."""
RANKS = (
    *("#3f72b6", "#f2a470", "#459f01", "#8d4047", "#a589ad", "#f6d724", "#99c9c2", "#9b735c"),
    *("#e76eff", "#7b7f80", "#292952", "#3d2900", "#0000d6", "#47ffc2", "#665270", "#d6ccff"),
)
"""Areas that belong to a rank; `rank_colours` goes on after the last."""
RAMP = ("#0e4a8a", "#4a90dc", "#a6cff5", "#eaf3fd")
"""Areas from best to worst."""
FAULTS = ("#8b0037", "#c8641e", "#f2b84b", "#9b9b9b")
"""Areas of what is no figure: wrong, failed, out of memory, unsupported; apart from RAMP too."""
NEUTRAL = "#c9ced6"  # an area with nothing to tell; apart from the first five of SERIES
ATTENDED, FORBIDDEN, MISSED = "#3f72b6", "#c0392b", "#f6d724"
"""Pairs of a table: attended rightly, attended but forbidden, allowed but not attended."""
EMPTY = "#f4f4f4"  # pairs that nobody attends to
GROUNDS = MappingProxyType(
    {
        "ground": ("#f5f7fb", "#10161e"),
        "card": ("#ffffff", "#18202a"),
        "ink": ("#1d2733", "#e6ebf2"),
        "quiet": ("#566372", "#a4afbd"),
        "line": ("#e2e7ee", "#2d3846"),
        "frame": ("#b8c1cd", "#465465"),
        "accent": ("#005bc9", "#6fa8ff"),
        "soft": ("#eef2f9", "#1f2a37"),
    }
)
"""Colours of a page's ground, cards, ink, quieter ink, grid lines, frames, links: light, dark."""
ROUND, PALER, ROUNDS = 3, 0.12, 16  # of ranks after the last colour


def rank_colours(num_ranks: int) -> list[str]:
    """Return a colour for each rank.

    Up to 16 ranks have the colours of RANKS. After these the colours come again, moved on by three
    places and paler each round, so that neighbours by 1, 2, 4, 8, ... ranks differ.
    """
    shades = []
    for rank in range(num_ranks):
        turn = rank // len(RANKS)
        shade = RANKS[(rank + ROUND * turn) % len(RANKS)]
        shades.append(paler(shade, PALER * (5 * turn % ROUNDS) / ROUNDS))
    return shades


def variables() -> str:
    """Return GROUNDS as variables of CSS, `--ink` and so on; paper is light."""
    light, dark = (
        "".join(f"--{name}: {pair[scheme]}; " for name, pair in GROUNDS.items())
        for scheme in (0, 1)
    )
    return (
        f":root {{ color-scheme: light dark; {light}}}\n"
        f"@media screen and (prefers-color-scheme: dark) {{ :root {{ {dark}}} }}\n"
    )


def chart_style() -> dict[Any, Any]:
    """Return settings of matplotlib (rc_context) that give a chart the looks of a page."""
    ink, quiet, line, frame = (GROUNDS[name][0] for name in ("ink", "quiet", "line", "frame"))
    shades = ", ".join(repr(light) for light, _ in SERIES)
    return {
        "font.family": "sans-serif",
        "text.color": ink,
        "axes.labelcolor": ink,
        "axes.titleweight": "bold",
        "axes.edgecolor": frame,
        "axes.grid": True,
        "axes.axisbelow": True,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.prop_cycle": f"cycler('color', [{shades}])",
        "grid.color": line,
        "xtick.color": quiet,
        "ytick.color": quiet,
    }


def rgb(colour: str) -> tuple[float, float, float]:
    """Return red, green and blue of "#rrggbb", from 0 to 1."""
    red, green, blue = (int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5))
    return red, green, blue


def paler(colour: str, part: float) -> str:
    """Return a colour mixed with white; part 0 leaves it, part 1 is white."""
    return "#" + "".join(f"{round(255 * (part + (1 - part) * x)):02x}" for x in rgb(colour))


def luminance(colour: str) -> float:
    """Return the relative luminance of WCAG 2, from 0 (black) to 1 (white)."""
    linear = (x / 12.92 if x <= 0.04045 else ((x + 0.055) / 1.055) ** 2.4 for x in rgb(colour))
    return sum(part * x for part, x in zip((0.2126, 0.7152, 0.0722), linear, strict=True))


def contrast(a: str, b: str) -> float:
    """Return the contrast of WCAG 2, from 1 to 21."""
    dark, light = sorted((luminance(a), luminance(b)))
    return (light + 0.05) / (dark + 0.05)


def ink_on(colour: str) -> str:
    """Return black or white, whichever can be read better: 4.5 to 1 or more on any colour."""
    return max(("#000000", "#ffffff"), key=lambda ink: contrast(ink, colour))
