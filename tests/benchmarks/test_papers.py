"""The papers' accounting is theirs, and beside it stands what tw.volume counts."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

import tilewise as tw

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
    assert all(record["assumptions"] and record["source"] for record in records)


def test_an_unknown_study_is_refused_with_those_there_are():
    found = run("--only", "volumes")
    assert found.returncode == 2
    assert "volume, time, grid, scaling" in found.stderr
