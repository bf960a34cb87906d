"""Trying options of a pass in order of what they take at least, until no other can be faster."""

from __future__ import annotations

import heapq
import math
from collections.abc import Hashable, Iterable
from dataclasses import dataclass
from functools import cached_property

from tilewise.plan.ir import Plan
from tilewise.plan.shifts import Symmetry
from tilewise.planning.bounds import first_steps, moved_bound, shape_bound, steps_bound
from tilewise.planning.mask_bounds import MaskBounds
from tilewise.planning.options import EVERY_RANK, Option
from tilewise.planning.pass_model import PassModel
from tilewise.planning.peak_memory import PassMemory
from tilewise.simulation.engine import Timeline
from tilewise.simulation.simulator import num_messages, simulate_pass

MOST_UNLIKE, MOST_PRUNED = 384, 2560
"""So many ranks are simulated one by one in all the trials of a pass, if there are more than
options.EVERY_RANK of them: one trial of 64 takes half a second. The second number is for a causal
mask, where few ranks' programs are relabelled: a trial of 80 takes a tenth of a second."""

MOST_TRIALS = 32
"""And so many trials at most, however few the ranks."""

FINAL_MESSAGES = 24_000
"""So many messages of plans that are roughly the fastest are replayed in all, beside one plan's."""

TINY = 1e-30

ALL_VARIANTS_RANKS, VARIANT_RANKS, LEAST_VARIANTS = 64, 4096, 16
"""Up to so many ranks every schedule of a tile is looked at; with more, so many ranks' in all, but
no fewer schedules than the last number: making one of a large tile takes a fifth of a second."""


@dataclass(frozen=True)
class Trial:
    """An option's plan, simulated in one pass.

    Attributes:
        rough: whether ranks that send less than others were taken to send as much.
    """

    option: Option
    plan: Plan
    scene: PassModel
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
    def peak_bytes(self) -> int:
        """Counted when it is asked for: most trials are too slow for it to matter."""
        return PassMemory(self.plan, self.scene.work, self.scene.backward).peak_bytes


class Plans:
    """Options' plans, made when they are first looked at."""

    def __init__(self, options: list[Option]):
        self.options = options
        self._made: dict[int, Plan | None] = {}
        self._meshes: dict[Hashable, int] = {}

    def plan(self, order: int) -> Plan | None:
        """An option's plan; None if it is that of another option that was looked at before."""
        if order not in self._made:
            option = self.options[order]
            plan = self._made[order] = option.make()
            if option.kind == "mesh":
                key = option.degree, option.shape, hash(first_steps(plan))
                if self._meshes.setdefault(key, order) != order:
                    self._made[order] = None
        return self._made[order]


class Trials:
    """The trials of one pass so far, and the bounds of what was not tried.

    Args:
        most: so many options are tried, the most promising ones; None: as many as are needed to
            know the fastest, or as MOST_UNLIKE allows.
    Attributes:
        bounds: by an option's order; the simulated time of what was tried.
        large: orders of what would have been the fastest so far, had it fitted.
    """

    def __init__(self, scene: PassModel, plans: Plans, most: int | None = None):
        self.scene, self.plans = scene, plans
        if most is None and scene.one_by_one and scene.world_size > EVERY_RANK:
            ranks = MOST_UNLIKE if scene.alike is None else MOST_PRUNED
            most = max(2, min(MOST_TRIALS, ranks // scene.world_size))
        self.most = math.inf if most is None else most
        self.tried: dict[int, Trial] = {}
        self.large: set[int] = set()
        self.bounds = [shape_bound(scene, option) for option in plans.options]
        self._weighed: set[int] = set()
        self._mask_bounds = MaskBounds(scene)
        self.variants_left = math.inf
        if scene.world_size > ALL_VARIANTS_RANKS:
            self.variants_left = max(LEAST_VARIANTS, VARIANT_RANKS // scene.world_size)
        self._guessed: set[int] = set()
        self._of_twins: dict[int, float] = {}
        self._times: dict[tuple[str, int], float] = {}

    @property
    def full(self) -> bool:
        """Whether as many options were tried as may be."""
        return len(self.tried) >= self.most

    def settle(
        self, memory_bytes: int, orders: Iterable[int], patience: float = math.inf
    ) -> Trial | None:
        """Try options until none untried can be faster than the fastest that fits.

        Args:
            patience: options tried in all after which it ends if none fits so far.
        Returns:
            The fastest that fits, the simplest of equally fast ones; None: none fits.
        """
        backward = self.scene.backward
        chosen = (self.plans.options[order] for order in orders)
        queue = [(self.bounds[x.order], x.order) for x in chosen if x.backward in (None, backward)]
        heapq.heapify(queue)
        best: Trial | None = None
        while queue and not (self.full if best else len(self.tried) >= patience):
            expected, order = heapq.heappop(queue)
            least = expected if self.scene.alike is None else self.bounds[order]
            if (best and least >= best.seconds) or self.weigh(order) is None:
                continue
            sharper = self.bounds[order] * self._slower(order)
            if sharper > expected:
                heapq.heappush(queue, (sharper, order))
                continue
            trial = self.trial(order)
            if (best is None or trial.rank < best.rank) and self.fits(trial, memory_bytes):
                best = trial
        return best

    def fits(self, trial: Trial, memory_bytes: int) -> bool:
        """Whether a trial that is the fastest so far fits."""
        if trial.peak_bytes > memory_bytes:
            self.large.add(trial.option.order)
        return trial.peak_bytes <= memory_bytes

    def _slower(self, order: int) -> float:
        """How many times its bound an option is expected to take, if not all can be tried.

        As many as the best of its kind and degree that was tried; 1 if none was. It tells what to
        try first, and what not to try only where bounds are far off: where ranks are unlike.
        """
        option = self.plans.options[order]
        known = self._times.get((option.kind, option.degree), 1.0)
        return known if self.most < math.inf else 1.0

    def weigh(self, order: int) -> float | None:
        """The next sharper bound of an option; None if its plan is that of another one."""
        option = self.plans.options[order]
        if option.twin is not None and order not in self._guessed:
            self._guessed.add(order)
            if self._from_twin(option):
                return self.bounds[order]
        if option.variant and order not in self._weighed:
            if not self.variants_left:
                return None
            self.variants_left -= 1
        plan = self.plans.plan(order)
        if plan is None:
            return None
        if order not in self._weighed:
            self._weighed.add(order)
            sharper = steps_bound(self.scene, option, plan)
            if self.scene.alike is None and plan.cuts is None:
                sharper = self._mask_bounds.seconds(plan)
            self.bounds[order] = max(self.bounds[order], sharper)
        return self.bounds[order]

    def _from_twin(self, option: Option) -> bool:
        """Whether a bound by the twin's steps is sharper than the one that is known."""
        assert option.twin is not None
        if option.twin not in self._of_twins:
            plan = self.plans.plan(option.twin)
            known = 0.0 if plan is None else moved_bound(self.scene, option, plan)
            self._of_twins[option.twin] = known
        known, self.bounds[option.order] = (
            self.bounds[option.order],
            max(self.bounds[option.order], self._of_twins[option.twin]),
        )
        return self.bounds[option.order] > known

    def trial(self, order: int) -> Trial:
        """Simulate an option, once; roughly where that takes much less time."""
        if order not in self.tried:
            trial = self.tried[order] = self._simulated(order, self.scene.rough)
            times = trial.seconds / max(self.bounds[order], TINY)
            kind = trial.option.kind, trial.option.degree
            self._times[kind] = min(times, self._times.get(kind, math.inf))
            self.bounds[order] = trial.seconds
        return self.tried[order]

    def exact(self, trial: Trial) -> Trial:
        """The trial, simulated as tw.simulate does it."""
        order = trial.option.order
        if self.tried[order].rough:
            self.tried[order] = self._simulated(order, False)
            self.bounds[order] = self.tried[order].seconds
        return self.tried[order]

    def settle_exactly(self, memory_bytes: int) -> Trial | None:
        """The fastest that fits of the few trials that are roughly the fastest."""
        left, best, ratio = FINAL_MESSAGES, None, 1.0  # ratio: the least of exact to rough times
        for trial in sorted(self.tried.values(), key=lambda trial: trial.rank):
            cost = num_messages(trial.plan)
            if best and (ratio * trial.seconds >= best.seconds or left < cost):
                break
            if trial.option.own_shards or trial.peak_bytes > memory_bytes:
                continue
            left -= cost
            exact = self.exact(trial)
            ratio = min(ratio, exact.seconds / trial.seconds)
            if (best is None or exact.rank < best.rank) and exact.peak_bytes <= memory_bytes:
                best = exact
        return best

    def _simulated(self, order: int, rough: bool) -> Trial:
        plan, scene = self.plans.plan(order), self.scene
        assert plan is not None
        exact = False if rough else None
        timeline, symmetry = simulate_pass(plan, scene.work, scene.machine, scene.backward, exact)
        kept = timeline._replace(spans=())
        return Trial(self.plans.options[order], plan, scene, kept, symmetry, rough)


def ticks(seconds: float) -> float:
    """Seconds to twelve digits: those of plans that do the same in another order are equal."""
    return float(f"{seconds:.12g}")
