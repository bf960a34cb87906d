"""Machines: presets, files, errors that say what is wrong, kernel speeds between table entries."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest

from tilewise.simulation.machine import KernelSpeed, Link, Machine


def grid(**fields) -> KernelSpeed:
    good = {
        "dtype": "float32",
        "backward": False,
        "queries": (16.0, 256.0),
        "keys": (16.0, 64.0),
        "flops": ((1e9, 4e9), (4e9, 16e9)),
    }
    return KernelSpeed(**{**good, **fields})


@pytest.mark.parametrize("name", Machine.presets())
def test_a_preset_is_complete_and_survives_its_file(name: str, tmp_path: Path):
    machine = Machine.preset(name)
    assert machine.name == name and machine.source and machine.memory_bytes > 1e9
    for dtype in ("float64", "float32", "bfloat16", "float16"):
        for backward in (False, True):
            assert machine.kernel(dtype, backward).speed(4096, 4096) > 1e9
    sheet = re.search(r"GB at ([\d.]+) TB/s", machine.source)
    assert bool(sheet) == (name != "cpu-gloo")
    if sheet:
        memory = float(sheet[1]) * 1e12 * 7 / 8
        assert machine.merge_bandwidth == pytest.approx(memory / 3)
        assert machine.pack_bandwidth == pytest.approx(memory / 2)
        assert all(kernel.heads for kernel in machine.kernels)
    path = tmp_path / "machine.toml"
    path.write_text(machine.to_toml())
    assert Machine.load(path) == machine


def test_presets_cover_the_devices_and_their_numbers_of_nics():
    names = {f"{d}x8{nics}" for d in ("a100", "h100", "h200", "b200") for nics in NICS}
    others = {"a100-40gbx8", "l40sx8", "a6000x8", "mi300xx8", "nvl72", "cpu-gloo"}
    assert names | others == set(Machine.presets())
    for name in names:
        assert Machine.preset(name).nics == NICS[name[6:]]
    assert Machine.preset("nvl72").node_size == 72


NICS = {"": 8, "-4nic": 4, "-1nic": 1}


def test_every_field_survives_a_file(tmp_path: Path):
    machine = Machine(
        name='odd "name"\\',
        node_size=4,
        inside=Link(1e9, 1e-6),
        between=Link(12345678.9),
        kernels=(grid(), grid(backward=True, head_dim=64, launch_seconds=2e-5, edge_keys=31.5)),
        nics=2,
        pooled=True,
        launch_seconds=1e-6,
        message_seconds=3e-4,
        carry_seconds=1e-4,
        call_seconds=(1e-4, 2e-4),
        agree_seconds=5e-5,
        merge_seconds=6e-5,
        merge_bandwidth=7e9,
        pack_bandwidth=8e9,
        memory_bytes=123,
        rack_nodes=8,
        across=Link(1e8, 1e-3),
        cores=1.5,
        core_sharers=16,
        copy_cores=0.25,
        source="two\nlines",
    )
    path = tmp_path / "machine.toml"
    path.write_text(machine.to_toml())
    assert Machine.load(path) == machine


EIGHT_LINES = """
name = "h100x8"
peak = { bfloat16 = 989e12, float16 = 989e12, float32 = 67e12, float64 = 67e12 }
best = { forward = 0.65, backward = 0.55 }
node_size = 8
nics = 8
inside_bandwidth = 450e9
between_bandwidth = 50e9
memory = 80e9
"""
MEMORY = f"memory_bandwidth = {3.35e12 * 7 / 8}\nheads = {132 // 4}\n"


def written(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "mine.toml"
    path.write_text(text)
    return path


def test_eight_lines_are_the_preset_that_has_the_same_figures(tmp_path: Path):
    preset = Machine.preset("h100x8")
    machine = Machine.load(written(tmp_path, EIGHT_LINES + MEMORY))
    assert replace(machine, source=preset.source) == preset
    assert machine.kernel("bfloat16", True).speed(256, 256) == pytest.approx(989e12 * 0.55 / 4)
    spelled = EIGHT_LINES.replace("memory =", "memory_bytes =").replace(
        "inside_bandwidth = 450e9", "inside = { bandwidth = 450e9, latency = 1e-6 }"
    )
    other = Machine.load(written(tmp_path, spelled + MEMORY + "merge_bandwidth = 1e12\n"))
    assert other == replace(machine, inside=Link(450e9, 1e-6), merge_bandwidth=1e12)


def test_a_memorys_bandwidth_prices_merging_and_copying_and_heads_are_the_kernels(tmp_path: Path):
    more = "memory_bandwidth = 3e12\nheads = 32\n"
    machine = Machine.load(written(tmp_path, EIGHT_LINES + more))
    assert (machine.merge_bandwidth, machine.pack_bandwidth) == (1e12, 1.5e12)
    assert {kernel.heads for kernel in machine.kernels} == {32}
    assert Machine.load(written(tmp_path, machine.to_toml())) == machine


def test_the_example_file_is_a_machine_in_short_form():
    machine = Machine.load(Path(__file__).parents[2] / "examples" / "machine.toml")
    assert (machine.node_size, machine.nics, machine.memory_bytes) == (8, 4, 80_000_000_000)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("nics = 8\n", "", "machine lacks nics"),
        ("best = { forward = 0.65, backward = 0.55 }\n", "", "machine lacks best"),
        (", backward = 0.55", "", "best (forward) must have forward and backward"),
        ("0.65", "65", "best.forward (65.0) must be a share of the peak: above 0, at most 1"),
        ("450e9", '"450 GB/s"', "inside_bandwidth ('450 GB/s') must be a finite number, not text"),
        ("bfloat16 = 989e12", "bfloat16 = -1", "peak.bfloat16 (-1) must be FLOP per second"),
        ("bfloat16 =", "bf16 =", "the dtype of a kernel"),
        ("nics = 8", "nics = 3", "nics (3) must divide node_size (8)"),
        ("nics = 8", "nics = 8\nmemory_bandwidth = 0", "memory_bandwidth (0) must be bytes per"),
        ("nics = 8", "nics = 8\nheads = -1", "kernel bfloat16: heads"),
        ("memory =", "memroy =", "machine lacks memory"),
        ("nics = 8", "nics = 8\nnisc = 8", "machine has no field 'nisc'; did you mean nics?"),
        ("inside_bandwidth = 450e9", "inside = 450e9", "machine.inside (450000000000.0) must be"),
    ],
)
def test_a_wrong_short_form_is_one_line_that_says_what_is_missing_or_wrong(
    tmp_path: Path, old: str, new: str, message: str
):
    path = written(tmp_path, EIGHT_LINES.replace(old, new))
    with pytest.raises(ValueError) as raised:
        Machine.load(path)
    text = str(raised.value)
    assert text.startswith(f"{path}: ") and message in text and "\n" not in text


def test_an_unknown_preset_is_answered_with_those_there_are():
    with pytest.raises(ValueError, match=r"no preset 'h100x9'; there are a100-40gbx8, .*nvl72"):
        Machine.preset("h100x9")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("name = ", r"machine\.toml is no TOML"),
        ('name = "x"', "machine lacks node_size, inside, between"),
        ("inside = 5", r"machine.inside \(5\) must be an object"),
        ("[inside]\nlatency = 1", r"machine.inside lacks bandwidth"),
        ("node_size = true", r"machine.node_size \(True\) must be a whole number"),
        ("call_seconds = 1", r"call_seconds \(1\) must be a list of 2"),
        ("colour = 1", "has no field .colour."),
        ('[[kernel]]\ndtype = "float32"', r"machine.kernel\[0\] lacks pass, queries"),
        (
            '[[kernel]]\npass = "sideways"\ndtype = "float32"\nqueries = []\nkeys = []\nflops = []',
            r"kernel\[0\].pass \('sideways'\) must be one of forward, backward",
        ),
        ("kernel = 5", r"kernel \(5\) must be a list"),
        ("[inside]\nspeed = 1", "has no field .speed."),
    ],
)
def test_a_wrong_file_is_named_with_what_is_wrong(text: str, message: str, tmp_path: Path):
    path = tmp_path / "machine.toml"
    path.write_text(text)
    with pytest.raises(ValueError, match=message) as error:
        Machine.load(path)
    assert "machine.toml" in str(error.value)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"node_size": 0}, r"node_size \(0\) must be at least 1"),
        ({"node_size": 6, "nics": 4}, r"nics \(4\) must divide node_size \(6\)"),
        ({"rack_nodes": 2}, "rack_nodes and across"),
        ({"between": Link(0.0)}, "bandwidth of at least 1"),
        ({"between": Link(1e-320)}, "bandwidth of at least 1"),
        ({"inside": Link(1.0, 1e308)}, r"latency of 0 to 1e\+06 s"),
        ({"launch_seconds": 1e308}, r"launch_seconds \(1e\+308\) must be from 0 to"),
        ({"launch_seconds": -1.0}, r"launch_seconds \(-1.0\) must be from 0"),
        ({"cores": 0.0}, r"cores \(0.0\) must be above 0"),
        ({"kernels": (grid(keys=(64.0, 16.0)),)}, "keys .* must be positive and ascend"),
        ({"kernels": (grid(flops=((1e9, 1e9),)),)}, "flops must be 2 rows of 2 numbers"),
        ({"kernels": (grid(flops=((1e9, 1e-320),) * 2),)}, "flops must be 2 rows of 2 numbers"),
        ({"kernels": (grid(launch_seconds=1e308),)}, r"launch_seconds \(1e\+308\) must be from 0"),
        ({"kernels": (grid(edge_keys=1e308),)}, r"edge_keys \(1e\+308\) must be from 0"),
        ({"call_seconds": (0.0, 1e308)}, r"call_seconds .* must be two numbers from 0 to"),
    ],
)
def test_a_field_out_of_range_is_named(fields: dict, message: str):
    good = {"name": "x", "node_size": 2, "inside": Link(1.0), "between": Link(1.0), "kernels": ()}
    with pytest.raises(ValueError, match=message):
        Machine(**{**good, **fields})


def test_speeds_are_those_of_the_table_and_grow_between_them():
    kernel = grid()
    assert kernel.speed(16, 16) == pytest.approx(1e9)
    assert kernel.speed(256, 64) == pytest.approx(16e9)
    assert kernel.speed(64, 32) == pytest.approx(4e9)  # half way on both axes, in log scale
    assert kernel.speed(1, 1) == pytest.approx(1e9)
    assert kernel.speed(1 << 20, 1 << 20) == pytest.approx(16e9)
    speeds = [kernel.speed(q, 40) for q in range(8, 300, 7)]
    assert speeds == sorted(speeds)
    one = grid(queries=(1.0,), keys=(1.0,), flops=((5e9,),))
    assert one.speed(1e-3, 1e6) == pytest.approx(5e9)


def test_half_precisions_stand_in_for_each_other_and_others_do_not():
    machine = Machine("x", 1, Link(1.0), Link(1.0), (grid(dtype="float16"),))
    assert machine.kernel("bfloat16", False).dtype == "float16"
    with pytest.raises(
        ValueError, match="no forward kernel speeds for 'float64', only for float16"
    ):
        machine.kernel("float64", False)
    with pytest.raises(ValueError, match="no backward kernel speeds"):
        machine.kernel("float16", True)


def test_scaled_scales_every_link():
    machine = replace(Machine.preset("h100x8"), rack_nodes=4, across=Link(10.0, 1.0))
    faster = machine.scaled(3)
    assert faster.inside.bandwidth == 3 * machine.inside.bandwidth
    assert faster.between.bandwidth == 3 * machine.between.bandwidth
    assert faster.across == Link(30.0, 1.0)


def test_between_two_head_dims_the_time_of_a_pair_is_interpolated():
    """A pair of rows takes 32 / 2e9 and 128 / 4e9 seconds: half of the way, 24 ns."""
    narrow = grid(flops=((2e9, 2e9), (2e9, 2e9)), head_dim=32, launch_seconds=1e-5)
    wide = grid(flops=((4e9, 4e9), (4e9, 4e9)), head_dim=128, launch_seconds=3e-5, edge_keys=8)
    machine = Machine("two", 1, Link(1e9), Link(1e9), (wide, narrow))
    middle = machine.kernel("float32", False, 80)
    assert middle.speed(16, 16) == pytest.approx(80 / 24e-9)
    assert middle.launch_seconds == pytest.approx(2e-5) and middle.edge_keys == pytest.approx(4)
    assert machine.kernel("float32", False, 16) == machine.kernel("float32", False, 32) == narrow
    assert machine.kernel("float32", False, 256) == machine.kernel("float32", False) == wide


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"call_seconds": (1e-4,)}, r"call_seconds \(\(0.0001,\)\) must be 2 values"),
        ({"merge_bandwidth": 0.0}, r"merge_bandwidth \(0.0\) must be above 0, or left out"),
        ({"carry_seconds": -1.0}, r"carry_seconds \(-1.0\) must be from 0"),
    ],
)
def test_overheads_out_of_range_are_refused(fields: dict, message: str):
    with pytest.raises(ValueError, match=message):
        Machine("odd", 1, Link(1e9), Link(1e9), (grid(),), **fields)


def test_a_tokens_linear_layers_are_counted_in_pairs():
    h100 = Machine.preset("h100x8")
    assert h100.linear_pairs(8e9 / 32, 32, 128) == pytest.approx(2 * 8e9 / 32 / (4 * 32 * 128))
    attention = h100.kernel("bfloat16", False, 128).speed(8192, 8192)
    twice_as_fast = h100.linear_pairs(8e9 / 32, 32, 128, flops=2 * attention)
    assert twice_as_fast == pytest.approx(8e9 / 32 / (4 * 32 * 128))
    for bad in (0.0, float("nan"), -1.0):
        with pytest.raises(ValueError, match=r"parameters \(.*\) must be (finite|a number)"):
            h100.linear_pairs(bad, 32, 128)
        with pytest.raises(ValueError, match=r"flops \(.*\) must be (finite|a number)"):
            h100.linear_pairs(1e9, 32, 128, flops=bad)


@pytest.mark.parametrize(
    "old, new, message",
    [
        ("node_size", "node_sise", "machine has no field 'node_sise'; did you mean node_size?"),
        ("\nbandwidth", "\nspeed", "has no field 'speed'; its fields are bandwidth, latency"),
        (
            "node_size = 8",
            'node_size = "8 GPUs"',
            "node_size ('8 GPUs') must be a whole number",
        ),
    ],
)
def test_a_wrong_name_or_a_unit_in_a_file_is_named(
    tmp_path: Path, old: str, new: str, message: str
):
    path = tmp_path / "mine.toml"
    path.write_text(Machine.preset("h100x8").to_toml().replace(old, new))
    with pytest.raises(ValueError) as raised:
        Machine.load(path)
    assert message in str(raised.value) and str(path) in str(raised.value)
