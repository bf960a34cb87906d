"""Clocks of a run's ranks on one scale, from exchanges that no rank leaves before all are in."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from tilewise_tools.explain.rows import RankRows


class Clock(NamedTuple):
    """A rank's clock beside that of rank 0.

    Attributes:
        offset: seconds that it is ahead.
        error: by which the offset may be wrong at most, when the recording began.
    """

    offset: float
    error: float


def clocks(ranks: Sequence[RankRows]) -> list[Clock]:
    """Return every rank's clock.

    No rank leaves an exchange before the last one has entered it. So the clock of a rank is ahead
    of rank 0's by at least (its entry - rank 0's exit), at most (its exit - rank 0's entry), in
    each exchange; the offset is the middle of what all exchanges leave. Processes under one
    operating system have one clock.
    """
    first, found = ranks[0].head, list[Clock]()
    for rows in ranks:
        pairs = [*zip(rows.head["clock"], first["clock"], strict=True)]
        least = max(own[0] - other[1] for own, other in pairs)
        most = min(own[1] - other[0] for own, other in pairs)
        is_same = rows.head["kernel"] == first["kernel"]
        offset, error = 5e-10 * (least + most), 5e-10 * (most - least)
        found.append(Clock(0.0, 0.0) if is_same else Clock(offset, error))
    return found
