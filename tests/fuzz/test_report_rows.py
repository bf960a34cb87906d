"""Rows of any text and type are refused or give a page on which they are text and nothing else."""

from __future__ import annotations

import json
import tempfile
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

from hypothesis import given
from hypothesis import strategies as st
from plotly.offline import get_plotlyjs
from support.fuzzing import examples
from support.report_pages import many_rows, write_rows

from tilewise_tools.report.bench_report import page_of, read_rows, write_csv
from tilewise_tools.report.page import written

MARK = "evil"
TEXTS = (
    f"<img src=x onerror={MARK}()>",
    f"</script><script>{MARK}()</script>",
    f"'\"><svg/onload={MARK}()>",
    f'" onmouseover={MARK}() x="',
    f" {MARK}=1 autofocus onfocus=alert(1) ",
    f"<!--<script><{MARK}",
    f"]]><{MARK}>",
    f"&lt;{MARK}&gt;&#60;{MARK}&#x3e;",
    f"javascript:{MARK}()",
    f"$script ${{plotly}} %s {{0}} {MARK}",
    f"\u2028<{MARK}\x00>\ufeff\x1b[31m",
    f"</STYLE ><{MARK} ",
    f'<a href="https://{MARK}">',
    "\ud800",
    "",
    " " * 300,
    "kernels",
    "causal",
)
VALUES = st.one_of(
    st.sampled_from(TEXTS),
    st.sampled_from(
        (None, True, False, 0, -1, 1, 2, 3.5, 10**30, -(10**400), 1e308, 1e-320, float("nan"))
    ),
    st.sampled_from((float("inf"), [], {}, [1], {"a": 1}, [TEXTS[0]], {TEXTS[1]: TEXTS[2]}, [[]])),
    st.text(max_size=5),
    st.integers(),
    st.floats(),
)
WRONG = {"is_exact": False, "error_out": 3.0, "tolerance": 1e-5}
MEMORY = {"tflops": 2.0, "peak_bytes": 300, "predicted_peak_bytes": 290}
EVERY = [{**row, **(MEMORY, WRONG, {})[place % 3]} for place, row in enumerate(many_rows())]
FIELDS = sorted(
    {*(name for row in EVERY for name in row), "library_version", "cpu", "os", "window"}
)


class Elements(HTMLParser):
    """All elements of a page with the names of their attributes, and what its scripts hold."""

    def __init__(self) -> None:
        super().__init__()
        self.found: set[tuple[str, str]] = set()
        self.scripts = ""
        self._script = False

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found |= {(tag, ""), *((tag, name) for name, _ in attrs)}
        self.found |= {(tag, name) for name, value in attrs if (value or "").startswith("javas")}
        self._script = tag == "script" and dict(attrs).get("type") != "application/json"

    def handle_endtag(self, tag: str) -> None:
        self._script = False

    def handle_data(self, data: str) -> None:
        self.scripts += data * self._script


def elements(html: str) -> Elements:
    parser = Elements()
    parser.feed(html.replace(get_plotlyjs(), ""))
    parser.close()
    return parser


def page(rows: list[dict[str, Any]]) -> str | None:
    """The page of a file of these rows; None if it is refused."""
    with tempfile.TemporaryDirectory() as folder:
        path = write_rows(Path(folder) / "rows.jsonl", rows)
        try:
            found = read_rows([path])
            write_csv(found.rows, Path(folder) / "rows.csv")
            return written(page_of(found))
        except ValueError as error:
            assert str(error)
            return None


HARMLESS = elements(page([*EVERY, {**EVERY[0], "key": "damaged", "num_tokens": "x"}]) or "")


@examples(1)
@given(
    changes=st.lists(
        st.tuples(st.integers(0, len(EVERY) - 1), st.sampled_from(FIELDS), VALUES), max_size=12
    ),
    everywhere=st.none() | st.tuples(st.sampled_from(FIELDS), VALUES),
    taken=st.integers(1, 12),
)
def test_what_rows_say_is_text(
    changes: list[tuple[int, str, Any]], everywhere: tuple[str, Any] | None, taken: int
):
    rows = [{**row, "key": str(number)} for number, row in enumerate(EVERY)]
    for number, field, value in changes:
        rows[number][field] = value
    if everywhere is not None:
        rows = [{**row, everywhere[0]: value_of(everywhere[1], row)} for row in rows]
    html = page(rows[::taken])
    if html is not None:
        found = elements(html)
        assert found.found <= HARMLESS.found, found.found - HARMLESS.found
        assert MARK not in found.scripts and found.scripts == HARMLESS.scripts


def value_of(value: Any, row: dict[str, Any]) -> Any:
    """Some rows keep theirs, so that not all of a page is one case."""
    return value if len(json.dumps(row)) % 3 else row.get("mask")
