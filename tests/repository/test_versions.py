"""Versions: one number for a release, and one table of what it runs with."""

import re
import tomllib
from pathlib import Path

import yaml

import tilewise as tw
from benchmarks.support import PAGES, support_versions, written

ROOT = Path(__file__).resolve().parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())


def numbers(version: str) -> tuple[int, ...]:
    return tuple(map(int, version.split(".")))


def test_pages_have_the_table_of_support_versions():
    for page in PAGES:
        text = (ROOT / page).read_text(encoding="utf-8")
        assert text == written(page), f"{page}: python -m benchmarks.support --write"


def test_the_versions_that_tests_run_with_lie_within_the_table():
    pins = re.findall(r"^([\w-]+)==([\d.]+)", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
    pinned = {name.lower(): numbers(version) for name, version in pins}
    for name, (low, high) in support_versions().items():
        assert numbers(low) <= pinned[name.lower()] <= numbers(high), name


def test_what_pip_asks_for_is_the_lowest_that_was_tested():
    groups = PROJECT["project"]["optional-dependencies"]
    specs = [*PROJECT["project"]["dependencies"], *groups["hf"], *groups["diffusers"]]
    asked = dict(spec.split(">=") for spec in specs if ">=" in spec)
    assert asked.keys() >= {"torch", "transformers", "diffusers"}
    for name, version in asked.items():
        lowest = numbers(support_versions()[name][0])
        assert lowest[: len(numbers(version))] == numbers(version), name


def test_a_release_has_one_number():
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert str(citation["version"]) == tw.__version__
    assert re.fullmatch(r"\d+\.\d+\.\d+", tw.__version__)


def test_workflows_and_templates_are_read():
    """Their files parse, jobs have steps, and what they run is in the repository."""
    folder = ROOT / ".github"
    paths = [*folder.glob("workflows/*.yml"), *folder.glob("ISSUE_TEMPLATE/*.yml")]
    found = {path.stem: yaml.safe_load(path.read_text()) for path in paths}
    assert found.keys() >= {"ci", "package", "nightly", "release", "wrong_result", "config"}
    for name in ("ci", "package", "nightly"):
        for job in found[name]["jobs"].values():
            assert job["steps"] and job["timeout-minutes"]
    named = re.findall(r"tests/[\w/]+\.py", (folder / "workflows/package.yml").read_text())
    assert named and all((ROOT / path).exists() for path in named)
    for template in ("wrong_result", "slow", "model_or_library"):
        assert found[template]["name"] and any("id" in field for field in found[template]["body"])
