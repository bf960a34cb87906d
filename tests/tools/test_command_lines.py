"""Command lines, good and bad: how they end, what they say, and what they leave behind."""

import json
import re
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

import tilewise as tw
from benchmarks.masks import app as masks_app
from benchmarks.study.__main__ import app as study_app
from tilewise_tools.cli import app
from tilewise_tools.naming import Parser, new_file, run_script, whole_number

CODE = """
import tilewise as tw

plan = tw.ring(4)
mask = tw.Causal() & tw.Window(63, 0)
number = 3


def ring(world_size):
    return tw.ring(world_size)


def causal(num_tokens):
    return tw.Causal()


def broken(number):
    return number / 0


def leaves(num_tokens):
    raise SystemExit(3)
"""
CONFIG = {
    **{"model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 64},
    **{"intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 8},
    **{"num_key_value_heads": 4, "vocab_size": 100, "max_position_embeddings": 131072},
}
FILES = {"mine.py", "config.json", "plan.json", "results.jsonl", "m.toml", "note.txt"}

GOOD = (
    ("show ring(4)", "rank 3"),
    ("show mine.py:plan", "rank 3"),
    ("show mine.py:ring --world-size 3 --rank 2", "rank 2"),
    ("show ring(2) --mask mine.py:mask --num-tokens 1K", "rank 1"),
    ("show needed --world-size 2 --num-tokens 1K --heads 8:2", "needed(Causal()"),
    ("show ring(2) --check --heads 4:4", "every pair is computed once"),
    ("show ring(2) --code --backward --rank 1 --dtype float32", "workspace:"),
    ("simulate mine.py:plan --num-tokens 4K --mask mine.py:causal", "on 4 ranks of h100x8"),
    ("simulate plan.json --num-tokens 4K --machine a100x8", "on 2 ranks of a100x8"),
    ("simulate ring(8) --num-tokens 2M --machine cpu-gloo", " s "),
    ("plan --world-size 2 --num-tokens 2K --strategy mine.py:ring", "2K tokens"),
    ("mask mine.py:mask --num-tokens 1K --world-size 2", "1,024 tokens on 2 ranks"),
    ("mask causal_document --num-tokens 1K --seed 3 --corpus pile", "1,024 tokens on 8 ranks"),
    ("advise --for megatron --model config.json --num-tokens 8K --world-size 4", "8K tokens on 4"),
    ("doctor", "diffusers"),
    ("fits -h", "Examples:"),
)

BAD = (
    ("frobnicate", "No such command 'frobnicate'; see"),
    ("simulate", "Missing argument 'plan'; see"),
    ("simulate ring(4) --length 4K", "No such option: --length"),
    ("simulate ring(4) --num-tokens", "--num-tokens"),
    ("simulate ring(4)", "--num-tokens is missing; give the length of the sequence, as in 128K"),
    ("simulate ring(4) --num-tokens 4Q", "--num-tokens ('4Q') must be a number such as 4096, 128K"),
    ("simulate ring(4) --num-tokens 4K --heads 3:2", "--heads: num_heads (3) must be a multiple"),
    ("simulate ring(4) --num-tokens 4K --heads 8x2", "--heads ('8x2') must be query:KV heads such"),
    ("simulate ring(4) --num-tokens 4K --head-dim 0", "'--head-dim': "),
    ("simulate ring(4) --num-tokens 4K --dtype int8", "--dtype ('int8') must be 'float64', "),
    ("simulate ring(4) --num-tokens 4K --save often", "--save ('often') must be 'replay' or"),
    ("simulate ring(4) --num-tokens 4K --mask nothing", "--mask 'nothing' is not known; take one"),
    ("simulate ring(4) --num-tokens 4K --mask mine.py:number", "--mask mine.py:number is of type"),
    ("simulate ring(4) --num-tokens 4K --mask mine.py", "--mask: mine.py is a whole file; write"),
    (
        "simulate ring(4) --num-tokens 4K --mask mine.py:broken",
        "--mask: mine.py:broken failed: Zero",
    ),
    ("simulate ring(4) --num-tokens 4K --mask causal&", "--mask: 'causal&' cannot be read; write"),
    (
        "simulate ring(4) --num-tokens 4K --mask window(-1,0)",
        "--mask: window(-1, 0): Window left=-1",
    ),
    ("simulate ring(4) --num-tokens 4K --wire float8(", "--wire: 'float8(' cannot be read; write"),
    ("simulate ring(4) --num-tokens 4K --machine m.toml", "--machine: m.toml: machine lacks name"),
    (
        "simulate ring(4) --num-tokens 4K --backward-plan ring(8)",
        "--backward-plan: ring(8) is for 8",
    ),
    ("simulate ring(4) --num-tokens 4K --layout spiral", "--layout ('spiral') must be one of"),
    ("simulate ring(0) --num-tokens 4K", "ring(0): world_size=0 must be at least 1"),
    ("simulate m.toml --num-tokens 4K", "'m.toml' is neither a literal nor a strategy (ring, "),
    ("simulate mine.py --num-tokens 4K", "mine.py is a whole file; write mine.py:name of a plan"),
    (
        "simulate mine.py:number --num-tokens 4K",
        "must be a Plan, such as tw.ring(n), or a function",
    ),
    ("simulate ring(4) --num-tokens 4K --machine fast", "--machine ('fast') is neither a preset"),
    ("simulate ring(4) --num-tokens 4K --world-size 8", "but --world-size is 8"),
    ("simulate ring(4) --num-tokens 4K --trace made/t.json", "made is no folder; make it, or"),
    ("simulate mine.py:ring --num-tokens 4K", "add --world-size"),
    ("simulate mine.py:nothing --num-tokens 4K", "mine.py has no 'nothing'; it has"),
    ("show ring(4) --heads 8:8", "--heads is of a rank's code; add --code or --check"),
    ("show ring(4) --backward", "--backward is of a rank's code; add --code"),
    ("show ring(4) --after tiles", "--after is of a rank's code; add --code"),
    ("show ring(4) --check --json", "--json is of the grid"),
    ("show ring(4) --check --rank 1", "--rank is of the grid"),
    ("show ring(4) --code --rank 4", "--rank (4) must be from 0 to 3"),
    ("show ring(4) --code --after tea", "--after 'tea' is not known; take one of naive, "),
    ("show ring(4) --code --mask", "Option '--mask' requires an argument; see root show -h"),
    ("show ring(4) --check --reduction canonical", "take one of these, or --reduction='fast'"),
    ("show ring(4) --layout zigzag", "pruned by --mask; add it"),
    ("show ring(4) --rank 4", "--rank (4) must be from 0 to 3"),
    ("plan --world-size 4 --num-tokens 4K --memory 1X", "--memory ('1X') must be a number of"),
    ("plan --world-size 4 --num-tokens 4K -o made/plan.json", "made is no folder; make it, or"),
    ("plan --world-size 4 --num-tokens 4K --memory 1K", "--memory (1000) is too little for a rank"),
    (
        "plan --world-size 4 --num-tokens 4K --strategy ring(8)",
        "--strategy: ring(8) is for 8 ranks",
    ),
    ("plan --world-size 4 --num-tokens 4K --strategy rig", "--strategy 'rig' is not known; take"),
    ("plan --world-size 4 --preset radio", "--preset 'radio' is not known; take one of"),
    ("mask causal --num-tokens 1K --seed 3", "--seed is of patterns that are drawn: "),
    ("mask sliding_window --num-tokens 1K --corpus pile", "--corpus is of patterns that are drawn"),
    ("mask causal_document --corpus no.csv", "--corpus no.csv cannot be read: No such file"),
    ("mask causal --layout round", "'--layout': "),
    ("mask causal --world-size 2000", "--world-size (2000) must be from 1 to 1024"),
    (
        "advise --for nobody --model config.json --num-tokens 4K",
        "--for 'nobody' is not known",
    ),
    ("advise --for megatron --model config.json --num-tokens 4K --ranks 16", "--ranks (16) must"),
    ("advise --for megatron --model no.json --num-tokens 4K", "--model: no.json cannot be read"),
    ("fits --model plan.json", "--model: plan.json: model_type is missing"),
    ("fits --model config.json --cp 8 --strategy ring(4)", "is for 4 ranks, but --cp is 8"),
    ("fits --model config.json --cp 2 --strategy tiled", "tiled sees the mask"),
    ("fits --model config.json --cp 65537", "--cp (65537) must be from 1 to 65536"),
    ("fits --model config.json --offload all", "--offload 'all' is not known; take one of"),
    ("report plan.json --num-tokens 0 -o made/p.html", "--num-tokens ('0') must be a number"),
    ("report plan.json --num-tokens 4K --heads 3:2 -o made/p.html", "--heads: num_heads (3) must"),
    (
        "report plan.json --num-tokens 4K --machine no -o made/p.html",
        "--machine ('no') is neither a",
    ),
    ("report results.jsonl --num-tokens 4K -o made/p.html", "options such as --num-tokens"),
    ("report plan.json --num-tokens 4K -o plan.json", "--output would write over plan.json"),
    ("report results.jsonl -o p.html --csv results.jsonl", "--csv would write over results.jsonl"),
    ("report results.jsonl -o p.html --csv p.html", "write over p.html, which another argument"),
    ("report plan.json --mask mine.py:mask -o mine.py", "--output would write over mine.py, which"),
    ("report plan.json --machine m.toml -o m.toml", "--output would write over m.toml, which"),
    ("simulate plan.json --num-tokens 4K --trace plan.json", "--trace would write over plan.json"),
    ("simulate mine.py:plan --num-tokens 4K --trace mine.py", "--trace would write over mine.py"),
    ("explain results.jsonl -o x --trace x", "--output would write over x, which another"),
    ("explain . -o results.jsonl", "--output would write over results.jsonl, which another"),
    (
        "plan --world-size 2 --num-tokens 2K --mask mine.py:mask -o mine.py",
        "--output would write over mine.py, which another argument names; name another file",
    ),
    ("plan --world-size 2 --num-tokens 2K --machine m.toml -o m.toml", "would write over m.toml"),
    ("parity mine.py:ring --html mine.py", "--html would write over mine.py, which another"),
    ("simulate ring(4) --num-tokens 4K --mask mine.py:leaves", "leaves failed: SystemExit: 3 ("),
    ("simulate needd --num-tokens 4K --world-size 2", "tree, needed, tiled"),
    ("simulate . --num-tokens 4K", ". is a folder; name a plan's file in it"),
    ("simulate ring(4) --num-tokens 4K --machine .", "--machine ('.') is a folder; name a"),
    ("simulate ring(100000000) --num-tokens 4K", "multiplied they must be at most 1048576"),
    ("show ring(4) --num-tokens 1K", "--num-tokens is of a plan pruned by --mask; add it"),
    ("report plan.json --csv made/rows.csv -o made/p.html", "--csv writes a benchmark's rows"),
    ("bench strategies --quick --num-tokens 2K --tokens-per-rank 1K", "--tokens-per-rank both say"),
    ("bench strategies --quick --cases cases.toml", "--quick and --cases both say what to run"),
    ("bench strategies --quick --mask causal --window 64", "window is of sliding_window"),
    ("bench strategies --quick --num-tokens 2Q", "--num-tokens ('2Q') must be a number such as"),
    ("bench strategies --quick --world-size 0", "--world-size (0) must be at least 1"),
    ("bench strategies --quick --repeats 0", "--repeats (0) must be at least 1"),
    ("bench strategies --quick --heads 3:2", "--heads: num_heads (3) must be a multiple of"),
    ("bench strategies --quick --seed -1 -o made/r.jsonl", "--seed (-1) must be at least 0"),
    ("bench strategies --quick --strategy ring(9) -o made/r.jsonl", "--strategy ring(9) is for 9"),
    ("bench strategies --quick --strategy ring(0)", "--strategy: ring(0): world_size=0 must be"),
    ("bench strategies --quick --wire float8(0)", "--wire: float8(0): block=0 must be at least 1"),
    ("bench strategies --quick --ulysses-degree 0", "--ulysses-degree (0) must be at least 2"),
    ("bench strategies --quick --mask mine.py", "--mask: mine.py is a whole file; write mine.py:"),
    ("bench strategies --cases m.toml", "--cases: m.toml: kind is None, this command wants"),
    ("bench strategies --quick --also mine.py", "--also: mine.py is no module with a function"),
    (
        "bench strategies --quick --profile made -o results.jsonl",
        "--output: results.jsonl holds no",
    ),
    (
        "bench strategies --quick --profile note.txt/x -o r.jsonl",
        "--profile: note.txt is no folder",
    ),
    ("bench kernels --quick --kernel cpu -o note.txt", "--output: note.txt holds no rows"),
    ("bench kernels --quick --strategy ring", "No such option: --strategy"),
    ("lab run --hosts 0", "--hosts (0) must be from 1 to 250"),
    ("lab run --hosts 2 --num-tokens 2K --tokens-per-rank 1K", "both say how long; give one"),
    ("lab run --hosts 2 --strategy ring(4)", "is for 4 ranks, but --hosts x --ranks-per-host is 2"),
    (
        "lab run --hosts 2 --limited --strategy mine.py:broken",
        "--strategy: mine.py:broken failed: Z",
    ),
    ("lab calibrate --hosts 1", "--hosts (1) x --ranks-per-host (1) must be 2 or more"),
    ("calibrate --world-size 1 -o m.toml", "--world-size (1) must be from 2 to 64"),
    ("calibrate --world-size 4 --node-size 3 -o m.toml", "--node-size (3) must divide"),
    ("demo --num-tokens 1M", "--num-tokens (1048576) must be from 1 to 16384"),
    ("demo --world-size 17", "--world-size (17) must be from 1 to 16"),
    (
        "explain nowhere -o made/p.html",
        "--output: made is no folder; make it, or write p.html elsewhere",
    ),
    ("parity mine.py:number --html p.html", "must be FILE.py:NAME of a function"),
    ("parity mine.py:ring --html made/p.html", "--html: made is no folder; make it, or write"),
)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    # words of progress, which a busy machine would print
    monkeypatch.setattr("tilewise_tools.cli.output.PATIENCE", 1000.0)
    monkeypatch.delitem(sys.modules, "mine", raising=False)  # of another test's folder
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "mine.py").write_text(CODE)
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    (tmp_path / "plan.json").write_text(tw.ring(2).to_json())
    (tmp_path / "results.jsonl").write_text('{"contender": "ring"}\n')
    (tmp_path / "m.toml").write_text("")
    (tmp_path / "note.txt").write_text("not a row")
    return tmp_path


def left_behind(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir() if path.name != "__pycache__"} - FILES


@pytest.mark.parametrize(("line", "words"), GOOD)
def test_good_command_lines_end_well(line: str, words: str, folder: Path):
    ended = CliRunner().invoke(app, line.split())
    assert ended.exit_code == 0, ended.stderr
    assert words in " ".join(ended.stdout.split()) or words in ended.stdout
    assert not re.search(r"\de[+-]\d", ended.stdout)  # a unit in place of an exponent
    assert left_behind(folder) == set()


@pytest.mark.parametrize(("line", "words"), BAD)
def test_bad_command_lines_end_in_one_line_and_leave_nothing(line: str, words: str, folder: Path):
    ended = CliRunner().invoke(app, line.split())
    assert ended.exit_code == 2
    assert words in ended.stderr
    assert not re.search(r"-\w*---|----", ended.stderr)  # each option is named once
    assert ended.stderr.startswith("tilewise: ") and ended.stderr.count("\n") == 1
    assert ended.stdout == ""
    assert left_behind(folder) == set()
    assert (folder / "note.txt").read_text() == "not a row"


@pytest.mark.parametrize("words", ("--frobnicate", "--num 3", "left over"))
def test_scripts_of_benchmarks_refuse_words_in_one_line(
    words: str, capsys: pytest.CaptureFixture[str]
):
    parser = Parser(prog="tiled.py")
    parser.add_argument("--num", type=int, choices=(1, 2))
    with pytest.raises(SystemExit) as ended:
        parser.parse_args(words.split())
    said = capsys.readouterr().err
    assert ended.value.code == 2
    assert said.startswith("tiled.py: ") and said.endswith("; see tiled.py -h\n")
    assert words.split()[0] in said and said.count("\n") == 1


def refused_by_library():
    raise ValueError("num_tokens (3) must be a multiple\nof world_size (2)")


def missing_file():
    Path("nowhere.csv").read_text()


@pytest.mark.parametrize(
    ("main", "said"),
    (
        (refused_by_library, "--tokens (3) must be a multiple of --ranks (2); see tiled.py -h\n"),
        (missing_file, "nowhere.csv: No such file or directory; see tiled.py -h\n"),
    ),
)
def test_scripts_of_benchmarks_refuse_what_the_library_refuses_in_one_line(
    main: Callable[[], None],
    said: str,
    monkeypatch: pytest.MonkeyPatch,
    folder: Path,
    capsys: pytest.CaptureFixture[str],
):
    monkeypatch.setattr("sys.argv", ["benchmarks/tiled.py"])
    with pytest.raises(SystemExit) as ended:
        run_script(main, world_size="--ranks", num_tokens="--tokens")
    assert ended.value.code == 2
    assert capsys.readouterr().err == f"tiled.py: {said}"
    assert left_behind(folder) == set()


def test_a_script_ends_with_the_code_that_it_returns():
    for code, main in ((0, lambda: None), (3, lambda: 3)):
        with pytest.raises(SystemExit) as ended:
            run_script(main)
        assert ended.value.code == code


@pytest.mark.parametrize(
    ("kind", "bad", "words"),
    (
        (whole_number, "0", "4096, 128K or 1M"),
        (whole_number, "2.5K", "4096, 128K or 1M"),
        (new_file, "nowhere/rows.json", "nowhere is no folder"),
        (new_file, ".", "is a folder"),
    ),
)
def test_options_of_scripts_say_what_would_work(
    kind: Callable[[str], object], bad: str, words: str, capsys: pytest.CaptureFixture[str]
):
    parser = Parser(prog="tiled.py")
    parser.add_argument("--num", type=kind)
    with pytest.raises(SystemExit):
        parser.parse_args(["--num", bad])
    said = capsys.readouterr().err
    assert "--num" in said and words in said and said.count("\n") == 1
    assert whole_number("2K") == 2048 and new_file("rows.json") == Path("rows.json")


@pytest.mark.parametrize("app_of_one", (masks_app, study_app))
def test_apps_of_benchmarks_refuse_words_as_commands_do(app_of_one: typer.Typer):
    ended = CliRunner().invoke(app_of_one, ["--frobnicate"])
    assert ended.exit_code == 2 and ended.stderr.count("\n") == 1
    assert ended.stderr.startswith("tilewise: No such option: --frobnicate; see ")
