"""The reason why a candidate wins or loses, in a sentence or two with the deciding numbers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Protocol

from tilewise.plan.ir import Plan


class ComparedFigures(Protocol):
    """Figures that are compared: a candidate, a line of a table, the cost of a setting."""

    @property
    def strategy(self) -> str: ...
    @property
    def seconds(self) -> float: ...
    @property
    def exposed_seconds(self) -> float: ...
    @property
    def overhead_seconds(self) -> float: ...
    @property
    def bytes_by_link(self) -> Mapping[str, int]: ...


HARDLY = 1 + 5e-5
"""Times whose ratio is below this are called equally long: they differ by less than 0.01 %."""

TIE = 1.003
"""Times whose ratio is below this count as a tie, because a simulation errs by more."""

LINKS: Mapping[str, str] = MappingProxyType(
    {"inside": "inside its node", "between": "between nodes", "across": "across racks"}
)


def reason(row: ComparedFigures, rows: Sequence[ComparedFigures], ring: float | None) -> str:
    """Why the first row of a ranked table wins, or why another is slower.

    Args:
        ring: seconds of the ring; None if it was not simulated.
    """
    best = rows[0]
    if row is not best and row != best:
        longer = _longer(row.seconds / best.seconds, best.strategy)
        return f"{longer[0].upper()}{longer[1:]}: it {_against(row, best)}."
    waiting, overhead = (
        f"{_time(seconds)} ({100 * seconds / row.seconds:.1f} %)"
        for seconds in (row.exposed_seconds, row.overhead_seconds)
    )
    statement = (
        f"{row.strategy} takes {_time(row.seconds)}, of which a rank waits {waiting} for messages"
    )
    if row.overhead_seconds:
        statement += f", and copies and merges for {overhead}"
    statement += "."
    tied = [other.strategy for other in rows[1:] if other.seconds <= TIE * best.seconds]
    if tied:
        names = ", ".join(tied[:4]) + f" and {len(tied) - 4} more" * (len(tied) > 4)
        statement += (
            f" A tie, within {100 * (TIE - 1):.1f} %, which is less than the model errs by: {names}"
            f"; {row.strategy} is the simplest."
        )
    if row.strategy == "ring":
        next_row = next((other for other in rows if other.strategy not in ("ring", *tied)), None)
        if next_row is None:
            return statement
        longer = _longer(next_row.seconds / row.seconds)
        return f"{statement} Next is {next_row.strategy}, {longer}: it {_against(next_row, row)}."
    ring_row = next((other for other in rows if other.strategy == "ring"), None)
    if ring_row is None and ring is None:
        return statement
    if ring_row is None:
        assert ring is not None
        return f"{statement} A ring would take {_time(ring)}, {_longer(ring / row.seconds)}."
    longer = _longer(ring_row.seconds / row.seconds)
    against = _against(ring_row, row)
    return f"{statement} A ring would take {_time(ring_row.seconds)}, {longer}: it {against}."


def _longer(times: float, compared_with: str = "") -> str:
    """Say how much longer it takes: in percent, from twice as long on in times.

    Args:
        compared_with: what it is compared with, if that is to be named.
    """
    if abs(times - 1) < HARDLY - 1:
        return "just as long" + f" as {compared_with}" * bool(compared_with)
    if times >= 2:
        factor = f"{times:,.0f}" if times >= 100 else f"{times:.3g}"
        return f"{factor} times as long" + f" as {compared_with}" * bool(compared_with)
    word = "longer" if times > 1 else "shorter"
    return f"{100 * abs(times - 1):.3g} % {word}" + f" than {compared_with}" * bool(compared_with)


def _against(row: ComparedFigures, best: ComparedFigures) -> str:
    """Say what a slower row loses by: the largest of its three costs, and its cause."""
    waits = f"waits {_time(row.exposed_seconds)} against {_time(best.exposed_seconds)}"
    copies = f"{_time(row.overhead_seconds)} against {_time(best.overhead_seconds)}"
    own_seconds, best_seconds = (
        max(compared.seconds - compared.exposed_seconds - compared.overhead_seconds, 0.0)
        for compared in (row, best)
    )
    computes = f"{_time(own_seconds)} against {_time(best_seconds)}"
    longer_wait = max(row.exposed_seconds - best.exposed_seconds, 0.0)
    longer_copies = row.overhead_seconds - best.overhead_seconds
    if longer_copies > max(longer_wait, own_seconds - best_seconds):
        return f"copies and merges for {copies}, and {waits}"
    if own_seconds - best_seconds > longer_wait:
        cause = " in smaller and slower kernel calls" if row.seconds > best.seconds else ""
        return f"computes {computes}{cause}, and {waits}"
    links = {*row.bytes_by_link, *best.bytes_by_link}
    bytes_by_link = {
        x: [compared.bytes_by_link.get(x, 0) for compared in (row, best)] for x in links
    }
    link = max(bytes_by_link, key=lambda x: bytes_by_link[x][0] - bytes_by_link[x][1], default="")
    if link and bytes_by_link[link][0] > bytes_by_link[link][1]:
        sent_bytes, best_sent_bytes = map(_bytes, bytes_by_link[link])
        return f"sends {sent_bytes} {LINKS[link]} against {best_sent_bytes} and {waits}"
    return f"{waits}, and computes {computes}"


def fewer_wait(plan: Plan, backward_plan: Plan, memory: float) -> str:
    """Say in which passes fewer results wait than the device lets, to fit so many bytes."""
    said = [
        f"at most {plan.waiting_results} wait in {name}"
        if plan.waiting_results
        else f"none waits in {name} (each is added at once)"
        for name, plan in (("forward", plan), ("backward", backward_plan))
        if plan.waiting_results is not None
    ]
    if not said:
        return ""
    return (
        f" To fit {_bytes(memory)}, of the results of kernel calls for one row "
        f"{' and '.join(said)}; they are read and written more often for that."
    )


def _time(seconds: float) -> str:
    return _amount(seconds, (("s", 1.0), ("ms", 1e-3), ("µs", 1e-6)))


def _bytes(count: float) -> str:
    return _amount(count, (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3), ("B", 1.0)))


def _amount(value: float, units: Sequence[tuple[str, float]]) -> str:
    """A value in the largest unit that it reaches once it is rounded to three digits."""
    unit, size = next((one for one in units if value >= 0.9995 * one[1]), units[-1])
    digits = f"{value / size:.0f}" if value >= 999.5 * size else f"{value / size:.3g}"
    return f"{digits} {unit}"
