"""How pages look: the answer first, small without charts, on a phone, on paper."""

from html.parser import HTMLParser
from importlib.resources import files
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from matplotlib.figure import Figure as Canvas
from support.report_pages import MACHINE, chart, many_rows, row, subject, write_rows

import tilewise as tw
from tilewise_tools.report.bench_report import page_of as page_of_bench
from tilewise_tools.report.bench_report import read_rows
from tilewise_tools.report.drawing import Cells, Drawing
from tilewise_tools.report.page import Fact, Figure, Page, Section, TextTable, written
from tilewise_tools.report.plan_report import page_of, subject_of
from tilewise_tools.report.png import draw, write_pngs
from tilewise_tools.report.timeline import CLASSES, classes
from tilewise_verify.palette import RAMP, contrast
from tilewise_verify.pictures import drawn as pairs_drawn

CSS = files("tilewise_tools.report").joinpath("page.css").read_text(encoding="utf-8")


class Holders(HTMLParser):
    """Collects what each table and picture stands in, and the styles of coloured cells."""

    def __init__(self):
        super().__init__()
        self.open: list[str] = []
        self.held: list[tuple[str, str]] = []
        self.styles: list[str] = []
        self.order: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]):
        words = dict(attrs)
        if tag in ("table", "svg") and not self.open.count("svg"):
            self.held.append((tag, self.open[-1]))
        if tag == "td" and words.get("style"):
            self.styles.append(words["style"] or "")
        if tag not in ("meta", "link", "br", "wbr", "img", "rect", "path"):
            self.open.append(f"{tag}.{words.get('class') or ''}")
        self.order.append(self.open[-1] if self.open else tag)

    def handle_endtag(self, tag: str):
        if self.open and self.open[-1].startswith(f"{tag}."):
            self.open.pop()


def read(html: str) -> Holders:
    reader = Holders()
    reader.feed(html)
    return reader


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Page:
    folder = tmp_path_factory.mktemp("rows")
    return page_of_bench(read_rows([write_rows(folder / "rows.jsonl", many_rows())]))


@pytest.fixture(scope="module")
def plan() -> Page:
    return page_of(subject(tw.mesh(16, q_tile=4), 128, tw.Causal()))


def figures(page: Page) -> list[Figure]:
    return [x for section in page.sections for x in (*section.figures, *section.more)]


def test_each_chart_of_a_page_becomes_a_picture(bench: Page, plan: Page, tmp_path: Path):
    for page in (bench, plan):
        shown = [x for section in page.sections for x in section.figures]
        paths = write_pngs(page, tmp_path / page.kind[:5])
        assert [path.name for path in paths] == [f"{figure.name}.png" for figure in shown]
        assert all(path.read_bytes().startswith(b"\x89PNG") for path in paths)


def test_a_picture_shows_the_numbers_and_words_of_its_chart(plan: Page):
    (figure,) = (x for x in figures(plan) if x.name == "seconds")
    assert isinstance(figure.drawing, Drawing)
    axes = Canvas().subplots()
    draw(axes, figure.drawing)
    *drawn, totals = figure.drawing.data
    widths = [width for trace in drawn for width in trace["x"]]
    patches: list[Any] = list(axes.patches)
    assert [patch.get_width() for patch in patches] == pytest.approx(widths)
    assert [text.get_text() for text in axes.texts] == totals["text"]
    ticks = [tick.get_text() for tick in axes.get_xticklabels()]
    assert ticks == list(figure.drawing.layout["xaxis"]["ticktext"])


def test_options_and_names_break_where_they_can_be_read_on():
    table = TextTable(("options", ""), (("--cp-comm-type a2a+p2p --seq-length 8", "x"),))
    cells = Cells(("ring_moves_q",), ("block_sparse",), (("good", RAMP[0]),), [[(0, "1", "n")]])
    sections = (
        Section("others", "Others", table=table),
        Section("cells", "Cells", figures=(Figure("c", "Cells", "What.", cells),)),
    )
    html = written(Page("kind", "Title", "lead", (), sections))
    assert '<span class="whole">--cp-comm-type</span> a2a+p2p' in html
    assert "<th>ring_<wbr>moves_<wbr>q</th>" in html and "<th>block_<wbr>sparse</th>" in html


def test_a_table_without_a_header_has_no_empty_line_and_a_page_without_parts_no_menu():
    section = Section("lines", "In short", table=TextTable(("", ""), (("step", "1 s"),)))
    assert "<thead>" not in written(Page("kind", "Title", "lead", (), (section,)))
    assert "<nav" not in written(Page("kind", "Title", "lead", (), ()))


def test_a_page_without_charts_is_small_and_has_no_script():
    table = TextTable(("layer", "error"), tuple((f"layers.{i}", "1.5") for i in range(300)))
    allowed = np.tri(256, dtype=bool)
    cells = Cells(("a", "b"), ("x",), (("good", RAMP[0]),), [[(0, "1", "n")], [(-1, "", "n")]])
    sections = (
        Section("rows", "Rows", table=table),
        Section("pairs", "Pairs", picture=pairs_drawn(allowed, allowed[::-1])),
        Section("cells", "Cells", figures=(Figure("c", "Cells", "What.", cells),)),
    )
    html = written(Page("kind", "Title", "lead", (Fact("a", "b"),), sections, verdict="Right."))
    assert len(html.encode()) < 200_000 and "<script" not in html
    assert "script-src 'none'" in html and "Plotly" not in html


def test_the_verdict_comes_first_then_why_then_evidence(plan: Page, bench: Page):
    for page in (plan, bench):
        assert page.verdict.endswith(".")
        order = read(written(page)).order
        places = [order.index(x) for x in ("p.verdict", "dl.facts", "main.")]
        assert places == sorted(places)
    assert [section.name for section in plan.sections][:1] == ["why"]
    assert [section.name for section in bench.sections][:2] == ["winners", "support"]


def test_a_candidates_page_names_ties_and_other_libraries_best_settings():
    work = tw.Workload(64, 8, 4, 64, mask=tw.Causal())
    best = tw.search(work, MACHINE, world_size=4)[0]
    reported = subject_of(best)
    page = page_of(reported)
    assert {setting.library for setting in reported.settings} == {
        row[0] for section in page.sections if section.name == "others" and section.table
        for row in section.table.rows
    } != set()  # fmt: skip
    assert all(setting.library in page.verdict for setting in reported.settings)
    assert all(name in page.verdict for name in reported.ties)
    assert reported.ranked is not None
    tied = {line[0] for line in reported.ranked.rows if line[2].endswith("tie")}
    assert tied >= set(reported.ties)


def test_every_table_and_picture_scrolls_in_its_own_box(plan: Page, bench: Page):
    picture = pairs_drawn(np.eye(4, dtype=bool), np.eye(4, dtype=bool))
    other = Page("k", "t", "l", (), (Section("p", "P", picture=picture),))
    for page in (plan, bench, other):
        held = read(written(page)).held
        assert held and {holder for _, holder in held} <= {"div.scroll", "div.wide"}
    for rule in (".scroll {", ".wide {"):
        assert "overflow-x: auto" in CSS.partition(rule)[2].partition("}")[0]


def test_paper_is_a4_light_and_cuts_no_chart():
    paper = CSS.partition("@media print {")[2]
    assert "size: A4" in paper and "color-scheme: light" in paper
    for rule in ("figure,", ".scroll, .wide {"):
        assert rule in paper
    assert "break-inside: avoid" in paper and "overflow: visible; max-height: none" in paper
    script = files("tilewise_tools.report").joinpath("page.js").read_text(encoding="utf-8")
    assert "beforeprint" in script and "afterprint" in script


def test_coloured_cells_can_be_read(bench: Page):
    styles = read(written(bench)).styles
    assert styles
    for style in set(styles):
        fill, ink = (part.partition(":")[2] for part in style.split(";"))
        assert contrast(fill, ink) >= 4.5, style


def test_axes_of_quantities_have_names(plan: Page, bench: Page):
    drawings = [
        x for page in (plan, bench) for x in figures(page) if isinstance(x.drawing, Drawing)
    ]
    assert len(drawings) > 8
    for figure in drawings:
        axes = {name: chart(figure).layout[name] for name in ("xaxis", "yaxis")}
        named = {name for name, words in axes.items() if words.get("title", {}).get("text")}
        is_bar = chart(figure).data[0]["type"] == "bar"
        assert named >= ({"xaxis"} if is_bar else {"xaxis", "yaxis"}), figure.name


def test_the_diagonal_of_predictions_has_equal_scales(bench: Page):
    (figure,) = (x for x in figures(bench) if x.name == "predictions")
    x, y = (chart(figure).layout[name] for name in ("xaxis", "yaxis"))
    assert x["range"] == y["range"] and y["scaleanchor"] == "x"


def test_a_timeline_shows_three_classes_of_ranks_and_the_rest_on_demand():
    work = tw.Workload(1 << 12, 8, 8, 64, mask=tw.Causal())
    found = tw.simulate(tw.ring(16), work, MACHINE, exact=True)
    names = classes(found)
    assert tuple(names.values()) == CLASSES
    waits = [sum(use.exposed_seconds for use in found.use(rank)) for rank in names]
    every = [sum(use.exposed_seconds for use in found.use(rank)) for rank in range(16)]
    assert waits[0] == max(every) and waits[-1] == min(every) and waits == sorted(waits)[::-1]
    page = page_of(subject(tw.ring(8), 16, tw.Causal()))
    (section,) = (section for section in page.sections if section.name == "when")
    (shown,), more = section.figures, section.more
    assert len(chart(shown).layout["yaxis"]["tickvals"]) <= 3
    assert all(len(chart(x).layout["yaxis"]["tickvals"]) > 3 for x in more)


def test_a_row_of_contenders_without_a_result_still_has_a_page(tmp_path: Path):
    rows = [row("a", outcome="failed"), row("b", outcome="unsupported", message="no")]
    html = written(page_of_bench(read_rows([write_rows(tmp_path / "r.jsonl", rows)])))
    assert "<script" not in html and len(html) < 200_000
