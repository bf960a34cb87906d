"""docs/extending.md: its files, outside the package, run by its commands; and wrong files."""

import json
import shlex
import sys
from pathlib import Path

import pytest
import torch
from support.docs_blocks import ROOT, blocks
from typer.testing import CliRunner

import tilewise as tw
from tilewise.kernels.self_check import check_kernel
from tilewise_tools.bench.grid import contenders_of
from tilewise_tools.bench.our_strategies import STRATEGIES
from tilewise_tools.cli import app
from tilewise_tools.outside import load

PAGE = blocks((ROOT / "docs" / "extending.md").read_text())
FILES = {
    block.content.split()[1]: block.content for block in PAGE if block.content.startswith("# my_")
}
COMMANDS = [line for block in PAGE if block.language == "sh" for line in block.content.splitlines()]
SMALL = [
    *("--num-tokens", "60", "--heads", "4:2", "--head-dim", "8", "--dtype", "float64"),
    *("--repeats", "1"),
]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The files of the page, in the working directory."""
    for name, content in FILES.items():
        (tmp_path / name).write_text(content)
    (corpus,) = [block.content for block in PAGE if block.content.startswith("length\n")]
    (tmp_path / "my_corpus.csv").write_text(corpus)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])  # other tests add examples/
    for name in FILES:
        sys.modules.pop(name.removesuffix(".py"), None)
    yield tmp_path
    for name in FILES:
        sys.modules.pop(name.removesuffix(".py"), None)


def bench(words: list[str]) -> list[dict]:
    ran = CliRunner().invoke(app, ["bench", *words, "--json"])
    assert ran.exit_code == 0, ran.output
    return json.loads(ran.stdout[ran.stdout.index("{") :])["rows"]


def test_all_files_take_part_in_one_run(folder: Path):
    words = ["strategies", "--quick", "--world-size", "2", "--pass", "forward", *SMALL]
    words += ["--strategy", "ring", "--strategy", "my_strategy.py:my_ring", "--cap", "40"]
    words += ["--kernel", "my_kernel.py:my_kernel", "--also", "my_library.py"]
    words += ["--mask", "my_mask.py:two_halves", "--mask", "causal_document | window(7, 7)"]
    rows = bench([*words, "--corpus", "my_corpus.csv"])
    kernel, ring = "my_kernel.py:my_kernel", "my_strategy.py:my_ring"
    who = {f"ring, {kernel}", f"{ring}, {kernel}", "my gathering"}
    assert {row["contender"] for row in rows} == who and len(rows) == 6
    assert all(row["outcome"] == "ok" and row["is_exact"] for row in rows), rows
    mine = [row for row in rows if row["contender"] == "my gathering"]
    assert {row["corpus"] for row in rows} == {None, "my_corpus.csv"}
    for row in mine:
        (same, _) = [x for x in rows if x["mask"] == row["mask"] and x not in mine]
        assert row["pairs"] == same["pairs"] and row["tflops"] > 0
        assert row["bytes_reason"] is None and row["bytes_total"] > 0


@pytest.mark.slow
@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_of_the_page_gives_exact_rows(command: str, folder: Path):
    words = shlex.split(command)[2:]
    if words[0] == "strategies":
        few: list[str] = (
            [] if "--strategy" in words else ["--strategy", "ring", "--strategy", "mesh"]
        )
        few += [] if "--mask" in words else ["--mask", "causal", "--mask", "sliding_window"]
        words += ["--world-size", "2", *few]
    rows = bench([*words, *SMALL])
    assert {row["outcome"] for row in rows} == {"ok"}, [row["message"] for row in rows]
    assert all(row["is_exact"] and row["tflops"] > 0 for row in rows)
    mine = {one for one in words if one.startswith("my_") and ":" in one}
    said = {str(row[name]) for row in rows for name in ("contender", "kernel", "mask", "corpus")}
    assert mine <= said


@pytest.mark.slow
def test_a_kernel_and_a_strategy_from_outside_run_under_all_strategies_and_masks(folder: Path):
    ours = [*(name for name in STRATEGIES if name != "tree"), "my_strategy.py:my_ring"]
    names = [word for name in ours for word in ("--strategy", name)]
    words = ["strategies", "--quick", *names, "--kernel", "my_kernel.py:my_kernel", *SMALL]
    rows = bench(words)
    assert {row["mask"] for row in rows} == set(tw.masks.NAMES) and len(rows) == 14 * len(ours)
    assert {row["outcome"] for row in rows} <= {"ok", "unsupported"}
    assert all(row["is_exact"] for row in rows if row["outcome"] == "ok")
    assert sum(row["outcome"] == "ok" for row in rows) > 14 * (len(ours) - 3)


@pytest.mark.parametrize("name", ["causal", "causal_document", "block_sparse_uniform"])
def test_an_outside_kernel_and_strategy_run_in_attention(name: str, folder: Path):
    kernel, plan = load("my_kernel.py:my_kernel"), load("my_strategy.py:my_ring")(3)
    mask, layout = tw.masks.random(name, 50, seed=2), tw.striped(50, 3)
    tw.check(plan, mask, layout)
    q, k, v = (torch.randn(50, heads, 8, dtype=torch.float64) for heads in (4, 2, 2))
    whole = tw.attention(q, k, v, plan=tw.ring(1), layout=tw.contiguous(50, 1), mask=mask)

    def on_rank(rank: int, group: tw.Group) -> torch.Tensor:
        mine = (layout.shard(x, rank) for x in (q, k, v))
        words = {"plan": plan, "layout": layout, "mask": mask}
        return tw.attention(*mine, **words, group=group, kernel=kernel)

    found = layout.unshard(tw.loopback(3, on_rank))
    assert (found - whole).abs().max() < 1e-12 and kernel.calls > 0


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("def backward", "def backwards", "lacks backward"),
        ("self.calls += 1", "raise KeyError('lost')", "KeyError: 'lost'"),
        ("self.calls += 1", "q = q[:1]", "has shape [1, 2, 4, 8], not [5, 2, 4, 8]"),
        ("self.calls += 1", "scale = 2 * scale", "out is off by"),
        ("scale, into)\n\n    def b", "scale)\n\n    def b", "must return `into` itself"),
        (
            "return self.inner.forward(q, k, v, call, scale, into)",
            "out, lse = self.inner.forward(q, k, v, call, scale, into); return out, lse / 0.6931",
            "lse is the natural logarithm",
        ),
        (
            "return self.inner.forward(q, k, v, call, scale, into)",
            "out, lse = self.inner.forward(q, k, v, call, scale, into); return out, lse.float()",
            "lse has dtype torch.float32, not torch.float64",
        ),
        (
            "return self.inner.backward(q, k, v, dout, lse,",
            "return self.inner.backward(q, k, v, dout, lse + 1,",
            "dq is off by",
        ),
    ],
)
def test_a_kernel_that_is_none_is_refused_before_anything_runs(
    old: str, new: str, message: str, folder: Path
):
    assert old in FILES["my_kernel.py"]
    (folder / "my_kernel.py").write_text(FILES["my_kernel.py"].replace(old, new))
    for kind in ("kernels", "strategies"):
        words = ["bench", kind, "--quick", *SMALL, "--kernel", "my_kernel.py:my_kernel"]
        ran = CliRunner().invoke(app, [*words, "-o", "r.jsonl"])
        assert ran.exit_code == 2 and message in " ".join(ran.stderr.split()), ran.stderr
        assert f"{folder / 'my_kernel.py'}:" in ran.stderr
        assert not Path("r.jsonl").exists()


def test_our_kernels_pass_their_own_check():
    for name in ("cpu", "reference"):
        for dtype in (torch.float64, torch.float32, torch.bfloat16):
            check_kernel(tw.kernel(name), "cpu", dtype, 16)


def test_a_plan_of_ones_own_is_shown_and_simulated(folder: Path):
    (folder / "plans.py").write_text("import tilewise as tw\n\nfixed = tw.mesh(4, q_tile=2)\n")

    def ran(*words: str) -> tuple[int, str]:
        done = CliRunner().invoke(app, list(words))
        return done.exit_code, done.output

    own, size = "my_strategy.py:my_ring", ("--num-tokens", "4K", "--json")
    plan = load(own)(4)
    code, shown = ran("show", own, "--world-size", "4")
    assert code == 0 and tw.parse(shown).steps == plan.steps
    code, told = ran("simulate", own, "--world-size", "4", *size)
    assert code == 0
    work = tw.Workload(4096, 32, 8, 128, mask=tw.Causal())
    seconds = tw.simulate(plan, work, tw.Machine.preset("h100x8")).seconds
    assert json.loads(told)["seconds"] == pytest.approx(seconds)
    assert tw.parse(ran("show", "plans.py:fixed")[1]) == tw.mesh(4, q_tile=2)
    for words, message in (
        (("show", own), "is a function of the number of ranks; add --world-size"),
        (("show", "plans.py:fixed", "--world-size", "8"), "is for 4 ranks, but --world-size is 8"),
    ):
        code, said = ran(*words)
        assert code == 2 and message in said and said.count("\n") == 1


@pytest.mark.parametrize(
    ("name", "text", "word", "message"),
    [
        ("bad_plan.py", "import tilewise as tw\nf = tw.ring(3)\n", "strategy", "for 3 ranks, but"),
        ("bad_plan2.py", "f = lambda n: 7\n", "strategy", "must be a Plan, such as tw.ring(n)"),
        (
            "bad_plan3.py",
            "import tilewise as tw\n"
            "def f(n):\n    p = tw.ring(n)\n    return p.replaced('half', p.steps[:-2])\n",
            "strategy",
            "computes no attention",
        ),
        ("bad_mask.py", "f = lambda n: 'causal'\n", "mask", "is of type str; give a mask"),
        ("bad_name.py", "g = 1\n", "mask", "has no 'f'; it has g"),
        ("bad_code.py", "x = 1\ny = 1 / 0\n", "kernel", "line 2"),
    ],
)
def test_other_files_with_mistakes_are_refused(
    name: str, text: str, word: str, message: str, folder: Path
):
    (folder / name).write_text(text)
    words = ["bench", "strategies", "--quick", f"--{word}", f"{name}:f", "--world-size", "2"]
    ran = CliRunner().invoke(app, [*words, "-o", "r.jsonl"])
    assert ran.exit_code == 2 and message in " ".join(ran.stderr.split()), ran.stderr


def test_a_module_without_contenders_is_refused(folder: Path):
    with pytest.raises(ValueError, match="no module with a function contenders"):
        contenders_of("my_mask.py")
