"""The site: every page is in its navigation, every public name in its API page, and it builds."""

import re
import subprocess
import sys
from pathlib import Path

import yaml

import tilewise as tw
import tilewise_verify
from tilewise import compiler, kernels, plan, planning, simulation, transport

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"


def pages(entry) -> list[str]:
    """The pages of a navigation entry, in order."""
    match entry:
        case str():
            return [entry]
        case dict():
            return [page for value in entry.values() for page in pages(value)]
    return [page for value in entry for page in pages(value)]


def test_every_page_is_in_the_navigation_once():
    listed = pages(yaml.safe_load((ROOT / "mkdocs.yml").read_text())["nav"])
    assert sorted(listed) == sorted(str(p.relative_to(DOCS)) for p in DOCS.rglob("*.md"))


def test_the_menu_is_short_and_the_site_has_logo_repository_search_next_and_previous():
    config = yaml.safe_load((ROOT / "mkdocs.yml").read_text())
    assert len(config["nav"]) <= 9
    theme = config["theme"]
    assert (DOCS / theme["logo"]).exists() and config["repo_url"] and "search" in config["plugins"]
    assert {"navigation.footer", "navigation.tabs"} <= set(theme["features"])
    assert all((DOCS / path).exists() for path in config["extra_css"])


def test_the_api_page_has_every_public_name():
    listed = re.findall(r"^::: tilewise[._]([\w.]+)$", (DOCS / "api.md").read_text(), re.MULTILINE)
    assert len(listed) == len(set(listed))
    modules = {"masks", "wires"}
    assert {name for name in listed if "." not in name} - modules == set(tw.__all__)
    workshop = (planning, plan, kernels, transport, compiler, simulation, tilewise_verify)
    named = {f"{m.__name__[len('tilewise.') :]}.{name}" for m in workshop for name in m.__all__}
    assert named - set(listed) == {"plan.Plan", "kernels.kernel_for"}


def test_the_site_builds_without_a_warning(tmp_path: Path):
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path)]
    ran = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=240)
    assert ran.returncode == 0, ran.stderr
    api = (tmp_path / "api" / "index.html").read_text()
    for name in tw.__all__:
        assert f'id="tilewise.{name}"' in api, name
    sections = (tmp_path / "llms.txt").read_text()
    for page in pages(yaml.safe_load((ROOT / "mkdocs.yml").read_text())["nav"]):
        assert f"](https://OWNER.github.io/tilewise/{page})" in sections, page
        if ":::" not in (DOCS / page).read_text():
            assert (tmp_path / page).read_text() == (DOCS / page).read_text(), page
    described = (tmp_path / "api.md").read_text()
    assert ":::" not in described and all(f"`tilewise.{name}`" in described for name in tw.__all__)
    assert "Exact softmax attention" in described
    assert 'href="https://github.com/OWNER/tilewise"' in api
    # Material's own link to a repository asks its host for numbers
    assert 'data-md-component="source"' not in api
    scripts = [p for p in tmp_path.rglob("*.html") if re.search(r'src="https?://', p.read_text())]
    assert not scripts, "pages must load nothing from elsewhere"
