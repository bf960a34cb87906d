"""Why a candidate wins, or what it loses by, in a sentence or two with the numbers that decide."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Protocol


class Row(Protocol):
    """Figures that are compared: a candidate, a line of a table, the cost of a setting."""

    @property
    def strategy(self) -> str: ...
    @property
    def seconds(self) -> float: ...
    @property
    def exposed_seconds(self) -> float: ...
    @property
    def bytes_by_link(self) -> Mapping[str, int]: ...


HARDLY = 1 + 5e-5
"""What takes less than so many times as long takes as long, to a hundredth of a percent."""

TIE = 1.003
"""Times of which none is so many times another are taken as equal: a simulation errs by more."""

LINKS: Mapping[str, str] = MappingProxyType(
    {"inside": "inside its node", "between": "between nodes", "across": "across racks"}
)


def reason(row: Row, rows: Sequence[Row], ring: float | None) -> str:
    """Why the first row of a ranked table wins, or why another is slower.

    Args:
        ring: seconds of the ring; None if it was not simulated.
    """
    best = rows[0]
    if row is not best and row != best:
        longer = _longer(row.seconds / best.seconds, best.strategy)
        return f"{longer[0].upper()}{longer[1:]}: it {_against(row, best)}."
    first = (
        f"{row.strategy} takes {_time(row.seconds)}, of which a rank waits "
        f"{_time(row.exposed_seconds)} ({row.exposed_seconds / row.seconds:.1%}) for messages."
    )
    tied = [other.strategy for other in rows[1:] if other.seconds <= TIE * best.seconds]
    if tied:
        names = ", ".join(tied[:4]) + f" and {len(tied) - 4} more" * (len(tied) > 4)
        first += (
            f" A tie, within {TIE - 1:.1%}, which is less than the model errs by: {names}; "
            f"{row.strategy} is the simplest."
        )
    if row.strategy == "ring":
        second = next((other for other in rows if other.strategy not in ("ring", *tied)), None)
        if second is None:
            return first
        longer = _longer(second.seconds / row.seconds)
        return f"{first} Next is {second.strategy}, {longer}: it {_against(second, row)}."
    known = next((other for other in rows if other.strategy == "ring"), None)
    if known is None and ring is None:
        return first
    if known is None:
        assert ring is not None
        return f"{first} A ring would take {_time(ring)}, {_longer(ring / row.seconds)}."
    longer = _longer(known.seconds / row.seconds)
    return f"{first} A ring would take {_time(known.seconds)}, {longer}: it {_against(known, row)}."


def _longer(times: float, than: str = "") -> str:
    """Say how much longer it takes: in percent, from twice as long on in times.

    Args:
        than: what it is compared with, if that is to be named.
    """
    if abs(times - 1) < HARDLY - 1:
        return "just as long" + f" as {than}" * bool(than)
    if times >= 2:
        more = f"{times:,.0f}" if times >= 100 else f"{times:.3g}"
        return f"{more} times as long" + f" as {than}" * bool(than)
    word = "longer" if times > 1 else "shorter"
    return f"{100 * abs(times - 1):.3g}% {word}" + f" than {than}" * bool(than)


def _against(row: Row, best: Row) -> str:
    """Say what a slower row loses by: the larger of its two costs, and its cause."""
    waits = f"waits {_time(row.exposed_seconds)} against {_time(best.exposed_seconds)}"
    work, least = (one.seconds - one.exposed_seconds for one in (row, best))
    computes = f"{_time(work)} against {_time(least)}"
    waited = row.exposed_seconds - best.exposed_seconds
    if work - least > max(waited, 0.0):
        why = " in smaller and slower kernel calls" if row.seconds > best.seconds else ""
        return f"computes {computes}{why}, and {waits}"
    links = {*row.bytes_by_link, *best.bytes_by_link}
    sent = {x: [one.bytes_by_link.get(x, 0) for one in (row, best)] for x in links}
    link = max(sent, key=lambda x: sent[x][0] - sent[x][1], default="")
    if link and sent[link][0] > sent[link][1]:
        more, less = map(_bytes, sent[link])
        return f"sends {more} {LINKS[link]} against {less} and {waits}"
    return f"{waits}, and computes {computes}"


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
