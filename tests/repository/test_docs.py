"""The documentation says what the code does: its blocks run, its outputs and grids are real."""

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from support.docs_blocks import PAGES, ROOT, blocks, name, run
from typer.main import get_command
from typer.testing import CliRunner

import tilewise as tw
from tilewise_tools.cli import app
from tilewise_tools.cli.examples import EXAMPLES

STRATEGIES = {page.stem: page for page in PAGES if page.parent.name == "strategies"}
SOURCES = ROOT / "src"
PACKAGE = SOURCES / "tilewise"
SECTIONS = ("Cost", "Source", "When to use it", "Departures from the paper")


def grids() -> list[tuple[str, str]]:
    """Every plan grid of the documentation, with its page."""
    return [
        (name(page), block.content)
        for page in PAGES
        for block in blocks(page.read_text())
        if block.content.startswith("plan: ")
    ]


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_a_pages_code_runs_and_prints_what_it_says(page: Path):
    for block, printed in run(page):
        if block.is_output:
            assert block.content == printed


class SimulationBegunError(Exception):
    """All arguments of a command were taken."""


def command_lines() -> list[tuple[str, list[str]]]:
    """Command lines in blocks, those in text that say for how many ranks, and those of --help."""
    found: list[tuple[str, str]] = []
    for page in PAGES:
        text = page.read_text()
        for block in blocks(text):
            lines = block.content.replace("\\\n", " ")
            found += [(name(page), x) for x in re.findall(r"^tilewise [a-z].*$", lines, re.M)]
        inline = re.findall(r"`(tilewise [^`]*--world-size[^`]*)`", text)
        found += [(name(page), line) for line in inline]
    helped = [("--help", line) for lines in EXAMPLES.values() for line in lines]
    found += [(page, line) for page, line in helped if line.startswith("tilewise ")]
    return [(page, shlex.split(line, comments=True)[1:]) for page, line in found]


def test_command_lines_are_taken(monkeypatch: pytest.MonkeyPatch):
    def begun(*_: object, **words: object):
        raise SimulationBegunError

    for command, work in (("plan", "search"), ("simulate", "simulate")):
        monkeypatch.setattr(f"tilewise_tools.cli.{command}.{work}", begun)
    group, names = get_command(app), set[str]()
    for page, words in command_lines():
        if words[0] in ("plan", "simulate"):
            done = CliRunner().invoke(app, words)
            assert isinstance(done.exception, SimulationBegunError), (page, words, done.output)
        else:
            command = group.commands[words[0]]
            if words[0] in ("bench", "lab"):
                command, words = command.commands[words[1]], words[1:]
            command.make_context(words[0], words[1:])
        names.add(words[0])
    assert names >= {"plan", "simulate", "show", "mask", "report", "advise", "run"}


def test_every_grid_is_the_plan_that_its_name_says():
    assert {page for page, _ in grids()} >= {name(page) for page in STRATEGIES.values()}
    for page, grid in grids():
        expression = grid.partition("\n")[0].removeprefix("plan: ")
        plan = tw.parse(grid)
        assert tw.show(plan) == grid, page
        if not expression.endswith(", pruned"):
            built = eval(expression, {"__builtins__": {}}, {x: getattr(tw, x) for x in tw.__all__})
            assert plan == built, f"{page}: {expression}"


def test_every_grid_is_checked_against_the_code_above_it():
    for page in PAGES:
        for block in blocks(page.read_text()):
            if block.content.startswith("plan: "):
                assert block.is_output, f"{name(page)}: {block.content[:40]}"


def test_a_strategy_page_has_a_grid_and_every_section():
    for stem, page in STRATEGIES.items():
        headings = re.findall(r"^## (.*)$", page.read_text(), re.MULTILINE)
        assert not set(SECTIONS) - set(headings), stem
        assert any(grid for where, grid in grids() if where == name(page)), stem


def test_links_lead_somewhere():
    for page in PAGES:
        for target in re.findall(r"\]\(([^)#]+)[^)]*\)", page.read_text()):
            if not target.startswith("http"):
                assert (page.parent / target).exists(), f"{name(page)}: {target}"


def test_files_that_are_named_exist():
    folders = [
        path.name
        for path in (*ROOT.iterdir(), *SOURCES.iterdir(), *PACKAGE.iterdir())
        if path.is_dir()
    ]
    path = re.compile(
        rf"(?<![\w/.-])(?:{'|'.join(folders)})/[\w/.-]*\w\.(?:py|toml|json|jsonl|csv|md|png)\b"
    )
    missing = [
        f"{name(page)}: {found}"
        for page in PAGES
        for found in path.findall(page.read_text())
        if not any((root / found).exists() for root in (ROOT, SOURCES, PACKAGE, page.parent))
    ]
    assert not missing


def script() -> str:
    """The example of the README that is a script of its own."""
    (found,) = [
        b.content for b in blocks((ROOT / "README.md").read_text()) if "__main__" in b.content
    ]
    return found


def test_the_script_of_the_readme_is_exact_in_loopback():
    namespace = {"__name__": "documentation"}
    exec(script(), namespace)
    errors = tw.loopback(3, lambda rank, group: namespace["main"](group))
    assert max(errors) < 1e-12


@pytest.mark.slow
def test_the_script_of_the_readme_is_exact_under_torchrun(tmp_path: Path):
    (tmp_path / "attend.py").write_text(script())
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    command = [*launch, str(tmp_path / "attend.py")]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    assert float(ran.stdout.split()[-1]) < 1e-12
