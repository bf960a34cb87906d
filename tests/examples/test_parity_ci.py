"""The repository of examples/parity_ci passes its own test on a CPU, and the action runs it."""

import os
import re
import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[2]
EXAMPLE = ROOT / "examples" / "parity_ci"
ACTION = ROOT / ".github" / "actions" / "parity" / "action.yml"
FUNCTIONS = "llama3_flash_attn_prepare_cu_seqlens, llama3_flash_attn_varlen_func"
OURS = f"from tilewise.compat.ring_flash_attn import {FUNCTIONS}\n"
WINDOW = "                window_size=(WINDOW, 0),\n"  # of the split call


def theirs() -> str:
    """ring-flash-attn's own file, past its `__init__`, which needs transformers below 5."""
    spec = find_spec("ring_flash_attn")
    if spec is None or spec.submodule_search_locations is None:
        pytest.skip("ring-flash-attn is not installed: pip install 'tilewise[peers]'")
    path = [*spec.submodule_search_locations]
    return f"__path__ = {path!r}\nfrom .llama3_flash_attn_varlen import {FUNCTIONS}\n"


def run_example(folder: Path, package: str) -> tuple[int, str]:
    """Run the example's test in a folder, where `import ring_flash_attn` finds a package."""
    (folder / "ring_flash_attn").mkdir()
    (folder / "ring_flash_attn" / "__init__.py").write_text(package)
    source = os.pathsep.join((str(ROOT / "src"), os.environ.get("PYTHONPATH", "")))
    environment = {**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "PYTHONPATH": source}
    command = [sys.executable, "-m", "pytest", "-p", "tilewise_verify.pytest_plugin", "-q"]
    options = {"capture_output": True, "text": True, "timeout": 280, "check": False}
    ran = subprocess.run(command, cwd=folder, env=environment, **options)
    return ran.returncode, ran.stdout + ran.stderr


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    return Path(shutil.copytree(EXAMPLE, tmp_path / "repository"))


@pytest.mark.parametrize("make", [lambda: OURS, theirs], ids=["tilewise", "ring-flash-attn"])
def test_the_trainers_split_is_the_unsplit_model(repository, make):
    code, output = run_example(repository, make())
    assert code == 0 and "1 passed" in output, output


@pytest.mark.slow
@pytest.mark.parametrize("make", [lambda: OURS, theirs], ids=["tilewise", "ring-flash-attn"])
def test_a_window_that_the_split_call_forgets_is_named(repository, make):
    trainer = repository / "trainer.py"
    assert trainer.read_text().count(WINDOW) == 1
    trainer.write_text(trainer.read_text().replace(WINDOW, ""))
    code, output = run_example(repository, make())
    wanted = "window_ignored in blocks.0.attention: with world_size 2 the model is not the unsplit"
    assert code == 1 and wanted in output, output
    assert wanted in (EXAMPLE / "README.md").read_text()


def test_the_action_is_one_that_the_examples_workflow_can_use():
    action = yaml.safe_load(ACTION.read_text())
    text = ACTION.read_text()
    assert action["runs"]["using"] == "composite"
    assert {*re.findall(r"\$\{\{ inputs\.([\w-]+) \}\}", text)} == {*action["inputs"]}
    assert all("shell" in step for step in action["runs"]["steps"] if "run" in step)
    installed = ACTION.parent / "../../.."  # by the path within the action's own repository
    assert "$GITHUB_ACTION_PATH/../../..[pytest]" in text
    assert (installed / "pyproject.toml").resolve() == ROOT / "pyproject.toml"
    workflow = yaml.safe_load((EXAMPLE / ".github" / "workflows" / "parity.yml").read_text())
    (step,) = (s for s in workflow["jobs"]["parity"]["steps"] if "tilewise" in s["uses"])
    assert step["uses"] == "OWNER/tilewise/.github/actions/parity@v1"
    assert {*step["with"]} <= {*action["inputs"]}
    assert all((EXAMPLE / name).is_file() for name in step["with"].values())
