"""tw.record: rows of every rank with the times of each operation, and nothing where it is off."""

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import tilewise as tw
from tilewise import recording
from tilewise.compiler import ops
from tilewise.transport.agreement import agreement_of
from tilewise.transport.loopback import LoopbackGroup
from tilewise.transport.processes import run_ranks

N, TOKENS, HEADS, HEAD_DIM = 4, 64, 4, 8


def made(group: Any, plan: tw.Plan | None = None) -> tuple[tw.ContextParallel, list[Tensor]]:
    cp = tw.ContextParallel(group, num_tokens=TOKENS, mask=tw.Causal(), strategy=plan or tw.ring(N))
    generator = torch.Generator().manual_seed(cp.rank)
    shape = cp.layout.size(cp.rank), HEADS, HEAD_DIM
    tensors = [torch.randn(shape, generator=generator, requires_grad=True) for _ in range(3)]
    return cp, tensors


def rows_of(folder: Path, rank: int) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / f"rank{rank}.jsonl").read_text().splitlines()]


def of_kind(rows: list[dict[str, Any]], kind: str) -> list[dict[str, Any]]:
    return [row for row in rows if row["kind"] == kind]


@pytest.mark.parametrize(("every", "recorded"), [(1, [0, 1, 2, 3, 4]), (2, [1, 3]), (4, [1])])
def test_one_in_every_so_many_steps_is_recorded(tmp_path: Path, every: int, recorded: list[int]):
    def train(rank: int, group: LoopbackGroup) -> None:
        cp, tensors = made(group)
        with tw.record(cp, every, tmp_path):
            for _ in range(5):
                sum(cp.attention(*tensors).sum() for _ in range(2)).backward()  # pyright: ignore

    tw.loopback(N, train)
    for rank in range(N):
        rows = rows_of(tmp_path, rank)
        assert [row["step"] for row in of_kind(rows, "pass")] == [
            step for step in recorded for _ in range(4)
        ]
        forward, backward = of_kind(rows, "case")
        assert (forward["backward"], backward["backward"]) == (False, True)
        code = tw.ring(N).code(tw.Workload(TOKENS, HEADS, HEADS, HEAD_DIM, "float32",
                                           mask=tw.Causal()), rank)  # fmt: skip
        assert [op["label"] for op in forward["ops"]] == [*code.labels]
        assert [op["op"] for op in forward["ops"]] == [type(op).__name__ for op in code.ops]
        areas = [op.call.area for op in code.ops if isinstance(op, ops.Attend)]
        assert [op["area"] for op in forward["ops"] if op["op"] == "Attend"] == areas
        cases = forward, backward
        for row in of_kind(rows, "pass"):
            assert len(row["after"]) == len(cases[row["case"]]["ops"]) + 2
            assert row["after"] == sorted(row["after"]) and row["after"][0] >= 0


def test_a_recorded_pass_computes_the_same_bits_and_ends_with_the_recorder(tmp_path: Path):
    def both(rank: int, group: LoopbackGroup) -> bool:
        cp, tensors = made(group)

        def results() -> list[Tensor]:
            out = cp.attention(*tensors)
            return [out.detach(), *torch.autograd.grad(out.sum(), tensors)]

        plain = results()
        with tw.record(cp, 1, tmp_path) as recorder:
            watched = results()
            assert agreement_of(group).recorder is recorder
        assert agreement_of(group).recorder is None
        results()
        return all(map(torch.equal, plain, watched))

    assert tw.loopback(N, both) == [True] * N
    assert len(of_kind(rows_of(tmp_path, 0), "pass")) == 2


def entered(call: Any) -> set[str]:
    """Files of the library whose functions a call enters."""
    files: set[str] = set()

    def note(frame: Any, event: str, _: object) -> None:
        if event == "call":
            files.add(frame.f_code.co_filename)

    sys.setprofile(note)
    try:
        call()
    finally:
        sys.setprofile(None)
    return {Path(file).name for file in files if "tilewise" in Path(file).parts}


def test_what_is_not_recorded_enters_nothing_of_the_recorder(tmp_path: Path):
    def seen(rank: int, group: LoopbackGroup) -> list[set[str]]:
        cp, tensors = made(group)
        cp.attention(*tensors).sum().backward()
        plain = entered(lambda: cp.attention(*tensors).sum().backward())
        with tw.record(cp, 1, tmp_path):
            watched = entered(lambda: cp.attention(*tensors).sum().backward())
        after = entered(lambda: cp.attention(*tensors).sum().backward())
        return [plain, watched, after]

    for plain, watched, after in tw.loopback(N, seen):
        assert "run.py" in plain and "recording.py" not in plain
        assert after == plain and "recording.py" in watched


def test_steps_may_be_told_and_what_a_checkpoint_runs_again_begins_none(tmp_path: Path):
    def train(rank: int, group: LoopbackGroup) -> None:
        cp, (q, k, v) = made(group)

        def layers(q: Tensor) -> Tensor:
            for _ in range(2):
                q = checkpoint(cp.attention, q, k, v, use_reentrant=False)  # pyright: ignore
            return q

        with tw.record(cp, 1, tmp_path / "found"):
            for _ in range(2):
                layers(q).sum().backward()
        with tw.record(cp, 1, tmp_path / "told") as recorder:
            for _ in range(2):
                recorder.step()
                for _ in range(2):  # accumulated gradients
                    layers(q).sum().backward()

    tw.loopback(N, train)
    for folder, passes in (("found", 6), ("told", 12)):
        rows = rows_of(tmp_path / folder, 1)
        steps = [row["step"] for row in of_kind(rows, "pass")]
        assert steps == [0] * passes + [1] * passes
        borders = [(row["kind"], row["step"]) for row in rows if row["kind"] in ("step", "end")]
        told = [("step", 0), ("end", 0), ("step", 1), ("end", 1)]
        assert borders == (told if folder == "told" else [])


def test_calls_of_which_no_gradient_is_asked_are_steps(tmp_path: Path):
    def infer(rank: int, group: LoopbackGroup) -> None:
        cp, tensors = made(group)
        with torch.no_grad(), tw.record(cp, 1, tmp_path):
            for _ in range(3):
                cp.attention(*tensors)

    tw.loopback(N, infer)
    assert [row["step"] for row in of_kind(rows_of(tmp_path, 0), "pass")] == [0, 1, 2]


def on_gloo(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    cp, tensors = made(None, tw.ring(2))
    recorder = tw.record(cp, 1, folder)
    cp.attention(*tensors).sum().backward()
    recorder.close()


def test_on_gloo_each_message_has_its_own_wait(tmp_path: Path):
    run_ranks(2, on_gloo, str(tmp_path))
    heads = [rows_of(tmp_path, rank)[0] for rank in range(2)]
    assert heads[0]["run"] == heads[1]["run"] and len(heads[0]["run"]) == 16
    for rank in range(2):
        rows = rows_of(tmp_path, rank)
        cases = {row["case"]: row for row in of_kind(rows, "case")}
        for row in of_kind(rows, "pass"):
            messages = {True: list[Any](), False: list[Any]()}
            for is_send, whats, begin, end in row["waits"]:
                assert 0 <= begin <= end <= row["after"][-1]
                messages[is_send] += whats
            posts = [op for op in cases[row["case"]]["ops"] if op["op"] == "Post"]
            for is_send, side in ((True, "sends"), (False, "recvs")):
                posted = [[peer, what] for op in posts for peer, what, _ in op[side]]
                assert sorted(messages[is_send]) == sorted(posted) != []


def refusals(tmp_path: Path) -> Iterator[tuple[Any, str]]:
    blocked = tmp_path / "file"
    blocked.write_text("")
    yield {"every": 0}, "every"
    yield {"folder": blocked}, "folder"


def test_bad_input_is_refused_on_every_rank(tmp_path: Path):
    for words, named in refusals(tmp_path):

        def begin(rank: int, group: LoopbackGroup, words: Any = words) -> str:
            cp, _ = made(group)
            mine = words if rank == 1 else {"folder": tmp_path / "run"}
            with pytest.raises(ValueError) as raised:
                tw.record(cp, **mine)  # pyright: ignore
            return str(raised.value)

        texts = tw.loopback(N, begin)
        assert named in texts[0] and len({*texts}) == 1, texts


def test_one_rank_and_other_values_are_refused():
    cp = tw.ContextParallel(num_tokens=8)
    with pytest.raises(ValueError, match="one rank waits for nobody"):
        tw.record(cp)
    with pytest.raises(ValueError, match="cp"):
        tw.record("cp")  # pyright: ignore


def test_what_a_file_cannot_hold_is_said_in_its_rows(tmp_path: Path):
    def canonical(rank: int, group: LoopbackGroup) -> None:
        cp = tw.ContextParallel(
            group, num_tokens=256, strategy=tw.all_gather(2), reduction="canonical"
        )
        q = torch.randn(cp.layout.size(rank), HEADS, HEAD_DIM)
        with tw.record(cp, 1, tmp_path):
            cp.attention(q, q, q)

    tw.loopback(2, canonical)
    (case,) = of_kind(rows_of(tmp_path, 0), "case")
    assert "canonical" in case["unwritten"] and "workload" not in case


@pytest.mark.parametrize("plan", [tw.ring(2), tw.tree(2)], ids=repr)
def test_queries_of_another_layout_than_the_keys_are_in_no_file(plan: tw.Plan, tmp_path: Path):
    keys = tw.contiguous(10, 2)

    def crosswise(rank: int, group: LoopbackGroup) -> None:
        cp = tw.ContextParallel(group, num_tokens=8)
        q, k = torch.randn(4, HEADS, HEAD_DIM), torch.randn(5, HEADS, HEAD_DIM)
        with tw.record(cp, 1, tmp_path):
            cp.attention(q, k, k, plan=plan, mask=tw.Full(), kv_layout=keys)

    tw.loopback(2, crosswise)
    (case,) = of_kind(rows_of(tmp_path, 0), "case")
    assert "have a layout of their own" in case["unwritten"] and "workload" not in case


def test_events_are_read_against_the_hosts_clock(monkeypatch: pytest.MonkeyPatch):
    class Event:
        def __init__(self, milliseconds: float):
            self.milliseconds = milliseconds

        def synchronize(self) -> None:
            return

        def elapsed_time(self, other: "Event") -> float:
            return other.milliseconds - self.milliseconds

    clock = recording.DeviceClock(torch.device("cuda"))
    monkeypatch.setattr(clock, "now", lambda: Event(10.0))
    monkeypatch.setattr(recording.time, "perf_counter_ns", lambda: 50_000_000)
    moments: list[Any] = [Event(2.0), Event(9.5)]
    assert clock.nanoseconds(moments) == [42_000_000, 49_500_000]
