"""The command line, as its users type it."""

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from importlib import import_module
from importlib.metadata import version
from inspect import isfunction, signature
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from typer.main import get_command
from typer.testing import CliRunner, Result

import tilewise as tw
from tilewise.expressions import STRATEGIES, read_mask, read_plan
from tilewise_tools.cli import app
from tilewise_tools.cli.examples import EXAMPLES
from tilewise_tools.cli.output import as_bytes, as_seconds
from tilewise_tools.cli.show import draw
from tilewise_tools.demo import Demo, DemoRow, run_demo

PIECES = ("ring", "all_gather", "balanced_ring", "tree", "ulysses")


def tilewise(*words: str) -> Result:
    return CliRunner().invoke(app, list(words))


@pytest.mark.parametrize(
    "text, plan",
    [
        ("ring(5)", tw.ring(5)),
        ("ring(world_size=3, moves='q')", tw.ring(3, moves="q")),
        ("mesh(16, q_tile=4)", tw.mesh(16, q_tile=4)),
        ("mesh(4, 2, 'gather')", tw.mesh(4, 2, "gather")),
        ("double_ring(2, 3)", tw.double_ring(2, 3)),
        (" ulysses(2, inner=mesh(4, q_tile=2)) ", tw.ulysses(2, inner=tw.mesh(4, q_tile=2))),
        (
            "ulysses(2, inner=ulysses(2, inner=ring(2)))",
            tw.ulysses(2, inner=tw.ulysses(2, inner=tw.ring(2))),
        ),
    ],
)
def test_piped_grids_can_be_parsed_back(text: str, plan: tw.Plan):
    shown = tilewise("show", text)
    assert shown.exit_code == 0
    assert shown.stdout == tw.show(plan)
    assert tw.parse(shown.stdout) == plan


@pytest.mark.parametrize("name", PIECES)
def test_a_name_alone_takes_the_world_size(name: str):
    shown = tilewise("show", name, "--world-size", "4")
    assert tw.parse(shown.stdout) == getattr(tw, name)(4)


def test_show_writes_json():
    shown = tilewise("show", "mesh(6, q_tile=2)", "--json")
    assert tw.from_json(shown.stdout) == tw.mesh(6, q_tile=2)


def test_a_planners_file_is_shown_and_simulated(tmp_path: Path):
    path, size = str(tmp_path / "plan.json"), ("--num-tokens", "4K")
    assert tilewise("plan", "--world-size", "4", *size, "-o", path).exit_code == 0
    best = tw.load_candidate(path)
    assert tw.parse(tilewise("show", path).stdout) == best.plan
    found = tilewise("simulate", path, "--json")
    assert json.loads(found.stdout)["seconds"] == pytest.approx(best.seconds)
    other = tilewise("simulate", path, "--num-tokens", "8K", "--machine", "a100x8", "--json")
    assert json.loads(other.stdout)["seconds"] > 2 * best.seconds
    for words, part in (
        (("show", path, "--world-size", "3"), "is for 4 ranks, but --world-size is 3"),
        (("show", str(tmp_path / "no.json")), "cannot be read: No such file"),
    ):
        ended = tilewise(*words)
        assert ended.exit_code == 2 and part in ended.stderr and ended.stderr.count("\n") == 1


def test_the_version_is_told():
    assert tilewise("--version").stdout == f"{version('tilewise')}\n"


def test_no_help_text_is_taken_for_markup():
    """[default: ...] in a help text would vanish from the page."""

    def texts(command: Any) -> Iterator[str]:
        for option in command.params:
            yield getattr(option, "help", None) or ""
        for inner in getattr(command, "commands", {}).values():
            yield from texts(inner)

    assert not [text for text in texts(get_command(app)) if re.search(r"\[[a-z]", text)]


@pytest.mark.parametrize("name", ["needed", "tiled"])
def test_strategies_that_see_the_mask_are_shown_and_simulated(name: str):
    words = ("--world-size", "3", "--mask", "causal_document", "--num-tokens", "96")
    plan = tw.parse(tilewise("show", name, *words).stdout)
    assert plan.world_size == 3 and plan.name.startswith(name)
    found = tilewise("simulate", name, *words, "--layout", "balanced", "--json")
    assert json.loads(found.stdout)["forward_seconds"] > 0, found.output
    ended = tilewise("simulate", name, "--num-tokens", "96")
    assert ended.exit_code == 2 and "needs --world-size" in ended.stderr


def test_the_code_of_a_candidate_is_that_of_its_workload(tmp_path: Path):
    work = tw.Workload(96, 4, 2, 16, "float32", mask=tw.Causal())
    best = tw.search(work, tw.Machine.preset("cpu-gloo"), world_size=2)[0]
    path = tmp_path / "plan.json"
    path.write_text(best.to_json())
    shown = tilewise("show", str(path), "--code")
    wanted = best.plan.code(best.own_work, 0, False)
    assert shown.stdout.splitlines()[:-1] == list(wanted.listing()), shown.output


def commands(group: Any, *names: str) -> Iterator[str]:
    """The names of all commands, with their groups'."""
    for name, command in group.commands.items():
        if hasattr(command, "commands"):
            yield from commands(command, *names, name)
        else:
            yield " ".join((*names, name))


def test_every_commands_help_has_its_examples_and_h_shows_it():
    assert set(commands(get_command(app))) == EXAMPLES.keys()
    for name, lines in EXAMPLES.items():
        short, long = (tilewise(*name.split(), word).stdout for word in ("-h", "--help"))
        assert short == long and "Examples:" in short and len(lines) >= 2
        flat = "".join(short.split())
        for line in lines:
            assert "".join(line.split()) in flat and name in line


def test_sizes_are_written_alike_everywhere(monkeypatch: pytest.MonkeyPatch):
    """2K is 2048 tokens: of the demo, the benchmark and the lab, too."""
    taken: list[Any] = []

    def taking(*values: Any, **_: Any):
        taken.append(values)
        raise ValueError("taken")

    for module, name in (("demo", "Demo"), ("bench", "entered"), ("lab", "BenchCase")):
        monkeypatch.setattr(sys.modules[f"tilewise_tools.cli.{module}"], name, taking)
    strategies = ("bench", "strategies", "--quick", "--mask", "causal", "--world-size", "2")
    runs = (
        ("demo", "--num-tokens", "2K"),
        ("bench", "kernels", "--quick", "--mask", "causal", "--num-tokens", "2K"),
        (*strategies, "--tokens-per-rank", "1K"),
        ("lab", "run", "--hosts", "2", "--tokens-per-rank", "1K"),
    )
    for words in runs:
        ended = tilewise(*words)
        assert (ended.exit_code, ended.stderr) == (2, "tilewise: taken\n"), ended.stderr
        wrong = tilewise(*words[:-1], "2Q")
        assert wrong.exit_code == 2
        assert f"{words[-2]} ('2Q') must be a number such as 4096, 128K or 1M" in wrong.stderr
    demo, kernels, ranks, lab = taken
    lengths = {case.num_tokens for run in (kernels[0], ranks[0]) for case, *_ in run.cases()}
    assert demo[1] == 2048 and lengths == {2048} and lab[2] == 2048


def test_help_shows_what_is_usual_for_a_command():
    pages = [tilewise(*words, "--help").stdout for words in (("simulate",), ("lab", "run"))]
    assert "(32:8)" in pages[0] and "(causal)" in pages[0]
    assert "(16:16)" in pages[1] and "(full)" in pages[1]
    assert all("--num-tokens" in page and "<bool>" not in page for page in pages)


def test_the_code_of_a_rank_has_the_widths_and_wire_that_are_asked_for():
    words = ("show", "ring(2)", "--code", "--heads", "4:2", "--head-dim", "16")
    plain = tilewise(*words, "--dtype", "float32").stdout
    coded = tilewise(*words, "--dtype", "float32", "--wire", "float8").stdout
    sent = [int(text.rsplit("sent: ", 1)[1].split()[0]) for text in (plain, coded)]
    assert sent[0] == 2 * 8 * 2 * 16 * 4 and 0 < sent[1] < sent[0]


def test_show_checks_a_plan_and_the_codes_of_a_canonical_one():
    size = "--num-tokens", "200", "--mask", "causal", "--heads", "4:2", "--head-dim", "8"
    fast = tilewise("show", "all_gather(4)", "--check", *size)
    assert fast.stdout == "all_gather(4): every pair is computed once\n"
    same = tilewise("show", "all_gather(4)", "--check", *size, "--reduction", "canonical")
    assert same.stdout == fast.stdout[:-1] + (", and every result has the same bits at any split\n")
    refused = tilewise("show", "ring(4)", "--check", *size, "--reduction", "canonical")
    assert refused.exit_code != 0 and "served by all_gather, needed, ulysses" in refused.stderr


def test_a_plan_that_is_asked_for_is_in_the_planners_table():
    words = ("plan", "--world-size", "4", "--num-tokens", "4K", "--heads", "8:8", "--top", "1")
    machine, work = tw.Machine.preset("h100x8"), tw.Workload(4096, 8, 8, 128, mask=tw.Causal())
    asked = ("--strategy", "ring(4, moves='q')", "--strategy", "tree(4)")
    rows = json.loads(tilewise(*words, *asked, "--json").stdout)["candidates"]
    assert [row["rank"] for row in rows] == [1, 2, 3]
    for plan in (tw.ring(4, moves="q"), tw.tree(4)):
        (row,) = (row for row in rows if row["plan"] == plan.name)
        found = tw.simulate(plan, work, machine)
        assert row["seconds"] == pytest.approx(found.seconds)
        assert (row["sent_bytes"], row["peak_bytes"]) == (found.sent_bytes, found.peak_bytes)
    assert rows == sorted(rows, key=lambda row: row["seconds"])
    ended = tilewise(*words, "--strategy", "ring(8)")
    assert ended.exit_code == 2
    assert "ring(8) is for 8 ranks, but --world-size is 4" in ended.stderr


def test_times_have_the_unit_that_suits_them():
    """140 s of a machine that is a million times slower than the preset, not 1.4e+05 ms."""
    assert [as_seconds(x) for x in (139.62, 0.0012345, 9.9e-7, 0.0)] == [
        *("139.6 s", "1.234 ms", "990 ns", "0 s")
    ]
    table = tilewise("simulate", "ring(64)", "--num-tokens", "8M", "--machine", "a6000x8").stdout
    time = next(line for line in table.splitlines() if line.split()[:1] == ["time"])
    assert re.fullmatch(r" *time +[\d.]+ s +[\d.]+ s *", time), table


@pytest.mark.parametrize("mask", ["causal", "causal & window(100, 0)"])
def test_a_planners_file_of_a_canonical_plan_is_checked(tmp_path: Path, mask: str):
    path = str(tmp_path / "plan.json")
    words = "--num-tokens", "1K", "--heads", "4:2", "--head-dim", "16", "--reduction", "canonical"
    found = tilewise("plan", "--world-size", "4", *words, "--mask", mask, "-o", path)
    assert found.exit_code == 0
    assert ", canonical " in " ".join(found.stdout.split())
    assert "does nearest" not in found.stdout
    assert tw.load_candidate(path).work.reduction == "canonical"
    assert "the same bits at any split" in tilewise("show", path, "--check").stdout


def test_one_ranks_steps_are_shown():
    shown = tilewise("show", "ring(4)", "--rank", "2").stdout
    assert "rank 2" in shown and "q2xkv1" in shown and "q1xkv" not in shown
    ended = tilewise("show", "ring(4)", "--rank", "4")
    assert (ended.exit_code, "--rank (4) must be from 0 to 3" in ended.stderr) == (2, True)


@pytest.mark.parametrize(
    "option",
    ["plan -o", "simulate --trace", "calibrate -o", "mask --png", "lab -o", "parity --html"],
)
def test_a_file_that_cannot_be_written_is_refused_before_the_work(option: str, tmp_path: Path):
    command, flag = option.split()
    words = {
        "plan": ["--world-size", "4096", "--num-tokens", "1M"],
        "simulate": ["ring(512)", "--num-tokens", "1M"],
        "calibrate": [],
        "mask": ["causal"],
        "lab": ["calibrate"],
        "parity": ["math:tau"],
    }[command]
    ended = tilewise(command, *words, flag, str(tmp_path / "no" / "x.png"))
    assert ended.exit_code == 2 and "is no folder; make it" in ended.stderr


def test_show_prunes():
    words = ("--mask", "causal & document([0, 9, 20])", "--layout", "striped", "--num-tokens", "20")
    shown = tilewise("show", "ring(3)", *words)
    mask = tw.Causal() & tw.Document([0, 9, 20])
    assert tw.parse(shown.stdout) == tw.prune(tw.ring(3), mask, tw.striped(20, 3))


def test_masks_are_read_with_their_precedence():
    mask = read_mask("full & causal | window(2, right=0)")
    assert mask == tw.Full() & tw.Causal() | tw.Window(2, 0)


@pytest.mark.parametrize(
    "words, part",
    [
        (["foo"], "strategy 'foo' is not known; take one of ring, all_gather"),
        (["foo(3)"], "strategy 'foo' is not known"),
        (["ring"], "write ring(8), or --world-size 8"),
        (
            ["attention2d", "--world-size", "4"],
            "than a number of ranks: attention2d(rows, columns)",
        ),
        (["attention2d(4)"], "missing a required argument: 'columns'"),
        (["mesh(4, q_tile=3)"], "q_tile=3 must divide world_size=4"),
        (["ring(4)", "--world-size", "5"], "ring(4) is for 4 ranks, but --world-size is 5"),
        (["ring(0)"], "world_size=0 must be at least 1"),
        (["ring(2.5)"], "world_size=2.5 must be a whole number"),
        (["ring(True)"], "True and False are not numbers"),
        (["ring(4"], "cannot be read"),
        (["ring(n)"], "'n' in 'ring(n)' is neither a literal nor a strategy"),
        (["ring(*[4])"], "neither a literal nor a strategy"),
        (["ring(**{'world_size': 4})"], "** cannot be read"),
        (["7"], "'7' is not a strategy"),
        (["ring(1000000000)"], "multiplied they must be at most 1048576"),
        (["double_ring(5000, 5000)"], "multiplied they must be at most 1048576"),
        (["ring(513)"], "513 ranks cannot be shown, at most 512 can"),
        (["ring(4)", "--num-tokens", "8"], "pruned by --mask; add it"),
        (["ring(4)", "--mask", "nothing"], "mask 'nothing' is not known; take one of full, causal"),
        (["ring(4)", "--mask", "causal & 3"], "is not a mask"),
        (
            ["ring(4)", "--check", "--reduction", "exact"],
            "reduction ('exact') must be 'fast' or 'canonical'",
        ),
        (["ring(4)", "--mask", "window(-1, 0)"], "left=-1 must be at least 0"),
        (["ring(4)", "--mask", "document([0, 5])", "--num-tokens", "9"], "ends at 5"),
        (["(" * 300 + ")" * 300], "cannot be read"),
    ],
)
def test_bad_input_is_one_line_and_code_2(words: list[str], part: str):
    ended = tilewise("show", *words)
    assert ended.exit_code == 2
    assert part in ended.stderr
    assert ended.stderr.startswith("tilewise: ") and ended.stderr.count("\n") == 1
    assert ended.stdout == ""


def test_expressions_run_no_code(tmp_path: Path):
    made = tmp_path / "made"
    for text in (
        f"__import__('pathlib').Path({str(made)!r}).touch()",
        f"ring(open({str(made)!r}, 'w').write('x'))",
        "ring.__globals__",
        "ulysses(2, inner=(lambda: 1)())",
    ):
        with pytest.raises(ValueError, match=r"is not known|neither a literal"):
            read_plan(text)
    assert not made.exists()


def test_every_strategy_that_sees_no_mask_can_be_written():
    functions = {name: f for name in dir(tw) if isfunction(f := getattr(tw, name))}
    made = {name: f for name, f in functions.items() if "strategies" in f.__module__}
    assert {n: f for n, f in made.items() if "mask" not in signature(f).parameters} == STRATEGIES


@pytest.mark.parametrize("width", [40, 80, 200])
def test_a_terminal_gets_the_whole_grid_within_its_width(width: int):
    plan, file = tw.ulysses(2, inner=tw.mesh(6, q_tile=2)), StringIO()
    console = Console(file=file, force_terminal=True, color_system=None, width=width)
    draw(plan, console)
    text = file.getvalue()
    assert all(len(line) <= width for line in text.splitlines())
    words = {word for line in tw.show(plan).splitlines()[6:] for word in line.split("|")[1:]}
    assert all(part in text for word in words for part in word.split())
    assert all(f"rank {rank}" in text for rank in range(12))


def test_doctor_lists_what_is_here():
    found = json.loads(tilewise("doctor", "--json").stdout)
    here = {(one["part"], one["name"]): one["is_here"] for one in found}
    assert here["kernel", "cpu"] and here["transport", "loopback"] and here["version", "torch"]
    assert all(one["detail"] for one in found)
    table = tilewise("doctor")
    assert table.exit_code == 0 and "loopback" in table.stdout


@cache
def demo_rows(settings: Demo) -> tuple[DemoRow, ...]:
    return tuple(run_demo(settings))


@pytest.fixture
def demos_run_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the same settings, for all tests."""
    command = import_module("tilewise_tools.cli.demo")
    monkeypatch.setattr(command, "run_demo", lambda settings: iter(demo_rows(settings)))


@pytest.mark.usefixtures("demos_run_once")
def test_demo_prints_a_table_and_grids():
    ended = tilewise("demo", "--world-size", "2", "--num-tokens", "60")
    assert ended.exit_code == 0, ended.output
    assert all(name in ended.stdout for name in STRATEGIES)
    assert "FAULT" not in ended.stdout and "step | rank 0" in ended.stdout


@pytest.mark.usefixtures("demos_run_once")
def test_demo_writes_json():
    ended = tilewise("demo", "--world-size", "2", "--num-tokens", "60", "--json")
    data = json.loads(ended.stdout)
    assert data["num_tokens"] == 60 and data["cu_seqlens"][-1] == 60 and data["faults"] == []
    assert all(row["counted"] == row["formula"] for row in data["rows"])


@pytest.mark.parametrize("as_json", [False, True])
def test_a_fault_ends_the_demo_with_code_1(as_json: bool, monkeypatch: pytest.MonkeyPatch):
    command = import_module("tilewise_tools.cli.demo")

    def with_a_lost_byte(settings):
        for row in demo_rows(settings):
            yield row._replace(counted=(row.counted[0] - 1, *row.counted[1:]))

    monkeypatch.setattr(command, "run_demo", with_a_lost_byte)
    words = ["--world-size", "1", "--num-tokens", "20", *["--json"] * as_json]
    ended = tilewise("demo", *words)
    assert ended.exit_code == 1
    assert "tw.volume says (0,)" in ended.stdout


def test_demo_refuses_bad_numbers():
    ended = tilewise("demo", "--world-size", "99")
    assert (ended.exit_code, ended.stderr) == (
        2,
        "tilewise: --world-size (99) must be from 1 to 16\n",
    )


@pytest.mark.parametrize(
    "count, text", [(0, "0 B"), (999, "999 B"), (1000, "1 kB"), (2_220_032, "2.22 MB")]
)
def test_bytes_are_legible(count: int, text: str):
    assert as_bytes(count) == text
    assert as_bytes(999_900) == "1 MB"


def test_the_installed_command_runs():
    command = [sys.executable, "-c", "from tilewise_tools.cli import app; app()", "show", "ring(2)"]
    run = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert (run.returncode, run.stderr) == (0, "")
    assert run.stdout == tw.show(tw.ring(2))


MODEL = Path(__file__).parents[2] / "benchmarks" / "cases" / "models" / "llama-3.1-8b.json"


def test_advise_prints_a_setting_to_paste_its_cost_and_the_verdict():
    words = "advise", "--for", "megatron", "--model", str(MODEL), "--num-tokens", "32K"
    shown = tilewise(*words)
    assert shown.exit_code == 0, shown.output
    assert "--context-parallel-size 8 --cp-comm-type a2a --seq-length 32768" in shown.stdout
    assert "Your own Ulysses (a2a) is as good as anything of ours" in shown.stdout
    told = json.loads(tilewise(*words, "--ranks", "4", "--world-size", "16", "--json").stdout)
    assert told["setting"]["split"] | {"num_tokens": 0} == {
        "ranks": 4,
        "degree": 4,
        "groups": 4,
        "num_tokens": 0,
    }
    assert told["setting"]["options"].startswith("--context-parallel-size 4 --cp-comm-type a2a")
    assert told["best"]["plans"] == ["ulysses(4)"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (("--for", "fairseq"), "--for 'fairseq' is not known; take one of megatron"),
        (("--model", "none.json"), "none.json cannot be read"),
        (("--num-tokens", "many"), "--num-tokens ('many') must be a number such as"),
        (("--machine", "h100x9"), "--machine ('h100x9') is neither a preset nor a file"),
        (("--ranks", "3"), "ranks (3) must divide the 8 devices"),
    ],
)
def test_advise_refuses_bad_input_in_one_line(change: tuple[str, str], message: str):
    words = {
        "--for": "megatron",
        "--model": str(MODEL),
        "--num-tokens": "32K",
        change[0]: change[1],
    }
    shown = tilewise("advise", *(word for pair in words.items() for word in pair))
    assert shown.exit_code == 2 and message in shown.stderr
    assert len(shown.stderr.strip().splitlines()) == 1
