"""Wheel and source distribution: they hold what is needed, and the wheel works by itself."""

import json
import os
import site
import subprocess
import sys
import tarfile
import venv
import zipfile
from pathlib import Path

import pytest

import tilewise as tw

ROOT = Path(__file__).resolve().parents[2]
SOURCES = ROOT / "src"
pytestmark = pytest.mark.slow


SIX_LINES = """
import sys

def test_cp(request):
    assert "torch" not in sys.modules
    assert callable(request.getfixturevalue("cp_parity"))
"""


def run(*command: str | Path, **options) -> str:
    ran = subprocess.run(command, capture_output=True, text=True, timeout=280, **options)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    return ran.stdout


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The wheel, built from the source distribution as an index's users get it, and the latter."""
    folder = tmp_path_factory.mktemp("dist")
    # Without isolation nothing is downloaded: the build backend is among the dev dependencies.
    run(sys.executable, "-m", "build", "--no-isolation", "--outdir", str(folder), str(ROOT))
    (wheel,), (sdist,) = folder.glob("*.whl"), folder.glob("*.tar.gz")
    return wheel, sdist


def test_the_wheel_holds_every_file_of_the_package(built: tuple[Path, Path]):
    wheel, _ = built
    names = set(zipfile.ZipFile(wheel).namelist())
    sources = {
        str(path.relative_to(SOURCES))
        for path in SOURCES.rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    assert any(name.endswith(".toml") for name in sources)
    packages = {name.partition("/")[0] for name in sources}
    assert packages == {"tilewise", "tilewise_verify", "tilewise_tools"}
    assert {f"{package}/py.typed" for package in packages} <= sources
    assert sources <= names
    extra = {name for name in names - sources if ".dist-info/" not in name}
    assert not extra


def test_the_source_distribution_holds_tests_and_documentation(built: tuple[Path, Path]):
    _, sdist = built
    with tarfile.open(sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    assert {"pyproject.toml", "README.md", "LICENSE"} <= names
    assert {"docs/index.md", "tests/repository/test_docs.py", "examples/fsdp_cp.py"} <= names


def test_the_wheel_works_in_an_environment_of_its_own(built: tuple[Path, Path], tmp_path: Path):
    """The dependencies are lent by this environment, all else is the wheel's."""
    wheel, _ = built
    venv.create(tmp_path / "env", with_pip=False)
    python = tmp_path / "env" / "bin" / "python"
    (lent,) = site.getsitepackages()
    install = ["-m", "pip", "--python", python, "install", "--no-deps", "--no-index", wheel]
    run(sys.executable, *install)
    (own,) = (tmp_path / "env" / "lib").glob("python*/site-packages")
    # A plain path line: the .pth files there, this checkout's among them, are not read.
    (own / "lent.pth").write_text(lent + "\n")
    clean = {k: v for k, v in os.environ.items() if not k.startswith("PYTHON")}
    options = {"cwd": tmp_path, "env": clean}
    where = run(python, "-c", "import tilewise; print(tilewise.__file__)", **options)
    assert Path(where.strip()).is_relative_to(own)
    tilewise = python.with_name("tilewise")
    findings = json.loads(run(tilewise, "doctor", "--json", **options))
    assert any(f["name"] == "tilewise" and f["detail"] == tw.__version__ for f in findings)
    assert "tilewise" in run(tilewise, "doctor", **options)
    data = "tw.Machine.preset('h100x8'); tw.lengths.sample('pile', 64, seed=0)"
    run(python, "-c", f"import tilewise as tw; {data}", **options)
    (tmp_path / "test_cp.py").write_text(SIX_LINES)
    assert "1 passed" in run(python, "-m", "pytest", "-q", "test_cp.py", **options)
