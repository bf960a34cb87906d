"""The attention of a recorded run: its plans and workload, and a machine of its rates."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from tilewise.plan.ir import Plan
from tilewise.plan.payload import Payload
from tilewise.planning.candidate_format import (
    FileLayout,
    FilePlan,
    read_layout,
    read_plan,
    read_workload,
)
from tilewise.serializer import read
from tilewise.simulation.machine import KernelSpeed, Link, Machine, read_machine
from tilewise.workload import Workload
from tilewise_tools.explain.rates import (
    KernelFit,
    KernelRates,
    LinkRate,
    node_size,
    usual_bandwidth,
)
from tilewise_tools.explain.rows import CaseRow, Run
from tilewise_tools.explain.waiting import COPY, RecordedStep

FAST = 1e13
"""Bytes a second of links for which nobody waited: they cost nothing that was seen."""


class Subject(NamedTuple):
    """A call of attention that was recorded.

    Attributes:
        passes: how many of its passes a step has, forward and backward.
        plans, work: None where no file holds them; why says the reason.
    """

    case: CaseRow
    passes: tuple[float, float]
    plans: tuple[Plan, Plan] | None
    work: Workload | None
    why: str = ""

    @property
    def name(self) -> str:
        """The plans' names."""
        return " / ".join(dict.fromkeys(self.case.about["plans"]))


def subjects(run: Run, steps: Sequence[RecordedStep]) -> list[Subject]:
    """Return the kinds of calls of a run, those of most passes first."""
    counts: dict[tuple[Any, ...], list[float]] = {}
    cases: dict[tuple[Any, ...], CaseRow] = {}
    for step in steps:
        for one in run.ranks[0].steps[step.number].passes:
            _, *key = one.case.identity
            kind = repr(key), one.case.about["batch"]
            cases.setdefault(kind, one.case)
            counts.setdefault(kind, [0.0, 0.0])[one.case.backward] += 1 / len(steps)
    found = [_subject(run, cases[kind], (a, b)) for kind, (a, b) in counts.items()]
    return sorted(found, key=lambda subject: -sum(subject.passes))


def _subject(run: Run, case: CaseRow, passes: tuple[float, float]) -> Subject:
    about, n = case.about, len(run.ranks)
    if "unwritten" in about:
        return Subject(case, passes, None, None, about["unwritten"])
    try:
        data = about["workload"]
        layout = read_layout(read(FileLayout, about["layout"], "layout"), data["num_tokens"], n)
        work = read_workload(data, layout)
        save = work.save or "replay"
        forward, backward = (
            read_plan(read(FilePlan, one, "plan"), n, save, (work.mask, layout))
            for one in about["written"]
        )
    except (KeyError, ValueError) as error:
        return Subject(case, passes, None, None, str(error))
    return Subject(case, passes, (forward, backward), work)


def machine_of(
    run: Run,
    steps: Sequence[RecordedStep],
    kernels: KernelRates,
    links: dict[tuple[int, int], LinkRate],
    work: Workload,
) -> Machine:
    """A machine with the rates of the recorded run: its kernels, links, copies and merges.

    The machine that cp was given is taken as it is, with these rates in place of its own only where
    there is none.
    """
    given = run.head.get("machine")
    if given:
        return read_machine("\n".join(given), "the run's machine")
    inside, between = (usual_bandwidth(run, links, inside=x) for x in (True, False))
    fastest = between or inside or FAST
    tables = tuple(
        _table(fit or kernels.fits[not backward], work, bool(backward))
        for backward, fit in enumerate(kernels.fits)
    )
    copied, merged = _memory_rates(run, steps)
    return Machine(
        "this run",
        node_size(run),
        Link(max(inside or fastest, 1.0)),
        Link(max(fastest, 1.0)),
        tables,
        nics=node_size(run),
        pack_bandwidth=copied,
        merge_bandwidth=merged,
        call_seconds=_call_seconds(run, steps),
        device="cpu" if run.ranks[0].cases[0].about["device"] == "cpu" else "cuda",
        source="rows of tw.record",
    )


def _table(fit: KernelFit | None, work: Workload, backward: bool) -> KernelSpeed:
    payload = Payload(
        backward, work.num_heads, work.num_kv_heads, *work.widths, work.dtype, work.wires
    )
    launch, pair_seconds, _ = fit or KernelFit(0.0, 0.0, 0.0)
    flops = payload.flop / work.num_heads / max(pair_seconds, 1e-18)
    return KernelSpeed(
        work.dtype, backward, (1.0,), (1.0,), ((flops,),), launch_seconds=max(launch, 0.0)
    )


def _memory_rates(run: Run, steps: Sequence[RecordedStep]) -> tuple[float | None, float | None]:
    """Return the bandwidths of copies and of merges that a run shows, in bytes per second.

    A copy reads and writes each number; a merge reads two and writes one. None: it shows none.
    """
    sums = {"Copy": [0.0, 0.0], "Merge": [0.0, 0.0]}
    for step in steps:
        for rank, pieces in enumerate(step.pieces):
            passes = run.ranks[rank].steps[step.number].passes
            for piece in pieces:
                place, number = piece.place
                ops = passes[place].case.ops if place >= 0 and piece.kind == COPY else ()
                if 0 <= number < len(ops) and ops[number].kind in sums:
                    sums[ops[number].kind][0] += ops[number].num_bytes
                    sums[ops[number].kind][1] += piece.seconds
    (copied, copying), (merged, merging) = sums.values()
    rates = copied / (2 * copying) if copying else 0, merged / (3 * merging) if merging else 0
    return rates[0] or None, rates[1] or None


def _call_seconds(run: Run, steps: Sequence[RecordedStep]) -> tuple[float, float]:
    """Mean seconds in which a pass is set up, forward and backward."""
    found: tuple[list[float], list[float]] = [], []
    for rows in run.ranks:
        for step in steps:
            for one in rows.steps[step.number].passes:
                found[one.case.backward].append(one.marks[0] - one.begin)
    forward, backward = (sum(some) / len(some) if some else 0.0 for some in found)
    return forward, backward


def check_plan(subject: Subject, plan: Plan) -> None:
    """Raise ValueError unless a call's forward pass ran this plan."""
    digest = subject.case.about["digests"][0]
    if subject.work is None:
        given = plan.name
        same = given == subject.case.about["plans"][0]
    else:
        given = subject.work.resolve(plan)[0].plan.fingerprint
        same = given == digest
    if not same:
        raise ValueError(f"the rows are of another plan: of {digest}, not of {given}")
