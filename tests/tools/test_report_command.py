"""tilewise report on files, good and bad."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support.report_pages import MACHINE, many_rows, row, write_rows
from typer.testing import CliRunner

import tilewise as tw
from tilewise_tools.bench.case import BenchCase
from tilewise_tools.bench.our_strategies import strategy
from tilewise_tools.cli import app


def run(*words: str | Path) -> tuple[int, str]:
    done = CliRunner().invoke(app, ["report", *map(str, words)])
    return done.exit_code, done.output


@pytest.fixture(scope="module")
def plan_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    work = tw.Workload(64, 8, 2, 64, mask=tw.Causal())
    path = tmp_path_factory.mktemp("plan") / "plan.json"
    path.write_text(tw.search(work, MACHINE, world_size=8)[0].to_json())
    return path


def test_a_plan_file_gives_a_page_with_its_ranked_table(plan_file: Path, tmp_path: Path):
    code, said = run(plan_file, "-o", tmp_path / "deep" / "page.html")
    assert code == 0 and "page.html" in said
    html = (tmp_path / "deep" / "page.html").read_text()
    best = tw.load_candidate(plan_file)
    assert best.reason.split(",")[0] in html and "Over the byte bound" in html
    assert all(row.strategy in html for row in best.rows)


def test_options_replace_what_a_plan_file_says_and_are_refused_beside_results(
    plan_file: Path, tmp_path: Path
):
    page = tmp_path / "page.html"
    words = ("--num-tokens", "2K", "--machine", "a100x8", "--mask", "full", "--heads", "16:4")
    code, said = run(plan_file, *words, "-o", page)
    assert code == 0, said
    html, best = page.read_text(), tw.load_candidate(plan_file)
    assert "Attention over 2K tokens on 8 devices" in html and best.plan.name in html
    assert "16 query and 4 KV heads" in html and "full mask" in html and "a100x8" in html
    assert best.reason.split(",")[0] not in html and "Over the byte bound" not in html
    results = write_rows(tmp_path / "results.jsonl", many_rows())
    code, said = run(results, "--machine", "a100x8")
    assert code == 2 and "options such as --num-tokens and --machine are for plan files" in said


def test_a_plan_alone_is_shown_simulated_drawn_and_measured(tmp_path: Path):
    path = tmp_path / "alone.json"
    path.write_text(tw.to_json(tw.mesh(4, q_tile=2)))
    assert run(path) == (
        2,
        "tilewise: --num-tokens is missing; give the length of the sequence, as in 128K\n",
    )
    words = ("--num-tokens", "64", "--heads", "8:2", "--head-dim", "64", "--mask", "causal")
    code, said = run(path, *words, "--machine", "h100x8-1nic", "-o", tmp_path / "page.html")
    assert code == 0, said
    assert "mesh(4, q_tile=2" in (tmp_path / "page.html").read_text()
    shown = CliRunner().invoke(app, ["show", str(path)])
    assert shown.exit_code == 0 and tw.parse(shown.stdout) == tw.mesh(4, q_tile=2)
    simulated = CliRunner().invoke(app, ["simulate", str(path), *words, "--json"])
    assert simulated.exit_code == 0 and json.loads(simulated.stdout)["seconds"] > 0
    case = BenchCase("strategies", "causal", 64, 8, 2, 64, world_size=4)
    assert strategy(str(path)).supports(case) is None
    assert "is for 4 ranks, not 2" in str(strategy(str(path)).supports(replace(case, world_size=2)))


def test_a_plan_for_a_few_tokens_is_not_drawn_on_more_devices(tmp_path: Path):
    path = tmp_path / "short.json"
    path.write_text(tw.to_json(tw.ring(2)))
    code, said = run(path, "--num-tokens", "9", "-o", tmp_path / "page.html")
    assert code == 0, said
    html = (tmp_path / "page.html").read_text()
    assert "Time against bandwidth" in html and "Time against devices" not in html


def test_results_give_a_page_beside_them_and_csv(tmp_path: Path):
    path = write_rows(tmp_path / "results.jsonl", many_rows())
    with path.open("a") as file:
        file.write('{"format": 1, "key": "torn')
    code, said = run(path, "--csv", tmp_path / "rows.csv", "--json")
    found = json.loads(said)
    assert code == 0 and found["lost_lines"] == 1
    assert found["files"] == [str(tmp_path / "results.html"), str(tmp_path / "rows.csv")]
    assert all(Path(file).stat().st_size > 100 for file in found["files"])


def test_results_are_known_by_their_rows_whatever_the_name(tmp_path: Path):
    path = write_rows(tmp_path / "results.json", many_rows()[:4])
    assert run(path)[0] == 0 and (tmp_path / "results.html").exists()


@pytest.mark.parametrize("text", ["", "{}", "[1, 2]", '{"format": 9}', "no JSON", "\x00\x01"])
def test_other_files_are_refused_in_one_line(text: str, tmp_path: Path):
    path = tmp_path / "x.json"
    path.write_text(text)
    code, said = run(path)
    assert code == 2 and said.count("\n") == 1 and "x.json" in said
    assert not (tmp_path / "x.html").exists()


def test_missing_files_and_mixed_kinds_are_refused(plan_file: Path, tmp_path: Path):
    rows = write_rows(tmp_path / "results.jsonl", many_rows()[:2])
    assert run(tmp_path / "none.json")[0] == run(tmp_path / "none.jsonl")[0] == 2
    assert run(tmp_path)[0] == 2
    code, said = run(rows, plan_file)
    assert code == 2 and "2 files" in said
    code, said = run(plan_file, "--csv", tmp_path / "rows.csv")
    assert code == 2 and "plan file" in said
    code, said = run(rows, "-o", rows / "page.html")
    assert code == 2 and "is no folder" in said
    for page in (rows / "folder" / "page.html", tmp_path / "new" / "folder" / "page.html"):
        assert run(tmp_path / "none.json", "-o", page)[0] == 2
    assert not (tmp_path / "new").exists()


def test_an_edited_plan_file_is_refused(plan_file: Path, tmp_path: Path):
    data = json.loads(plan_file.read_text())
    data["world_size"] = 4
    edited = tmp_path / "edited.json"
    edited.write_text(json.dumps(data))
    code, said = run(edited)
    assert code == 2 and "edited.json" in said


@pytest.mark.parametrize(
    "damage",
    [
        lambda row: row.pop("outcome"),
        lambda row: row.pop("contender"),
        lambda row: row.update(mask=["causal"]),
        lambda row: row.update(num_heads=[8]),
        lambda row: row.update(median_seconds="fast"),
        lambda row: row.update(world_size="2"),
        lambda row: row.update(predicted_seconds={}),
    ],
)
def test_a_damaged_row_is_left_out_and_counted(tmp_path: Path, damage: Callable[[dict], Any]):
    good, bad = row("cpu"), row("odd-kernel")
    damage(bad)
    path = write_rows(tmp_path / "rows.jsonl", [good, row("naive"), bad])
    ended = CliRunner().invoke(app, ["report", str(path)])
    assert ended.exit_code == 0, ended.output
    assert "1 line was not whole" in ended.output
    assert "odd-kernel" not in (tmp_path / "rows.html").read_text().partition("plotly.js v")[0]
