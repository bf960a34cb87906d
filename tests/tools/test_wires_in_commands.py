"""Wires on command lines: how they are written, and who names them."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import tilewise as tw
from tilewise.expressions import read_wire
from tilewise_tools.bench.case import KINDS, BenchCase, LabNetwork
from tilewise_tools.bench.contender import Facts
from tilewise_tools.bench.grid import entered, read_cases
from tilewise_tools.bench.measure import Figures
from tilewise_tools.bench.our_strategies import strategy
from tilewise_tools.cli import app
from tilewise_tools.lab.comparison import rows_of

Float8, Wires, Plain = tw.wire.Float8, tw.wire.Wires, tw.wire.Plain


@pytest.mark.parametrize(
    ("text", "wire"),
    [
        ("none", None),
        ("float8", Float8()),
        ("float8(64, stochastic=True)", Float8(64, stochastic=True)),
        ("plain('bfloat16')", Plain("bfloat16")),
        ("wires(float8(), partials=plain('float32'))", Wires(Float8(), partials=Plain("float32"))),
        ("latent(num_kv_heads=8, head_dim=24, v_head_dim=16, width=40)",
         tw.wire.Latent(num_kv_heads=8, head_dim=24, v_head_dim=16, width=40)),
    ],
)  # fmt: skip
def test_wires_are_written_as_they_are_made(text: str, wire: Any):
    assert read_wire(text) == wire


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("morse", "wire 'morse' is not known; take one of float8, plain, latent, wires, none"),
        ("float8(block=0)", "block=0 must be at least 1"),
        ("3", "'3' is not a wire, such as float8"),
        ("float8(rows=3)", r"float8\(block: int = 128.*unexpected keyword argument 'rows'"),
    ],
)
def test_what_is_no_wire_is_said_in_a_line(text: str, message: str):
    with pytest.raises(ValueError, match=message):
        read_wire(text)


def run(*words: str) -> Any:
    done = CliRunner().invoke(app, [*words, "--json"])
    assert done.exit_code == 0, done.output
    return json.loads(done.stdout)


def test_plan_and_simulate_count_the_bytes_of_a_wire():
    sizes = "--num-tokens", "2K", "--heads", "8:8", "--mask", "full"
    plain, eight = (run("simulate", "ring(4)", *sizes, "--wire", x) for x in ("none", "float8"))
    link = next(iter(plain["bytes_by_link"]))
    work = tw.Workload(2048, 8, 8, 128)
    moved = [tw.volume(tw.ring(4), replace(work, wire=x)) for x in (None, Float8())]
    ratio = sum(map(max, moved[1])) / sum(map(max, moved[0]))
    assert eight["bytes_by_link"][link] / plain["bytes_by_link"][link] == ratio < 1
    planned = run("plan", "--world-size", "2", *sizes, "--wire", "float8(64)")
    assert "Float8(block=64" in planned["wire"]


def grid(path: Path, kind: str) -> Path:
    sizes = "heads = ['4:2']\nnum_tokens = [256]\nmask = ['causal']\n"
    wires = "wire = ['none', 'float8(32)']\n"
    path.write_text(f"kind = '{kind}'\n[[grid]]\n{sizes}{wires}contender = ['ring', 'cpu']\n")
    return path


def test_contenders_are_named_by_their_wire(tmp_path: Path):
    run = read_cases(grid(tmp_path / "cases.toml", "strategies"), "strategies")
    ((case, (plain, eight)),) = entered(run.narrowed({"contender": ["ring"]}))
    assert [plain.name, eight.name] == ["ring, wire none", "ring, wire float8(32)"]
    machine = tw.Machine.preset("cpu-gloo")
    sent = [one.predict(case, machine).volume_bytes for one in (plain, eight)]
    assert sent[0] is not None and sent[1] is not None and sent[1] < sent[0]
    with pytest.raises(ValueError, match="is of latents, but the cases have k and v"):
        latent = "latent(num_kv_heads=2, head_dim=64, v_head_dim=64, width=40)"
        entered(run.narrowed({"wire": [latent]}))
    with pytest.raises(ValueError, match="wire"):
        entered(read_cases(grid(tmp_path / "cases.toml", KINDS[0]), KINDS[0]))


def test_the_lab_compares_wires_of_one_strategy():
    case = BenchCase("network", "full", 64, 4, 4, 32, "bfloat16", world_size=4, layout="zigzag")
    case = replace(case, network=LabNetwork("limited", 4, 1, 50.0))
    pair = [strategy("ring(4)", wire=wire) for wire in ("none", "float8")]
    figures = [
        Figures("zigzag", 16, {}, [(0.0, 0.0, x)] * 5, None, None, (), (), Facts(), 0, {})
        for x in (2.0, 1.0)
    ]
    first, second = rows_of(case, pair, [[one] * 4 for one in figures])
    moved = [
        sum(map(max, tw.volume(tw.ring(4), tw.Workload(64, 4, 4, 32, wire=wire))))
        for wire in (None, Float8())
    ]
    assert second.byte_ratio == moved[0] / moved[1] > 1.1 and first.byte_ratio == 1
    assert [row.strategy for row in (first, second)] == [
        "ring(4), wire none",
        "ring(4), wire float8",
    ]
    assert second.ratio == 2
