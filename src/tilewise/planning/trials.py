"""One pass of the options: lower bounds of their times, and what they take by simulation."""

import heapq
import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

from tilewise.layouts.layout import contiguous
from tilewise.masks.base import Full
from tilewise.plan.ir import Plan, Side, find_symmetry
from tilewise.plan.shifts import Symmetry
from tilewise.planning.bounds import shape_bound
from tilewise.planning.options import Option
from tilewise.planning.pass_model import PassModel
from tilewise.planning.plan_bounds import PlanBounds
from tilewise.planning.reasons import TIE
from tilewise.planning.teams import simulate_teams, splits_into_teams
from tilewise.simulation.peak_memory import PassMemory
from tilewise.simulation.simulator import num_messages, simulate_pass
from tilewise.simulation.timeline import Timeline

COPIES = 3
"""Times that what a rank holds of a shard is at most as large as its messages: operand and wire,
partial (of twice the width) and what arrives for it."""

FIRST = 1e-6
"""By so much of a bound an option comes before another of half its degree or less."""

PRUNED_FOR_ONE = 8
"""Messages that are pruned in the time in which one is simulated."""


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
        """Whether no rank needs more; first asked of more than they need, in much less time."""
        if self._held_bytes <= num_bytes:
            return True
        whole = not self.option.own_shards and self.plan.made_for is None
        return (whole and self._fits_whole(num_bytes)) or self.memory.fits(num_bytes)

    @property
    def _held_bytes(self) -> int:
        """If no shard that a rank ever reads, fills or passes on were freed, with all copies."""
        model, degree = self.model, self.plan.num_head_groups
        own = sum(model.shard_bytes(1, kept=True).values())
        if self.plan.cuts is not None:
            return COPIES * model.world_size * own
        sizes, most = model.shard_bytes(degree, kept=True), 0
        for rank in find_symmetry(self.plan).firsts():  # the mask has no say in it
            steps = self.plan.rank_steps(rank)
            hops = (hop for step in steps for hop in (*step.sends, *step.recvs))
            held = {(hop.item.side, hop.item.shard) for hop in hops}
            for tile in (tile for step in steps for tile in step.tiles):
                held.update((Side.Q, shard) for shard in tile.q)
                held.update((Side.KV, shard) for shard in tile.kv)
            most = max(most, sum(sizes[side] for side, _ in held))
        return COPIES * (most + own)

    def _fits_whole(self, num_bytes: float) -> bool:
        """The same as if the mask left out nothing, one head group apart from its exchange."""
        model, (degree, inner) = self.model, self.plan.traits.head_split or (1, self.plan)
        rows = degree * max(model.layout.sizes)
        layout = contiguous(rows * inner.world_size, inner.world_size)
        full = {"num_tokens": layout.num_tokens, "mask": Full(), "layout": layout}
        every = model.of_heads(degree, **full)
        exchange = COPIES * sum(model.shard_bytes(1, kept=True).values()) * (degree > 1)
        memory = PassMemory(every.resolve(inner), backward=model.backward)
        return memory.fits(num_bytes - exchange)


class Trials:
    """The trials of one pass so far, and the bounds of what was not tried.

    Args:
        options: all of them, by order.
        max_messages: that may be simulated; the last trial may go beyond it.
    Attributes:
        bounds: by an option's order; the simulated time of what was tried.
        messages_left: of max_messages.
    """

    def __init__(self, model: PassModel, options: list[Option], max_messages: int):
        self.model, self.options, self.messages_left = model, options, max_messages
        self.tried: dict[int, Trial] = {}
        self.bounds = [shape_bound(model, option) for option in options]
        self._sharp: set[int] = set()
        self._plan_bounds = PlanBounds(model)

    def sharpen(self, order: int) -> None:
        """Raise an option's bound to that by its plan, which is made for it."""
        if order in self._sharp or self.model.alike is None:
            return
        self._sharp.add(order)
        option = self.options[order]
        self.bounds[order] = max(
            self.bounds[order], self._plan_bounds.seconds(option, option.make())
        )

    def expected(self, order: int) -> float:
        """The time of an option; of one not tried its bound.

        Of equal ones the simplest is tried first: bounds within a tie of each other are made equal.
        Where ranks differ, plans that are made for the mask are, and then those that split heads
        most, which are simulated soonest.
        """
        least = self.bounds[order]
        if order in self.tried or not least:
            return least
        option, tied = self.options[order], TIE ** math.floor(math.log(least, TIE))
        if self.model.alike is not None:
            return tied
        return tied * (1 - FIRST * (option.degree if option.shape.q else self.model.world_size + 1))

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
            lambda entry: self.expected(entry.order),
            lambda entry: self.sharpen(entry.order),
        )
        for least, entry in queue:
            while ranked and (TIE * least >= ranked[0][1].seconds or self.messages_left <= 0):
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
        plan, model = self.options[order].make(), self.model
        if rough and model.alike is None:
            rough = splits_into_teams(model, plan)
        if rough and model.alike is None:
            timeline, symmetry, messages = simulate_teams(model, plan)
        else:
            exact, of = False if rough else None, (model.machine, model.backward)
            timeline, symmetry = simulate_pass(plan, model.work, *of, exact)
            messages = num_messages(plan) // symmetry.members
            if model.alike is None and plan.made_for is None:
                pruned = model.work.resolve(plan)[model.backward].pruned
                left = sum(len(step.transfers) for step in pruned.steps)
                messages = left + (messages - left) // PRUNED_FOR_ONE
        kept = replace(timeline, recording=None)
        self.tried[order] = Trial(self.options[order], plan, model, kept, symmetry, rough)
        self.bounds[order] = timeline.seconds
        self.messages_left -= messages


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
