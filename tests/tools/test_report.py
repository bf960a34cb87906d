"""The page of a plan: it shows what the plan and the simulator say, and asks for nothing else."""

import json
import re
from dataclasses import replace
from html.parser import HTMLParser

import numpy as np
import pytest
from support.report_pages import MACHINE, chart, subject

import tilewise as tw
from tilewise_tools.report import plan_charts
from tilewise_tools.report.drawing import Series, axis, bars, log_axis
from tilewise_tools.report.page import Figure, Page, written
from tilewise_tools.report.plan_report import page_of
from tilewise_tools.report.studies import Studies, StudyEntry
from tilewise_tools.report.timeline import timeline, timeline_figure
from tilewise_tools.report.words import count, in_words, mask_words, quantity, short, times

VOID = {"meta", "link", "img", "br"}


@pytest.fixture(scope="module")
def page() -> Page:
    return page_of(subject(tw.mesh(8, q_tile=2)))


def cells(figure: Figure) -> np.ndarray:
    """The ranks of an assignment's cells, -1 for none."""
    (trace,) = chart(figure).data
    return trace["customdata"]


def figures(page: Page) -> list[Figure]:
    return [figure for section in page.sections for figure in section.figures]


def test_numbers_have_three_digits_and_a_prefix():
    assert [quantity(x, "s") for x in (0.0123, 2e-6, 0, 90)] == ["12.3 ms", "2 µs", "0 s", "90 s"]
    assert [quantity(x, "B") for x in (999_900, 1.5e9, 0.25)] == ["1 MB", "1.5 GB", "0.25 B"]
    assert quantity(float("nan"), "s") == "–"  # noqa: RUF001 - the dash that is shown
    assert [count(n) for n in (1 << 20, 4096, 1000, 1536)] == ["1M", "4K", "1,000", "1.5K"]
    assert times(2.345)[:-1] == "2.35"
    assert [quantity(x, "x") for x in (0.5, 12.0)] == ["0.5x", "12x"]
    assert quantity(12.34, "%") == "12.3 %"


def test_a_plan_for_a_mask_is_named_without_the_mask():
    mask = tw.masks.causal_document([0, 3, 40, 128])
    plan = tw.needed(mask, tw.Workload(128, 8, 8, 8, mask=mask).layout_for(4).owned)
    assert short(plan.name) == "needed(the mask)" and in_words(plan.name) == "needed"
    assert short(f"ulysses(2, inner={plan.name})") == "ulysses(2, inner=needed(the mask))"


@pytest.mark.parametrize("longest", (0.0013, 7.0, 9.99e9))
def test_bars_have_few_ticks_with_units(longest: float):
    words = bars(axis("time"), "s", [Series("a", ["x"], [longest], [""], 0)]).layout["xaxis"]
    assert 3 <= len(words["tickvals"]) <= 8 and len({*words["ticktext"]}) == len(words["ticktext"])
    assert words["ticktext"][0] == "0 s" and words["tickvals"][-1] <= words["range"][1]


@pytest.mark.parametrize("values", [[1.0], [0.98, 1.0], [0.3, 0.9], [1e-6, 40.0], [0.0, 2.0]])
def test_logarithmic_axes_always_have_ticks_and_hold_their_values(values: list[float]):
    axis = log_axis("time", "s", values)
    low, high = (10**end for end in axis["range"])
    assert all(low < value < high for value in values if value)
    assert len(axis["tickvals"]) >= 3 and all(low <= place <= high for place in axis["tickvals"])
    assert len(set(axis["ticktext"])) == len(axis["tickvals"])


@pytest.mark.parametrize(
    "plan", [tw.ring(4), tw.mesh(6, q_tile=2), tw.ulysses(2, inner=tw.ring(3)), tw.all_gather(5)]
)
def test_every_cell_has_the_colour_of_the_rank_that_computes_it(plan: tw.Plan):
    found = plan_charts.assignments(tw.Workload(60, 2, 2, 8, layout="contiguous").resolve(plan)[0])
    assert len(found) == min(plan.num_head_groups, 2)
    for group, figure in enumerate(found):
        wanted = {
            (q, kv): rank
            for rank in range(plan.world_size)
            for step in plan.rank_steps(rank)
            for tile in step.tiles
            if tile.heads == group
            for q in tile.q
            for kv in tile.kv
        }
        shown = {place: int(rank) for place, rank in np.ndenumerate(cells(figure))}
        assert shown == wanted


def test_cells_that_a_mask_makes_needless_are_blank():
    work = tw.Workload(60, 1, 1, 8, mask=tw.Causal(), layout="contiguous")
    (figure,) = plan_charts.assignments(work.resolve(tw.ring(6))[0])
    blank = {place for place, rank in np.ndenumerate(cells(figure)) if rank < 0}
    assert blank == {(q, kv) for q in range(6) for kv in range(6) if kv > q}


def test_large_tables_are_thinned_and_keep_their_ranks():
    work = tw.Workload(4096, 1, 1, 8, layout="contiguous")
    (figure,) = plan_charts.assignments(work.resolve(tw.mesh(1024, q_tile=32))[0])
    assert cells(figure).shape == (256, 256)
    assert set(cells(figure).ravel().tolist()) <= set(range(1024))


def test_the_timeline_has_all_compute_and_waiting():
    work = tw.Workload(1 << 14, 8, 8, 64)
    machine = replace(tw.Machine.preset("a100x8"), merge_bandwidth=None)  # drawn with tiles
    found = tw.simulate(tw.double_ring(2, 4), work, machine, exact=True)
    drawn = timeline(found)
    assert [rank for rank, _ in drawn.ranks] == list(range(8))
    assert drawn.end == pytest.approx(found.seconds)
    for row, (rank, _) in enumerate(drawn.ranks):
        bars = [bar for bar in drawn.bars if bar.row == row]
        assert all(0 <= bar.start <= bar.start + bar.seconds <= drawn.end * 1.0001 for bar in bars)
        busy = sum(bar.seconds for bar in bars if bar.lane == "compute")
        wanted = sum(use.compute_seconds for use in found.use(rank))
        assert busy == pytest.approx(wanted, rel=0.01)


def test_the_axis_of_time_has_one_unit_in_which_all_on_it_is_given():
    work = tw.Workload(1 << 14, 8, 8, 64)
    found = tw.simulate(tw.ring(4), work, MACHINE)
    figure = timeline_figure(found)
    drawn = chart(figure)
    axis = drawn.layout["xaxis"]
    words, unit = axis["title"]["text"].split(" (")
    assert words == "time"
    assert "tickformat" not in axis
    seconds = {"s)": 1.0, "ms)": 1e-3, "µs)": 1e-6}[unit]
    assert axis["range"][1] * seconds == pytest.approx(found.seconds)
    assert 1 <= axis["range"][1] < 1000
    jumps = {name: (start * seconds, stop * seconds) for name, start, stop in figure.jumps}
    assert jumps["Forward"] == pytest.approx((0, found.forward_seconds))
    assert jumps["Backward"] == pytest.approx((found.forward_seconds, found.seconds))
    ends = [b + x for bar in drawn.data for b, x in zip(bar["base"], bar["x"], strict=True)]
    assert max(ends) * seconds == pytest.approx(found.seconds, rel=1e-3)


def test_bars_of_time_add_up_to_the_time_where_ranks_differ():
    mask = tw.masks.causal_document([0, 100, 1700, 4096])
    entries = Studies(tw.Workload(1 << 12, 8, 2, 64, mask=mask), MACHINE).compared(16)
    figure = plan_charts.seconds(entries)
    *bars, totals = chart(figure).data
    drawn = [sum(parts) for parts in zip(*(bar["x"] for bar in bars), strict=True)]
    assert drawn == totals["x"] == pytest.approx(sorted(x.simulation.seconds for x in entries))
    assert any(
        x.simulation.compute_seconds + x.simulation.exposed_seconds > 1.01 * x.simulation.seconds
        for x in entries
    )


def test_a_timeline_of_many_ranks_shows_some():
    work = tw.Workload(1 << 12, 8, 8, 64, mask=tw.Causal())
    found = tw.simulate(tw.ring(16), work, MACHINE, exact=True)
    assert len(timeline(found).ranks) == 12


@pytest.mark.parametrize(
    ("mask", "words"),
    (
        (tw.Causal(), "causal"),
        (tw.Causal() & tw.Window(4095, 0), "causal & window(4095, 0)"),
        (tw.Causal() & (tw.Document([0, 9, 40]) | tw.Full()), "causal & (document | full)"),
        (
            tw.Causal() & tw.Document([0, 9, 40]) & tw.Window(3, 3),
            "causal & document & window(3, 3)",
        ),
    ),
)
def test_a_composed_mask_is_named_by_its_parts(mask: tw.Mask, words: str):
    assert mask_words(mask) == words


def test_bytes_by_link_are_the_simulators():
    work = tw.Workload(1 << 12, 8, 2, 64)
    entries = Studies(work, MACHINE).compared(16)
    figure = plan_charts.bytes_by_link(entries)
    *bars, totals = chart(figure).data
    drawn = [sum(parts) for parts in zip(*(bar["x"] for bar in bars), strict=True)]
    assert drawn == totals["x"]
    wanted = sorted(entry.simulation.sent_bytes for entry in entries)
    assert drawn == wanted
    assert any(sum(x.simulation.bytes_by_link.values()) > x.simulation.sent_bytes for x in entries)
    assert {entry.family for entry in entries} >= {"ring", "mesh", "hybrid", "double ring"}


def test_scaling_goes_from_8_to_1024_or_fully_to_4096_where_the_sequence_is_long():
    work = tw.Workload(1 << 20, 8, 8, 64, mask=tw.Causal())
    assert Studies(work, MACHINE).sizes() == [1 << power for power in range(3, 11)]
    assert Studies(work, MACHINE, full=True).sizes()[-1] == 4096
    short = Studies(tw.Workload(64, 8, 8, 64), MACHINE)
    assert short.sizes() == [8, 16, 32]
    (ring,) = (entry for n, entry in short.scaled() if n == 16 and entry.family == "ring")
    assert ring.simulation.seconds == tw.simulate(tw.ring(16), short.work, MACHINE).seconds


def test_more_bandwidth_is_never_slower():
    studies = Studies(tw.Workload(1 << 12, 8, 8, 64), MACHINE)
    plan = tw.ring(16)
    this = StudyEntry("this plan", plan, tw.simulate(plan, studies.work, MACHINE))
    found = [e.simulation.seconds for _, e in studies.rescaled(this, None) if e.family == "ring"]
    assert len(found) == 5 and found == sorted(found, reverse=True)


class Reader(HTMLParser):
    """Collects addresses, scripts, and the elements left open."""

    def __init__(self):
        super().__init__()
        self.addresses, self.scripts, self.open, self.plots = [], [], [], []
        self.kind = ""

    def handle_starttag(self, tag, attrs):
        words = dict(attrs)
        self.addresses += [words[name] for name in ("src", "href") if name in words]
        self.plots += [words] if "plot" in (words.get("class") or "").split() else []
        if tag not in VOID:
            self.open.append(tag)
        self.kind = words.get("type", tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if self.open and self.open[-1] == "script":
            self.scripts.append((self.kind, data))


def test_the_page_is_one_file_and_needs_no_network(page: Page):
    html = written(page)
    reader = Reader()
    reader.feed(html)
    assert not reader.open
    assert all(address.startswith("#") for address in reader.addresses)
    assert "default-src 'none'" in html
    assert html.count("plotly.js v") == 1
    assert "It is &lt;small&gt; &amp; fast." in html
    drawn = [json.loads(text) for kind, text in reader.scripts if kind == "application/json"]
    assert len(drawn) == len(reader.plots) + 1 == len(figures(page)) + 1
    assert not re.search(r"url\(|@import", html.partition("</style>")[0])


def test_every_figure_has_words_and_numbers(page: Page):
    reader = Reader()
    reader.feed(written(page))
    assert all(len(words["aria-label"]) > 60 and words["role"] == "img" for words in reader.plots)
    names = [figure.name for figure in figures(page)]
    assert len(set(names)) == len(names)
    for figure in figures(page):
        assert figure.title and figure.caption.endswith(".") and figure.rows
        assert chart(figure).layout["xaxis"]["title"]["text"]


def test_the_head_says_what_the_simulator_says(page: Page):
    mine = tw.simulate(tw.mesh(8, q_tile=2), subject(tw.ring(8)).work, MACHINE)
    facts = {fact.name: fact.value for fact in page.facts}
    assert facts["Time per layer"] == quantity(mine.seconds, "s")
    assert facts["Sent by a rank"] == quantity(mine.sent_bytes, "B")
    assert facts["Peak memory"] == quantity(mine.peak_bytes, "B")


def test_documents_and_two_plans_have_a_page():
    two = subject(tw.ulysses(2, inner=tw.mesh(4, q_tile=2)), 32, tw.Document((0, 14, 32)))
    two = type(two)(two.plan, two.work, MACHINE, tw.mesh(8, q_tile=4))
    page = page_of(two)
    assert page.title == "Ulysses 2 × mesh 2 × 2, then mesh 4 × 2"  # noqa: RUF001
    assert "timeline" in [figure.name for figure in figures(page)]


@pytest.mark.parametrize(
    "plan, words",
    [
        (tw.ring(8), "ring 8"),
        (tw.ring(8, moves="q"), "ring 8 of queries"),
        (tw.mesh(32, q_tile=4), "mesh 4 x 8"),
        (tw.double_ring(2, 4), "double ring 2 x 4"),
        (tw.ulysses(4), "Ulysses 4"),
        (tw.ulysses(8, inner=tw.mesh(8, q_tile=2)), "Ulysses 8 x mesh 2 x 4"),
        (tw.hierarchical(tw.ring(2), tw.all_gather(4)), "hierarchical x ring 2 x all gather 4"),
        (tw.needed(tw.Causal(), tw.zigzag(64, 4)), "needed"),
    ],
)
def test_plans_have_titles_in_words(plan: tw.Plan, words: str):
    assert in_words(plan.name).replace(chr(215), "x") == words
