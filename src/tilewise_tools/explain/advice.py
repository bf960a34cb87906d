"""Changes that would make a run faster: other plans and layouts, simulated beside its own."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

from tilewise.layouts.balanced import balanced, default_layout
from tilewise.planning.search import promising, search
from tilewise.simulation.machine import Machine
from tilewise.simulation.simulator import Simulation, simulate
from tilewise.workload import Workload
from tilewise_tools.explain.subject import Subject
from tilewise_tools.report.words import quantity

SEARCHED = 16
"""Up to this many ranks a whole search is made; among more only promising plans are tried."""
MOST_LETTERS = 80
"""Of plans' names in a line; longer ones have a mask or a layout in them."""
LEAST_GAIN = 0.03
"""Part of the simulated time below which a change is not worth a word."""


class Change(NamedTuple):
    """A change to a run, simulated.

    Attributes:
        before, after: seconds of both passes of one call.
    """

    text: str
    before: float
    after: float

    @property
    def gain(self) -> float:
        """Part of the time that it saves."""
        return 1 - self.after / self.before if self.before else 0.0


def simulated(subject: Subject, machine: Machine) -> Simulation | None:
    """The call as it was recorded, on a machine; None: its plan or workload is not known."""
    if subject.plans is None or subject.work is None:
        return None
    return simulate(subject.plans[0], subject.work, machine, backward_plan=subject.plans[1])


def best_change(subject: Subject, machine: Machine, before: Simulation) -> Change | None:
    """The best plan and layout for the workload of a call; None: none is clearly faster.

    Tried are the call's own layout, the usual one of its mask, and a balanced one.
    """
    work, n = subject.work, before.world_size
    assert work is not None
    own = work.layout_for(n)
    layouts = {own.fingerprint: own}
    if own.is_partition:
        for layout in (
            default_layout(work.mask, work.num_tokens, n),
            balanced(work.mask, work.num_tokens, n),
        ):
            layouts.setdefault(layout.fingerprint, layout)
    found: list[Change] = []
    for layout in layouts.values():
        name, save, seconds = _fastest(replace(work, layout=layout, save=None), machine, n)
        on = "" if layout is own else f" on layout {layout!r}"
        text = f"{name}{on}{save}"
        found.append(Change(text, before.seconds, seconds))
    best = min(found, key=lambda change: change.after)
    return best if best.gain >= LEAST_GAIN else None


def _fastest(work: Workload, machine: Machine, n: int) -> tuple[str, str, float]:
    """The names of the fastest plans, what they save, and their seconds."""
    if n > SEARCHED:
        pair = promising(work, machine, n)
        names = dict.fromkeys((pair.plan.name, pair.backward_plan.name))
        return " / ".join(names), "", pair.seconds
    best = search(work, machine, world_size=n)[0]
    names = " / ".join(dict.fromkeys((best.plan.name, best.backward_plan.name)))
    save = f", save={best.save!r}" if best.save != best.plan.default_save else ""
    return names if len(names) <= MOST_LETTERS else best.strategy, save, best.seconds


def text_of(change: Change) -> str:
    """The change as a line says it."""
    before, after = quantity(change.before, "s"), quantity(change.after, "s")
    return f"{change.text}: {before} -> {after} a call, {-100 * change.gain:.0f} %"
