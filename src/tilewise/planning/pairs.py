"""The search over both passes: each by itself, or one plan that keeps what forward gathered."""

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from itertools import islice, product
from typing import NamedTuple

from tilewise.planning.options import Option
from tilewise.planning.pass_model import PassModel
from tilewise.planning.reasons import TIE
from tilewise.planning.trials import Trial, Trials, explore

MAX_MESSAGES = 24_000
"""Messages that each part of a search simulates: ten thousand take about a second."""

LARGE_WORLDS = (128, 1024)
"""Above each of these numbers of ranks, a part simulates half as many messages: making a plan takes
longer there, and so do the fastest pairs with all their ranks."""

FINALISTS = 3
"""So many of the fastest pairs are simulated with all ranks, after samples of ranks."""

RING_RANKS = 64
"""Up to this many ranks, a ring is simulated for comparison where no rank stands for another."""

MEMORY_RANKS = 8
"""Ranks whose memory is counted of a plan that is not the fastest, where ranks are unlike."""

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

    def sampled_peak_bytes(self) -> int:
        """The bytes of the rank that needs most of MEMORY_RANKS."""
        passes = self.forward, self.backward
        return max(trial.memory.sample(MEMORY_RANKS) for trial in passes)

    def fits(self, num_bytes: float) -> bool:
        return self.forward.fits(num_bytes) and self.backward.fits(num_bytes)

    @property
    def sampled(self) -> bool:
        return self.forward.sampled or self.backward.sampled

    @property
    def strategy(self) -> str:
        families = dict.fromkeys((self.forward.option.family, self.backward.option.family))
        return " / ".join(families)

    @property
    def one_plan(self) -> bool:
        """True if both passes run the same plan."""
        return self.forward.option == self.backward.option

    @property
    def complexity(self) -> tuple[bool, bool, int, int]:
        """Sort key: simpler pairs first. A pair of which only a sample was simulated comes last."""
        orders = self.forward.option.order, self.backward.option.order
        return self.sampled, not self.one_plan, *orders


class PairSearch:
    """The search over both passes.

    Args:
        model: of the forward pass; its save is the workload's, None: the faster one.
        memory: bytes of a rank.
        max_messages: messages that may be simulated in each part of the search. The last trial may
            exceed it.
        keeping: whether gathered operands may be kept for backward even where that takes memory.
        progress: called with the name of each part of the search as it begins.
    """

    def __init__(
        self,
        model: PassModel,
        options: list[Option],
        memory: float,
        max_messages: int = MAX_MESSAGES,
        keeping: bool = True,
        progress: Callable[[str], None] = lambda text: None,
    ):
        self.save, self.memory, self.options = model.work.save, memory, options
        self.max_messages = max_messages >> sum(model.world_size > ranks for ranks in LARGE_WORLDS)
        self.keeping, self.progress = keeping, progress

        def trials(backward: bool, save: str) -> Trials:
            work = replace(model.work, save=save)
            return Trials(replace(model, work=work, backward=backward), options)

        self.forward = trials(False, "replay")
        self.backward = {save: trials(True, save) for save in ("replay", "gathered")}
        self.lacks_memory = False  # whether a mesh did not fit that would have been the fastest
        self._rings_fit = False

    def fastest(self) -> Pair:
        """The fastest pair.

        Raises:
            ValueError: if none fits.
        """
        return self._best_of_families(self._pairs())[0]

    def ranked(self) -> list[Pair]:
        """The fastest pair, then the best of every other strategy that was simulated.

        Raises:
            ValueError: if none fits.
        """
        pairs = self._exactly(self._pairs())
        if self.save != "gathered":
            pairs += self._others(pairs)
        return self._best_of_families(pairs)

    def ring(self) -> Pair | None:
        """A ring in both passes; None if its simulation would take too long."""
        model, save = self.forward.model, self.save or "replay"
        each_rank = model.alike is None or not model.sampled
        if each_rank and model.world_size > RING_RANKS:
            return None
        rings = (option for option in self.options if option.kind == "ring")
        option = next(rings, None)  # none serves canonical sums
        return None if option is None else self._pair(option, save)

    def _pair(self, option: Option, save: str = "replay") -> Pair:
        """An option in both passes, simulated."""
        return Pair(self.forward.trial(option), self.backward[save].trial(option), save)

    def _pairs(self) -> list[Pair]:
        """Simulate the most promising options; return all pairs of what was simulated."""
        pairs: list[Pair] = []
        if self.save != "gathered":
            searches = self.forward, self.backward["replay"]
            common = [x for x in self.options if not x.own_shards and not x.keeps]
            self.progress("plans for the forward pass")
            explore(common, [self.forward], self._fits, self.max_messages)
            self.progress("plans for the backward pass")
            best = self._seconds_in_backward()
            explore(common, [self.backward["replay"]], self._fits, self.max_messages, best)
            trials_by_pass = ([*trials.tried.values()] for trials in searches)
            pairs += [
                Pair(forward_trial, backward_trial, "replay")
                for forward_trial, backward_trial in product(*trials_by_pass)
            ]
        self.progress("one plan for both passes")
        for save, options in self._together():
            best = self._fastest_that_fits(pairs)
            if best and best.forward.option in options:  # most often it is fast here too
                pairs.append(self._pair(best.forward.option, save))
                best = self._fastest_that_fits(pairs)
            seconds = best.seconds if best else math.inf
            searches = self.forward, self.backward[save]
            trials_by_pass = explore(options, searches, self._fits, self.max_messages, seconds)
            pairs += [
                Pair(forward_trial, backward_trial, save)
                for forward_trial, backward_trial in trials_by_pass
            ]
        return pairs

    def _seconds_in_backward(self) -> float:
        """Simulate the fastest plan of forward in backward, where it is most often fast too.

        Returns:
            its seconds; infinity if it does not fit there.
        """
        ranked = sorted(self.forward.tried.values(), key=lambda trial: trial.rank)
        fastest = next((trial for trial in ranked if trial.fits(self.memory)), None)
        trial = fastest and self.backward["replay"].trial(fastest.option)
        return trial.seconds if trial and trial.fits(self.memory) else math.inf

    def _fastest_that_fits(self, pairs: Iterable[Pair]) -> Pair | None:
        ranked = sorted(pairs, key=lambda pair: pair.seconds)
        return next((pair for pair in ranked if pair.fits(self.memory)), None)

    def _together(self) -> Iterator[tuple[str, list[Option]]]:
        """Yield options that both passes must share, by `save`.

        They are plans with shards of their own, and plans that keep what forward gathered.
        """
        if self.save != "gathered":
            yield "replay", [option for option in self.options if option.own_shards]
        if self.save != "replay":
            yield "gathered", [x for x in self.options if self.keeping or x.kind == "ulysses"]

    def _fits(self, trial: Trial) -> bool:
        """Return whether a trial that is the fastest so far fits."""
        if trial.fits(self.memory):
            return True
        self.lacks_memory |= trial.option.kind == "mesh"
        if not self._rings_fit and self.save != "gathered":
            self._check_that_rings_fit()
        return False

    def _check_that_rings_fit(self) -> None:
        """Raise ValueError if no ring fits: rings hold the fewest shards, so that nothing fits."""
        pairs: list[Pair] = []
        leanest = [option for option in self.options if option.kind in LEANEST] or self.options
        for option in leanest:
            pairs.append(self._leanest(option))
            if pairs[-1].fits(self.memory):
                self._rings_fit = True
                return
        raise ValueError(self._too_little(pairs))

    def _leanest(self, option: Option) -> Pair:
        """An option in both passes, each with as many waiting results as fit, or as need least."""

        def best(trials: Trials) -> Trial:
            tried: list[Trial] = []
            leaner: Option | None = option
            while leaner is not None:
                tried.append(trials.trial(leaner))
                if tried[-1].fits(self.memory):
                    return tried[-1]
                leaner = trials.leaner(leaner)
            return min(tried, key=lambda trial: trial.memory.peak_bytes)

        return Pair(best(self.forward), best(self.backward["replay"]), "replay")

    def _exactly(self, pairs: list[Pair]) -> list[Pair]:
        """Return the pairs, the fastest of them simulated again with all ranks.

        A sample waits less than all ranks do: once a sample takes longer than what was simulated
        with all ranks, no later one can be the fastest. Pairs that are known by a sample only, and
        seem faster than these, are left out: nothing proves their time.
        """
        ranked = sorted(pairs, key=lambda pair: pair.seconds)
        finalists = [*islice((pair for pair in ranked if pair.fits(self.memory)), FINALISTS)]
        if not finalists:
            return pairs
        exact: list[Pair] = []
        best = math.inf
        messages_before = self._num_messages
        for pair in finalists:
            spent = self._num_messages - messages_before
            if spent >= FINALISTS * MAX_MESSAGES or pair.seconds >= best:
                break
            forward_trial = self.forward.exact(pair.forward)
            backward_trial = self.backward[pair.save].exact(pair.backward)
            exact.append(pair._replace(forward=forward_trial, backward=backward_trial))
            best = min(best, exact[-1].seconds)
        others = (pair for pair in ranked if pair not in finalists[: len(exact)])
        return exact + [x for x in others if not x.sampled or x.seconds >= best]

    def _others(self, simulated: list[Pair]) -> list[Pair]:
        """Simulate more pairs for the table: of each other kind the option with the lowest bound.

        The ring is always simulated, the others as long as the budget of messages allows.
        """
        ring = self.ring()
        simulated_kinds = {pair.forward.option.kind for pair in simulated if pair.one_plan}
        pairs_to_add = [ring] if ring else []
        if self.forward.model.sampled:
            return pairs_to_add  # one more takes seconds
        passes = self.forward, self.backward["replay"]
        nearest = sorted(
            (option for option in self.options[1:] if not option.keeps),
            key=lambda option: sum(trials.bound(option) for trials in passes),
        )
        messages_before = self._num_messages
        for option in nearest:
            if self._num_messages - messages_before >= self.max_messages:
                break
            if option.kind not in simulated_kinds:
                simulated_kinds.add(option.kind)
                pairs_to_add.append(self._pair(option))
        return pairs_to_add

    @property
    def _num_messages(self) -> int:
        """Messages that were simulated so far."""
        return sum(trials.num_messages for trials in (self.forward, *self.backward.values()))

    def _best_of_families(self, pairs: list[Pair]) -> list[Pair]:
        """The best pair, the simplest of equally fast ones, and the best plan of each family."""
        ranked = sorted(pairs, key=lambda pair: (pair.seconds, pair.complexity))
        best = next((pair for pair in ranked if pair.fits(self.memory)), None)
        if best is None:
            raise ValueError(self._too_little(ranked))
        tied = [pair for pair in ranked if best.seconds <= pair.seconds <= TIE * best.seconds]
        tied.sort(key=lambda pair: pair.complexity)
        simplest = next(pair for pair in tied if pair.fits(self.memory))
        rows = {simplest.strategy: simplest}
        for pair in ranked:
            if pair.one_plan and pair.strategy not in rows and pair.fits(self.memory):
                rows[pair.strategy] = pair
        return [*rows.values()]

    def _too_little(self, pairs: list[Pair]) -> str:
        leanest = min(pairs, key=lambda pair: pair.peak_bytes)
        names = leanest.forward.plan.name
        if leanest.backward.plan.name != names:
            names += f" with {leanest.backward.plan.name} in backward"
        return (
            f"memory_bytes ({self.memory}) is too little for a rank of any plan; "
            f"{names} (save={leanest.save!r}) "
            f"needs least, {leanest.peak_bytes} bytes ({-(-leanest.peak_bytes >> 20)} MiB): give "
            "as many, or use more ranks"
        )
