"""Extras: without one, what needs it says so in one line, and all else works."""

import json
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from support.report_pages import many_rows, subject, write_rows
from typer.testing import CliRunner, Result

import tilewise as tw
from tilewise_tools.cli import app
from tilewise_tools.doctor import EXTRAS, MissingExtraError, require
from tilewise_tools.mask_report.view import draw, view
from tilewise_tools.report.page import written
from tilewise_tools.report.plan_report import page_of

ROOT = Path(__file__).resolve().parents[2]
INSTALL = "pip install 'tilewise[report]'"


@pytest.fixture
def without(monkeypatch: pytest.MonkeyPatch) -> None:
    """An installation without the extras: their packages are not found and cannot be imported."""
    for extra in EXTRAS:
        monkeypatch.setitem(sys.modules, extra.module, None)


def run(*words: str | Path) -> Result:
    return CliRunner().invoke(app, [*map(str, words)])


def test_the_table_says_what_pyproject_does():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    offered = project["optional-dependencies"]
    for extra in EXTRAS:
        names = {re.split(r"[^\w-]", spec)[0] for spec in offered[extra.name]}
        assert extra.module in names
    dependencies = {re.split(r"[^\w-]", spec)[0] for spec in project["dependencies"]}
    assert dependencies == {"torch", "numpy"}


def test_a_report_without_plotly_is_refused_in_one_line(without: None, tmp_path: Path):
    rows = write_rows(tmp_path / "rows.jsonl", many_rows()[:4])
    done = run("report", rows)
    assert (done.exit_code, done.output.count("\n")) == (2, 1)
    assert done.output == f"tilewise: tilewise report needs plotly: {INSTALL}\n"
    assert not rows.with_suffix(".html").exists()
    with pytest.raises(MissingExtraError, match=r"a report's page needs plotly: pip install"):
        written(page_of(subject(tw.ring(8))))


def test_a_picture_without_matplotlib_is_refused_in_one_line(without: None, tmp_path: Path):
    words = "mask", "causal", "--num-tokens", "512", "--world-size", "4"
    done = run(*words, "--png", tmp_path / "mask.png")
    assert done.exit_code == 2
    assert done.output == f"tilewise: tilewise mask --png needs matplotlib: {INSTALL}\n"
    assert run(*words).exit_code == 0  # as text
    seen = view(tw.Causal(), tw.contiguous(64, 4), 8)
    with pytest.raises(MissingExtraError, match=r"picture of a mask needs matplotlib: pip install"):
        draw(seen, 4, ("causal",), tmp_path / "mask.png")


def test_doctor_lists_every_extra_and_how_to_install_it(without: None):
    found = {one["name"]: one for one in json.loads(run("doctor", "--json").output)}
    for extra in EXTRAS:
        one = found[extra.module]
        assert (one["part"], one["is_here"]) == ("extra", False)
        assert one["detail"] == f"{extra.use}: pip install 'tilewise[{extra.name}]'"


def test_what_is_installed_is_not_asked_for():
    assert require("plotly", "this") is None
    found = {one["name"]: one for one in json.loads(run("doctor", "--json").output)}
    assert found["plotly"]["is_here"] and found["matplotlib"]["is_here"]


def test_the_command_line_without_its_extra_says_what_to_install():
    hidden = "import sys; sys.modules['typer'] = None; from tilewise.__main__ import main; main()"
    ran = subprocess.run([sys.executable, "-c", hidden], capture_output=True, text=True)
    assert ran.returncode == 1
    assert ran.stderr == "the command line needs typer: pip install 'tilewise[cli]'\n"
