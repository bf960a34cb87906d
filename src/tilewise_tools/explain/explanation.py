"""A recorded run in five lines: where the step goes, why, and what would change it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

from tilewise.plan.ir import Plan
from tilewise.simulation.machine import Machine
from tilewise.simulation.simulator import Simulation
from tilewise_tools.explain.advice import Change, best_change, simulated, text_of
from tilewise_tools.explain.causes import Finding, findings
from tilewise_tools.explain.clocks import clocks
from tilewise_tools.explain.rates import (
    KernelRates,
    Link,
    LinkRate,
    kernel_rates,
    link_rates,
)
from tilewise_tools.explain.rows import Run
from tilewise_tools.explain.subject import Subject, check_plan, machine_of, subjects
from tilewise_tools.explain.waiting import (
    COPY,
    KERNEL,
    LINK,
    OUTSIDE,
    WAIT,
    Cause,
    Piece,
    RecordedStep,
    recorded_steps,
)
from tilewise_tools.report.words import quantity

PARTS = MappingProxyType(
    {KERNEL: "kernels", WAIT: "waiting", COPY: "copies and merges", OUTSIDE: "the rest"}
)
DOES = MappingProxyType(
    {KERNEL: "computes", COPY: "copies and merges", OUTSIDE: "is outside of attention's passes"}
)
SHOWN_WAITS = 3
SHOWN_FINDINGS = 2


class Explanation(NamedTuple):
    """A run explained.

    Attributes:
        seconds: of a step, the mean over the recorded ones.
        parts: seconds of a step by what a rank does, KERNEL, WAIT, COPY or OUTSIDE; the mean over
            ranks. They add up to seconds.
        waits: of WAIT, the seconds by cause.
        by_rank: parts of each rank.
        findings: causes, the dearest first.
        simulation: of the first subject on machine; None: it is not known, and note says why.
    """

    run: Run
    steps: tuple[RecordedStep, ...]
    seconds: float
    parts: dict[str, float]
    waits: dict[Cause, float]
    by_rank: tuple[dict[str, float], ...]
    kernels: KernelRates
    links: dict[Link, LinkRate]
    findings: tuple[Finding, ...]
    subjects: tuple[Subject, ...]
    machine: Machine | None
    simulation: Simulation | None
    change: Change | None
    note: str = ""

    @property
    def clock_error(self) -> float:
        """Seconds by which the ranks' clocks may have differed when the recording began."""
        return max(clock.error for clock in clocks(self.run.ranks))

    @property
    def simulated_seconds(self) -> float | None:
        """Simulated seconds of the passes of a step, if it has calls of one kind alone."""
        if self.simulation is None or len(self.subjects) != 1:
            return None
        forward, backward = self.subjects[0].passes
        simulation = self.simulation
        return forward * simulation.forward_seconds + backward * simulation.backward_seconds

    def lines(self) -> list[str]:
        """The explanation in at most five lines."""
        return [*self._lines()][:5]

    def _lines(self) -> Iterator[str]:
        num, n = len(self.steps), len(self.run.ranks)
        shares = ", ".join(
            f"{name} {100 * self.parts[part] / self.seconds:.0f} %" for part, name in PARTS.items()
        )
        plan = self.subjects[0].name
        yield (
            f"step: {quantity(self.seconds, 's')} on {n} ranks, mean of {num} recorded, {plan}: "
            f"{shares}"
        )
        named = self.findings[:SHOWN_FINDINGS]
        for word, finding in zip(("first", "then"), named, strict=False):
            yield f"{word}: {finding.text}"
        if not named:
            yield "first: no rank, link or document stands out"
        waits = sorted(self.waits.items(), key=lambda item: -item[1])[:SHOWN_WAITS]
        if waits:
            texts = ", ".join(f"{quantity(x, 's')} {_while(cause)}" for cause, x in waits)
            yield f"a rank waits {quantity(self.parts[WAIT], 's')}: {texts}"
        yield f"would help: {self._help()}"

    def _help(self) -> str:
        """Return what would shorten the step, and by how much."""
        texts = []
        if self.findings and self.findings[0].kind != "uneven work":
            first = self.findings[0]
            gain = first.seconds / self.seconds
            what = "rank" if first.kind == "slow rank" else "link"
            texts.append(f"that {what} as fast as others, up to {-100 * gain:.0f} % of the step")
        if self.change is not None:
            texts.append(f"{text_of(self.change)} (simulated on {self._machine_name()})")
        elif self.simulation is not None:
            texts.append(f"no other plan or layout (simulated on {self._machine_name()})")
        else:
            texts.append(f"no plan was simulated: {self.note}")
        return "; ".join(texts)

    def _machine_name(self) -> str:
        assert self.machine is not None
        is_own = self.machine.name == "this run"
        return "a machine of this run's rates" if is_own else self.machine.name

    def as_json(self) -> dict[str, Any]:
        """All figures, in seconds."""
        return {
            "steps": [step.number for step in self.steps],
            "world_size": len(self.run.ranks),
            "plans": [subject.name for subject in self.subjects],
            "seconds": self.seconds,
            "step_seconds": [step.seconds for step in self.steps],
            "parts": self.parts,
            "waits": [
                {"kind": cause.kind, "rank": cause.rank, "peer": cause.peer, "seconds": seconds}
                for cause, seconds in sorted(self.waits.items(), key=lambda item: -item[1])
            ],
            "by_rank": self.by_rank,
            "slowness": self.kernels.slowness,
            "links": [rate._asdict() for rate in self.links.values()],
            "findings": [finding._asdict() for finding in self.findings],
            "machine": self.machine and self.machine.name,
            "simulated_seconds": self.simulated_seconds,
            "change": self.change and {**self.change._asdict(), "gain": self.change.gain},
            "clock_error": self.clock_error,
            "lost_lines": self.run.num_lost,
            "note": self.note,
            "lines": self.lines(),
        }


def explain(run: Run, machine: Machine | None = None, plan: Plan | None = None) -> Explanation:
    """Explain a recorded run.

    Args:
        plan: that the run must have had; None: any.
        machine: on which the run's plan and others are simulated; None: the one that cp was given,
            or else one of the rates that the rows show.
    Raises:
        ValueError: if the machine is of another kind of device than the run's, or the run had
            another plan.
    """
    steps = recorded_steps(run)
    kernels, links = kernel_rates(run, steps), link_rates(run, steps)
    some = subjects(run, steps)
    main = some[0]
    if plan is not None:
        check_plan(main, plan)
    by_rank, waits, seconds = _sums(steps)
    n = len(by_rank)
    parts = {part: sum(one[part] for one in by_rank) / n for part in PARTS}
    found = findings(run, seconds, kernels, links, main.work, main.plans and main.plans[0])
    simulation = change = None
    if main.work is not None:
        machine = machine or machine_of(run, steps, kernels, links, main.work)
        _check_machine(run, machine)
        simulation = simulated(main, machine)
        assert simulation is not None
        change = best_change(main, machine, simulation)
    return Explanation(
        run,
        tuple(steps),
        seconds,
        parts,
        waits,
        by_rank,
        kernels,
        links,
        tuple(found),
        tuple(some),
        machine,
        simulation,
        change,
        main.why,
    )


def _check_machine(run: Run, machine: Machine) -> None:
    device = run.ranks[0].cases[0].about["device"]
    if (device == "cpu") != (machine.device == "cpu"):
        raise ValueError(
            f"machine {machine.name!r} is made of {machine.device} devices, but the rows of "
            f"{run.ranks[0].path} were recorded on {device}; name the machine that the run was on"
        )


def _sums(
    steps: Sequence[RecordedStep],
) -> tuple[tuple[dict[str, float], ...], dict[Cause, float], float]:
    """Parts of each rank, causes of waiting (the mean over ranks), and seconds of a step.

    A rank whose step ends before the longest one waits for the rank of that, whatever it does.
    """
    n = len(steps[0].pieces)
    by_rank = [dict.fromkeys(PARTS, 0.0) for _ in range(n)]
    waits: dict[Cause, float] = defaultdict(float)
    for step in steps:
        lengths = [pieces[-1].end - pieces[0].start for pieces in step.pieces]
        longest = lengths.index(max(lengths))
        for rank, pieces in enumerate(step.pieces):
            rest = _last(step.pieces[longest], longest, lengths[longest] - lengths[rank])
            for piece in (*pieces, *rest):
                by_rank[rank][piece.kind] += piece.seconds / len(steps)
                if piece.cause is not None:
                    waits[piece.cause] += piece.seconds / len(steps) / n
    return tuple(by_rank), dict(waits), sum(step.seconds for step in steps) / len(steps)


def _last(pieces: Sequence[Piece], rank: int, seconds: float) -> Iterator[Piece]:
    """Yield the last seconds of a rank's step, as causes for which another rank waits."""
    start = pieces[-1].end - seconds
    for piece in pieces:
        if seconds > 0 and piece.end > start:
            begin, cause = max(piece.start, start), piece.cause or Cause(piece.kind, rank)
            yield Piece(begin, piece.end, WAIT, cause)


def _while(cause: Cause) -> str:
    if cause.kind == LINK:
        return f"for the link from rank {cause.rank} to rank {cause.peer}"
    return f"while rank {cause.rank} {DOES[cause.kind]}"
