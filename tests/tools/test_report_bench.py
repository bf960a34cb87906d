"""The page of a benchmark: winners, failures, scaling and predictions as the rows say."""

import csv
import json
import re
from base64 import b64encode
from collections.abc import Iterator
from hashlib import sha256
from html.parser import HTMLParser
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from support.report_pages import chart, hostile_pages, many_rows, row, write_rows

import tilewise as tw
from benchmarks.longca import read_csv
from tilewise_tools.report.bench_cases import cases, described, facets, slowdowns
from tilewise_tools.report.bench_charts import (
    memory,
    predictions,
    row_table,
    speeds,
    support,
    verdict,
    waiting,
    winner,
    winners,
)
from tilewise_tools.report.bench_report import page_of, read_rows, write_csv
from tilewise_tools.report.drawing import Cells, Series, axis, bars, lines, log_axis
from tilewise_tools.report.page import Figure, Page, written

MASKS = (*tw.masks.NAMES, "causal", "full")
DISTRIBUTED = "baseline,masktype,world_size,wd,ulysses,ring,mean_tflops,mean_peak_mems\n"


def figures(page: Page) -> dict[str, Figure]:
    return {figure.name: figure for section in page.sections for figure in section.figures}


def grid_of(figure: Figure) -> dict[tuple[str, str], tuple[str, str]]:
    """Level and text by mask and contender."""
    cells = figure.drawing
    assert isinstance(cells, Cells)
    found = {}
    for down, line in zip(cells.rows, cells.lines, strict=True):
        for across, (level, text, _) in zip(cells.columns, line, strict=True):
            names = (down, across) if down in MASKS else (across, down)
            found[names] = (cells.levels[level][0] if level >= 0 else "", text)
    return found


def bars_of(figure: Figure) -> dict[str, dict[str, float]]:
    """Values by name and series."""
    bars = [trace for trace in chart(figure).data if trace["type"] == "bar"]
    return {bar["name"]: dict(zip(bar["y"], bar["x"], strict=True)) for bar in bars}


def test_the_fastest_of_each_case_wins_it():
    rows = [
        row("a", "full", median_seconds=1.0),
        row("b", "full", median_seconds=2.0),
        row("a", "full", num_tokens=2048, median_seconds=3.0),
        row("b", "full", num_tokens=2048, median_seconds=2.9),
        row("a", "causal", median_seconds=5.0),
        row("c", "causal", outcome="failed", median_seconds=0.1),
    ]
    assert [line[:4] for line in winners({"kernels": cases(rows)}).rows] == [
        ("full", "2", "a", "1"),
        ("causal", "1", "a", "1"),
    ]


def test_a_tie_and_the_best_of_other_libraries_stand_beside_the_winner():
    rows = [
        row("a", median_seconds=1.0),
        row("b", median_seconds=1.04),
        row("c", median_seconds=1.06),
        row("slow", median_seconds=3.0, library="other"),
        row("quick", median_seconds=1.5, library="another"),
        row("wreck", median_seconds=0.1, library="another", outcome="failed"),
    ]
    (line,) = winners({"kernels": cases(rows)}).rows
    assert line[2:6] == ("a", "1", "b", "quick") and line[6].startswith("1.50")
    said = verdict({"kernels": cases(rows)})
    assert "a is fastest in 1 of 1 cases; a tie with b (within 5 %)" in said and "quick" in said
    assert winner(cases([row("a", outcome="failed")])) is None
    assert verdict({"kernels": cases([row("a", outcome="failed")])}) == ""


def test_more_contenders_than_colours_are_told_apart():
    numbers = range(17)
    x, y = axis("x", ticks=((1, "1"), (2, "2"))), log_axis("y", "s", (1.0, 2.0))
    parts = [Series(f"c{i}", [1, 2], [1.0, 2.0], ["", ""], i) for i in numbers]
    drawing = lines(x, y, parts)
    looks = [
        (one["line"]["color"], one["line"]["dash"], one["marker"]["symbol"]) for one in drawing.data
    ]
    assert len(set(looks)) == 17
    filled = [(one["marker"]["color"], one["marker"]["pattern"]["shape"])
              for one in bars(x, "s", parts).data[:-1]]  # fmt: skip
    assert len(set(filled)) == 17
    labels = drawing.layout["annotations"]
    assert {label["text"] for label in labels} == {f"c{i}" for i in numbers}
    shifts = sorted(label["ay"] for label in labels)
    assert all(b - a >= 16 for a, b in pairwise(shifts))


def test_the_heat_map_tells_slow_from_failed():
    rows = [
        row("a", median_seconds=1.0),
        row("b", median_seconds=2.0),
        row("c", median_seconds=40.0),
        row("d", outcome="unsupported", message="no windows"),
        row("e", outcome="out_of_memory"),
        row("f", outcome="timed_out"),
        row("g", median_seconds=1.0, is_exact=False),
        row("a", "full"),
    ]
    names = {name: place for place, name in enumerate("abcdefg")}
    cells = grid_of(support("kernels", cases(rows), names))
    assert [cells["causal", name][0] for name in "abcdefg"] == [
        *("fastest, or within 5 %", "up to 3 times slower", "slower still", "unsupported"),
        *("out of memory", "failed or timed out", "wrong results"),
    ]
    assert cells["causal", "b"][1].startswith("2.00")
    assert cells["full", "b"] == ("", "")


def test_speeds_are_compared_within_a_mask_and_memory_within_a_case():
    rows = [
        row("a", tflops=2e-3, peak_bytes=300),
        row("b", tflops=1e-3, peak_bytes=200, predicted_peak_bytes=190),
        row("c", outcome="failed", tflops=9.0, peak_bytes=9),
        row("a", "full", tflops=4e-3, peak_bytes=700),
    ]
    colours = {name: place for place, name in enumerate("abc")}
    figure = speeds("kernels", cases(rows), colours)
    assert figure is not None
    cells = grid_of(figure)
    assert cells["causal", "a"] == ("fastest, or within 5 %", "2")
    assert cells["causal", "b"] == ("up to 3 times slower", "1")
    assert "In GFLOP/s of a device" in figure.caption
    assert cells["full", "b"] == ("", "") and ("causal", "c") not in cells

    figure = memory(rows, colours)
    assert figure is not None
    assert list(bars_of(figure).items()) == [("b", {"b": 200}), ("a", {"a": 300})]
    assert "planned 190 B" in chart(figure).data[0]["hovertext"][0]
    assert memory([row("a")], colours) is speeds("kernels", cases([row("a")]), colours) is None


def test_speed_per_mask_ranks_as_time_does_whatever_the_slowest_rank_had_to_do():
    # tflops is of the slowest rank's own share, which differs between strategies
    shared = {"world_size": 4, "kind": "strategies"}
    rows = [
        row("even", median_seconds=1.0, tflops=1e-3, total_tflops=8e-3, **shared),
        row("uneven", median_seconds=2.0, tflops=3e-3, total_tflops=4e-3, **shared),
    ]
    figure = speeds("strategies", cases(rows), {"even": 0, "uneven": 1})
    assert figure is not None and figure.rows is not None
    cells = grid_of(figure)
    assert (cells["causal", "even"][1], cells["causal", "uneven"][1]) == ("2", "1")
    place = figure.rows.header.index("speed of a device")
    assert [line[place] for line in figure.rows.rows] == ["2 GFLOP/s", "1 GFLOP/s"]


def test_wrong_results_do_not_win():
    rows = [
        row("right", median_seconds=2.0),
        row("wrong", median_seconds=1.0, is_exact=False, library="other"),
    ]
    (line,) = winners({"kernels": cases(rows)}).rows
    assert line[2:6] == ("right", "1", "", "")
    assert slowdowns(cases(rows)) == {"wrong": [0.5], "right": [1.0]}


def test_a_tie_has_figures_in_every_case():
    rows = [
        row(who, mask, num_tokens=n, median_seconds=seconds)
        for mask in ("full", "causal")
        for n in (1024, 2048)
        for who, seconds in (("best", 1.0), ("all", 1.01))
    ]
    rows.append(row("once", "full", median_seconds=1.02, library="other"))
    said = verdict({"kernels": cases(rows)})
    assert "a tie with all (within 5 %)" in said
    assert "once, takes 1.02" in said and "in 1 of the cases" in said


def test_each_row_says_its_heads():
    table = row_table([row("a", num_heads=32, num_kv_heads=8)])
    assert table.rows[0][table.header.index("heads q:kv")] == "32:8"


def test_rows_of_other_blocks_are_other_cases():
    rows = [row("a", block=64), row("b", block=128), row("b", block=64, median_seconds=2.0)]
    assert slowdowns(cases(rows)) == {"a": [1.0], "b": [2.0, 1.0]}
    assert "block 64" in described(cases(rows)[0].fields)


def test_only_rows_of_the_same_case_are_compared():
    rows = [
        row("a", median_seconds=1.0),
        row("b", median_seconds=3.0),
        row("b", head_dim=128, median_seconds=9.0),
    ]
    assert slowdowns(cases(rows)) == {"a": [1.0], "b": [3.0, 1.0]}


def test_scaling_takes_rows_that_differ_in_nothing_else():
    rows = [row("a", num_tokens=n, median_seconds=float(n)) for n in (256, 512, 1024)]
    rows += [row("a", "full", num_tokens=n) for n in (256, 512)]
    found = facets(rows, "num_tokens", 2)
    assert [len(one.rows) for one in found] == [3, 2]
    assert "causal mask" in found[0].about and not facets(rows, "world_size", 2)
    weak = [row("a", world_size=n, num_tokens=512 * n) for n in (2, 4)]
    (one,) = facets(weak, "world_size", 2)
    assert "512 tokens a rank" in one.about


def test_predictions_state_their_median_error():
    rows = [row("a", median_seconds=1.0, predicted_seconds=x) for x in (0.5, 0.9, 1.0)]
    figure = predictions(rows, {"a": 0})
    assert figure is not None and "Median error 10 %" in figure.caption
    assert predictions([row("a")], {"a": 0}) is None


def test_every_chart_of_a_page_has_its_rows(tmp_path: Path):
    rows = many_rows()
    page = page_of(read_rows([write_rows(tmp_path / "r.jsonl", rows)]))
    found = figures(page)
    assert len(found) >= 6
    for name, figure in found.items():
        assert figure.rows and figure.rows.rows and figure.caption, name
    assert {mask for mask, _ in grid_of(found["heat-strategies"])} == set(tw.masks.NAMES)
    assert "a library with a long name" in written(page)


def test_a_file_cut_off_in_the_middle_gives_its_whole_rows(tmp_path: Path):
    path = write_rows(tmp_path / "r.jsonl", many_rows())
    data = path.read_bytes()
    path.write_bytes(data[: len(data) // 2])
    whole = data[: len(data) // 2].count(b"\n")
    found = read_rows([path])
    assert (len(found.rows), found.num_lost) == (whole, 1)
    assert page_of(found).notice.startswith("1 line was not whole")


def test_csv_holds_every_field_of_every_row(tmp_path: Path):
    rows = [row("a", bytes_by_rank=[1, 2]), row("b", outcome="failed", message='a "b", c')]
    write_csv(rows, tmp_path / "rows.csv")
    with (tmp_path / "rows.csv").open() as file:
        back = list(csv.DictReader(file))
    assert [one["contender"] for one in back] == ["a", "b"]
    assert json.loads(back[0]["bytes_by_rank"]) == [1, 2]
    assert back[1]["message"] == 'a "b", c' and back[1]["bytes_by_rank"] == ""


def test_published_distributed_rows_are_read(tmp_path: Path):
    path = tmp_path / "output-8-causal.csv"
    lines = "usp,causal,8,fwd,4,2,410.5,2.5e9\nring_p2p,causal,8,bwd,-1,8,-1000.0,-1000.0\nuls"
    path.write_text(DISTRIBUTED + lines)
    rows, num_lost = read_csv(path)
    assert num_lost == 1
    assert [one["outcome"] for one in rows] == ["ok", "out_of_memory"]
    assert (rows[0]["pass"], rows[0]["tflops"], rows[0]["num_tokens"]) == ("forward", 410.5, 65536)
    assert (rows[0]["peak_bytes"], rows[1]["pass"]) == (2.5e9, "backward")


def test_published_kernel_rows_are_read(tmp_path: Path):
    folder = tmp_path / "attn-bwd with causal_document mask"
    folder.mkdir()
    names = "seqlen,fa3,flex,fa3-min,flex-min,fa3-max,flex-max\n"
    (folder / "flops.csv").write_text(
        names + "1024.0,300,100,290,90,310,110\n2048,600,-2,1,2,3,4\n"
    )
    rows, num_lost = read_csv(folder / "flops.csv")
    assert num_lost == 0
    assert [(one["contender"], one["num_tokens"]) for one in rows] == [
        ("fa3", 1024), ("flex", 1024), ("fa3", 2048), ("flex", 2048)
    ]  # fmt: skip
    assert {(one["mask"], one["pass"]) for one in rows} == {("causal_document", "backward")}
    assert rows[3]["outcome"] == "unsupported"


def test_published_speeds_and_our_times_share_a_page(tmp_path: Path):
    csv_file = tmp_path / "output-8-full.csv"
    lines = [f"{who},full,{n},fwd,1,{n},{400 - n},1e9\n" for who in ("usp", "x") for n in (8, 16)]
    csv_file.write_text(DISTRIBUTED + "".join(lines))
    published = write_rows(tmp_path / "published.jsonl", read_csv(csv_file)[0])
    found = read_rows([write_rows(tmp_path / "r.jsonl", many_rows()), published])
    page = page_of(found)
    assert len(found.rows) == len(many_rows()) + 4
    speed = [f for f in figures(page).values() if f.title == "Speed against ranks"]
    assert page_of(read_rows([published])).facts[0].value == "2"
    assert all("Higher is faster" in figure.caption for figure in speed)
    assert "Speed against ranks" in {
        f.title for f in figures(page_of(read_rows([published]))).values()
    }


def test_bars_of_computing_and_waiting_are_those_of_the_case_with_most_strategies():
    shared = {"kind": "network", "world_size": 8, "network": "lab", "mbit": 50.0}
    rows = [
        row("ring", median_seconds=0.6, exposed_seconds=0.5, **shared),
        row("mesh", median_seconds=0.4, exposed_seconds=0.1, **shared),
        row("a library", median_seconds=0.2, exposed_seconds=None, **shared),
        row("ring", "full", median_seconds=9.0, exposed_seconds=1.0, **shared),
    ]
    figure = waiting("network", cases(rows))
    assert figure is not None and "causal" in figure.caption
    assert bars_of(figure) == {
        "computing": {"mesh": pytest.approx(0.3), "ring": pytest.approx(0.1)},
        "waiting": {"mesh": 0.1, "ring": 0.5},
    }
    assert waiting("network", cases(rows[2:])) is None


def test_kernels_have_speed_and_memory_by_length_density_and_block(tmp_path: Path):
    sizes = [(block, density) for block in (64, 128) for density in (0.1, 1.0)]
    rows = [
        row(who, "block_sparse_uniform", block=block, density=density, tflops=density, peak_bytes=9)
        for who in ("cpu", "sdpa")
        for block, density in sizes
    ]
    rows += [row("cpu", num_tokens=n, tflops=1.0, peak_bytes=n) for n in (1024, 2048)]
    titles = {
        f.title for f in figures(page_of(read_rows([write_rows(tmp_path / "r", rows)]))).values()
    }
    for field in ("tokens", "density", "block"):
        assert {f"Speed against {field}", f"Memory against {field}"} <= titles


@pytest.mark.parametrize("text", ["", "a,b\n1,2\n", "seqlen\n1\n"])
def test_other_csv_files_are_refused(tmp_path: Path, text: str):
    (tmp_path / "x.csv").write_text(text)
    with pytest.raises(ValueError, match="not those of LongCA-bench"):
        read_csv(tmp_path / "x.csv")


@pytest.mark.parametrize(
    "damage",
    [
        {"kind": 1},
        {"dtype": 1},
        {"network": 0.5},
        {"library": ["x"]},
        {"mbit": -(10**400)},
    ],
)
def test_a_row_with_a_wrong_type_is_left_out(damage: dict, tmp_path: Path):
    rows = [row("a"), row("b"), {**row("c", num_tokens=2048), **damage}]
    found = read_rows([write_rows(tmp_path / "rows.jsonl", rows)])
    assert [one["contender"] for one in found.rows] == ["a", "b"] and found.num_lost == 1
    assert "alert" not in written(page_of(found))


class _Tags(HTMLParser):
    """The elements of a page, with their attributes, and the text outside scripts."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[tuple[str, tuple[str, ...]]] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, tuple(name for name, _ in attrs)))


def tags(html: str) -> set[tuple[str, tuple[str, ...]]]:
    parser = _Tags()
    parser.feed(html)
    return set(parser.found)


def strings(value: Any, name: str = "") -> Iterator[tuple[str, str]]:
    """All texts of a drawing, by the name of the field that they are in."""
    if isinstance(value, dict):
        for key, entry in value.items():
            yield from strings(entry, key)
    elif isinstance(value, list):
        for entry in value:
            yield from strings(entry, name)
    elif isinstance(value, str):
        yield name, value


def test_hostile_texts_are_nothing_but_text(tmp_path: Path):
    plain = read_rows([write_rows(tmp_path / "plain.jsonl", many_rows())])
    harmless = tags(written(page_of(plain)))
    for name, page in hostile_pages(tmp_path).items():
        html = page.read_text()
        more = {tag for tag in tags(html) - harmless if tag[0] not in ("td", "th")}
        assert not more, (name, more)
        for drawing in re.findall(r'<script type="application/json">(.*?)</script>', html):
            for field, text in strings(json.loads(drawing)):
                if field not in ("hovertemplate", "texttemplate"):
                    assert "<" not in text.replace("<br>", ""), (name, field, text)


def test_a_page_runs_its_own_scripts_alone(tmp_path: Path):
    html = written(page_of(read_rows([write_rows(tmp_path / "rows.jsonl", many_rows())])))
    policy = re.search(r'http-equiv="Content-Security-Policy" content="([^"]*)"', html)
    assert policy
    allowed = re.search(r"script-src ([^;]*);", policy[1])
    assert allowed and "default-src 'none'" in policy[1] and "unsafe-eval" not in policy[1]
    scripts = re.findall(r"<script>(.*?)</script>", html, re.DOTALL)
    hashes = [b64encode(sha256(script.encode()).digest()).decode() for script in scripts]
    assert allowed[1].split() == [f"'sha256-{one}'" for one in hashes] and len(hashes) == 2


@pytest.mark.parametrize("kind", ["kernels<img src=x onerror=alert(1)>", "other", "", "Kernels"])
def test_a_row_of_an_unknown_kind_is_refused_with_its_line(kind: str, tmp_path: Path):
    path = write_rows(tmp_path / "rows.jsonl", [row("a"), row("b", kind=kind)])
    with pytest.raises(ValueError, match=r"rows.jsonl, line 2: kind \(.*\) must be one of kernels"):
        read_rows([path])
