"""Why a candidate wins, or what it loses by, in a sentence or two with the numbers that decide."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tilewise.planning.candidate import Candidate, PlanRow

    Row = PlanRow | Candidate

HARDLY = 1 + 5e-5
"""What takes less than so many times as long takes as long, to a hundredth of a percent."""


def reason(row: Row, rows: Sequence[Row], ring: tuple[float, bool]) -> str:
    """Of a row of a ranked table.

    Args:
        ring: seconds of the ring, and whether they are a lower bound only.
    """
    if row is not rows[0] and row != rows[0]:
        best = rows[0]
        longer = _longer(row.seconds / best.seconds, best.strategy)
        return f"{longer[0].upper()}{longer[1:]}: it {_against(row, best)}."
    first = (
        f"{row.strategy} takes {_time(row.seconds)}, of which a rank waits "
        f"{_time(row.exposed_seconds)} ({row.exposed_seconds / row.seconds:.1%}) for messages."
    )
    if row.strategy == "ring":
        second = next((other for other in rows if other.strategy != "ring"), None)
        if second is None:
            return first
        return f"{first} {_next(second, row)}"
    seconds, at_least = ring
    known = next((other for other in rows if other.strategy == "ring"), None)
    if known is None or at_least:
        least = "at least " if at_least else ""
        times = seconds / row.seconds
        longer = f", {least}{_longer(times)}" if times >= HARDLY else ""
        return f"{first} A ring would take {least}{_time(seconds)}{longer}."
    longer = _longer(known.seconds / row.seconds)
    return f"{first} A ring would take {_time(known.seconds)}, {longer}: it {_against(known, row)}."


def _next(second: Row, best: Row) -> str:
    longer = _longer(second.seconds / best.seconds)
    return f"Next is {second.strategy}, {longer}: it {_against(second, best)}."


def _longer(times: float, than: str = "") -> str:
    """How much longer it takes: in percent, from twice as long on in times.

    Args:
        than: what it is compared with, if that is to be named.
    """
    if times < HARDLY:
        return "just as long" + f" as {than}" * bool(than)
    if times >= 2:
        more = f"{times:,.0f}" if times >= 100 else f"{times:.3g}"
        return f"{more} times as long" + f" as {than}" * bool(than)
    return f"{100 * (times - 1):.3g}% longer" + f" than {than}" * bool(than)


def _against(row: Row, best: Row) -> str:
    """What sets a slower row apart from the best."""
    links = sorted(
        {*row.bytes_by_link, *best.bytes_by_link},
        key=lambda x: best.bytes_by_link.get(x, 0) - row.bytes_by_link.get(x, 0),
    )
    waits = f"waits {_time(row.exposed_seconds)} against {_time(best.exposed_seconds)}"
    for link in links[:1]:
        more, less = (one.bytes_by_link.get(link, 0) for one in (row, best))
        if more > less:
            return f"sends {_bytes(more)} {_where(link)} against {_bytes(less)} and {waits}"
    work, least = (one.seconds - one.exposed_seconds for one in (row, best))
    return f"{waits}, and computes {_time(work)} against {_time(least)}"


def _where(link: str) -> str:
    return {"inside": "inside its node", "between": "between nodes", "across": "across racks"}[link]


def _time(seconds: float) -> str:
    for unit, size in (("s", 1.0), ("ms", 1e-3)):
        if seconds >= size:
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds * 1e6:.3g} us"


def _bytes(count: float) -> str:
    for unit, size in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= size:
            return f"{count / size:.3g} {unit}"
    return f"{count:.0f} B"
