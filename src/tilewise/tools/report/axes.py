"""Logarithmic axes with ticks that read well, few decades or many."""

from __future__ import annotations

import math
from collections.abc import Iterable

from tilewise.tools.report.chart import Axis
from tilewise.tools.report.units import quantity

__all__ = ["log_axis"]

ROOM = 1.15  # around the values
LEAST_SPAN = 1.6  # so that small differences look small
MANY_DECADES = 3.2
FEWEST_TICKS = 3
STEPS = (1, 2, 5, 10)


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
