"""The example of a strategy of one's own: short, of public names alone, exact in both passes."""

import ast
import json
import runpy
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from conformance.oracle import assert_close, dense, draw, split
from typer.testing import CliRunner

import tilewise as tw
from examples import my_strategy
from tilewise_tools.cli import app

EXAMPLE = Path(__file__).parents[2] / "examples" / "my_strategy.py"


@pytest.fixture(autouse=True)
def _module_of_its_own(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Commands import the file under its own name, which a file of another test may have, too."""
    monkeypatch.setattr(sys, "path", [*sys.path])
    yield
    sys.modules.pop(EXAMPLE.stem, None)


def test_it_is_forty_lines_at_most_and_imports_tilewise_alone():
    text = EXAMPLE.read_text()
    assert len(text.splitlines()) <= 40
    imports = [n for n in ast.walk(ast.parse(text)) if isinstance(n, ast.Import | ast.ImportFrom)]
    modules = {n.module if isinstance(n, ast.ImportFrom) else n.names[0].name for n in imports}
    assert {str(module).partition(".")[0] for module in modules} == {"tilewise"}


def test_it_checks_draws_simulates_and_runs_its_strategy(capsys):
    runpy.run_path(str(EXAMPLE), run_name="__main__")
    printed = capsys.readouterr().out
    grid, _, rest = printed.partition("\n\n")
    assert tw.parse(grid) == my_strategy.butterfly(4)
    seconds, largest = rest.strip().splitlines()
    assert float(seconds.split()[0]) > 0 and float(largest.split()[-1]) < 1e-12


def test_the_benchmark_takes_it(tmp_path: Path):
    words = ["--num-tokens", "32", "--heads", "2", "--head-dim", "4", "--mask", "causal"]
    words += ["--world-size", "4", "--strategy", f"{EXAMPLE}:butterfly", "--repeats", "1"]
    out = tmp_path / "rows.jsonl"
    ended = CliRunner().invoke(app, ["bench", "strategies", *words, "-o", str(out)])
    assert ended.exit_code == 0, ended.output
    for row in map(json.loads, out.read_text().splitlines()):
        assert (row["plan"], row["outcome"], row["is_exact"]) == ("butterfly(4)", "ok", True)


@pytest.mark.parametrize("world_size", [1, 2, 8])
def test_a_butterfly_is_attention_in_both_passes(world_size: int):
    plan, mask = my_strategy.butterfly(world_size), tw.Causal()
    layout = tw.zigzag(29, plan.world_size)
    x = draw((29, 4, 8), (29, 2, 8), seed=0)
    tw.check(plan)
    assert_close(split(x, plan, layout, mask), dense(x, mask))
