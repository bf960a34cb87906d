"""Numbers and plans as people read them."""

import ast
import math
import sys

from tilewise.masks.base import And, Mask, Window

CROSS, NOTHING = "\N{MULTIPLICATION SIGN}", "\N{EN DASH}"
PREFIXES = ("p", "n", "µ", "m", "", "k", "M", "G", "T", "P", "E")
WHOLE = 4  # the place of no prefix
COUNTED = ("B", "FLOP", "FLOP/s", "B/s")  # units that have no thousandths


def quantity(value: float, unit: str = "", figures: int = 3) -> str:
    """Return a quantity as text, as in "12.3 ms" or "1.5 GB"; without a unit thousands
    are grouped.

    Args:
        unit: one that SI prefixes go with, or "%", or "x" for a ratio.
        figures: significant digits of a quantity with such a unit.
    """
    if not math.isfinite(value):
        return NOTHING
    if not unit:
        return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"
    if unit == "%":
        return f"{value:.3g} %"
    if unit == "x":
        return f"{value:.3g}x"
    if value == 0:
        return f"0 {unit}"
    unit, scale = prefixed(value, unit)
    scaled = value / scale
    digits = f"{scaled:.0f}" if abs(scaled) >= 999.5 else f"{scaled:.{figures}g}"
    return f"{digits} {unit}"


def prefixed(value: float, unit: str) -> tuple[str, float]:
    """Return the unit with the SI prefix that a value takes, and that prefix as a number."""
    most = sys.float_info.max
    power = math.floor(math.log10(min(abs(value) * 1.0005, most)) / 3)
    lowest_power = 0 if unit in COUNTED else -WHOLE
    power = min(max(power, lowest_power), len(PREFIXES) - 1 - WHOLE)
    return f"{PREFIXES[power + WHOLE]}{unit}", 1000.0**power


def times(ratio: float) -> str:
    """A ratio with its cross, as in 2.3 times."""
    return f"{ratio:.2f}{CROSS}" if ratio < 10 else f"{quantity(ratio)}{CROSS}"


def count(number: int) -> str:
    """Tokens or devices: powers of two in their short form, as in "256K" for 262144."""
    for power, letter in ((30, "G"), (20, "M"), (10, "K")):
        if number >= 1 << power and number % (1 << power - 2) == 0:
            return f"{number / (1 << power):g}{letter}"
    return f"{number:,}"


def mask_words(mask: Mask) -> str:
    """A mask for a title, as in "causal & window(4095, 0)"; a mask of documents is "document"."""
    if isinstance(mask, And):
        parts = (
            f"({mask_words(part)})"
            if isinstance(part, And) and part.symbol != mask.symbol
            else mask_words(part)
            for part in (mask.a, mask.b)
        )
        return f" {mask.symbol} ".join(parts)
    if isinstance(mask, Window):
        return repr(mask).lower()
    return type(mask).__name__.lower()


def short(plan_name: str) -> str:
    """A plan's name without what goes without saying, and without the mask it was made for."""
    plan_name = _without_masks(plan_name, "the mask")
    for usual in (", schedule='greedy'", ", moves='kv'"):
        plan_name = plan_name.replace(usual, "")
    return plan_name


def _without_masks(plan_name: str, instead: str) -> str:
    """A plan's name with other words for what the strategies that see the mask are given."""
    for name in ("needed(", "tiled("):
        head, found, rest = plan_name.partition(name)
        depth = 1
        for end, letter in enumerate(rest):
            depth += {"(": 1, ")": -1}.get(letter, 0)
            if found and not depth:
                plan_name = head + name + instead + rest[end:]
                break
    return plan_name


def in_words(plan_name: str) -> str:
    """A plan's name for a title, as in "Ulysses 8 x mesh 4 x 8"; as it is, where it is no call."""
    try:
        call = ast.parse(_without_masks(plan_name, ""), mode="eval").body
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
