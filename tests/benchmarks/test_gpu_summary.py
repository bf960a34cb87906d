"""The GPU benchmark's page and table: targets are judged by rows, rows decide on kernels."""

import json
import tomllib

import pytest
import torch

from benchmarks import gpu
from benchmarks.gpu_parts.summary import summary, targets
from benchmarks.kernel_table import from_benchmark, write
from tilewise.kernels.registry import Use, choose


def kernel_row(contender: str, mask: str, ms: float, **more: float) -> dict:
    """A row of the kernel table: backward takes twice as long as forward."""
    given = {"part": "kernels", "contender": contender, "mask": mask, "num_tokens": 65536}
    times = {"forward_ms": ms, "backward_ms": 2 * ms}
    speeds = {"forward_tflops": 100 / ms, "backward_tflops": 100 / ms}
    return {**given, "heads": "32:32", "head_dim": 128, **times, **speeds, **more}


def verdicts(rows: list[dict]) -> dict[str, bool | None]:
    """By the first words of what is wanted."""
    found = {}
    for one in targets(rows):
        name = " ".join(one.wanted.split()[:4])
        found[name] = all(i.met for i in one.items) if one.items else None
    return found


def test_targets_are_judged_by_rows():
    direct = {"forward_direct_tflops": 100.0, "backward_direct_tflops": 100.0}
    shares = {"forward_share": 0.98, "backward_share": 0.975}
    rows = [
        kernel_row("cuda", "causal", 1.0, **direct, **shares),
        kernel_row("triton", "causal", 1.05),
        *(kernel_row("triton", m, 1.0) for m in ("causal_document", "sliding_window_causal")),
        *(kernel_row("cuda", m, 1.5) for m in ("causal_document", "sliding_window_causal")),
        kernel_row("torch flex", "causal_document", 2.1),
        kernel_row("torch flex", "sliding_window_causal", 1.9),
        {"part": "correctness", "kernel": "cuda", "plan": "ring", "mask": "causal", "right": True},
        {"part": "executor", "error": "RuntimeError: out of memory", "kernel": "cuda"},
    ]
    assert verdicts(rows) == {
        "conformance green": True,
        "a rank's mesh tile": None,
        "peak memory of both": None,
        "dense causal of the": True,
        "slice kernel >= 2x": False,
        "slice kernel >= 0.9x": True,
        "slice kernel >= 1x": True,
        "doctor states what each": None,
    }
    page = "\n".join(summary(rows))
    assert "sliding_window_causal 65536 32:32 triton 1.90x, 1.90x: NOT MET" in page
    assert "causal_document 65536 32:32 triton 2.10x, 2.10x: met" in page
    assert "failed: executor cuda: RuntimeError: out of memory" in page


def test_a_rank_is_judged_against_the_fastest_call_of_any_kernel():
    def row(kernel: str, rank_ms: float, one_ms: float) -> dict:
        times = {
            f"{x}_{name}": value
            for x in ("forward", "backward")
            for name, value in (
                ("ms", rank_ms),
                ("one_call_ms", one_ms),
                ("share", one_ms / rank_ms),
                ("tflops", 1.0),
                ("one_call_tflops", 1.0),
                ("host_ms", 1.0),
                ("peak_bytes", 103),
                ("planned_bytes", 100),
            )
        }
        return {"part": "executor", "kernel": kernel, "mask": "causal", "heads": "32:32", **times}

    near, far = row("cuda", 10.0, 9.8), row("cudnn", 11.0, 8.0)
    found = verdicts([near])
    assert found["a rank's mesh tile"] and found["peak memory of both"]
    assert not verdicts([near, far])["a rank's mesh tile"]
    page = "\n".join(summary([near, far]))
    assert "causal 32:32 forward 0.800, cuda against cudnn (against itself 0.980): NOT MET" in page


def test_measured_rows_decide_which_kernel_is_taken(tmp_path, capsys):
    rows = [
        {"part": "environment", "device_name": "NVIDIA H200"},
        kernel_row("cuda", "causal", 3.0),
        kernel_row("triton", "causal", 2.0),
        kernel_row("torch flex", "causal", 1.0),
        {**kernel_row("cudnn", "causal", 1.0), "backward_ms": float("nan")},
        {"part": "kernels", "contender": "cuda", "mask": "full", "skipped": "no time"},
        kernel_row("cuda", "causal_document", 1.0),
        kernel_row("cuda", "sliding_window_causal", 9.0),
        kernel_row("triton", "causal_document", 2.0),
        kernel_row("triton", "sliding_window_causal", 3.0),
        kernel_row("cuda", "share_question", 0.1),
        kernel_row("flex", "causal_document", 0.1),
    ]
    del rows[4]["backward_ms"]
    found = from_benchmark(rows)
    causal, slices = found
    assert causal.seconds == pytest.approx({"triton": 6e-3, "cuda": 9e-3})
    assert slices.seconds == pytest.approx({"triton": 15e-3, "cuda": 30e-3})
    path = tmp_path / "measured.toml"
    path.write_text('# why\n[default.cuda]\nany = ["cuda"]\n\n# rows:\n# [[row]]\n')
    write([causal._replace(seconds={"cuda": 1e-9})], path)
    write(found, path)
    text = path.read_text()
    assert text.startswith("# why\n") and text.count("\n[[row]]") == 2 and "1.000e-09" not in text
    table, half = tomllib.loads(text), (torch.bfloat16, 128)
    assert choose(table, "cuda", half, Use("NVIDIA H200", "causal", 70000)).name == "triton"
    assert choose(table, "cuda", half, Use("NVIDIA H200", "full", 70000)).name == "cuda"
    source = tmp_path / "rows.jsonl"
    source.write_text("".join(json.dumps(r) + "\n" for r in rows) + '{"part": "cut of')
    assert len(from_benchmark(gpu._rows(source))) == 2
