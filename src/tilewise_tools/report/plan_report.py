"""The page of a candidate: who computes what and when, what it moves, and what else there is."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property

from tilewise.arguments import ITEM_BYTES
from tilewise.plan.ir import Plan
from tilewise.planning.advisor import Setting, nearest_settings
from tilewise.planning.candidate import Candidate, PlanRow
from tilewise.planning.reasons import TIE
from tilewise.simulation.machine import Machine
from tilewise.simulation.simulator import Simulation, simulate
from tilewise.workload import Workload
from tilewise_tools.report import plan_charts
from tilewise_tools.report.page import Fact, Page, Section, TextTable
from tilewise_tools.report.studies import Studies, StudyEntry
from tilewise_tools.report.timeline import classes, timeline_figure
from tilewise_tools.report.words import count, in_words, mask_words, quantity, short, times

LONGEST_MASK = 200  # letters
RANKED = (
    *("strategy", "both passes", "to best", "waiting", "copies, merges"),
    *("sent by a rank", "peak memory", "save", "plan"),
)


@dataclass(frozen=True)
class ReportedPlan:
    """The subject of the page: a plan, its workload and its machine.

    Args:
        ranked: the candidates that were compared, best first; None: there were none.
        least_seconds, least_bytes: what no plan can fall below; 0: not known.
    """

    plan: Plan
    work: Workload  # with the candidate's own layout, save and wire
    machine: Machine
    backward_plan: Plan | None = None  # None: plan serves both passes
    reason: str = ""  # in words, why it was chosen
    ranked: TextTable | None = None
    least_seconds: float = 0.0
    least_bytes: float = 0.0
    peak_bytes: int = 0  # of a device, where it has been counted
    ties: tuple[str, ...] = ()  # strategies that take as long, as far as a simulation can tell
    settings: tuple[Setting, ...] = ()  # the best of other libraries
    rows: tuple[PlanRow, ...] = ()  # those of ranked whose plan serves both passes

    @property
    def plans(self) -> tuple[Plan, Plan]:
        """Forward's and backward's."""
        return self.plan, self.backward_plan or self.plan

    @cached_property
    def entry(self) -> StudyEntry:
        simulation = simulate(self.plan, self.work, self.machine, self.backward_plan)
        return StudyEntry(plan_charts.THIS, self.plan, simulation)


def subject_of(candidate: Candidate) -> ReportedPlan:
    """A candidate, for its own layout, save and wire."""
    best = candidate.rows[0].seconds if candidate.rows else 1.0
    ties = tuple(row.strategy for row in candidate.rows[1:] if row.seconds <= TIE * best)
    rows = tuple(
        (
            row.strategy,
            quantity(row.seconds, "s"),
            times(row.seconds / best) + ", tie" * (row.strategy in ties),
            quantity(row.exposed_seconds, "s"),
            quantity(row.overhead_seconds, "s"),
            quantity(row.sent_bytes, "B"),
            quantity(row.peak_bytes, "B"),
            row.save,
            short(row.plan)
            + f"; backward {short(row.backward_plan)}" * (row.backward_plan != row.plan),
        )
        for row in candidate.rows
    )
    return ReportedPlan(
        candidate.plan,
        candidate.own_work,
        candidate.machine,
        candidate.backward_plan,
        candidate.reason,
        TextTable(RANKED, rows) if rows else None,
        *candidate.distances,
        candidate.peak_bytes,
        ties,
        nearest_settings(candidate),
        tuple(row for row in candidate.rows if row.plan == row.backward_plan),
    )


def page_of(
    subject: ReportedPlan, *, full: bool = False, progress: Callable[[str], object] = str
) -> Page:
    """All figures and tables of a candidate.

    Args:
        full, progress: as for Studies.
    """
    work, plan, entry = subject.work, subject.plan, subject.entry
    studies = Studies(
        work,
        subject.machine,
        full=full,
        progress=progress,
        world_size=plan.world_size,
        rows={row.plan: row for row in subject.rows},
    )
    other_entries = studies.compared(plan.world_size)
    rescaled, every = studies.rescaled(entry, subject.backward_plan), [entry, *other_entries]
    scaling = [plan_charts.scaling(studies, entry)] if studies.sizes() else []
    reason = subject.reason or "What else one would try by hand, simulated on the same machine."
    sections = (
        Section("why", "Why this plan", reason, (plan_charts.seconds(every),), subject.ranked),
        *_others(subject),
        _assignments(subject),
        _timelines(entry.simulation),
        Section("traffic", "Traffic", figures=(plan_charts.bytes_by_link(every),)),
        Section(
            "elsewhere",
            "Other clusters",
            "The same layer simulated on more or fewer devices, and on faster or slower links.",
            (*scaling, plan_charts.sensitivity(rescaled)),
            narrow=True,
        ),
        Section("inputs", "Machine and workload", table=_inputs(subject)),
    )
    lead = (
        f"{work.num_heads} query and {work.num_kv_heads} KV heads of {work.shown_widths}, "
        f"{work.dtype}, {mask_words(work.mask)} mask, {_layout(work)} layout, on "
        f"{subject.machine.name}. Every time on this page is simulated, of one layer's forward and "
        "backward pass."
    )
    return Page(
        f"Attention over {count(work.num_tokens)} tokens on {plan.world_size} devices",
        ", then ".join(dict.fromkeys(in_words(one.name) for one in subject.plans)),
        lead,
        tuple(_facts(subject, other_entries)),
        sections,
        verdict=_verdict(subject, other_entries),
    )


def _verdict(subject: ReportedPlan, other_entries: list[StudyEntry]) -> str:
    """Return what the plan takes, beside a ring, its ties and other libraries' best settings."""
    seconds = subject.entry.simulation.seconds
    sentences = [f"It takes {quantity(seconds, 's')} a layer"]
    for entry in other_entries:
        if entry.family == "ring" and entry.plan != subject.plan:
            ratio = entry.simulation.seconds / seconds
            word = f"{times(ratio)} faster" if ratio >= 1 else f"{times(1 / ratio)} slower"
            sentences[0] += f", {word} than a ring"
    if subject.ties:
        sentences.append(f"It ties with {', '.join(subject.ties)} (within {100 * (TIE - 1):.1f} %)")
    for setting in subject.settings:
        more = setting.seconds / seconds
        takes = "is as good" if more <= TIE else f"takes {times(more)} as long"
        sentences.append(f"The best setting of {setting.library}, {setting.scheme}, {takes}")
    return ". ".join(sentences) + "."


def _others(subject: ReportedPlan) -> Iterator[Section]:
    """Section of other libraries' best settings for the same layer and ranks."""
    seconds = subject.entry.simulation.seconds
    rows = tuple(
        (
            setting.library,
            quantity(setting.seconds, "s"),
            times(setting.seconds / seconds) + ", tie" * (setting.seconds <= TIE * seconds),
            setting.options,
            short(setting.plan),
        )
        for setting in subject.settings
    )
    if rows:
        header = ("library", "both passes", "to this plan", "options", "the same plan here")
        yield Section(
            "others",
            "Other libraries' best settings",
            "The fastest setting that each library's code allows here, simulated on this machine.",
            table=TextTable(header, rows),
        )


def _timelines(simulation: Simulation) -> Section:
    """The ranks that wait longest, as most do, and least; others on demand."""
    names = classes(simulation)
    more = (timeline_figure(simulation),) if names else ()
    return Section("when", "Timeline", figures=(timeline_figure(simulation, names),), more=more)


def _facts(subject: ReportedPlan, other_entries: list[StudyEntry]) -> Iterator[Fact]:
    simulation = subject.entry.simulation
    sent_bytes, by_link = simulation.sent_bytes, simulation.bytes_by_link
    outside = sum(num_bytes for link, num_bytes in by_link.items() if link != "inside")
    passes = quantity(simulation.forward_seconds, "s"), quantity(simulation.backward_seconds, "s")
    yield Fact(
        "Time per layer",
        quantity(simulation.seconds, "s"),
        "{} forward, {} backward".format(*passes),
    )
    for entry in other_entries:
        if entry.family == "ring":
            seconds = entry.simulation.seconds
            ratio = seconds / simulation.seconds
            name, ratio = ("Faster than a ring", ratio) if ratio >= 1 else ("Slower", 1 / ratio)
            yield Fact(name, times(ratio), f"a ring takes {quantity(seconds, 's')}")
    hidden = "messages not hidden behind compute"
    yield Fact("Waiting", quantity(simulation.exposed_seconds, "s"), hidden)
    share = simulation.compute_seconds / simulation.seconds if simulation.seconds else 1.0
    yield Fact("Computing", f"{100 * share:.0f} %", "of the time, on the busiest rank")
    yield Fact(
        "Sent by a rank", quantity(sent_bytes, "B"), f"{quantity(outside, 'B')} leave the node"
    )
    peak = quantity(subject.peak_bytes or simulation.peak_bytes, "B")
    yield Fact("Peak memory", peak, "of a device, buffers included")
    if distances := subject.least_seconds:
        note = f"no plan is below {quantity(distances, 's')}"
        yield Fact("Over the compute bound", times(simulation.seconds / distances), note)
    if distances := subject.least_bytes:
        note = f"equal shares send at least {quantity(distances, 'B')}"
        yield Fact("Over the byte bound", times(sent_bytes / distances), note)


def _assignments(subject: ReportedPlan) -> Section:
    figures = plan_charts.assignments(subject.work.resolve(subject.plan)[0])
    groups = subject.plan.num_head_groups
    intro = (
        "Rows are shards of queries, columns shards of keys and values: every cell is computed by "
        "one rank. A rank's own shards need not travel; all others of its rows and columns must."
    )
    if groups > 1:
        intro += f" There are {groups} groups of heads, computed alike by different ranks."
    return Section("assignment", "Assignment", intro, figures[:1], more=figures[1:])


def _layout(work: Workload) -> str:
    return work.layout if isinstance(work.layout, str) else work.layout.name


def _inputs(subject: ReportedPlan) -> TextTable:
    work, (plan, backward_plan) = subject.work, subject.plans
    kv_bytes = work.num_tokens * work.num_kv_heads * sum(work.widths) * ITEM_BYTES(work.dtype)
    rows = (
        ("tokens", f"{work.num_tokens:,}"),
        ("heads", f"{work.num_heads} query, {work.num_kv_heads} KV, {work.shown_widths} wide"),
        ("dtype", work.dtype),
        ("on the wire", str(work.wires)),
        ("mask", repr(work.mask)[:LONGEST_MASK]),
        ("layout", _layout(work)),
        ("save, for backward", work.save or plan.default_save),
        ("a device's K and V", quantity(kv_bytes / plan.world_size, "B")),
        ("plan forward", plan.name),
        ("plan backward", backward_plan.name),
        *_machine(subject.machine),
    )
    return TextTable(("field", "value"), rows)


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
