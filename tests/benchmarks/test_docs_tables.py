"""The tables that one command writes into the pages."""

import json
from pathlib import Path

import pytest

from benchmarks.docs_tables import ROOT, TABLES, grid, lines_of, main, replaced, rows_of


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


def test_an_old_page_is_named_and_an_unknown_table_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    def run(*words: str) -> tuple[object, str]:
        with pytest.raises(SystemExit) as end:
            main(words)
        said = capsys.readouterr()
        return end.value.code, said.out + said.err

    status, said = run("--only", "claim")
    assert status == 2 and "--only 'claim' is not known; take some of controls" in said
    rows = tmp_path / "rows.json"
    rows.write_text(json.dumps({"measured": []}))
    wanted = 1, "papers.md: measured\n"
    assert run("--only", "measured", "--check", "--rows", str(rows)) == wanted
    assert run("--only", "measured", "--check") == (0, "all tables are those of the commands\n")


def test_every_reason_on_the_page_of_models_says_what_to_do():
    hf_models = pytest.importorskip("benchmarks.hf_models", reason="needs transformers")
    section = hf_models.PAGE.read_text().partition("## Why models are refused")[2]
    lines = [line for line in section.partition("No tiny model")[0].splitlines() if "|" in line]
    known = {one.instead for one in hf_models.MODELS} | {*hf_models.INSTEAD.values()}
    assert hf_models.TEMPLATE.count(lines[0]) == 1 and len(lines) > 5
    for line in lines[2:]:
        _, instead, models = line.strip("| ").split(" | ")
        assert instead in known and models, line
    reason = "layers of type hybrid cannot be split by tilewise"
    assert hf_models.instead(reason) == "use a model without them"
    with pytest.raises(ValueError, match="no words say what to do about 'because'"):
        hf_models.instead("because")


@pytest.mark.parametrize(
    "study",
    [
        "code",
        *(
            pytest.param(name, marks=pytest.mark.slow)
            for name in ("controls", "model", "stress", "video", "published")
        ),
    ],
)
def test_the_pages_tables_are_those_of_the_studies(study: str):
    tables = rows_of([study])
    for name, table in TABLES.items():
        if table.study == study:
            page = (ROOT / "docs" / table.page).read_text()
            assert replaced(page, name, table.lines(tables)) == page, name
