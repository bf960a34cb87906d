"""The longest sequence whose training step fits a memory.

A step does the same operations at every length, and what each of them leaves is, but for the
workspace of our passes, proportional to the rows of a rank beside what it has at any length. So two
short steps say what all others hold; a step of the length that they lead to checks it.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from tilewise_tools.fits.parts import Peak, moments, peak_of
from tilewise_tools.fits.setting import Setting
from tilewise_tools.fits.step import Step, run_step

UNIT = 128
"""Tokens of a rank by which lengths are tried."""
FIRST = (8, 16)  # units of the two first steps
MOST_TOKENS = 1 << 27
MOST_STEPS = 8


class Fit(NamedTuple):
    """A length, and the memory of a step of it.

    Attributes:
        num_tokens: of the whole sequence; 0 if not even one unit fits, whose step then stands here.
    """

    num_tokens: int
    step: Step
    peak: Peak


def memory_of(config: Any, setting: Setting, num_tokens: int) -> Fit:
    """Return the memory of a step of one length."""
    step = run_step(config, setting, num_tokens)
    return Fit(num_tokens, step, peak_of(step, setting))


def longest(
    config: Any,
    setting: Setting,
    memory_bytes: int,
    progress: Callable[[int], None] = lambda _: None,
) -> Fit:
    """Find the longest sequence that fits, in units of UNIT tokens a rank, and at most MOST_TOKENS.

    Args:
        progress: called with each length that is tried.
    """
    unit = UNIT * setting.cp
    tried: dict[int, Fit] = {}

    def at(units: int) -> Fit:
        if units not in tried:
            progress(units * unit)
            tried[units] = memory_of(config, setting, units * unit)
        return tried[units]

    most = MOST_TOKENS // unit
    before, last = (min(units, most) for units in FIRST)
    low, high = 0, most + 1  # fits, does not
    for _ in range(MOST_STEPS):
        for units in (before, last):
            if at(units).peak.num_bytes <= memory_bytes:
                low = max(low, units)
            else:
                high = min(high, units)
        if high - low <= 1:
            break
        found = _by_two(*(at(units).step for units in (before, last)), setting, memory_bytes, unit)
        found = min(max(found, low, 1), high - 1)
        if found in tried:  # it fits; the next one is thought not to
            found = min(low + 1, high - 1)
        before, last = last, found
    if low == 0:
        return at(1)._replace(num_tokens=0)
    return at(low)


def _by_two(first: Step, second: Step, setting: Setting, memory_bytes: int, unit: int) -> int:
    """Return the units that fit if every moment's bytes are on a line through two steps."""
    totals = [moments(step, setting).sum(1).astype(float) for step in (first, second)]
    lengths = first.num_tokens, second.num_tokens
    if len(totals[0]) != len(totals[1]):  # other operations: the peaks alone are comparable
        totals = [total.max(keepdims=True) for total in totals]
    slopes = (totals[1] - totals[0]) / (lengths[1] - lengths[0])
    fixed = totals[1] - slopes * lengths[1]
    growing = slopes > 0
    if not growing.any():
        return MOST_TOKENS // unit
    longest_of_each = (memory_bytes - fixed[growing]) / slopes[growing]
    return int(np.clip(np.floor(longest_of_each.min() / unit), 0, MOST_TOKENS // unit))
