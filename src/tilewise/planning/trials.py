"""One pass of the options: lower bounds of their times, and their simulations."""

import heapq
import math
import sys
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from tilewise.compiler.facts import device_traits
from tilewise.plan.ir import Item, Plan, Role, Side, find_symmetry
from tilewise.plan.shifts import Symmetry
from tilewise.planning.bounds import shape_bound, steps_bound
from tilewise.planning.options import Option
from tilewise.planning.pass_model import PassModel
from tilewise.planning.reasons import TIE
from tilewise.planning.teams import simulate_teams, splits_into_teams
from tilewise.simulation.peak_memory import PassMemory
from tilewise.simulation.simulator import simulate_pass
from tilewise.simulation.timeline import Timeline

OVERHEAD = 200
"""Messages that are simulated in the time in which a plan is lowered. A plan of which a sample of
ranks is simulated is a large one, and takes three times as long."""

MAKING = 100
"""Messages that are simulated in the time in which a small plan is made and bounded; a large one
takes as long as its bound looks at transfers."""

PATIENCE = 24
"""So many plans are bounded by their steps before one is simulated, so that others can be left
out."""

COPIES = 3
"""Copies of a shard that a rank holds at most: the operand and its encoded form, the partial (of
twice the width) and what arrives for it."""

PARTS = Role.OPERAND, Role.PARTIAL


@dataclass(frozen=True)
class Trial:
    """An option's plan, simulated in one pass.

    Attributes:
        sampled: whether ranks that send less than others were taken to send as much.
    """

    option: Option
    plan: Plan
    model: PassModel
    timeline: Timeline
    symmetry: Symmetry
    sampled: bool

    @property
    def seconds(self) -> float:
        return self.timeline.seconds

    @property
    def rank(self) -> tuple[float, int]:
        """Sort key: the better trial has the lower value."""
        return self.seconds, self.option.order

    def fits(self, num_bytes: float) -> bool:
        """Return whether no rank needs more; memory is counted only if a cheap bound exceeds it."""
        return self._most_bytes <= num_bytes or self.memory.fits(num_bytes)

    @property
    def _most_bytes(self) -> int:
        """Upper bound of a rank's memory: every shard it touches, never freed, times COPIES."""
        resolved = self.model.work.resolve(self.plan)[self.model.backward]
        plan = resolved.plan
        if resolved.then is not None:
            return sys.maxsize
        payload = resolved.payload._replace(saved=False)
        sizes = [
            max(layout.sizes) * sum(payload.row_bytes(Item(side, role, 0)) for role in PARTS)
            for side, layout in zip(Side, resolved.layouts, strict=True)
        ]
        most_bytes = 0
        for rank in find_symmetry(plan).representatives():
            steps = plan.rank_steps(rank)
            transfers = (x for step in steps for x in (*step.sends, *step.recvs))
            touched_shards = {(x.item.side, x.item.shard) for x in transfers}
            for tile in (tile for step in steps for tile in step.tiles):
                touched_shards.update((Side.Q, shard) for shard in tile.q)
                touched_shards.update((Side.KV, shard) for shard in tile.kv)
            most_bytes = max(most_bytes, sum(sizes[side] for side, _ in touched_shards))
        return COPIES * (most_bytes + plan.num_head_groups * sum(sizes))

    @cached_property
    def memory(self) -> PassMemory:
        """The memory of this pass, computed only when it is asked for: most trials are too slow to
        matter.
        """
        passes, machine = self.model.work.resolve(self.plan), self.model.machine
        return PassMemory(passes, backward=self.model.backward, device=machine.device)


class Trials:
    """The bounds of all options in one pass, and the trials so far.

    Args:
        options: all of them, by order.
    Attributes:
        num_messages: that were simulated so far.
        bounding: messages that could be simulated in the time of the bounds so far.
    """

    def __init__(self, model: PassModel, options: list[Option]):
        self.model, self.options, self.num_messages, self.bounding = model, options, 0, 0
        self.tried: dict[Option, Trial] = {}
        self._bounds = [shape_bound(model, option) for option in options]
        self._made: set[int] = set()
        self._exact: dict[Option, Trial] = {}

    def bound(self, option: Option) -> float:
        """The seconds of an option that was simulated, else the best lower bound of its seconds.

        With fewer waiting results it is taken to be no faster than with all.
        """
        trial = self.tried.get(option) or self.tried.get(option._replace(waiting_results=None))
        return trial.seconds if trial else self._bounds[option.order]

    def sharpen(self, option: Option) -> None:
        """Raise an option's bound to that by its steps, for which its plan is made."""
        if option.order not in self._made:
            self._made.add(option.order)
            by_steps = steps_bound(self.model, option)
            self._bounds[option.order] = max(self._bounds[option.order], by_steps.seconds)
            self.bounding += max(MAKING, by_steps.num_transfers)

    def trial(self, option: Option) -> Trial:
        """Simulate an option, once; only a sample of its ranks where the model asks for that."""
        if option not in self.tried:
            self.tried[option] = self._simulated(option, self.model.sampled)
        return self.tried[option]

    def leaner(self, option: Option) -> Option | None:
        """The option with half as many results that wait on the machine's devices, if any do."""
        return option.leaner(device_traits(self.model.machine.device).waiting_results)

    def exact(self, trial: Trial) -> Trial:
        """The trial as tw.simulate runs it, which is itself unless it is sampled."""
        if not trial.sampled:
            return trial
        if trial.option not in self._exact:
            self._exact[trial.option] = self._simulated(trial.option, False)
        return self._exact[trial.option]

    def _simulated(self, option: Option, sampled: bool) -> Trial:
        plan, model = option.plan, self.model
        if sampled and model.alike is None:
            sampled = splits_into_teams(model, plan)
        if sampled and model.alike is None:
            timeline, symmetry = simulate_teams(model, plan)
        else:
            arguments = plan, model.work, model.machine, model.backward
            timeline, symmetry = simulate_pass(*arguments, exact=False if sampled else None)
        assert timeline.recording
        if model.alike is None:
            self.num_messages += sum(map(len, timeline.recording.operations))
        else:
            overhead = OVERHEAD * (3 if sampled else 1)
            self.num_messages += len(timeline.recording.messages) + overhead
        timeline = replace(timeline, recording=None)
        # Under a full mask ranks of a class do the same, and a sample is exact.
        return Trial(option, plan, model, timeline, symmetry, sampled and model.alike is not False)


def explore(
    options: Iterable[Option],
    passes: Sequence[Trials],
    fits: Callable[[Trial], bool],
    max_messages: int,
    best: float = math.inf,
) -> list[tuple[Trial, ...]]:
    """Simulate options in the order of their bounds until no bound is below the best time.

    The options are looked at in the order of their bounds; of equal ones the best of each kind and
    degree, by its shape, comes first. If some option fits, bounds by steps end when they have taken
    as long as max_messages would in each pass, and simulations after max_messages in each pass. The
    other schedules of a tile are tried after its first one: they move the same shards,
    and making them takes time. An option that would be the fastest and does not fit is tried again
    with half as many waiting results, down to none.

    Args:
        passes: the passes that run the same option. Its time is the sum over them.
        max_messages: the last trial may go beyond it.
        best: seconds of the best choice so far, without these options.
    Returns:
        The trials of every option that was simulated, one of each pass.
    """

    def bound(option: Option) -> float:
        return sum(searched.bound(option) for searched in passes)

    def entry(option: Option) -> tuple[int, int, int, Option]:
        bucket = math.floor(math.log(bound(option), TIE))
        return bucket, places[option.order], option.order, option

    def spent() -> tuple[int, int]:
        return sum(x.num_messages for x in passes), sum(x.bounding for x in passes)

    options = list(options)
    places = _places(options, bound)
    first_options, variants = [], defaultdict(list)
    for option in options:
        (variants[option.tile] if option.variant else first_options).append(option)
    queue = [entry(option) for option in first_options]
    heapq.heapify(queue)
    bounded: list[tuple[int, int, int, Option]] = []  # by their steps, and not simulated
    explored: list[tuple[Trial, ...]] = []
    last_message, last_bound = (used + max_messages * len(passes) for used in spent())
    while queue or bounded:
        messages, bounding = spent()
        if best < math.inf and messages >= last_message:
            break
        if best < math.inf and bounding >= last_bound and bounded:
            queue.clear()
        first_is_due = not explored and len(bounded) >= PATIENCE
        if bounded and (first_is_due or not queue or bounded[0] < queue[0]):
            option = heapq.heappop(bounded)[-1]
            if TIE * bound(option) >= best:
                continue
            trials = tuple(searched.trial(option) for searched in passes)
            explored.append(trials)
            seconds = sum(trial.seconds for trial in trials)
            if seconds < best and all(map(fits, trials)):
                best = seconds
            elif seconds < best and (leaner := passes[0].leaner(option)):
                heapq.heappush(bounded, entry(leaner))
            for variant in variants.pop(option.tile, ()):
                heapq.heappush(queue, entry(variant))
            continue
        option = heapq.heappop(queue)[-1]
        if TIE * bound(option) >= best:
            continue
        for searched in passes:
            searched.sharpen(option)
        heapq.heappush(bounded, entry(option))
    return explored


def _places(options: Iterable[Option], bound: Callable[[Option], float]) -> dict[int, int]:
    """Return the place of each option (by its `order`) among those of its kind and degree.

    0 is the option with the lowest bound.
    """
    groups: defaultdict[tuple[str, int], list[Option]] = defaultdict(list)
    for option in options:
        groups[option.kind, option.degree].append(option)
    ranked = (sorted(group, key=lambda x: (bound(x), x.order)) for group in groups.values())
    return {option.order: place for group in ranked for place, option in enumerate(group)}
