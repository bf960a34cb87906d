"""The papers' accounting is theirs, and beside it stands what tw.volume counts."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from support.docs_tables import NUMBER, numbers_after, table_of

import tilewise as tw
from benchmarks import docs_tables
from benchmarks.study.__main__ import KEPT, STUDIES

ROOT = Path(__file__).parents[2]


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "benchmarks/papers.py", *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True)


@pytest.fixture(scope="module")
def records() -> list[dict]:
    found = run("--only", "volume", "--json")
    assert found.returncode == 0, found.stderr
    return json.loads(found.stdout)


@pytest.fixture(scope="module")
def figures(records: list[dict]) -> dict[tuple[str, str], dict[str, float]]:
    rows = (record for record in records if record["kind"] == "row")
    return {(row["machine"], row["plan"]): row["figures"] for row in rows}


def test_the_papers_accounting_meets_its_largest_reduction(figures: dict):
    ring, mesh = (figures["as the paper counts", name] for name in ("ring", "mesh 8 x 32"))
    assert (ring["forward"], ring["backward"]) == (510, 1530)
    assert (mesh["forward"], mesh["backward"]) == (76, 221)
    assert mesh["less, %"] == pytest.approx(100 * (1 - 297 / 2040))
    assert round(mesh["less, %"], 1) == 85.4


def test_what_the_paper_leaves_out_and_sends_twice_is_all_that_differs(figures: dict):
    theirs, ours = (figures[who, "mesh 8 x 32"] for who in ("as the paper counts", "tw.volume"))
    lse, out, transfers = 4 / (128 * 2), 1, 7
    assert ours["forward"] == theirs["forward"] + transfers * lse
    assert ours["backward"] == theirs["backward"] - transfers * out + transfers * 2 * lse


def test_the_hybrid_row_is_what_volume_says(figures: dict):
    plan = tw.ulysses(8, inner=tw.mesh(32, q_tile=4))
    work = tw.Workload(256 * 16, 32, 32, 128)
    shard = 16 * 32 * 128 * 2
    found = figures["tw.volume", "ulysses(8) x mesh 4 x 8"]
    assert found["forward"] == max(tw.volume(plan, work).forward) / shard
    assert found["less, %"] > 95


def test_every_record_says_what_it_assumes_and_every_claim_how_far_off_it_is(records: list[dict]):
    claims = [record for record in records if record["kind"] == "claim"]
    assert [(claim["claimed"], claim["off"]) for claim in claims] == [
        (85.4, "+0.0 points"),
        (79.0, "+0.6 points"),
    ]
    assert all(claim["why"] and claim["best_plan"] for claim in claims)
    assert [(claim["topology"], round(claim["by_bytes"], 1)) for claim in claims] == [
        (0.0, 85.4),
        (0.0, 79.6),
    ]
    assert all(record["assumptions"] and record["source"] for record in records)


def test_an_unknown_study_is_refused_with_those_there_are():
    found = run("--only", "volumes")
    assert found.returncode == 2
    assert "volume, time, grid, scaling" in found.stderr


@pytest.fixture(scope="module")
def every_record() -> list[dict]:
    found = run("--json")
    assert found.returncode == 0, found.stderr
    return json.loads(found.stdout)


@pytest.mark.slow
def test_the_pages_tables_are_what_the_command_prints(every_record: list[dict]):
    for name in ("claims", "times", "grids", "scaling"):
        table = docs_tables.TABLES[name]
        page = (ROOT / "docs" / table.page).read_text()
        assert docs_tables.replaced(page, name, table.lines({"papers": every_record})) == page


PAPERS = {"volume": "Mesh-Attention: volume", "time": "Mesh-Attention: time",
          "grid": "ATTENTION2D", "scaling": "LongCA-bench"}  # fmt: skip


def test_every_figure_of_the_papers_has_a_command():
    table = table_of("papers.md", "| paper | figures | command |")
    rows = [(figures, command) for _, figures, command in table.rows]
    claimed = [row[2] for row in table_of("papers.md", "| claim | on | paper |").rows]
    known = [float(NUMBER.findall(x)[0]) for x in claimed if NUMBER.findall(x)]
    by_command = [float(x) for figures, command in rows if "--only" in command
                  for x in NUMBER.findall(figures)]  # fmt: skip
    assert sorted(by_command) == sorted(known)
    commands = " ".join(command for _, command in rows)
    for name in PAPERS:
        assert f"`python benchmarks/papers.py --only {name}`" in commands
    for name in ("model", "contexts", "published"):
        assert f"`python -m benchmarks.study {name}`" in commands and name in (*STUDIES, *KEPT)


@pytest.mark.slow
def test_each_command_makes_the_figures_that_the_page_says(every_record: list[dict]):
    claims = [record for record in every_record if record["kind"] == "claim"]
    for _, figures, command in table_of("papers.md", "| paper | figures | command |").rows:
        which = command.partition("--only ")[2].partition("`")[0]
        if which:
            made = [x["claimed"] for x in claims if x["paper"] == PAPERS[which] and x["claimed"]]
            assert made == [float(x) for x in NUMBER.findall(figures)], command


@pytest.mark.slow
def test_the_pages_sentences_have_the_figures_of_the_command(every_record: list[dict]):
    claims = [record for record in every_record if record["kind"] == "claim"]
    mesh, waits = (
        next(x for x in claims if x["what"].startswith(words))
        for words in ("speed-up, largest", "ring waits")
    )
    grids = [x for x in claims if x["paper"] == "ATTENTION2D" and x["what"].startswith("NO")]
    on_a100, on_h100 = grids
    said = numbers_after("papers.md", "on `h100x8` the mesh")
    longer = next(
        r["figures"]["1M"] for r in every_record if "over the best of" in r.get("plan", "")
    )
    assert said[:4] == [8, 32, round(mesh["found"], 2), round(mesh["by_bytes"], 2)]
    assert said[-2:] == [round(longer, 2), 1]
    (times, tokens, beyond) = numbers_after("papers.md", "ATTENTION2D's NO on A100 is")
    assert (times, tokens, beyond) == (round(on_a100["by_bytes"], 1), 4, 64)
    found, of = numbers_after("papers.md", "a double ring gains nothing: the")
    assert (found, of) == (round(on_h100["found"], 1), on_h100["claimed"])
    rows = {(r["machine"], r["plan"]): r["figures"] for r in every_record if r["kind"] == "row"}
    one = {plan: figures["max"] for (machine, plan), figures in rows.items()
           if machine == "h100x8-1nic"}  # fmt: skip
    best = [round(one[plan], 1) for plan in ("best tile of mesh", "double_ring(32, 8)")]
    assert numbers_after("papers.md", "With one, the best tile reaches") == best
    claimed, share = numbers_after("papers.md", "Waiting:")
    assert claimed == waits["claimed"] and f"gets {share:.0f} %" in waits["why"]
    a100 = on_a100["where"]
    no, o = (rows[a100, plan] for plan in
             ("NO: attention2d(8, 8)", "O: attention2d(8, 8, overlap=True)"))  # fmt: skip
    said = numbers_after("papers.md", "lie at their short end: NO on A100 is")
    lengths = [x for n in ("4K", "64K", "256K") for x in (round(no[n], 1), int(n[:-1]))]
    assert said == [*lengths, on_a100["claimed"]]
    both = [round(x["256K"], 2) for x in (o, no)]
    assert numbers_after("papers.md", "long enough to hide them, it wins by a hair") == both
