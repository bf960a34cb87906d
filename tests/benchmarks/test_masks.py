"""`python -m benchmarks.masks`: its tables, its pictures and the figures of their rows."""

import json
from functools import cache
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner, Result

import tilewise as tw
from benchmarks import masks
from benchmarks.masks import (
    PLANS,
    PatternRow,
    by_draw,
    document_row,
    joined,
    pattern_row,
    planned,
    seeds_of,
    span,
)
from tilewise_tools.mask_report.figures import MaskCase, RankLoad, load
from tilewise_tools.mask_report.named import DRAWN, drawn

CASE = MaskCase(4, 1000, 4, 2, 16)


def tables(*words: str) -> Result:
    return CliRunner().invoke(masks.app, list(words))


@pytest.mark.parametrize(
    "words, part",
    [
        (["--world-size", "0"], "world_size (0) must be from 1 to 512"),
        (["--tokens-per-rank", "0"], "tokens_per_rank (0) must be from 1"),
        (["--heads", "32:"], "must be query:KV heads such as 32:8, or 32"),
        (["--heads", "32:5"], "num_heads (32) must be a multiple"),
        (["--heads", "0:0"], "heads ('0:0') must be query:KV heads"),
        (["--seeds", "0"], "seeds (0) must be at least 1"),
    ],
)
def test_bad_input_is_one_line_and_code_2(words: list[str], part: str):
    ended = tables(*words)
    assert ended.exit_code == 2
    assert part in ended.stderr and ended.stdout == ""
    assert ended.stderr.count("\n") == 1


def test_pictures_are_drawn_into_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(masks, "MORE_PICTURES", (("causal", "tiled"),))
    ended = tables("--pictures", str(tmp_path))
    assert ended.exit_code == 0, ended.output
    names = {f"mask_{name}.png" for name in (*tw.masks.ALL_NAMES, "causal_tiled")}
    assert {path.name for path in tmp_path.iterdir()} == names


def test_masks_has_a_line_for_every_pattern(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(masks, "pattern_row", cache(masks.pattern_row))
    small = ("--world-size", "2", "--tokens-per-rank", "128", "--seeds", "1")
    shown = tables(*small)
    assert shown.exit_code == 0, shown.output
    lines = [line.split()[0] for line in shown.stdout.splitlines() if line.strip()]
    assert all(lines.count(name) == 2 for name in tw.masks.ALL_NAMES)
    rows = json.loads(tables(*small, "--json").stdout)
    assert [row["mask"] for row in rows] == list(tw.masks.ALL_NAMES)
    assert rows[0]["area"] == 1 and rows[0]["bytes"]["ring"] == {"mean": 1, "busiest": 1}


def test_documents_has_a_line_for_every_corpus():
    small = ("--documents", "--world-size", "4", "--tokens-per-rank", "512", "--seeds", "1")
    shown = tables(*small)
    assert shown.exit_code == 0, shown.output
    assert shown.stdout.count("64:64") == shown.stdout.count("64:8") == 4
    rows = json.loads(tables(*small, "--heads", "8:2", "--json").stdout)
    assert [(row["corpus"], row["mix"]) for row in rows] == [
        ("prolong512k", 0),
        ("pile", 0),
        ("prolong512k", 0.6),
        ("pile", 0.6),
    ]
    assert all(row["heads"] == "8:2" and set(row["bytes"]) == set(PLANS) for row in rows)


def test_one_rank_sends_nothing():
    row = pattern_row("causal_document", MaskCase(1, 500, 4, 4, 16), seed=0)
    assert all(moved == RankLoad(0, 0) for moved in row.bytes.values())
    assert set(row.imbalance.values()) == {1.0} and set(row.areas.values()) == {1.0}


def test_seeds_are_joined():
    def row(area: float, ratio: float, sent: float) -> PatternRow:
        one = {"x": ratio}
        return PatternRow("m", area, one, {"x": RankLoad(sent, 2 * sent)}, one, {"x": area}, one)

    assert joined([row(0.2, 1.5, 0.1), row(0.4, 1.0, 0.3)]) == (
        "m",
        pytest.approx(0.3),
        {"x": 1.5},
        {"x": pytest.approx((0.2, 0.4))},
        {"x": 1.5},
        {"x": pytest.approx(0.3)},
        {"x": 1.5},
    )
    assert span([0.1, 0.1]) == "0.100" and span([0.2, 0.1]) == "0.100-0.200"


def test_draws_of_one_workload_are_put_together():
    rows = [document_row(("pile", 4, 0.0), CASE, seed) for seed in (0, 1)]
    other = document_row(("pile", 1, 0.6), CASE, 0)
    assert list(by_draw([rows[0], other, rows[1]])) == [rows, [other]]


def test_only_what_is_drawn_differs_by_seed():
    for name in tw.masks.ALL_NAMES:
        same = drawn(name, 4096, 0) == drawn(name, 4096, 1)
        assert same == (name not in DRAWN)
        assert list(seeds_of(name, 3)) == ([0] if same else [0, 1, 2])


@pytest.mark.parametrize("who", PLANS)
@pytest.mark.parametrize("name", ["causal", "share_question"])
def test_bytes_are_those_of_volume(name: str, who: str):
    mask = drawn(name, CASE.num_tokens, seed=0)
    plan, layout = planned(mask, CASE, who)
    tw.check(plan, mask, layout)
    found = load(plan, mask, layout, CASE)[0]
    sent = tw.volume(plan, CASE.workload(mask, layout)).forward
    assert found.mean == pytest.approx(np.mean(sent) / CASE.ring_bytes)
    assert found.busiest >= max(sent) / CASE.ring_bytes


def test_an_unknown_plan_is_refused():
    with pytest.raises(ValueError, match="plan 'x' is not known; take one of ring, mesh"):
        planned(tw.Full(), CASE, "x")
