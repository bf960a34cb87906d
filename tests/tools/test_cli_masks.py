"""`tilewise mask` as its users type it, and the figures behind it."""

import json
import sys
from io import StringIO
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console
from typer.testing import CliRunner, Result

import tilewise as tw
from tilewise.layouts.balanced import balanced
from tilewise_tools.cli import app
from tilewise_tools.cli.mask import as_blocks, as_signs
from tilewise_tools.cli.mask import mask as draw_mask
from tilewise_tools.mask_report import figures
from tilewise_tools.mask_report.figures import (
    MaskCase,
    imbalance,
)
from tilewise_tools.mask_report.named import drawn
from tilewise_tools.mask_report.view import view

SMALL = ("--num-tokens", "1000", "--world-size", "3")
CASE = MaskCase(4, 1000, 4, 2, 16)


def tilewise(*words: str) -> Result:
    return CliRunner().invoke(app, list(words))


@pytest.mark.parametrize("name", tw.masks.ALL_NAMES)
def test_every_pattern_can_be_drawn_as_text(name: str):
    shown = tilewise("mask", name, *SMALL)
    assert shown.exit_code == 0, shown.output
    lines = shown.stdout.splitlines()
    assert lines[0] == name and "1,000 tokens on 3 ranks, balanced" in lines[1]
    assert {*"".join(lines[6:])} <= {*" 012."}


@pytest.mark.parametrize("layout", ["balanced", "zigzag", "contiguous", "striped", "tiled"])
def test_a_picture_is_written(layout: str, tmp_path: Path):
    path = tmp_path / "out.png"
    shown = tilewise("mask", "causal_document", *SMALL, "--layout", layout, "--png", str(path))
    assert shown.exit_code == 0, shown.output
    assert path.read_bytes().startswith(b"\x89PNG") and path.stat().st_size < 60_000
    assert shown.stdout.startswith(f"{path}: ")


def test_a_speckled_picture_has_larger_cells(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(sys.modules[draw_mask.__module__], "MOST_BYTES", 66_000)
    path = tmp_path / "out.png"
    words = ("--num-tokens", "16K", "--world-size", "64", "--layout", "striped", "--png", str(path))
    shown = tilewise("mask", "block_sparse_uniform", *words)
    assert shown.exit_code == 0, shown.output
    assert path.stat().st_size <= 66_000


def test_an_expression_is_drawn():
    text = "causal & document([0, 500, 1000])"
    found = json.loads(tilewise("mask", text, *SMALL, "--json").stdout)
    assert found["area"] == 2 * (500 * 501 // 2)
    assert sum(found["tokens"]) == 1000 and max(found["tokens"]) - min(found["tokens"]) <= 1
    assert sum(found["areas_of_own_queries"]) == found["area"]


def test_the_figures_of_a_mask_are_those_of_its_plan():
    found = json.loads(tilewise("mask", "causal", *SMALL, "--layout", "zigzag", "--json").stdout)
    layout = tw.zigzag(1000, 3)
    work = tw.Workload(1000, 32, 32, 128, mask=tw.Causal(), layout=layout)
    sent = tw.volume(tw.needed(tw.Causal(), layout), work).forward
    assert found["plan"] == "needed" and found["mean_bytes"] == pytest.approx(np.mean(sent))
    assert found["busiest_bytes"] >= max(sent) - 1e-6
    assert found["ring_bytes"] == pytest.approx(2 / 3 * 1000 * 2 * 32 * 128 * 2)


def test_signs_say_who_computes():
    seen = view(tw.Causal(), tw.contiguous(4, 2), 4)
    assert as_signs(seen).splitlines() == ["    0011", "", "0   00..", "1   1111"]


@pytest.mark.parametrize("cells", [4, 5])
def test_a_terminal_gets_colours(cells: int):
    seen, file = view(tw.Causal(), tw.contiguous(40, 2), cells), StringIO()
    Console(file=file, force_terminal=True, color_system="truecolor").print(as_blocks(seen, 2))
    text = file.getvalue()
    assert text.count("▀") == -(-cells // 2) * (cells + 2) and "63;114;182" in text


@pytest.mark.parametrize(
    "words, part",
    [
        (["mask", "nothing"], "take one of full, causal, window, document, chunked_causal"),
        (["mask", "causal", "--num-tokens", "0"], "--num-tokens ('0') must be a number"),
        (["mask", "causal &"], "cannot be read; write it as in causal & window(1023, 0)"),
        (["mask", "causal", "--png", "x.txt"], "--png ('x.txt') must be a name that ends in .png"),
        (["mask", "causal", "--world-size", "0"], "--world-size (0) must be from 1 to 1024"),
        (["mask", "causal_document", "--corpus", "x"], "corpus 'x' is not known; take one of"),
        (["mask", "document([0, 5])", "--num-tokens", "9"], "ends at 5"),
        (["mask", "causal", "--num-tokens", "9", "--png", "no/where/x.png"], "is no folder"),
    ],
)
def test_bad_input_is_one_line_and_code_2(words: list[str], part: str):
    ended = tilewise(*words)
    assert ended.exit_code == 2
    assert part in ended.stderr and ended.stdout == ""
    assert ended.stderr.startswith("tilewise: ") and ended.stderr.count("\n") == 1


@pytest.mark.parametrize("name", ["causal_document", "sliding_window", "block_sparse_variable"])
def test_imbalance_is_that_of_the_dense_mask(name: str):
    mask = drawn(name, 300, seed=1)
    rows = mask.dense(range(300), range(300)).sum(1)
    for layout in (tw.contiguous(300, 4), tw.striped(300, 4), balanced(mask, 300, 4)):
        areas = [rows[layout.rows(rank)].sum() for rank in range(4)]
        assert imbalance(mask, layout) == pytest.approx(max(areas) / np.mean(areas))


def test_layouts_of_the_table_are_those_of_the_package():
    for name, make in figures.LAYOUTS.items():
        if name not in ("balanced", "zigzag_documents"):
            assert make(tw.Causal(), 100, 4) == getattr(tw, name)(100, 4)
    ours = figures.LAYOUTS["balanced"]
    assert ours(tw.Causal(), 1000, 4) == balanced(tw.Causal(), 1000, 4)
    assert ours(tw.Causal(), 100, 4) == balanced(tw.Causal(), 100, 4, chunk=100)
    every, cu = figures.LAYOUTS["zigzag_documents"], [0, 30, 100]
    for documents in (tw.Document(cu), tw.Document(cu) & tw.Causal()):
        assert every(documents, 100, 4) == tw.zigzag_documents(cu, 4)
    assert every(tw.Causal(), 96, 4) == tw.zigzag(96, 4)
