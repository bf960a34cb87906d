"""The tables that one command writes into the pages."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.docs_tables import ROOT, TABLES, grid, lines_of, replaced, rows_of


def test_every_table_has_its_place_on_a_page():
    for name, table in TABLES.items():
        page = (ROOT / "docs" / table.page).read_text()
        assert page.count(f"<!-- table: {name} -->") == 1, name
        assert "<!-- end -->" in page.partition(f"<!-- table: {name} -->")[2]


def test_lines_go_between_the_marks_and_nowhere_else():
    page = "before\n<!-- table: one -->\n\n| old |\n\n<!-- end -->\nafter\n"
    lines = lines_of(["a", "b"], [(1, "x")])
    assert lines == ["| a | b |", "|---|---|", "| 1 | x |"]
    new = replaced(page, "one", lines)
    assert new.startswith("before\n") and new.endswith("<!-- end -->\nafter\n")
    assert "| old |" not in new and "| 1 | x |" in new
    assert replaced(new, "one", lines) == new
    with pytest.raises(ValueError, match="has no line '<!-- table: two -->'"):
        replaced(page, "two", lines)


def test_a_grid_leaves_places_without_a_record_empty():
    records = [{"x": "a", "y": 1, "z": 5}, {"x": "b", "y": 2, "z": 6}]
    lines = grid(records, lambda r: r["x"], lambda r: str(r["y"]), lambda r: str(r["z"]), "xy")
    assert lines == ["| xy | 1 | 2 |", "|---|---|---|", "| a | 5 |  |", "| b |  | 6 |"]


def test_an_old_page_is_named_and_an_unknown_table_refused(tmp_path: Path):
    def run(*words: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "benchmarks.docs_tables", *words]
        return subprocess.run(command, cwd=ROOT, capture_output=True, text=True)

    done = run("--only", "claim")
    assert (
        done.returncode == 2 and "table 'claim' is not known; take some of controls" in done.stderr
    )
    rows = tmp_path / "rows.json"
    rows.write_text(json.dumps({"measured": []}))
    done = run("--only", "measured", "--check", "--rows", str(rows))
    assert done.returncode == 1 and done.stdout == "papers.md: measured\n"
    done = run("--only", "measured", "--check")
    assert done.returncode == 0 and "those of the commands" in done.stdout


@pytest.mark.slow
@pytest.mark.parametrize("study", ["controls", "model", "stress", "video", "published"])
def test_the_pages_tables_are_those_of_the_studies(study: str):
    tables = rows_of([study])
    for name, table in TABLES.items():
        if table.study == study:
            page = (ROOT / "docs" / table.page).read_text()
            assert replaced(page, name, table.lines(tables)) == page, name
