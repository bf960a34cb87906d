"""Scripts of benchmarks start in both forms."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SCRIPTS = sorted(path for path in (ROOT / "benchmarks").glob("*.py") if path.stem != "benchmarks")


@pytest.mark.parametrize(
    ("folder", "load"),
    (
        (ROOT, "for path in paths: importlib.import_module(f'benchmarks.{path.stem}')"),
        (ROOT / "benchmarks", "for path in paths: runpy.run_path(str(path), run_name=path.stem)"),
    ),
    ids=("python -m benchmarks.name", "python benchmarks/name.py"),
)
def test_every_script_finds_its_neighbours(folder: Path, load: str):
    code = "import importlib, pathlib, runpy, sys\npaths = [*map(pathlib.Path, sys.argv[1:])]\n"
    # in this folder, -c looks for modules where Python does when it starts a script in this form
    command = [sys.executable, "-c", code + load, *map(str, SCRIPTS)]
    ended = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr
