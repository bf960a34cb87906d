"""Scripts of benchmarks start in both forms, and refuse bad options in one line."""

import runpy
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


BAD = (
    ("balance", "--ranks 1", "--ranks (1) must be at least 2"),
    ("canonical_cost", "--tokens 3", "--ranks (2) x --tokens (3) must be a multiple of 1024"),
    ("canonical_cost", "--ranks 3", "--ranks: invalid choice: 3"),
    ("docs_tables", "--only nothing", "--only 'nothing' is not known; take some of"),
    ("docs_tables", "--rows note.txt", "--rows: Expecting value"),
    ("docs_tables", "--rows no.json", "--rows: no.json: No such file or directory"),
    ("documents", "--ranks 8,1", "--ranks (1) must be at least 2"),
    ("gpu", "--minutes -1", "--minutes (-1.0) must be from 1 to 1440"),
    ("gpu", "--minutes nan --plan", "--minutes (nan) must be from 1 to 1440"),
    ("gpu", "--summary note.txt", "--summary: note.txt holds no rows of this script; give a file"),
    ("gpu", "--table note.txt", "--table: note.txt holds no rows of this script; give a file"),
    ("greedy", "--tiles 0x4", "--tiles ('0x4') must be rows x columns from 1 to 99, such as 4x8"),
    ("greedy", "--ratios -1", "--ratios (-1.0) must be at least 0"),
    ("hf_models", "--seconds nan", "--seconds (nan) must be from 1 to 86400"),
    ("hf_one_rank", "--tokens", "--tokens: expected at least one argument"),
    ("hybrid_layers", "--show --lab", "--lab: not allowed with argument --show"),
    ("hybrid_layers", "--show --rows no.jsonl", "--rows: no.jsonl: No such file or directory"),
    ("hybrid_layers", "--rows made/no.jsonl", "--rows: made is no folder"),
    ("memory", "--heads 3x2", "--heads ('3x2') must be query:KV heads such"),
    ("memory", "--heads 3:2", "--heads: num_heads (3) must be a multiple of num_kv_heads (2)"),
    ("memory", "--machine radio", "--machine: no preset 'radio'"),
    ("memory", "--picture made/x.png", "--picture: made is no folder"),
    ("papers", "--only volume,", "--only '' is not known; take some of volume, time"),
    ("patterns", "--ranks 1", "--ranks (1) must be at least 2"),
    ("patterns", "--tokens 3", "--tokens (3) must be a multiple of 8"),
    ("planner_choices", "--write x.csv --json", "--json: not allowed with argument --write"),
    ("prediction", "--ranks 2,65", "--ranks (65) must be from 2 to 64"),
    ("schedules", "--ranks 1 --steps 1 --json", "--ranks: document "),
    ("soak", "--tokens 3", "--tokens (3) must be a multiple of --ranks (2)"),
    ("strategy_pictures", "made", "folder: made is no folder; make it first"),
    ("support", "--write --check", "--check: not allowed with argument --write"),
    ("team_exchange", "--hosts 3000", "--hosts (3000) must be from 1 to 250"),
    ("memory", "--ranks 8 --picture made.jpg", "--picture ('made.jpg') must be a name that ends"),
    ("greedy", "--ratios abc", "--ratios ('abc') must be numbers, as in 0.5,1,2"),
    ("longca", "no.csv -o made.jsonl", "no.csv cannot be read: No such file or directory"),
    ("team_exchange", "--hosts 1", "--hosts (1) must be at least 2"),
    ("team_exchange", "--mbit nan", "--mbit (nan) must be from 1 to 100000"),
    ("tiled", "--picture made/x.png", "--picture: made is no folder"),
    ("tiled", "--ranks 8,1", "--ranks (1) must be at least 2"),
    ("triton_blocks", "--tokens -1", "--tokens: the value ('-1') must be a number such as 4096"),
    ("triton_code", "--arch 12", "--arch: invalid choice: 12"),
    ("triton_code", "--head-dim 257", "--head-dim (257) must be from 1 to 256"),
    ("triton_code", "--head-dim 0", "--head-dim: the value ('0') must be a number such as"),
    ("triton_code", "--lists --whole-rows", "--whole-rows: not allowed with argument --lists"),
)


@pytest.mark.parametrize(("script", "words", "said"), BAD)
def test_a_script_refuses_bad_options_before_its_work(
    script: str,
    words: str,
    said: str,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "note.txt").write_text("not a row")
    monkeypatch.setattr("sys.argv", [f"benchmarks/{script}.py", *words.split()])
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(ROOT / "benchmarks" / f"{script}.py"), run_name="__main__")
    printed = capsys.readouterr()
    assert ended.value.code == 2
    assert said in printed.err and printed.err.count("\n") == 1, printed.err
    assert printed.err.startswith(f"{script}.py: ") and printed.out == ""
    assert [path.name for path in tmp_path.iterdir()] == ["note.txt"]
