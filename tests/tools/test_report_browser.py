"""The pages in a real browser: laptop and phone, light and dark."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.report_pages import browser, chromium, hostile_pages, many_rows, subject, write_rows

import tilewise as tw
from tilewise_tools.report.bench_report import page_of, read_rows
from tilewise_tools.report.page import written
from tilewise_tools.report.plan_report import page_of as page_of_plan

pytestmark = [
    pytest.mark.browser,
    pytest.mark.skipif(chromium() is None, reason="no chromium with chromedriver is installed"),
]
SCREENS = [(1280, 800), (390, 844)]
WAIT = "return document.documentElement.dataset.ready === 'yes'"
WIDTHS = "return [document.documentElement.scrollWidth, document.documentElement.clientWidth]"
MARKS = """return [...document.querySelectorAll('.plot')].map(plot => [plot.id,
    plot.querySelectorAll('.main-svg path, .main-svg image').length, plot.clientHeight])"""
OUTSIDE = """return [...document.querySelectorAll('.plot')].flatMap(plot => {
    const box = plot.getBoundingClientRect();
    return [...plot.querySelectorAll('.xtick text, .ytick text, .gtitle, .xtitle, .ytitle')]
        .map(text => [plot.id, text.textContent, text.getBoundingClientRect()])
        .filter(([, , r]) => r.width && (r.left < box.left - 1 || r.right > box.right + 1
            || r.top < box.top - 1 || r.bottom > box.bottom + 1))
        .map(([id, text]) => `${id}: ${text}`)})"""
OVERLAPS = """return [...document.querySelectorAll('.plot')].flatMap(plot =>
    ['.xtick text', '.ytick text'].flatMap(kind => {
        const boxes = [...plot.querySelectorAll(kind)].filter(t => t.textContent.trim()
            && !(t.getAttribute('transform') || '').match(/rotate\\(-?[1-9]/))
            .map(t => [t.textContent, t.getBoundingClientRect()]);
        const meet = (a, b) => a.left < b.right - 1 && b.left < a.right - 1
            && a.top < b.bottom - 1 && b.top < a.bottom - 1;
        return boxes.flatMap(([one, a], i) => boxes.slice(i + 1)
            .filter(([, b]) => meet(a, b)).map(([two]) => `${plot.id}: ${one} and ${two}`))}))"""


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A page of a plan and one of a benchmark."""
    folder = tmp_path_factory.mktemp("pages")
    plan = subject(tw.mesh(16, q_tile=4), 128, tw.Causal())
    rows = read_rows([write_rows(folder / "rows.jsonl", many_rows())])
    made = {"plan": page_of_plan(plan), "bench": page_of(rows)}
    for name, page in made.items():
        (folder / f"{name}.html").write_text(written(page))
    return {name: folder / f"{name}.html" for name in made}


@pytest.fixture(scope="module")
def driver() -> Iterator[Any]:
    with browser() as found:
        yield found


def show(driver: Any, path: Path, screen: tuple[int, int], scheme: str) -> None:
    """Load a page and wait until its charts are drawn."""
    from selenium.webdriver.support.ui import WebDriverWait

    width, height = screen
    size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 600}
    driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    liked = [{"name": "prefers-color-scheme", "value": scheme}]
    driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": liked})
    driver.get(path.as_uri())
    WebDriverWait(driver, 60).until(lambda it: it.execute_script(WAIT))


@pytest.mark.parametrize("name", ["plan", "bench"])
def test_pages_show_all_charts_and_never_scroll_sideways(
    name: str, driver: Any, pages: dict[str, Path]
):
    for screen in SCREENS:
        for scheme in ("light", "dark"):
            show(driver, pages[name], screen, scheme)
            assert driver.get_log("browser") == []
            needed, given = driver.execute_script(WIDTHS)
            assert needed <= given, f"{screen} {scheme}"
            marks = driver.execute_script(MARKS)
            assert len(marks) >= 4
            assert all(number > 3 and height > 150 for _, number, height in marks), marks
            assert driver.execute_script(OUTSIDE) == []
            assert driver.execute_script(OVERLAPS) == []


def test_charts_follow_the_colour_scheme(driver: Any, pages: dict[str, Path]):
    ink = "return getComputedStyle(document.querySelector('.xtick text')).fill"
    seen = {}
    for scheme in ("light", "dark"):
        show(driver, pages["bench"], SCREENS[0], scheme)
        seen[scheme] = driver.execute_script(ink)
    assert seen == {"light": "rgb(29, 39, 51)", "dark": "rgb(230, 235, 242)"}


def test_buttons_zoom_the_timeline(driver: Any, pages: dict[str, Path]):
    show(driver, pages["plan"], SCREENS[1], "light")
    edge = "return document.getElementById('timeline').layout.xaxis.range[0]"
    assert driver.execute_script(edge) == 0
    driver.execute_script(
        "[...document.querySelectorAll('.jumps button')].find(b => b.textContent === 'Backward')"
        ".click()"
    )
    assert driver.execute_script(edge) > 0


def test_a_chart_can_be_saved_as_png(driver: Any, pages: dict[str, Path], tmp_path: Path):
    from selenium.webdriver.support.ui import WebDriverWait

    there = {"behavior": "allow", "downloadPath": str(tmp_path)}
    driver.execute_cdp_cmd("Browser.setDownloadBehavior", there)
    show(driver, pages["plan"], SCREENS[0], "dark")
    for name in ("timeline", "assignment-0", "bytes"):
        driver.execute_script(
            f"document.querySelector('#{name} .modebar-btn[data-title*=\"PNG\"]').click()"
        )
        path = tmp_path / f"{name}.png"
        WebDriverWait(driver, 60).until(lambda _, path=path: path.exists())
        assert path.read_bytes().startswith(b"\x89PNG") and path.stat().st_size > 5000


def test_the_page_asks_no_network(driver: Any, pages: dict[str, Path]):
    show(driver, pages["plan"], SCREENS[0], "light")
    asked = driver.execute_script("return performance.getEntriesByType('resource').length")
    assert asked == 0


FOREIGN = """return [...document.querySelectorAll('img, a[href]:not(nav a), .main-svg a, iframe')]
    .map(one => one.outerHTML).concat([...document.querySelectorAll('.plot tspan, .plot text')]
    .filter(one => one.getAttribute('style')?.match(/font-weight: bold|underline/))
    .map(one => one.outerHTML))"""


def test_hostile_texts_do_nothing(driver: Any, tmp_path: Path):
    for name, page in hostile_pages(tmp_path).items():
        show(driver, page, SCREENS[0], "light")
        assert driver.get_log("browser") == [], name
        assert driver.execute_script(FOREIGN) == [], name
        shown = driver.execute_script("return document.body.textContent")
        assert name not in ("contender", "mask") or "<img src=x onerror=alert(1)>" in shown
