"""Charts as values: what is drawn, in which units and colours, with the rows behind it.

plotly_figures.py says how plotly draws them; a chart's table is the CSV.
"""

import ast
import math
from collections.abc import Iterable
from types import MappingProxyType
from typing import NamedTuple

import numpy as np

CROSS, NOTHING = "\N{MULTIPLICATION SIGN}", "\N{EN DASH}"
PREFIXES = ("p", "n", "µ", "m", "", "k", "M", "G", "T", "P", "E")
WHOLE = 4  # the place of no prefix
COUNTED = ("B", "FLOP", "FLOP/s", "B/s")  # units that have no thousandths
OWN = ("compute", "wait")  # lanes of which a rank is in one at a time
# Of logarithmic axes: room around the values, a least span so that small differences look small.
ROOM, LEAST_SPAN = 1.15, 1.6
MANY_DECADES, FEWEST_TICKS, STEPS = 3.2, 3, (1, 2, 5, 10)


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
GROUND = Colour("#ffffff", "#18202a")  # page.css's --card
LANES = MappingProxyType({"compute": 0, "wait": 1, "inside": 5, "between": 3, "across": 6})
"""The palette's numbers of what a rank does."""
LINK_NAMES = MappingProxyType(
    {"inside": "inside the node", "between": "between nodes", "across": "between racks"}
)
DARK = MappingProxyType({one.light: one.dark for one in (*SERIES, INK, GRID, SOFT, FRAME, GROUND)})
"""What the page's script replaces on dark ground."""


class Axis(NamedTuple):
    """A title, and a unit that SI prefixes go with ("s", "B"), "%" or none."""

    title: str
    unit: str = ""
    log: bool = False
    ticks: tuple[tuple[float, str], ...] = ()  # the places and texts of ticks; empty: chosen
    bounds: tuple[float, ...] = ()  # the first and the last place; empty: chosen


class Series(NamedTuple):
    """One line, one kind of bar, or one kind of point."""

    name: str
    x: tuple[float | str, ...]  # numbers, or the names of bars
    y: tuple[float, ...]
    notes: tuple[str, ...]  # what is said of each point when pointed at
    colour: int  # a number of the palette
    style: str = "line"  # "line", "dash" or "points"; bars ignore it


class Chart(NamedTuple):
    """Lines and points over a plane; or bars, lying and stacked, if bars is set."""

    x: Axis
    y: Axis
    series: tuple[Series, ...]
    bars: bool = False


class HeatMap(NamedTuple):
    """A table of coloured cells."""

    columns: tuple[str, ...]
    rows: tuple[str, ...]
    levels: tuple[tuple[str, int], ...]  # the name and the palette's number of each kind of cell
    cells: tuple[tuple[int, ...], ...]  # per row and column the place of its level, -1 for nothing
    texts: tuple[tuple[str, ...], ...]  # per row and column what is written in it
    notes: tuple[tuple[str, ...], ...]  # per row and column what is said when pointed at


class Tiles(NamedTuple):
    """A table of cells coloured by rank.

    Attributes:
        rows, columns: the shard that each begins with.
    """

    cells: np.ndarray  # int [rows, columns], the rank, -1 for nothing
    rows: tuple[int, ...]
    columns: tuple[int, ...]


class Bar(NamedTuple):
    """Something that a rank did; several that followed at once are one."""

    row: int
    lane: str
    start: float
    seconds: float
    note: str


class TimelineChart(NamedTuple):
    """Both passes of a few ranks.

    Attributes:
        turn, end: when backward begins and ends.
    """

    ranks: tuple[tuple[int, int], ...]  # of the rows: which, and how many do the same
    lanes: tuple[str, ...]  # what is drawn: a rank's own ones, then links
    bars: tuple[Bar, ...]
    turn: float
    end: float


Drawing = Chart | HeatMap | Tiles | TimelineChart


class Table(NamedTuple):
    """Texts in columns."""

    header: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


class Figure(NamedTuple):
    """A chart with its words.

    Attributes:
        jumps: parts of the horizontal axis to zoom in on, by name.
    """

    name: str  # of its place on the page, and of the PNG that the page saves
    title: str
    caption: str  # what to see in it; read out where it cannot be seen
    drawing: Drawing
    rows: Table | None = None  # what it was drawn from
    jumps: tuple[tuple[str, float, float], ...] = ()


class Section(NamedTuple):
    """A part of the page."""

    name: str
    title: str
    intro: str = ""  # sentences before the figures
    figures: tuple[Figure, ...] = ()  # side by side where there is room and narrow is set
    table: Table | None = None  # shown as it is
    narrow: bool = False
    picture: str = ""  # SVG, shown as it is


def quantity(value: float, unit: str = "") -> str:
    """As in "12.3 ms" or "1.5 GB"; without a unit thousands are grouped."""
    if not math.isfinite(value):
        return NOTHING
    if not unit:
        return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"
    if unit == "%":
        return f"{value:.3g} %"
    if value == 0:
        return f"0 {unit}"
    power = math.floor(math.log10(abs(value) * 1.0005) / 3)
    least = 0 if unit in COUNTED else -WHOLE
    power = min(max(power, least), len(PREFIXES) - 1 - WHOLE)
    scaled = value / 1000.0**power
    digits = f"{scaled:.0f}" if abs(scaled) >= 999.5 else f"{scaled:.3g}"
    return f"{digits} {PREFIXES[power + WHOLE]}{unit}"


def times(ratio: float) -> str:
    """A ratio with its cross, as in 2.3 times."""
    return f"{ratio:.2f}{CROSS}" if ratio < 10 else f"{ratio:.3g}{CROSS}"


def count(number: int) -> str:
    """Tokens or devices: powers of two in their short form, as in "256k" for 262144."""
    for power, letter in ((30, "G"), (20, "M"), (10, "k")):
        if number >= 1 << power and number % (1 << power - 2) == 0:
            return f"{number / (1 << power):g}{letter}"
    return f"{number:,}"


def short(plan_name: str) -> str:
    """A plan's name without what goes without saying."""
    for usual in (", schedule='greedy'", ", moves='kv'"):
        plan_name = plan_name.replace(usual, "")
    return plan_name


def in_words(plan_name: str) -> str:
    """A plan's name for a title, as in "Ulysses 8 x mesh 4 x 8"; as it is, where it is no call."""
    try:
        call = ast.parse(plan_name, mode="eval").body
    except SyntaxError:
        return plan_name
    return _said(call) if isinstance(call, ast.Call) else plan_name


def _said(call: ast.Call) -> str:
    words = {str(word.arg): word.value for word in call.keywords}
    inner = [one for one in (*call.args, *words.values()) if isinstance(one, ast.Call)]
    numbers = [one.value for one in call.args if isinstance(one, ast.Constant)]
    name = ast.unparse(call.func)
    if name == "mesh" and "q_tile" in words:
        a = int(ast.unparse(words["q_tile"]))
        numbers = [a, int(str(numbers[0])) // a]
    if name in ("tiled", "needed"):
        inner = []
    name = "Ulysses" if name == "ulysses" else name.replace("_", " ")
    first = f" {CROSS} ".join([f"{name} {numbers[0]}" if numbers else name, *map(str, numbers[1:])])
    turned = " of queries" if "moves='q'" in map(ast.unparse, call.keywords) else ""
    return f" {CROSS} ".join([first + turned, *map(_said, inner)])


def colour(number: int) -> str:
    """A colour of the palette, on light ground; after the last comes the first."""
    return SERIES[number % len(SERIES)].light


def log_axis(title: str, unit: str, values: Iterable[float]) -> Axis:
    """An axis for positive values; others are left out."""
    values = [value for value in values if value > 0] or [1.0]
    low, high = min(values) / ROOM, max(values) * ROOM
    missing = math.sqrt(max(1.0, LEAST_SPAN / (high / low)))
    low, high = low / missing, high * missing
    ticks = tuple((place, quantity(place, unit)) for place in _places(low, high))
    return Axis(title, unit, log=True, ticks=ticks, bounds=(low, high))


def _places(low: float, high: float) -> list[float]:
    """1, 2, 5 of each decade; powers of ten over many; even steps within less than one."""
    many = math.log10(high / low) > MANY_DECADES
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    found = [step * 10.0**power for power in powers for step in ((1,) if many else STEPS[:3])]
    found = [place for place in found if low <= place <= high]
    if len(found) >= FEWEST_TICKS:
        return found
    rough = (high - low) / FEWEST_TICKS
    unit = 10.0 ** math.floor(math.log10(rough))
    step = next(step * unit for step in reversed(STEPS) if step * unit <= rough * 1.001)
    first, last = math.ceil(low / step), math.floor(high / step)
    return [number * step for number in range(first, last + 1)]
