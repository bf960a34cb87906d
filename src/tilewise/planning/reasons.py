"""Why a candidate wins, or what it loses by, in a sentence or two with the numbers that decide."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tilewise.planning.candidate import Row


def reason(row: Row, rows: tuple[Row, ...], ring: tuple[float, bool]) -> str:
    """Of a row of a ranked table.

    Args:
        ring: seconds of the ring, and whether they are a lower bound only.
    """
    if row is not rows[0] and row != rows[0]:
        best = rows[0]
        return f"{row.seconds / best.seconds:.3g} times {best.strategy}: {_against(row, best)}."
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
        times = f"{seconds / row.seconds:.3g} times as long"
        return f"{first} A ring would take {least}{_time(seconds)}, {least}{times}."
    times = f"{known.seconds / row.seconds:.3g} times as long"
    return f"{first} A ring would take {_time(known.seconds)}, {times}: it {_against(known, row)}."


def _next(second: Row, best: Row) -> str:
    times = second.seconds / best.seconds
    return f"Next is {second.strategy}, {times:.3g} times as long: it {_against(second, best)}."


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
