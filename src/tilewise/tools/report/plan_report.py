"""The page of a candidate: who computes what and when, what it moves, and what else there is."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property

from tilewise.arguments import ITEM_BYTES
from tilewise.plan.ir import Plan
from tilewise.planning.candidate import Candidate
from tilewise.simulation.machine import Machine
from tilewise.simulation.simulator import simulate
from tilewise.tools.report import plan_charts
from tilewise.tools.report.chart import (
    Figure,
    Section,
    Table,
    count,
    in_words,
    quantity,
    short,
    times,
)
from tilewise.tools.report.page import Fact, Page
from tilewise.tools.report.studies import Studies, StudyEntry
from tilewise.workload import Workload

LONGEST_MASK = 200  # letters
RANKED = (
    *("strategy", "both passes", "to best", "waiting", "sent by a rank", "peak memory"),
    *("operands", "plan", "backward plan"),
)


@dataclass(frozen=True)
class ReportedPlan:
    """What the page is about.

    Args:
        ranked: the candidates that were compared, best first; None: there were none.
        least_seconds, least_bytes: what no plan can fall below; 0: not known.
    """

    plan: Plan
    work: Workload  # with the candidate's own layout, save and wire
    machine: Machine
    backward_plan: Plan | None = None  # None: plan serves both passes
    reason: str = ""  # in words, why it was chosen
    ranked: Table | None = None
    least_seconds: float = 0.0
    least_bytes: float = 0.0
    peak_bytes: int = 0  # of a device, where it has been counted

    @cached_property
    def entry(self) -> StudyEntry:
        plans = self.plan, self.work, self.machine, self.backward_plan
        return StudyEntry(plan_charts.THIS, self.plan, simulate(*plans))


def subject_of(candidate: Candidate) -> ReportedPlan:
    """A candidate, for its own layout, save and wire."""
    best = candidate.rows[0].seconds if candidate.rows else 1.0
    rows = tuple(
        (
            row.strategy,
            quantity(row.seconds, "s"),
            times(row.seconds / best),
            quantity(row.exposed_seconds, "s"),
            quantity(sum(row.bytes_by_link.values()), "B"),
            quantity(row.peak_bytes, "B"),
            row.save,
            short(row.plan),
            "same" if row.backward_plan == row.plan else short(row.backward_plan),
        )
        for row in candidate.rows
    )
    return ReportedPlan(
        candidate.plan,
        candidate.own_work,
        candidate.machine,
        candidate.backward_plan,
        candidate.reason,
        Table(RANKED, rows) if rows else None,
        *candidate.distances,
        candidate.peak_bytes,
    )


def page_of(
    subject: ReportedPlan, *, full: bool = False, tell: Callable[[str], object] = str
) -> Page:
    """All figures and tables of a candidate.

    Args:
        full, tell: as for Studies.
    """
    studies = Studies(subject.work, subject.machine, full=full, tell=tell)
    others = studies.compared(subject.plan.world_size)
    found = studies.rescaled(subject.entry, subject.backward_plan)
    entries = [subject.entry, *others]
    sections = (
        _choice(subject, entries),
        _assignments(subject),
        Section("when", "Timeline", figures=(plan_charts.timeline_figure(subject.entry),)),
        Section("traffic", "Traffic", figures=(plan_charts.bytes_by_link(entries),)),
        Section(
            "elsewhere",
            "Other clusters",
            "The same layer simulated on more or fewer devices, and on faster or slower links.",
            (plan_charts.scaling(studies, subject.entry), plan_charts.sensitivity(found)),
            narrow=True,
        ),
        _inputs(subject),
    )
    return Page(
        f"Attention over {count(subject.work.num_tokens)} tokens on "
        f"{subject.plan.world_size} devices",
        _title(subject),
        _lead(subject),
        _facts(subject, others),
        sections,
    )


def _title(subject: ReportedPlan) -> str:
    forward, back = in_words(subject.plan.name), in_words(_back(subject).name)
    return forward if forward == back else f"{forward}, then {back}"


def _back(subject: ReportedPlan) -> Plan:
    return subject.backward_plan or subject.plan


def _lead(subject: ReportedPlan) -> str:
    work, machine = subject.work, subject.machine
    return (
        f"{work.num_heads} query and {work.num_kv_heads} KV heads of {work.shown_widths}, "
        f"{work.dtype}, {_mask(subject)} mask, {_layout(subject)} layout, on {machine.name}. "
        "Every time on this page is simulated, of one layer's forward and backward pass."
    )


def _facts(subject: ReportedPlan, others: list[StudyEntry]) -> tuple[Fact, ...]:
    mine = subject.entry.simulation
    ring = next((entry for entry in others if entry.family == "ring"), None)
    sent = mine.bytes_by_link
    outer = {link: sent[link] for link in sent if link != "inside"}
    share = mine.compute_seconds / mine.seconds if mine.seconds else 1.0
    facts = [
        Fact(
            "Time per layer",
            quantity(mine.seconds, "s"),
            f"{quantity(mine.forward_seconds, 's')} forward, "
            f"{quantity(mine.backward_seconds, 's')} backward",
        ),
        Fact("Waiting", quantity(mine.exposed_seconds, "s"), "messages not hidden behind compute"),
        Fact("Compute", f"{100 * share:.0f} %", "of the time, on the busiest rank"),
        Fact(
            "Sent by a rank",
            quantity(sum(sent.values()), "B"),
            f"{quantity(sum(outer.values()), 'B')} leave the node",
        ),
        Fact(
            "Peak memory",
            quantity(subject.peak_bytes or mine.peak_bytes, "B"),
            "of a device, buffers included",
        ),
    ]
    if subject.least_seconds:
        over = times(mine.seconds / subject.least_seconds)
        least = quantity(subject.least_seconds, "s")
        facts.append(Fact("Over the compute bound", over, f"no plan is below {least}"))
    if subject.least_bytes:
        over = times(sum(sent.values()) / subject.least_bytes)
        least = quantity(subject.least_bytes, "B")
        facts.append(Fact("Over the byte bound", over, f"no even plan sends below {least}"))
    if ring is not None:
        ratio = ring.simulation.seconds / mine.seconds
        name, ratio = ("Faster than a ring", ratio) if ratio >= 1 else ("Slower", 1 / ratio)
        note = f"a ring takes {quantity(ring.simulation.seconds, 's')}"
        facts.insert(1, Fact(name, times(ratio), note))
    return tuple(facts)


def _choice(subject: ReportedPlan, entries: list[StudyEntry]) -> Section:
    intro = subject.reason or "What else one would try by hand, simulated on the same machine."
    return Section("why", "Why this plan", intro, (plan_charts.seconds(entries),), subject.ranked)


def _assignments(subject: ReportedPlan) -> Section:
    work, plan = subject.work, subject.plan
    figures: tuple[Figure, ...] = plan_charts.assignments(work.resolve(plan)[0])
    groups = plan.num_head_groups
    intro = (
        "Rows are shards of queries, columns shards of keys and values: every cell is computed by "
        "one rank. A rank's own shards need not travel; all others of its rows and columns must."
    )
    if groups > len(figures):
        intro += f" The first {len(figures)} of {groups} groups of heads are shown; the others "
        intro += "look the same, computed by other ranks."
    return Section("assignment", "Assignment", intro, figures, narrow=len(figures) > 1)


def _inputs(subject: ReportedPlan) -> Section:
    work, n = subject.work, subject.plan.world_size
    kv_bytes = work.num_tokens * work.num_kv_heads * sum(work.widths) * ITEM_BYTES(work.dtype)
    rows = (
        ("tokens", f"{work.num_tokens:,}"),
        ("heads", f"{work.num_heads} query, {work.num_kv_heads} KV, {work.shown_widths} wide"),
        ("dtype", work.dtype),
        ("on the wire", str(work.wires)),
        ("mask", repr(work.mask)[:LONGEST_MASK]),
        ("layout", _layout(subject)),
        ("operands for backward", work.save or subject.plan.default_save),
        ("a device's K and V", quantity(kv_bytes / n, "B")),
        ("plan forward", subject.plan.name),
        ("plan backward", _back(subject).name),
        *_machine(subject.machine),
    )
    return Section("inputs", "Machine and workload", table=Table(("field", "value"), rows))


def _mask(subject: ReportedPlan) -> str:
    return type(subject.work.mask).__name__.lower()


def _layout(subject: ReportedPlan) -> str:
    layout = subject.work.layout
    return layout if isinstance(layout, str) else layout.name


def _machine(machine: Machine) -> Iterator[tuple[str, str]]:
    nics = f"{machine.nics} NIC{'s' * (machine.nics > 1)}{', pooled' * machine.pooled}"
    yield "machine", machine.name
    yield "a node", f"{machine.node_size} devices, {nics}"
    for name, link in (
        ("link inside the node", machine.inside),
        ("link between nodes, a NIC", machine.between),
        ("link between racks", machine.across),
    ):
        if link:
            speed, latency = quantity(link.bandwidth, "B/s"), quantity(link.latency, "s")
            yield name, f"{speed} each way, {latency}"
    yield "device memory", quantity(machine.memory_bytes, "B")
    yield "kernel launch", quantity(machine.launch_seconds, "s")
    yield "figures from", machine.source or "a description without a source"
