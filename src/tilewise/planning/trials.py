"""One pass of the options: lower bounds of their times, and what they take by simulation."""

import heapq
import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

from tilewise.masks.base import Full
from tilewise.plan.ir import Plan
from tilewise.plan.shifts import Symmetry
from tilewise.planning.bounds import shape_bound, steps_bound
from tilewise.planning.mask_bounds import MaskBounds
from tilewise.planning.options import Option
from tilewise.planning.pass_model import PassModel
from tilewise.planning.peak_memory import PassMemory
from tilewise.simulation.engine import Timeline
from tilewise.simulation.simulator import num_messages, simulate_pass


@dataclass(frozen=True)
class Trial:
    """An option's plan, simulated in one pass.

    Attributes:
        rough: whether ranks that send less than others were taken to send as much.
    """

    option: Option
    plan: Plan
    model: PassModel
    timeline: Timeline
    symmetry: Symmetry
    rough: bool = False

    @property
    def seconds(self) -> float:
        return self.timeline.seconds

    @property
    def rank(self) -> tuple[float, int]:
        """The lower, the better."""
        return ticks(self.seconds), self.option.order

    @cached_property
    def memory(self) -> PassMemory:
        """Made when it is asked for: most trials are too slow for it to matter."""
        return PassMemory(self.model.work.resolve(self.plan), backward=self.model.backward)

    def fits(self, num_bytes: float) -> bool:
        """Whether no rank needs more; first asked as if the mask left out nothing: all alike."""
        if num_bytes == math.inf:
            return True
        whole = not self.option.own_shards and self.plan.made_for is None
        return (whole and self._whole.fits(num_bytes)) or self.memory.fits(num_bytes)

    @property
    def _whole(self) -> PassMemory:
        work, n = self.model.work, self.plan.world_size
        tokens = n * max(self.model.layout.sizes)
        every = replace(work, num_tokens=tokens, layout="contiguous", mask=Full())
        return PassMemory(every.resolve(self.plan), backward=self.model.backward)


class Plans:
    """Options' plans, made when they are first looked at."""

    def __init__(self, options: list[Option]):
        self.options = options
        self._made: dict[int, Plan] = {}

    def plan(self, order: int) -> Plan:
        if order not in self._made:
            self._made[order] = self.options[order].make()
        return self._made[order]


class Trials:
    """The trials of one pass so far, and the bounds of what was not tried.

    Args:
        max_messages: that may be simulated; the last trial may go beyond it.
    Attributes:
        bounds: by an option's order; the simulated time of what was tried.
        messages_left: of max_messages.
    """

    def __init__(self, model: PassModel, plans: Plans, max_messages: int):
        self.model, self.plans, self.messages_left = model, plans, max_messages
        self.tried: dict[int, Trial] = {}
        self.bounds = [shape_bound(model, option) for option in plans.options]
        self._sharp: set[int] = set()
        self._mask_bounds = MaskBounds(model)

    def sharpen(self, order: int) -> None:
        """Raise an option's bound to that by its plan, which is made for it."""
        if order in self._sharp:
            return
        self._sharp.add(order)
        plan = self.plans.plan(order)
        if self.model.alike is not None:
            sharper = steps_bound(self.model, self.plans.options[order], plan)
        else:
            sharper = self._mask_bounds.seconds(plan) if plan.cuts is None else 0.0
        self.bounds[order] = max(self.bounds[order], sharper)

    def trial(self, order: int) -> Trial:
        """Simulate an option, once; roughly where that takes much less time."""
        if order not in self.tried:
            self._simulate(order, self.model.rough)
        return self.tried[order]

    def settle(self, options: Iterable[Option], fits: Callable[[Trial], bool]) -> Trial | None:
        """Simulate options until none left can be faster than the fastest that fits.

        It ends too where no messages are left, if something fits.

        Returns:
            The fastest that fits, the simplest of equally fast ones; None: none fits.
        """
        entries = [
            (Entry(x.order), x) for x in options if x.backward in (None, self.model.backward)
        ]
        ranked: list[tuple[tuple[float, int], Trial]] = []
        queue = lowest_first(
            entries,
            lambda entry: self.bounds[entry.order],
            lambda entry: self.sharpen(entry.order),
        )
        for least, entry in queue:
            while ranked and (least >= ranked[0][1].seconds or self.messages_left <= 0):
                if fits(ranked[0][1]):
                    return ranked[0][1]
                heapq.heappop(ranked)
            trial = self.trial(entry.order)
            heapq.heappush(ranked, (trial.rank, trial))
        return next((trial for _, trial in sorted(ranked) if fits(trial)), None)

    def exact(self, trial: Trial) -> Trial:
        """The trial, simulated as tw.simulate does it."""
        order = trial.option.order
        if self.tried[order].rough:
            self._simulate(order, False)
        return self.tried[order]

    def _simulate(self, order: int, rough: bool) -> None:
        plan, model = self.plans.plan(order), self.model
        exact = False if rough else None
        timeline, symmetry = simulate_pass(plan, model.work, model.machine, model.backward, exact)
        kept = timeline._replace(spans=())
        self.tried[order] = Trial(self.plans.options[order], plan, model, kept, symmetry, rough)
        self.bounds[order] = timeline.seconds
        self.messages_left -= num_messages(plan) // symmetry.members


class Entry(NamedTuple):
    """An option in a queue: alone in a pass, or in both with what backward does about operands."""

    order: int
    save: str = "replay"


def lowest_first(
    entries: Iterable[tuple[Entry, Option]],
    bound: Callable[[Entry], float],
    sharpen: Callable[[Entry], None],
) -> Iterator[tuple[float, Entry]]:
    """Entries in order of their sharpened bounds, with these; the caller simulates each or stops.

    Other schedules of a tile follow when the first of its schedules has been taken: they move the
    same shards, and take time to make.
    """
    queue: list[tuple[float, Entry]] = []
    later: dict[tuple, list[Entry]] = {}
    tiles = {}
    for entry, option in entries:
        tile = tiles[entry] = option.kind, option.degree, option.shape, entry.save
        if option.variant:
            later.setdefault(tile, []).append(entry)
        else:
            queue.append((bound(entry), entry))
    heapq.heapify(queue)
    while queue:
        least, entry = heapq.heappop(queue)
        sharpen(entry)
        if bound(entry) > least:
            heapq.heappush(queue, (bound(entry), entry))
            continue
        for other in later.pop(tiles[entry], ()):
            heapq.heappush(queue, (bound(other), other))
        yield least, entry


def ticks(seconds: float) -> float:
    """Seconds to twelve digits: those of plans that do the same in another order are equal."""
    return float(f"{seconds:.12g}")
