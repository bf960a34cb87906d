"""A recorded run explained: what is slow is named first, parts add up, and rows that do not fit are
refused by name."""

import json
import shutil
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from typer.testing import CliRunner

import tilewise as tw
from tilewise.kernels.registry import kernel_for
from tilewise.tiles.calls import KernelCall
from tilewise.transport import posted
from tilewise.transport.loopback import LoopbackGroup
from tilewise.transport.processes import run_ranks
from tilewise_tools.cli import app
from tilewise_tools.explain.explanation import PARTS, Explanation, explain
from tilewise_tools.explain.page import page_of
from tilewise_tools.explain.rows import read_run
from tilewise_tools.explain.trace import trace_text
from tilewise_tools.lab import Lab
from tilewise_tools.lab.site import missing
from tilewise_tools.report.page import written

N, STEPS = 4, 3
PAUSE = 0.02  # seconds, many times what anything takes here
needs_lab = pytest.mark.skipif(missing() is not None, reason=f"no network lab: {missing()}")


@pytest.fixture(autouse=True)
def few_plans(monkeypatch: pytest.MonkeyPatch):
    """Promising plans alone: a whole search takes seconds."""
    monkeypatch.setattr("tilewise_tools.explain.advice.SEARCHED", 0)


class Slowed:
    """The CPU's kernel with a pause in every call."""

    def __init__(self) -> None:
        self._kernel = kernel_for("cpu", torch.float32, 16)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._kernel, name)

    def forward(self, *args: Any, **words: Any) -> Any:
        time.sleep(PAUSE)
        return self._kernel.forward(*args, **words)

    def backward(self, *args: Any, **words: Any) -> Any:
        time.sleep(PAUSE)
        return self._kernel.backward(*args, **words)


class AsLongAsPairs:
    """The CPU's kernel with a pause in every call, by the pairs that it computes."""

    def __init__(self) -> None:
        self._kernel = kernel_for("cpu", torch.float32, 16)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._kernel, name)

    def forward(self, q: Any, k: Any, v: Any, call: KernelCall, *args: Any, **words: Any) -> Any:
        time.sleep(PAUSE * call.area / 50_000)
        return self._kernel.forward(q, k, v, call, *args, **words)

    def backward(self, *args: Any, **words: Any) -> Any:
        time.sleep(PAUSE * args[6].area / 50_000)
        return self._kernel.backward(*args, **words)


def recorded(
    folder: Path,
    plan: tw.Plan,
    num_tokens: int = 256,
    mask: Any = None,
    layout: Any = None,
    disturb: Callable[[int, LoopbackGroup], Any] = lambda *_: None,
    backward: bool = True,
) -> float:
    """Record a few steps of two layers on loopback; returns the seconds of the longest step."""

    def train(rank: int, group: LoopbackGroup) -> float:
        kernel, longest = disturb(rank, group), 0.0
        mask_, words = tw.Full() if mask is None else mask, {"strategy": plan, "kernel": kernel}
        cp = tw.ContextParallel(group, num_tokens=num_tokens, mask=mask_, layout=layout, **words)
        shape = cp.layout.size(rank), 4, 16
        q, k, v = (torch.randn(shape, requires_grad=backward) for _ in range(3))
        with tw.record(cp, 1, folder) as recorder:
            for _ in range(STEPS):
                begin = time.perf_counter()
                recorder.step()
                out = cp.attention(cp.attention(q, k, v), k, v)
                if backward:
                    out.sum().backward()
                longest = max(longest, time.perf_counter() - begin)
        return longest

    return max(tw.loopback(N, train))


def explained(folder: Path, **words: Any) -> Explanation:
    explanation = explain(read_run([folder]), **words)
    assert len(explanation.lines()) <= 5
    for one in (explanation.parts, *explanation.by_rank):
        assert one.keys() == PARTS.keys()
        assert sum(one.values()) == pytest.approx(explanation.seconds, rel=1e-9)
    assert sum(explanation.waits.values()) == pytest.approx(explanation.parts["wait"], rel=1e-9)
    return explanation


def test_a_slowed_rank_is_named_first(tmp_path: Path):
    longest = recorded(
        tmp_path, tw.ring(N), disturb=lambda rank, _: Slowed() if rank == 2 else None
    )
    explanation = explained(tmp_path)
    first = explanation.findings[0]
    assert (first.kind, first.ranks) == ("slow rank", (2,))
    assert explanation.lines()[1].startswith("first: rank 2 is slow")
    # Two layers, two passes, four calls.
    assert first.seconds > 0.8 * 16 * PAUSE and explanation.kernels.slowness[2] > 3
    assert max(step.seconds for step in explanation.steps) <= longest


class Late:
    """An operation of gloo that ends later."""

    def __init__(self, work: Any):
        self._work = work

    def wait(self) -> Any:
        time.sleep(PAUSE)
        return self._work.wait()


def late_messages(rank: int, folder: str) -> None:
    """Record a few steps in which what rank 1 receives of rank 2 arrives late."""
    torch.set_num_threads(1)
    wait_for = posted.wait_for

    def late(work: Any, messages: Any, verb: str, link: Any) -> None:
        is_late = rank == 1 and verb != posted.SENDING and messages and messages[0].peer == 2
        slow: Any = Late(work) if is_late else work
        wait_for(slow, messages, verb, link)

    posted.wait_for = late  # pyright: ignore
    cp = tw.ContextParallel(num_tokens=256, strategy=tw.ring(N))
    q, k, v = (torch.randn(64, 4, 16, requires_grad=True) for _ in range(3))
    with tw.record(cp, 1, folder):
        for _ in range(STEPS):
            cp.attention(q, k, v).sum().backward()


def test_a_slow_link_is_named_first(tmp_path: Path):
    run_ranks(N, late_messages, str(tmp_path))
    explanation = explained(tmp_path)
    first = explanation.findings[0]
    assert (first.kind, first.ranks) == ("slow link", (2, 1))
    assert "the link from rank 2 to rank 1 is slow" in explanation.lines()[1]


def test_a_long_document_is_named_first(tmp_path: Path):
    borders = [*range(0, 1025, 64), 1536, *range(1600, 2049, 64)]
    mask, layout = tw.Document(borders), tw.contiguous(2048, N)
    recorded(tmp_path, tw.ring(N), 2048, mask, layout, lambda *_: AsLongAsPairs())
    explanation = explained(tmp_path)
    first = explanation.findings[0]
    assert (first.kind, first.ranks, first.document) == ("uneven work", (2,), (16, 1024, 1536))
    assert "document 16 (tokens 1024 to 1536, 512 long)" in explanation.lines()[1]


@pytest.mark.parametrize(
    "plan", [tw.ulysses(N), tw.all_gather(N), tw.mesh(N, q_tile=2)], ids=lambda plan: plan.name
)
def test_all_kinds_of_plans_are_explained_and_simulated(tmp_path: Path, plan: tw.Plan):
    recorded(tmp_path, plan, mask=tw.Causal())
    explanation = explained(tmp_path)
    assert explanation.simulated_seconds and not explanation.note
    assert explanation.subjects[0].passes == (2.0, 2.0)
    assert explanation.machine and explanation.machine.name == "this run"
    text = json.loads(trace_text(explanation))["traceEvents"]
    lanes = {(one["pid"], one["tid"]) for one in text if one["ph"] == "X"}
    assert lanes >= {(rank, lane) for rank in range(N) for lane in (0, 1)}
    own = [one for one in text if one["ph"] == "X" and (one["pid"], one["tid"]) == (0, 0)]
    pieces = explanation.steps[-1].pieces[0]
    microseconds = 1e6 * (pieces[-1].end - pieces[0].start)
    assert sum(one["dur"] for one in own) == pytest.approx(microseconds, rel=1e-3)
    assert "Where the step goes" in written(page_of(explanation))


def test_forward_alone_is_explained(tmp_path: Path):
    recorded(tmp_path, tw.ring(N), backward=False)
    explanation = explained(tmp_path)
    assert explanation.subjects[0].passes == (2.0, 0.0)
    assert explanation.kernels.fits[1] is None


def slow_link(rank: int, folder: str) -> float:
    torch.set_num_threads(1)
    cp = tw.ContextParallel(num_tokens=2048, mask=tw.Full(), strategy=tw.ring(N))
    q, k, v = (torch.randn(512, 4, 32, requires_grad=True) for _ in range(3))
    seconds = 0.0
    with tw.record(cp, 1, folder):
        for _ in range(2):
            dist.barrier()
            begin = time.perf_counter()
            cp.attention(q, k, v).sum().backward()
            seconds = time.perf_counter() - begin
    return seconds


@needs_lab
def test_a_slow_nic_of_the_lab_is_named_first_and_the_parts_are_the_step(tmp_path: Path):
    with Lab(N, mbit=200) as lab:
        slow = "tc qdisc change dev eth0 root tbf rate 20mbit burst 160kb limit 32mb"
        command = ["ip", "netns", "exec", lab.site.host(1), *slow.split()]
        subprocess.run(command, check=True)
        seconds = lab.run(slow_link, str(tmp_path), timeout_seconds=120)
    explanation = explained(tmp_path)
    first = explanation.findings[0]
    assert (first.kind, first.ranks) == ("slow link", (1, 0))
    assert explanation.seconds == pytest.approx(max(seconds), rel=0.05)


# Rows by hand


def entries(rank: int, **head: Any) -> list[dict[str, Any]]:
    """Rows of a rank of two: rank 0 computes for 10 ms and waits until 34; rank 1 computes for 20,
    then posts, and its message takes 14.
    """
    clock = [[1000 * i, 1000 * i + 500] for i in range(4)]
    known = {"format": "tilewise record 1", "version": tw.__version__, "run": "one", "every": 1}
    known |= {"world_size": 2, "host": "h", "kernel": "k", "machine": None, "clock": clock}
    case = {"kind": "case", "case": 0, "backward": False, "ahead": 1, "kernel": "cpu"}
    case |= {"device": "cpu", "plans": ["p", "p"], "digests": ["p", "p"], "batch": 1}
    case |= {"layout_digest": "l", "mask": "m", "unwritten": "by hand"}
    call = {"op": "Attend", "label": "compute", "q": 4, "k": 4, "area": 16, "heads": 1}
    if rank:
        ops = [call, {"op": "Post", "label": "launch", "sends": [[0, "kv1", 8]]}, call]
        after, waits = [0, 20, 20, 30, 34], [[True, [[0, "kv1"]], 30, 34]]
    else:
        post = {"op": "Post", "label": "launch", "recvs": [[1, "kv1", 8]], "groups": [[[0], [0]]]}
        ops = [post, call, {"op": "Wait", "label": "wait", "arrivals": [0]}, call]
        after, waits = [0, 0, 10, 34, 44, 44], [[False, [[1, "kv1"]], 10, 34]]
    waits = [[*x, 1_000_000 * a, 1_000_000 * b] for *x, a, b in waits]
    row = {"kind": "pass", "case": 0, "step": 0, "begin": 0, "waits": waits}
    after = [1_000_000 * x for x in after]
    return [
        {"kind": "run", "rank": rank, **known, **head},
        {**case, "ops": ops},
        row | {"after": after},
    ]


def write(folder: Path, rank: int, rows: list[dict[str, Any]]) -> Path:
    folder.mkdir(exist_ok=True)
    path = folder / f"rank{rank}.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_a_wait_is_first_for_the_sender_and_then_for_the_link(tmp_path: Path):
    for rank in range(2):
        write(tmp_path, rank, entries(rank))
    explanation = explained(tmp_path)
    assert explanation.seconds == pytest.approx(0.044)
    mine = explanation.by_rank[0]
    assert (mine["kernel"], mine["wait"]) == pytest.approx((0.020, 0.024))
    # Rank 1 computes for 20 and 10, waits for its send for 4, and then for rank 0 to end.
    other = explanation.by_rank[1]
    assert (other["kernel"], other["wait"]) == pytest.approx((0.030, 0.014))
    waits = {tuple(cause): seconds for cause, seconds in explanation.waits.items()}
    assert waits == pytest.approx(
        {("kernel", 1, -1): 0.005, ("link", 1, 0): 0.009, ("kernel", 0, -1): 0.005}
    )
    (rate,) = explanation.links.values()
    assert rate.bandwidth == pytest.approx(8 / 0.014)
    assert "no plan was simulated: by hand" in explanation.lines()[-1]


def test_clocks_of_different_hosts_are_put_on_one_scale(tmp_path: Path):
    write(tmp_path, 0, entries(0))
    head, case, row = entries(1, kernel="another")
    ahead = 5_000_000_000
    head["clock"] = [[ahead + a, ahead + b] for a, b in head["clock"]]
    write(tmp_path, 1, [head, case, row | {"begin": ahead}])
    explanation = explained(tmp_path)
    waits = {tuple(cause): seconds for cause, seconds in explanation.waits.items()}
    assert waits[("kernel", 1, -1)] == pytest.approx(0.005, abs=1e-6)
    assert explanation.clock_error == pytest.approx(500e-9)


REFUSED: tuple[tuple[str, Callable[[Path], Any], str], ...] = (
    ("rank missing", lambda f: (f / "rank1.jsonl").unlink(), "rows of rank 1 are missing, of 2"),
    (
        "another version",
        lambda f: write(f, 1, entries(1, version="0.0.1")),
        "recorded by tilewise 0.0.1",
    ),
    ("another run", lambda f: write(f, 1, entries(1, run="two")), "another run than"),
    ("another world", lambda f: write(f, 1, entries(1, world_size=3)), "another number of ranks"),
    (
        "another machine",
        lambda f: write(f, 1, entries(1, machine=['name = "m"'])),
        "of another machine than",
    ),
    (
        "another device",
        lambda f: write(f, 1, _with(entries(1), device="H100")),
        "recorded on another machine",
    ),
    (
        "another plan",
        lambda f: write(f, 1, _with(entries(1), digests=["q", "q"], plans=["q", "q"])),
        "rows of another plan than",
    ),
    ("another format", lambda f: write(f, 1, entries(1, format="x")), "rows of format 'x'"),
    ("a rank twice", lambda f: shutil.copy(f / "rank0.jsonl", f / "rank1.jsonl"), "both of rank 0"),
    ("an empty file", lambda f: (f / "rank1.jsonl").write_text(""), "rank1.jsonl is empty"),
    (
        "no rows of ours",
        lambda f: (f / "rank1.jsonl").write_text('{"kind": "case"}\n'),
        "rank1.jsonl",
    ),
    ("no pass", lambda f: write(f, 1, entries(1)[:2]), "no step was recorded whole"),
    (
        "times of another code",
        lambda f: write(f, 1, [*entries(1)[:2], {**entries(1)[2], "after": [1, 2]}]),
        "a row that tw.record does not write",
    ),
)


def _with(rows: list[dict[str, Any]], **changes: Any) -> list[dict[str, Any]]:
    head, case, row = rows
    return [head, case | changes, row]


@pytest.mark.parametrize(
    ("spoil", "message"), [one[1:] for one in REFUSED], ids=[x for x, *_ in REFUSED]
)
def test_rows_that_do_not_fit_are_refused_by_name(
    tmp_path: Path, spoil: Callable[[Path], Any], message: str
):
    for rank in range(2):
        write(tmp_path, rank, entries(rank))
    spoil(tmp_path)
    done = CliRunner().invoke(app, ["explain", str(tmp_path)])
    assert done.exit_code == 2 and message in done.output.replace("\n", ""), done.output


def test_lines_that_are_not_whole_are_counted(tmp_path: Path):
    write(tmp_path, 0, entries(0))
    path = write(tmp_path, 1, entries(1))
    path.write_text(path.read_text() + '{"kind": "pass", "ca')
    done = CliRunner().invoke(app, ["explain", str(tmp_path)])
    assert done.exit_code == 0 and "1 lines were not whole" in done.output


def test_the_command_reads_the_usual_folder_and_writes_a_page_and_a_trace(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(tmp_path)
    recorded(tmp_path / "run", tw.ring(N), mask=tw.Causal())

    def ran(*words: str) -> tuple[int, str]:
        done = CliRunner().invoke(app, ["explain", *words])
        return done.exit_code, done.output if done.exit_code else done.stdout

    code, text = ran("run", "-o", "run.html", "--trace", "trace.json", "--plan", f"ring({N})")
    assert code == 0 and text.startswith("step: ") and len(text.strip().splitlines()) <= 5
    assert (
        Path("run.html").read_text().startswith("<!DOCTYPE html>") and Path("trace.json").exists()
    )
    code, text = ran("--json")
    assert code == 0
    values = json.loads(text)
    assert values["seconds"] == pytest.approx(sum(values["parts"].values()))
    assert values["world_size"] == N and values["plans"] == ["ring(4, moves='kv')"]
    code, text = ran("--plan", f"ulysses({N})")
    assert code == 2 and "the rows are of another plan" in text
    code, text = ran("--machine", "h100x8")
    assert code == 2 and "is made of cuda devices" in text
    code, text = ran("--machine", "cpu-gloo")
    assert code == 0 and "simulated on cpu-gloo" in text
    code, text = ran("nowhere")
    assert code == 2 and "nowhere is neither a folder" in text
