"""The fixture cp_parity in tests of others: what it passes, what a failing test shows, its page."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from textwrap import dedent
from typing import Any

import pytest
import torch
from torch import nn

import tilewise as tw
from tilewise.transport.processes import RankFailure
from tilewise_verify.causes import CAUSES, FIXES, Finding
from tilewise_verify.cp_parity import MOST_LINES, checked
from tilewise_verify.parity import Deviation, ParityReport

ROOT = Path(__file__).resolve().parents[2]
T = 24


def run_pytest(folder: Path, *options: str) -> tuple[int, str]:
    """Run pytest with the plug-in alone, as in a repository of its own; return code and output."""
    paths = os.pathsep.join(str(ROOT / name) for name in ("src", "tests", "."))
    environment = {
        **os.environ,
        "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
        "PYTHONPATH": paths + os.pathsep + os.environ.get("PYTHONPATH", ""),
    }
    command = [sys.executable, "-m", "pytest", "-p", "tilewise_verify.pytest_plugin"]
    ran = subprocess.run(
        [*command, "-p", "no:cacheprovider", *options],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    return ran.returncode, ran.stdout + ran.stderr


def failures(junit: Path) -> dict[str, str]:
    """Texts of failing tests in JUnit's file, by test."""
    cases = ElementTree.parse(junit).iter("testcase")
    return {
        case.attrib["name"]: failure.text or ""
        for case in cases
        for failure in case.iter("failure")
    }


def test_a_run_without_the_fixture_imports_no_torch(tmp_path):
    (tmp_path / "test_nothing.py").write_text(
        dedent("""
        import sys

        def test_nothing():
            import tilewise_verify.pytest_plugin
            assert not {"torch", "numpy", "tilewise"} & {*sys.modules}
        """)
    )
    code, output = run_pytest(tmp_path, "-q")
    assert code == 0, output


TESTS = """
import threading

import torch
import torch.distributed as dist
from torch import nn

{}

def split_step(model, inputs, rank, group, keeps_the_mask=True):
    world_size = dist.get_world_size(group)
    rows = torch.arange(24).chunk(world_size)[rank]
    def attend(q, k, v):
        parts = [tw.ContextParallel(group, num_tokens=24).unshard(x) for x in (k, v)]
        allowed = rows[:, None] >= torch.arange(24)
        return dense(q, *parts, allowed if keeps_the_mask else torch.ones_like(allowed))
    model.attend = attend
    return model(inputs["x"][rows], inputs["weights"][rows]), rows

def forgets_the_mask(model, inputs, rank, group):
    return split_step(model, inputs, rank, group, keeps_the_mask=False)

def test_right(cp_parity):
    cp_parity(Layer(), inputs(), split=split_step)

def test_wrong(cp_parity):
    cp_parity(Layer(), inputs(), split=forgets_the_mask)

def test_nothing_is_split(cp_parity):
    cp_parity(Layer(), inputs(), split=lambda model, inputs, rank, group: model(**inputs))

def test_nothing_is_returned(cp_parity):
    cp_parity(Layer(), inputs(), split=lambda model, inputs, rank, group: None)

def test_raises(cp_parity):
    def split(model, inputs, rank, group):
        raise KeyError("no such shard")
    cp_parity(Layer(), inputs(), split=split)

def test_no_copy(cp_parity):
    model = Layer()
    model.lock = threading.Lock()
    cp_parity(model, inputs(), split=split_step)
"""
LAYER = '''
import tilewise as tw

def dense(q, k, v, allowed):
    q, k, v = (x.transpose(0, 1) for x in (q, k, v))
    out = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=allowed)
    return out.transpose(0, 1)

class Layer(nn.Module):
    """Projections around causal attention of 2 heads, and a loss of random weights a row."""
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.q, self.k, self.v, self.out = (nn.Linear(16, 16) for _ in range(4))
        self.attend = self.whole

    def whole(self, q, k, v):
        return dense(q, k, v, torch.ones(24, 24).tril().bool())

    def forward(self, x, weights):
        q, k, v = (f(x).unflatten(-1, (2, 8)) for f in (self.q, self.k, self.v))
        return (self.out(self.attend(q, k, v).flatten(-2)) * weights).sum()

def inputs():
    torch.manual_seed(1)
    return {"x": torch.randn(24, 16), "weights": torch.randn(24, 16)}
'''
REASONS = {
    "test_nothing_is_split": "split runs the whole sequence (24 rows) on every rank",
    "test_nothing_is_returned": "split returned no loss on ranks 0, 1",
    "test_raises": "rank 0 raised KeyError: 'no such shard' (",
    "test_no_copy": "cannot be copied (TypeError: cannot pickle '_thread.lock' object)",
}


@pytest.mark.parametrize(
    "options",
    [
        ("--import-mode=importlib",),
        pytest.param(("-p", "xdist", "-n", "1"), marks=pytest.mark.slow),
    ],
    ids=["by its path", "in a worker"],
)
def test_a_failing_test_shows_layer_cause_evidence_and_fix(tmp_path, options):
    """Ranks get a split of the test's own file also where no process can import that file."""
    pytest.importorskip("xdist")
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests" / "test_cp.py").write_text(TESTS.format(LAYER))
    files = ("--cp-parity=page.html", "--junitxml=junit.xml")
    code, output = run_pytest(tmp_path, *options, *files, "tests")
    texts = failures(tmp_path / "junit.xml")
    assert code == 1 and {*texts} == {"test_wrong", *REASONS}, output
    head, layer, cause, evidence, fix, *others = texts["test_wrong"].splitlines()
    assert head == "mask_ignored in (the model): with world_size 2 the model is not the unsplit one"
    assert layer == "first layer that differs: (the model)"
    assert cause == f"cause: mask_ignored. {CAUSES['mask_ignored']}"
    assert evidence.startswith("evidence: ") and "pairs attended" in evidence
    assert fix == f"fix: {FIXES['mask_ignored']}" and len(others) <= MOST_LINES - 5
    for name, reason in REASONS.items():
        assert reason in texts[name] and "\n" not in texts[name], texts[name]
    page = (tmp_path / "page.html").read_text()
    assert "<p>6 comparisons</p>" in page and page.count("<svg") == 1
    assert all(f"test_cp.py::{name}</h2>" in page for name in ("test_right", *texts))
    assert "http" not in page.replace("http://www.w3.org/2000/svg", "")
    verdicts = ElementTree.parse(tmp_path / "junit.xml").iter("property")
    assert {x.attrib["value"] for x in verdicts} >= {"equal", "not compared", "a rank failed"}


def test_a_page_without_a_folder_is_refused(tmp_path):
    code, output = run_pytest(tmp_path, "--cp-parity=missing/page.html")
    assert code == 4 and "there is no folder" in output


class Sum(nn.Module):
    """A model of one layer, whose loss is a sum."""

    def __init__(self, seconds: float = 0.0):
        super().__init__()
        self.layer, self.seconds = nn.Linear(4, 4), seconds

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        time.sleep(self.seconds)
        return self.layer(x).square().sum()


def rows_of_rank(model: Any, inputs: Any, rank: int, group: Any) -> Any:
    rows = torch.arange(T).chunk(2)[rank]
    return model(inputs["x"][rows]), rows


def hangs(model: Any, inputs: Any, rank: int, group: Any) -> Any:
    threading.Event().wait(30)


@pytest.mark.parametrize(
    "model, split, words",
    [
        (Sum(), hangs, "gave no answer in time"),
        (Sum(seconds=30), rows_of_rank, "no answer within 2 s (" + __file__),
    ],
    ids=["the split", "the model"],
)
def test_what_hangs_fails_within_its_time_limit(model, split, words):
    start = time.monotonic()
    options = {"split": split, "world_size": 2, "backend": "loopback"}
    result = checked(model, {"x": torch.rand(T, 4)}, timeout=2, **options)
    assert time.monotonic() - start < 10
    assert words in result.text and "\n" not in result.text


@pytest.mark.parametrize("cause", [*CAUSES])
def test_a_failing_test_has_at_most_fifteen_lines(cause):
    findings = tuple(Finding(name, f"evidence of\n{name}") for name in (cause, *CAUSES))
    deviations = tuple(Deviation("output", f"layers.{i}", 9.0) for i in range(50))
    report = ParityReport(False, "layers.0", cause, findings, deviations, 99, notes=("n",) * 20)
    text = text_of(report)
    assert len(text.splitlines()) <= MOST_LINES
    assert f"cause: {cause}. {CAUSES[cause]}" in text and f"fix: {FIXES[cause]}" in text


def test_a_long_list_of_ranks_that_failed_is_one_line():
    failed = tuple(RankFailure(rank, "error", "KeyError: 1\n") for rank in range(64))
    text = text_of(ParityReport(False, None, "unknown", failures=failed))
    assert "\n" not in text and len(text) <= 400


def text_of(report: ParityReport) -> str:
    from tilewise_verify import cp_parity

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cp_parity, "parity", lambda *args, **options: report)
        return checked(Sum(), {"x": torch.rand(T, 4)}, split=rows_of_rank, world_size=2).text


def test_every_cause_has_a_fix():
    assert {*FIXES} == {*CAUSES}


def test_a_budget_makes_a_model_of_transformers_smaller_and_says_so():
    transformers = pytest.importorskip("transformers", reason="needs the extra hf")
    config = transformers.MistralConfig(
        hidden_size=256, intermediate_size=512, num_hidden_layers=8, num_attention_heads=8,
        num_key_value_heads=2, vocab_size=300, sliding_window=100,
    )  # fmt: skip
    model = transformers.MistralForCausalLM(config)
    ids = torch.randint(300, (1, 200))
    inputs = {"input_ids": ids, "labels": ids.masked_fill(ids < 30, -100)}
    widths = []

    def split(model: Any, inputs: Any, rank: int, group: Any) -> Any:
        widths.append((model.config.hidden_size, inputs["input_ids"].shape[1]))
        assert (inputs["labels"] == -100).any() and model.config.num_key_value_heads == 2
        return tilewise_share(model, inputs, rank, group)

    options = {"split": split, "world_size": 2, "backend": "loopback"}
    result = checked(model, inputs, seconds=1, **options)
    assert result.report is not None and result.report.equal, result.text
    assert {*widths} == {(64, 64)}
    assert "num_hidden_layers 8 -> 2, hidden_size 256 -> 64" in result.note
    assert "tokens 200 -> 64" in result.note and result.note in result.text
    inputs["weights"] = torch.rand(7)
    assert "inputs['weights'] of shape (7,)" in checked(model, inputs, seconds=1, **options).text


def test_a_budget_that_no_other_model_can_keep_is_refused_in_a_line():
    options = {"split": rows_of_rank, "world_size": 2, "backend": "loopback"}
    text = checked(Sum(), {"x": torch.rand(T, 4)}, seconds=0.01, **options).text
    assert "Sum is no model of transformers" in text and "\n" not in text


@pytest.mark.parametrize(
    "options, words",
    [
        ({"seconds": "soon"}, "seconds ('soon') must be"),
        ({"timeout": 0}, "timeout (0) must be"),
        ({"world_size": 0}, "world_size (0) must be"),
        ({"backend": "nccl"}, "backend 'nccl' is not known"),
    ],
    ids=lambda x: "" if isinstance(x, str) else next(iter(x)),
)
def test_wrong_arguments_are_refused_in_a_line(options, words):
    usual = {"split": rows_of_rank, "world_size": 2, "backend": "loopback"}
    text = checked(Sum(), {"x": torch.rand(T, 4)}, **{**usual, **options}).text
    assert words in text and "\n" not in text, text


def tilewise_share(model: Any, inputs: Any, rank: int, group: Any) -> Any:
    from tilewise.integrations.transformers import hf

    ids = inputs["input_ids"]
    cp = tw.ContextParallel(group, num_tokens=ids.shape[1], mask=tw.Causal())
    split_model = hf.parallelize(model, cp, f"budget_{rank}")
    return split_model(**hf.shard(cp, ids, labels=inputs["labels"])).loss, cp.position_ids


FAULTS = (  # of verification/peer_bugs.py: thread, what the split does wrong, model
    ("accelerate #4177", "no window", "gpt_oss"),
    ("ring-flash-attention #35", "block window", "mistral"),
    ("axolotl #3608", "no documents", "llama"),
    ("prime-rl #3397", "no sink", "gpt_oss"),
    ("axolotl #3928", "own shard", "qwen3"),
    ("sglang #33327", "text again", "llama"),
    ("vllm-omni #5716", "padded heads", "llama"),
    ("DeepSpeed #8316", "last head", "qwen3"),
    ("Megatron #1464", "no reduction", "llama"),
    ("Automodel #1482", "own positions", "gpt2"),
    ("verl #4250", "labels shifted", "llama"),
    ("SkyRL #1420", "own mean", "llama"),
)
FAULT_TESTS = """
from verification.peer_bugs import BUGS, made, split_of
import pytest

FAULTS = {faults}
bugs = [bug for bug in BUGS if (bug.thread, bug.says, bug.model) in FAULTS]

@pytest.mark.parametrize("bug", bugs, ids=lambda bug: bug.thread)
def test_cp(cp_parity, bug):
    cp_parity(*made(bug), split=split_of(bug), world_size=2)
"""


@pytest.mark.slow
def test_faults_of_public_threads_fail_with_their_first_cause(tmp_path):
    pytest.importorskip("transformers", reason="needs the extra hf")
    from verification.peer_bugs import BUGS

    (tmp_path / "test_faults.py").write_text(FAULT_TESTS.format(faults=FAULTS))
    code, output = run_pytest(tmp_path, "-q", "--junitxml=junit.xml")
    texts = failures(tmp_path / "junit.xml")
    assert code == 1 and len(texts) == len(FAULTS), output
    for bug in BUGS:
        if (bug.thread, bug.says, bug.model) in FAULTS:
            head, layer, *_ = texts[f"test_cp[{bug.thread}]"].splitlines()
            assert head.startswith(bug.causes), head
            assert bug.layer is None or layer.endswith(f": {bug.layer}"), layer
