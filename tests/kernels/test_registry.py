"""Which kernel is taken: the table of measurements, its order, its default, and its reasons."""

import tomllib
from types import SimpleNamespace

import pytest
import torch

from benchmarks.kernel_table import Size, measure, write
from tilewise.kernels.registry import (
    PROVIDERS,
    Use,
    abilities,
    choose,
    kernel_for,
    kernel_named,
    mask_kind,
    order,
    read_table,
    use_of,
)
from tilewise.kernels.torch_cpu import CpuFlash
from tilewise.masks.base import Causal, Full, Window
from tilewise_tools import doctor
from tilewise_tools.doctor import examine

HALF = torch.bfloat16, 128
ROWS = """
[default.cuda]
any = ["cuda"]
float32 = ["reference"]
[[row]]
device = "GPU A"
dtype = "bfloat16"
head_dim = 128
mask = "causal"
num_tokens = 1024
seconds = { cuda = 1.0, triton = 2.0, cudnn = 3.0 }
[[row]]
device = "GPU A"
dtype = "bfloat16"
head_dim = 128
mask = "causal"
num_tokens = 65536
seconds = { flash_attn = 1.0, triton = 2.0, cuda = 3.0 }
"""


@pytest.mark.parametrize(
    ("use", "wanted"),
    [
        (None, ["cuda"]),
        (Use("GPU A", "causal", 100), ["cuda", "triton", "cudnn"]),
        (Use("GPU A", "causal", 8000), ["cuda", "triton", "cudnn"]),
        (Use("GPU A", "causal", 9000), ["flash_attn", "triton", "cuda"]),
        (Use("GPU A", "slices", 9000), ["cuda"]),
        (Use("GPU B", "causal", 9000), ["cuda"]),
    ],
)
def test_the_nearest_row_of_the_device_decides_else_the_default(use, wanted):
    assert order(tomllib.loads(ROWS), "cuda", HALF, use) == wanted


def test_the_first_of_the_order_that_can_is_taken_and_none_outside_it(monkeypatch):
    monkeypatch.setattr("tilewise.kernels.flash_attn._version", lambda: None)
    monkeypatch.setattr(torch.backends.cudnn, "is_available", lambda: False)
    table, far = tomllib.loads(ROWS), Use("GPU A", "causal", 65536)
    assert choose(table, "cuda", HALF, far).name == "triton"
    assert choose(table, "cuda", HALF, None).name == "cuda"
    assert choose(table, "cuda", (torch.float32, 128), far).name == "reference"
    table["row"][1]["seconds"] = {"flash_attn": 1.0, "cudnn": 2.0}
    table["default"]["cuda"]["any"] = ["flashinfer"]
    with pytest.raises(ValueError, match=r"'flash_attn' cannot .* 'cudnn' cannot .* 'flashinfer'"):
        choose(table, "cuda", HALF, far)


def test_the_packages_table_names_known_kernels_and_serves_every_device():
    table = read_table()
    assert set(table["default"]) == {"cpu", "cuda"}
    names = {
        name for rules in table["default"].values() for names in rules.values() for name in names
    }
    names |= {name for row in table.get("row", ()) for name in row["seconds"]}
    assert names <= set(PROVIDERS)
    assert all({"any"} <= set(rules) for rules in table["default"].values())


def test_a_use_is_a_device_a_kind_of_mask_and_a_size(monkeypatch):
    assert [mask_kind(m) for m in (Full(), Causal(), Causal() & Window(3, None))] == [
        "full",
        "causal",
        "slices",
    ]
    assert use_of(torch.device("cpu"), Full(), 10) is None
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "GPU A")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    cuda = torch.device("cuda")
    assert use_of(cuda, Causal(), 10) == Use("GPU A", "causal", 10, 9)
    assert use_of(cuda, Causal(), 10, square=False) == Use("GPU A", "slices", 10, 9)
    assert use_of(cuda, Full(), 10, square=False) == Use("GPU A", "full", 10, 9)


@pytest.mark.parametrize("capability", [8, 9, 10, 12])
@pytest.mark.parametrize("mask", ["full", "causal", "slices"])
def test_hopper_and_blackwell_take_cudnn_where_it_needs_no_dense_mask(
    mask, capability, monkeypatch
):
    monkeypatch.setattr(torch.backends.cudnn, "is_available", lambda: True)
    use = Use("GPU", mask, 16384, capability)
    fast = "triton" if mask == "slices" else "cudnn"
    names = [fast] if capability in (9, 10) else []
    assert order(read_table(), "cuda", HALF, use) == [*names, "cuda", "efficient"]
    first = names[0] if names else "cuda"
    assert kernel_for("cuda", *HALF, use).name == first
    assert kernel_for("cuda", torch.bfloat16, 192, use).name == (
        "cuda" if first == "cudnn" else first
    )
    assert kernel_for("cuda", torch.float32, 128, use).name == "efficient"
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: True)
    assert kernel_for("cuda", *HALF, use).name == ("cuda" if first == "cudnn" else first)


def test_between_two_head_dims_relative_times_are_interpolated():
    row = {"device": "GPU A", "dtype": "bfloat16", "mask": "full", "num_tokens": 1024}
    rows = [
        {**row, "head_dim": 64, "seconds": {"cuda": 1.0, "cudnn": 2.0, "flex": 2.5}},
        {**row, "head_dim": 128, "seconds": {"cuda": 12.0, "cudnn": 8.0}},
    ]
    table = {"default": {"cuda": {"any": ["efficient"]}}, "row": rows}

    def found(head_dim: int) -> list[str]:
        return order(table, "cuda", (torch.bfloat16, head_dim), Use("GPU A", "full", 2000))

    assert found(64) == found(32) == ["cuda", "cudnn", "flex", "efficient"]
    assert found(80) == ["cuda", "cudnn", "flex", "efficient"]  # 1.125, 1.75
    assert found(120) == ["cudnn", "cuda", "flex", "efficient"]  # 1.4375, 1.125
    assert found(128) == found(256) == ["cudnn", "cuda", "efficient"]


def test_measured_rows_can_be_read_back_and_decide(tmp_path):
    size = Size(64, 2, 1, 16)
    row = measure(Causal(), size, torch.float32, torch.device("cpu"), ("cpu", "cudnn", "reference"))
    assert set(row.seconds) == {"cpu", "reference"} and min(row.seconds.values()) > 0
    path = tmp_path / "measured.toml"
    path.write_text(ROWS)
    write([row._replace(use=row.use._replace(device="GPU C"), seconds={"triton": 1e-3})], path)
    table = tomllib.loads(path.read_text())
    assert order(table, "cuda", (torch.float32, 16), Use("GPU C", "causal", 1)) == [
        "triton",
        "reference",
    ]


def test_kernels_are_known_by_name():
    assert all(kernel_named(name).name == name for name in PROVIDERS)
    with pytest.raises(ValueError, match="kernel 'fast' is not known; take one of cpu, cuda"):
        kernel_named("fast")
    assert isinstance(kernel_for("cpu", torch.float32, 7), CpuFlash)


def test_doctor_says_what_each_kernel_can_do_here_or_why_it_cannot(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr("tilewise.kernels.flashinfer.find_spec", lambda name: None)
    found = {one.name: one for one in examine() if one.part == "kernel"}
    assert list(found) == list(PROVIDERS)
    assert found["cpu"].is_here and found["reference"].is_here
    assert "forward and backward; float64, float32, bfloat16, float16" in found["cpu"].detail
    for name, dtypes in (
        ("cuda", "bfloat16, float16"),
        ("efficient", "float32, bfloat16, float16"),
    ):
        able = f"all masks, forward and backward; {dtypes}; head_dim 64, 128, 256"
        assert found[name].detail.startswith(f"no CUDA device here; on one: {able}")
    assert found["flashinfer"].detail == "flashinfer is not installed"
    assert abilities("flex", "cpu") == (False, "on cpu it yields no lse, and has no backward")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr("tilewise.kernels.flashinfer.find_spec", lambda name: name)
    assert abilities("flashinfer", "cuda") == (
        True,
        "all masks, forward only; bfloat16, float16; head_dim 64, 128, 256",
    )
    here, detail = abilities("cuda", "cuda")
    assert here and detail.startswith("all masks, forward and backward; bfloat16, float16;")


def test_doctor_says_what_torch_is_built_with_and_which_gpus_there_are(monkeypatch):
    monkeypatch.setattr(torch.backends.cuda, "is_built", lambda: True)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.backends.cudnn, "is_available", lambda: True)
    monkeypatch.setattr(torch.backends.cudnn, "version", lambda: 91900)
    monkeypatch.setattr(torch.distributed, "is_nccl_available", lambda: True)
    monkeypatch.setattr(doctor.nccl, "version", lambda: (2, 28, 9))
    assert doctor._build() == ", CUDA 13.0, cuDNN 9.19.0, NCCL 2.28.9"
    gpu = SimpleNamespace(name="GPU A", major=9, minor=0, total_memory=141 * 2**30)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda i: gpu)
    assert doctor._devices()[1] == ("device", "cuda:0", True, doctor._gpu(gpu))
    assert doctor._gpu(gpu) == "GPU A, compute capability 9.0, 141 GiB"
    monkeypatch.setattr(doctor, "PACKAGES", ("no-such-package",))
    assert doctor._versions()[1] == ("version", "no-such-package", False, doctor.REINSTALL)
    monkeypatch.setattr(torch.backends.cuda, "is_built", lambda: False)
    assert doctor._build() == ", without CUDA"
