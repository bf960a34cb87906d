"""Pairs of plans for the two passes: each by itself, or one plan that keeps what it gathered."""

from __future__ import annotations

import heapq
import math
from dataclasses import replace
from itertools import islice
from typing import NamedTuple

from tilewise.planning.options import EVERY_RANK, Option
from tilewise.planning.pass_model import PassModel
from tilewise.planning.trials import Plans, Trial, Trials, ticks
from tilewise.simulation.machine import Machine
from tilewise.simulation.simulator import EXACT_RANKS
from tilewise.workload import Workload

ROWS, FEW_ROWS = 14, 4
"""So many families are simulated for the table; few where every rank is simulated by itself."""

CHEAP_HOPS = 1 << 10
"""Plans of more hops than that are not simulated for the table alone."""

LEANEST, PATIENCE = ("ring", "ring of q", "ulysses"), 12
"""Kinds of which one needs least memory, and options tried before it is asked whether they fit."""

KEPT = 2
"""Pairs that must run one plan in both passes, of those that are replayed at the end."""

FAR = 20.0
"""Plans that take more than so many times the best are not worth a line."""


class Effort(NamedTuple):
    """How much is tried.

    Attributes:
        trials: options simulated in each pass; None: as many as it takes.
        keeping: whether to keep what was gathered in forward even where that takes memory.
        table: whether to simulate other families only to tell what they take.
        exact: whether to simulate what is fastest exactly.
    """

    trials: int | None = None
    keeping: bool = True
    table: bool = True
    exact: bool = True


class Pair(NamedTuple):
    """Forward and backward of one run."""

    forward: Trial
    backward: Trial
    save: str

    @property
    def seconds(self) -> float:
        return self.forward.seconds + self.backward.seconds

    @property
    def peak_bytes(self) -> int:
        return max(self.forward.peak_bytes, self.backward.peak_bytes)

    @property
    def kept(self) -> bool:
        """Whether both passes must run one plan."""
        return self.save == "gathered" or self.forward.option.own_shards

    @property
    def strategy(self) -> str:
        first, second = self.forward.option.family, self.backward.option.family
        return first if first == second else f"{first} / {second}"

    @property
    def order(self) -> tuple[float, int, int, bool]:
        orders = self.forward.option.order, self.backward.option.order
        return ticks(self.seconds), *orders, self.save == "gathered"


class Pairs:
    """The search over both passes.

    Args:
        work: its layout is a Layout.
        memory: bytes of a rank.
    """

    def __init__(
        self,
        work: Workload,
        machine: Machine,
        options: list[Option],
        memory: int,
        effort: Effort,
    ):
        self.effort = effort
        world_size = len(work.layout_for(0).sizes)
        self.save, self.memory, self.options = work.save, memory, options
        plans = Plans(options)

        def trials(backward: bool, save: str) -> Trials:
            fixed = replace(work, save=save)
            return Trials(PassModel(fixed, machine, world_size, backward), plans, effort.trials)

        self.forward = trials(False, "replay")
        self.backward = {save: trials(True, save) for save in ("replay", "gathered")}

    def ranked(self) -> list[Pair]:
        """The fastest pair, then the best of every other family that was tried.

        Raises:
            ValueError: if none fits.
        """
        found: list[Pair] = []
        if self.save != "gathered":
            found += self._apart()
        found += self._together(found)
        if self.effort.table:
            found += self._fill(found)
        if self.effort.exact and self.forward.scene.rough:
            found = self._exactly(found)
        best: dict[str, Pair] = {}
        for pair in sorted(found, key=lambda pair: pair.order):
            if pair.strategy not in best and pair.peak_bytes <= self.memory:
                best[pair.strategy] = pair
        if not best:
            raise ValueError(self._too_little(found))
        return list(best.values())

    @property
    def lacks_memory(self) -> bool:
        """Whether a mesh did not fit that would have been the fastest so far."""
        large = self.forward.large | self.backward["replay"].large
        return any(self.options[order].kind == "mesh" for order in large)

    def ring_seconds(self) -> tuple[float, bool]:
        """What a ring takes in both passes, and whether that is only known to be the least."""
        backward = self.backward["replay"]
        tried = 0 in self.forward.tried and 0 in backward.tried
        for trials in (self.forward, backward):
            trials.weigh(0)
        return self._bound(0, "replay"), not tried

    def _apart(self) -> list[Pair]:
        """Each pass by itself; plans that own shards as all others do."""
        backward = self.backward["replay"]
        common = [option.order for option in self.options if not option.own_shards]
        first = self.forward.settle(self.memory, common, PATIENCE)
        other = backward.settle(self.memory, common, PATIENCE) if first else None
        if not (first and other):
            self._check_that_rings_fit()
            first = self.forward.settle(self.memory, common)
            other = backward.settle(self.memory, common)
        pairs = [Pair(first, other, "replay")] if first and other else []
        tried = [t for t in self.forward.tried.values() if t.option.order in common]
        for family in {trial.option.family for trial in tried}:
            parts = [
                self._fastest([t for t in of if t.option.family == family])
                for of in (tried, backward.tried.values())
            ]
            if parts[0] and parts[1]:
                pairs.append(Pair(parts[0], parts[1], "replay"))
        return pairs

    def _check_that_rings_fit(self) -> None:
        """Rings hold fewest shards at once: if none of them fits, nothing does."""
        rings = [option.order for option in self.options if option.kind in LEANEST]
        backward = self.backward["replay"]
        pairs = [Pair(self.forward.trial(x), backward.trial(x), "replay") for x in rings]
        if min(pair.peak_bytes for pair in pairs) > self.memory:
            raise ValueError(self._too_little(pairs))

    def _fastest(self, trials: list[Trial]) -> Trial | None:
        """The fastest that fits; if none does, the fastest."""
        ranked = sorted(trials, key=lambda trial: trial.rank)
        first = ranked[0] if ranked else None
        return next((trial for trial in ranked if trial.peak_bytes <= self.memory), first)

    def _together(self, found: list[Pair]) -> list[Pair]:
        """One plan for both passes: what it gathered is kept, or it owns shards of its own."""
        queue: list[tuple[float, int, str]] = []
        for option in self.options:
            saves = ["replay"] * option.own_shards
            saves += ["gathered"] * (self.effort.keeping or option.kind == "ulysses")
            if option.variant and option.backward is False:
                continue
            for save in saves:
                if self.save in (None, save):
                    queue.append((self._bound(option.order, save), option.order, save))
        heapq.heapify(queue)
        ranked = sorted(found, key=lambda pair: pair.seconds)
        fitting = (pair.seconds for pair in ranked if pair.peak_bytes <= self.memory)
        best, pairs = next(fitting, math.inf), []
        while queue and queue[0][0] < best:
            bound, order, save = heapq.heappop(queue)
            if self._full(order, save):
                continue
            if any(t.weigh(order) is None for t in (self.forward, self.backward[save])):
                continue
            sharper = self._bound(order, save)
            if sharper > bound:
                heapq.heappush(queue, (sharper, order, save))
                continue
            pair = Pair(self.forward.trial(order), self.backward[save].trial(order), save)
            pairs.append(pair)
            if pair.seconds < best and self._fits(pair):
                best = pair.seconds
        return pairs

    def _fits(self, pair: Pair) -> bool:
        """Whether a pair of one plan that is the fastest so far fits."""
        return (
            self.forward.fits(pair.forward, self.memory) and pair.backward.peak_bytes <= self.memory
        )

    def _exactly(self, found: list[Pair]) -> list[Pair]:
        """The fastest pair with exact times; of the others those that cannot be taken for it."""
        ranked = sorted(found, key=lambda pair: pair.order)
        fitting = [
            *islice((p for p in ranked if p.kept and p.peak_bytes <= self.memory), KEPT),
            *islice((p for p in ranked if not p.kept and p.peak_bytes <= self.memory), 1),
        ]
        exact, best, ratio = [], math.inf, 1.0  # ratio: the least of exact to rough times
        for pair in sorted(fitting, key=lambda pair: pair.order):
            made = self._exact(pair) if ratio * pair.seconds < best else None
            if made:
                exact.append(made)
                best, ratio = min(best, made.seconds), min(ratio, made.seconds / pair.seconds)
        return exact + [pair for pair in found if pair.seconds >= best or not exact]

    def _exact(self, pair: Pair) -> Pair | None:
        """A pair with exact times; of plans that need not be one, the fastest of each pass."""
        backward = self.backward[pair.save]
        if pair.kept:
            return Pair(self.forward.exact(pair.forward), backward.exact(pair.backward), pair.save)
        first, other = (part.settle_exactly(self.memory) for part in (self.forward, backward))
        return Pair(first, other, pair.save) if first and other else None

    def _full(self, order: int, save: str) -> bool:
        """Whether an option would have to be simulated, and no more may be."""
        parts = self.forward, self.backward[save]
        return any(part.full and order not in part.tried for part in parts)

    def _bound(self, order: int, save: str) -> float:
        return self.forward.bounds[order] + self.backward[save].bounds[order]

    def _fill(self, found: list[Pair]) -> list[Pair]:
        """Other families, for the table: of each what has the lowest bound."""
        if self.save == "gathered":
            return []
        known = {pair.strategy for pair in found}
        best = min((pair.seconds for pair in found), default=math.inf)
        first: dict[str, Option] = {}
        nearest = sorted(self.options[1:], key=lambda o: self._bound(o.order, "replay"))
        for option in (self.options[0], *nearest):  # the ring is what all are compared with
            if not option.own_shards and option.family not in known:
                first.setdefault(option.family, option)
        pairs = []
        scene = self.forward.scene
        few = scene.alike is None or (scene.one_by_one and scene.world_size > EVERY_RANK)
        room = FEW_ROWS if few else ROWS
        for option in first.values():
            ring = option.order == 0
            near = ring or self._bound(option.order, "replay") <= FAR * best
            room_left = ring or len(known) + len(pairs) < room
            if room_left and near and option.backward is None and self._cheap(option):
                trials = self.forward, self.backward["replay"]
                if all(t.weigh(option.order) is not None for t in trials):
                    ahead, back = (t.trial(option.order) for t in trials)
                    pairs.append(Pair(ahead, back, "replay"))
        return pairs

    def _cheap(self, option: Option) -> bool:
        """Whether simulating it takes no time to speak of."""
        scene, steps = self.forward.scene, (option.shape.q + option.shape.kv) * option.degree
        quick = scene.share(option) == 1.0 or scene.world_size <= EXACT_RANKS or not option.order
        return 0 < steps <= CHEAP_HOPS and quick

    def _too_little(self, found: list[Pair]) -> str:
        least = min(found, key=lambda pair: pair.peak_bytes)
        names = least.forward.plan.name
        if least.backward.option != least.forward.option:
            names += f" with {least.backward.plan.name} in backward"
        return (
            f"no plan fits into {self.memory} bytes a rank; {names} (save={least.save!r}) needs "
            f"least, {least.peak_bytes} bytes: give as many, or use more ranks"
        )
