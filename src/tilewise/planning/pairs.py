"""Pairs of plans for the two passes: each by itself, or one plan that keeps what it gathered."""

import math
from dataclasses import replace
from itertools import product
from typing import NamedTuple

from tilewise.planning.options import Option
from tilewise.planning.pass_model import PassModel
from tilewise.planning.reasons import TIE
from tilewise.planning.trials import Entry, Trial, Trials, lowest_first, ticks

MAX_MESSAGES = 24_000
"""Messages that a search simulates in each pass: ten thousand take about a second."""

ROUGHLY = 1.05
"""Two plans that are roughly faster than one by less are simulated exactly after it."""

LEANEST = "ring", "ring of q", "ulysses"
"""Kinds of which one needs least memory."""


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
        return max(self.forward.memory.peak_bytes, self.backward.memory.peak_bytes)

    def fits(self, num_bytes: float) -> bool:
        return self.forward.fits(num_bytes) and self.backward.fits(num_bytes)

    @property
    def strategy(self) -> str:
        first, second = self.forward.option.family, self.backward.option.family
        return first if first == second else f"{first} / {second}"

    @property
    def one_plan(self) -> bool:
        """Whether both passes run the same."""
        return self.forward.option == self.backward.option

    @property
    def complexity(self) -> tuple[bool, bool, int, int]:
        """The lower, the simpler; what was simulated roughly only comes last."""
        orders = self.forward.option.order, self.backward.option.order
        return self.forward.rough or self.backward.rough, not self.one_plan, *orders

    @property
    def kept(self) -> bool:
        """Whether both passes must run one plan."""
        return self.save == "gathered" or self.forward.option.own_shards

    @property
    def order(self) -> tuple[float, int, int, bool]:
        orders = self.forward.option.order, self.backward.option.order
        return ticks(self.seconds), *orders, self.save == "gathered"


class Pairs:
    """The search over both passes.

    Args:
        model: of the forward pass; its save is the workload's, None: the faster one.
        memory: bytes of a rank.
        max_messages: that may be simulated in each pass; the last trial may go beyond it.
        keeping: whether to keep what was gathered in forward even where that takes memory.
    """

    def __init__(
        self,
        model: PassModel,
        options: list[Option],
        memory: float,
        max_messages: int = MAX_MESSAGES,
        keeping: bool = True,
    ):
        self.save, self.memory, self.options = model.work.save, memory, options
        self.keeping = keeping

        def trials(backward: bool, save: str) -> Trials:
            work = replace(model.work, save=save)
            return Trials(replace(model, work=work, backward=backward), options, max_messages)

        self.forward = trials(False, "replay")
        self.backward = {save: trials(True, save) for save in ("replay", "gathered")}
        self._large: list[Option] = []
        self._rings_fit = False

    def fastest(self) -> Pair:
        """The fastest pair.

        Raises:
            ValueError: if none fits.
        """
        return self._best_of_families(self._found())[0]

    def ranked(self) -> list[Pair]:
        """The fastest pair with its exact time, then the best of every other family.

        Raises:
            ValueError: if none fits.
        """
        found = self._found()
        if self.forward.model.rough:
            found = self._exactly(found)
        if self.save != "gathered":
            found += self._others(found)
        return self._best_of_families(found)

    @property
    def lacks_memory(self) -> bool:
        """Whether a mesh did not fit that would have been the fastest so far."""
        return any(option.kind == "mesh" for option in self._large)

    def ring_seconds(self) -> tuple[float, bool]:
        """What a ring takes in both passes, and whether that is only known to be the least."""
        ring, backward = Entry(0), self.backward["replay"]
        tried = 0 in self.forward.tried and 0 in backward.tried
        self._sharpen(ring)
        return self.forward.bounds[0] + backward.bounds[0], not tried

    def _found(self) -> list[Pair]:
        found = self._apart() if self.save != "gathered" else []
        return found + self._together(found)

    def _best_of_families(self, found: list[Pair]) -> list[Pair]:
        best: dict[str, Pair] = {}
        for pair in sorted(found, key=lambda pair: pair.order):
            if pair.strategy not in best and pair.fits(self.memory):
                best[pair.strategy] = pair
        if not best:
            raise ValueError(self._too_little(found))
        ranked = list(best.values())
        tied = (pair for pair in ranked if pair.seconds <= TIE * ranked[0].seconds)
        simplest = min(tied, key=lambda pair: pair.complexity)
        return [simplest, *(pair for pair in ranked if pair is not simplest)]

    def _apart(self) -> list[Pair]:
        """Each pass by itself, in the best plan of all and of every family."""
        parts = self.forward, self.backward["replay"]
        common = [option for option in self.options if not option.own_shards]
        first, other = (trials.settle(common, self._fits) for trials in parts)
        pairs = [Pair(first, other, "replay")] if first and other else []
        for family in {trial.option.family for trial in self._common(self.forward)}:
            best = [
                self._fastest([t for t in self._common(trials) if t.option.family == family])
                for trials in parts
            ]
            if best[0] and best[1]:
                pairs.append(Pair(best[0], best[1], "replay"))
        return pairs

    def _common(self, trials: Trials) -> list[Trial]:
        """Trials of plans that own shards as all others do."""
        return [trial for trial in trials.tried.values() if not trial.option.own_shards]

    def _fits(self, trial: Trial) -> bool:
        """Whether a trial that is the fastest so far fits."""
        if trial.fits(self.memory):
            return True
        self._large.append(trial.option)
        if not self._rings_fit and self.save != "gathered":
            self._check_that_rings_fit()
        return False

    def _check_that_rings_fit(self) -> None:
        """Rings hold fewest shards at once: if none of them fits, nothing does."""
        pairs = []
        for order in (option.order for option in self.options if option.kind in LEANEST):
            pair = Pair(self.forward.trial(order), self.backward["replay"].trial(order), "replay")
            pairs.append(pair)
            if pair.fits(self.memory):
                self._rings_fit = True
                return
        raise ValueError(self._too_little(pairs))

    def _fastest(self, trials: list[Trial]) -> Trial | None:
        """The fastest that fits; if none does, the fastest."""
        ranked = sorted(trials, key=lambda trial: trial.rank)
        first = ranked[0] if ranked else None
        return next((trial for trial in ranked if trial.fits(self.memory)), first)

    def _together(self, found: list[Pair]) -> list[Pair]:
        """One plan for both passes: what it gathered is kept, or it owns shards of its own."""
        entries: list[tuple[Entry, Option]] = []
        for option in self.options:
            if option.variant and option.backward is False:
                continue
            saves = ["replay"] * option.own_shards
            saves += ["gathered"] * (self.keeping or option.kind == "ulysses")
            entries += [(Entry(option.order, x), option) for x in saves if self.save in (None, x)]
        ranked = sorted(found, key=lambda pair: pair.seconds)
        fitting = (pair.seconds for pair in ranked if pair.fits(self.memory))
        best, pairs = next(fitting, math.inf), []
        for least, entry in lowest_first(entries, self._bound, self._sharpen):
            if TIE * least >= best:
                break
            if best < math.inf and self._spent(entry):
                continue
            order, backward = entry.order, self.backward[entry.save]
            pair = Pair(self.forward.trial(order), backward.trial(order), entry.save)
            pairs.append(pair)
            fits = pair.seconds < best and self._fits(pair.forward)
            if fits and pair.backward.fits(self.memory):
                best = pair.seconds
        return pairs

    def _spent(self, entry: Entry) -> bool:
        """Whether an option would have to be simulated, and no more messages may be."""
        parts = self.forward, self.backward[entry.save]
        return any(x.messages_left <= 0 and entry.order not in x.tried for x in parts)

    def _bound(self, entry: Entry) -> float:
        parts = self.forward, self.backward[entry.save]
        return sum(trials.expected(entry.order) for trials in parts)

    def _sharpen(self, entry: Entry) -> None:
        self.forward.sharpen(entry.order)
        self.backward[entry.save].sharpen(entry.order)

    def _exactly(self, found: list[Pair]) -> list[Pair]:
        """The fastest pairs with exact times; of the others those that cannot be taken for them.

        They are simulated in order of their rough times, until the next, sped up as much as any of
        them, would not be faster, or no messages are left.
        """
        rough = [pair for pair in found if pair.kept]
        if self.save != "gathered":
            passes = product(self._common(self.forward), self._common(self.backward["replay"]))
            rough += [Pair(first, other, "replay") for first, other in passes]
        exact, best, ratio = [], math.inf, 1.0  # ratio: the least of exact to rough times
        two = ROUGHLY if self.forward.model.alike is None else 1.0
        for pair in sorted(rough, key=lambda pair: pair.seconds * (1 if pair.one_plan else two)):
            backward = self.backward[pair.save]
            spent = min(self.forward.messages_left, backward.messages_left) <= 0
            if exact and (spent or TIE * ratio * pair.seconds >= best):
                break
            if pair.fits(self.memory):
                first, other = self.forward.exact(pair.forward), backward.exact(pair.backward)
                exact.append(Pair(first, other, pair.save))
                best = min(best, exact[-1].seconds)
                ratio = min(ratio, exact[-1].seconds / pair.seconds)
        return exact + [pair for pair in found if pair.seconds >= best or not exact]

    def _others(self, found: list[Pair]) -> list[Pair]:
        """For the table, with the messages left: of each kind not found what has the lowest bound.

        And the ring, which all are compared with.
        """
        known = {trial.option.kind for pair in found for trial in pair[:2]}
        best = min(pair.seconds for pair in found) if self.forward.model.rough else 0.0
        parts = self.forward, self.backward["replay"]
        nearest = sorted(self.options[1:], key=lambda option: self._bound(Entry(option.order)))
        pairs = []
        for option in (self.options[0], *nearest):
            if option.order and (option.kind in known or option.backward is not None):
                continue
            if min(trials.messages_left for trials in parts) <= 0:
                break
            known.add(option.kind)
            first, other = (trials.trial(option.order) for trials in parts)
            pair = Pair(first, other, "replay")
            if pair.seconds >= best:
                pairs.append(pair)
        return pairs

    def _too_little(self, found: list[Pair]) -> str:
        least = min(found, key=lambda pair: pair.peak_bytes)
        names = least.forward.plan.name
        if least.backward.option != least.forward.option:
            names += f" with {least.backward.plan.name} in backward"
        return (
            f"no plan fits into {self.memory} bytes a rank; {names} (save={least.save!r}) needs "
            f"least, {least.peak_bytes} bytes: give as many, or use more ranks"
        )
