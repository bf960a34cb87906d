"""The script of a GPU's first ten minutes, tried out on the CPU."""

import json
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from support.flash_attn_4 import install

from benchmarks import gpu_first
from benchmarks.gpu_first import BY_LISTS, STAMP, main, parts
from benchmarks.gpu_parts import bodies, variants
from benchmarks.gpu_parts.case import Case
from benchmarks.gpu_parts.sizes import mask_named
from benchmarks.gpu_parts.variants import VARIANTS
from tilewise.kernels import flash_attn_4
from tilewise.kernels.call_masks import row_intervals
from tilewise.kernels.flash_attn_4 import FlashAttn4Lists
from tilewise.kernels.self_check import HEADS, KV_HEADS
from tilewise.tiles.cover import tile_calls

TINY = {"device": "cpu", "tiny": True}


def rows_of(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.mark.parametrize("part", parts(tiny=True, after=False), ids=lambda x: x.title)
def test_every_part_runs_on_the_cpu(part):
    assert part.cases and all(json.loads(json.dumps(c.options)) == c.options for c in part.cases)
    for case in part.cases:
        row, healthy = bodies.answer({**TINY, "part": case.part, "options": case.options})
        assert healthy and not {"error", "skipped"} & row.keys(), row


def tile_cases(name: str) -> list[Case]:
    (part,) = (part for part in parts(tiny=False, after=False) if part.title == "whole tiles")
    return [case for case in part.cases if case.options["kernel"] == name]


def test_a_tile_by_lists_is_tried_beside_triton_and_cudnn(monkeypatch):
    package = install(monkeypatch)
    monkeypatch.setattr(FlashAttn4Lists, "device", "cpu")
    cases = tile_cases(BY_LISTS)
    for case, *others in zip(cases, tile_cases("triton"), tile_cases("cudnn"), strict=True):
        assert all(x.options == {**case.options, "kernel": x.options["kernel"]} for x in others)
        options = {**case.options, "heads": "4:2", "num_tokens": 128, "head_dim": 16}
        row, healthy = bodies.answer({**TINY, "part": case.part, "options": options})
        assert healthy and row["calls"] == 1 and row["backward_ms"] > 0, row
    assert package.cells > 0


def test_tiles_of_the_first_minutes_are_more_than_one_slice_and_compiled_for_the_trial():
    for case in tile_cases(BY_LISTS):
        rows = np.arange(case.options["num_tokens"])
        (call,) = tile_calls(
            rows, rows, mask_named(case.options["mask"], len(rows)), whole_tile=True
        )
        assert len(call.as_slices) > 1 and len(row_intervals(call)) == 1
        heads, kv_heads = map(int, case.options["heads"].split(":"))
        assert heads // kv_heads == HEADS // KV_HEADS


def test_a_kernel_that_is_not_installed_is_skipped_with_its_reason(monkeypatch):
    monkeypatch.setattr(flash_attn_4, "_version", lambda: None)
    for case in tile_cases(BY_LISTS):
        row, healthy = bodies.answer({**TINY, "part": case.part, "options": case.options})
        assert healthy and row["skipped"] == "flash-attn-4 is not installed"


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_dry_run_has_a_row_of_every_case(tmp_path, capsys):
    pytest.importorskip("triton")
    path = tmp_path / "rows.jsonl"
    assert main(["--dry-run", "--after", "--out", str(path)]) == 0
    rows = rows_of(path)
    assert len(rows) == 1 + sum(len(part.cases) for part in parts(tiny=True, after=True))
    assert all(row[name] == rows[0][name] for row in rows for name in STAMP)
    assert all(row["right"] for row in rows if "variant" in row and "skipped" not in row)
    page = path.with_suffix(".md").read_text()
    assert re.findall("^## (.*)$", page, re.MULTILINE) == [
        *(title for title, *_ in gpu_first.TABLES),
        "Failed or skipped",
    ]
    assert page in capsys.readouterr().out + "\n"


def test_a_part_that_hangs_or_crashes_has_a_row_and_the_next_one_runs(
    tmp_path, monkeypatch, capsys
):
    pages, path = [], tmp_path / "rows.jsonl"

    def part(what: str) -> gpu_first.Part:
        pages.append(path.with_suffix(".md").exists())  # before this part
        return gpu_first.Part(what, [Case(what, {"does": what}, 1.0, what)], 2.0)

    monkeypatch.setattr(gpu_first, "ANSWER", "support.gpu_answers:answer")
    monkeypatch.setattr(gpu_first, "STAMP", ("process",))
    monkeypatch.setattr(
        gpu_first, "parts", lambda **_: map(part, ("hang", "crash", "work", "fail", "exit"))
    )
    monkeypatch.setattr(
        gpu_first.Runner, "ask", lambda self, case: {"device_name": "none", "process": 1}
    )
    assert main(["--dry-run", "--out", str(path)]) == 1
    rows = rows_of(path)
    assert [row.get("error") for row in rows] == [
        "no answer within 2 s; its process was ended",
        "its process died: signal SIGABRT",
        None,
        "RuntimeError: out of memory",
        "its process died: exit code 3",
    ]
    assert "- hang: no answer within 2 s" in capsys.readouterr().out
    assert pages == [False, True, True, True, True]


def test_the_parts_fit_into_ten_minutes():
    found = parts(tiny=False, after=True)
    assert sum(part.seconds for part in found) + 30 < gpu_first.SECONDS
    for part in found[1:]:  # of what is timed
        assert sum(case.seconds for case in part.cases) < part.seconds, part.title
    ranks = [case.options for case in found[3].cases if case.options["kernel"] == "cudnn"]
    assert {x.get("schedule", "greedy") for x in ranks} == {"greedy", "kv_first", "gather"}
    assert {x["heads"] for x in ranks} == {"32:32", "64:8"}
    assert {x["num_tokens"] for x in ranks} == {1 << 17, 1 << 20}
    assert {case.options["variant"] for case in found[-1].cases} == {*VARIANTS}


@pytest.mark.parametrize("name", ["TMA", "scores ahead", "backward, dq by TMA"])
def test_variants_compile_for_hopper(name):
    pytest.importorskip("triton")
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from benchmarks.gpu_parts import variant_kernels

    variant = VARIANTS[name]
    kernel = variant_kernels.backward if variant.backward else variant_kernels.forward
    constants = variants.settings(variant, 128)
    options = {x: constants.pop(x) for x in ("num_warps", "num_stages", "enable_fp_fusion")}
    if not variant.backward:
        constants |= {"AHEAD": variant.ahead, "SPECIALIZED": variant.specialized}
    pointers = {"lse": "*fp32", "delta": "*fp32", "dk": "*fp32", "dv": "*fp32", "scale": "fp32"}
    pointers |= dict.fromkeys(("q", "k", "v", "dout", "out"), "*bf16") | {"dq": "*fp32"}
    if variant.tma and variant.backward:
        pointers["dq"] = f"tensordesc<fp32[{variant.rows}, 128]>"
    elif variant.tma:
        sizes = {"q": variant.rows, "k": variant.keys, "v": variant.keys}
        pointers |= {x: f"tensordesc<bf16[{n}, 128]>" for x, n in sizes.items()}
    types = {x: "constexpr" if x in constants else pointers.get(x, "i32") for x in kernel.arg_names}
    made = variant_kernels.triton.compile(
        ASTSource(kernel, types, constants, {}), target=GPUTarget("cuda", 90, 32), options=options
    )
    assert ("cp.async.bulk.tensor" in made.asm["ptx"] or "cp.reduce" in made.asm["ptx"]) == (
        variant.tma
    )
    assert "wgmma" in made.asm["ptx"]


def test_a_variant_is_compared_with_ours(monkeypatch):
    x = torch.randn(8, 2)
    assert variants._difference(x, x) == 0 and variants._difference(2 * x, x) == pytest.approx(1)
