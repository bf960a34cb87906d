"""The doctor: which parts of tilewise can run on this machine, and why the rest cannot."""

import platform
import sys
from collections.abc import Mapping
from importlib import metadata
from importlib.util import find_spec
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.cuda import nccl
from torch.nn import attention

from tilewise.kernels.registry import PROVIDERS, abilities


class Extra(NamedTuple):
    """A package that an extra brings."""

    name: str  # the extra's, in pyproject.toml
    module: str
    use: str  # what the package is for

    @property
    def is_here(self) -> bool:
        """Return whether it is installed, without importing it."""
        return find_spec(self.module) is not None

    @property
    def install(self) -> str:
        return f"pip install 'tilewise[{self.name}]'"


EXTRAS = (
    Extra("report", "plotly", "pages of tilewise report"),
    Extra("report", "matplotlib", "PNG files: --png of tilewise mask, report and bench"),
    Extra("partition", "mtkahypar", "hypergraph partitioning, to compare plans with"),
    Extra("solver", "ortools", "optimal mesh schedules, to compare plans with"),
    Extra("hf", "transformers", "Hugging Face models"),
)
PEERS: Mapping[str, str] = MappingProxyType(
    {
        "accelerate": "Trainers of transformers, and ParallelismConfig",
        "trl": "TRL's trainers: SFT, DPO, GRPO and others",
        "peft": "adapters of split models",
        "diffusers": "image and video models",
    }
)
"""Packages that an integration works with, and what for; no extra brings them."""


class MissingExtraError(ImportError):
    """A package of an extra is needed and not installed."""


def require(module: str, what: str) -> None:
    """Refuse to go on without a package of an extra.

    Args:
        what: what needs it, as in "tilewise report".
    Raises:
        MissingExtraError: with the command that installs it, in one line.
    """
    (extra,) = (extra for extra in EXTRAS if extra.module == module)
    if not extra.is_here:
        raise MissingExtraError(f"{what} needs {module}: {extra.install}")


PACKAGES = ("tilewise", "torch", "triton", "numpy", "rich", "typer")  # whose versions matter
REINSTALL = "not installed as a package: pip install -e ."
NO_TRITON = "not installed; merging and the triton kernel need it on CUDA: pip install triton"
ON_CPU = ("cpu", "reference")  # kernels that are asked about the cpu, all others about cuda


class Component(NamedTuple):
    """One thing that is here or not."""

    part: str
    name: str
    is_here: bool
    detail: str  # its version or use; if it is not here, the reason and the fix


def examine() -> list[Component]:
    """Versions, devices, kernels, transports and extras. Asking touches no device's memory."""
    return [*_versions(), *_devices(), *_kernels(), *_transports(), *_extras(), *_peers()]


def _versions() -> list[Component]:
    components = [
        Component("version", "python", True, f"{platform.python_version()}, {sys.platform}")
    ]
    for name in PACKAGES:
        try:
            detail, is_here = metadata.version(name), True
        except metadata.PackageNotFoundError:
            detail, is_here = NO_TRITON if name == "triton" else REINSTALL, False
        components.append(
            Component("version", name, is_here, detail + _build() * (name == "torch"))
        )
    return components


def _build() -> str:
    """Return what this torch was built with."""
    if not torch.backends.cuda.is_built():
        return ", without CUDA"
    parts = [f"CUDA {torch.version.cuda}"]
    if torch.backends.cudnn.is_available():
        major, rest = divmod(torch.backends.cudnn.version() or 0, 10000)
        parts.append(f"cuDNN {major}.{rest // 100}.{rest % 100}")
    if dist.is_available() and dist.is_nccl_available():
        parts.append(f"NCCL {'.'.join(map(str, nccl.version()))}")
    return "".join(f", {part}" for part in parts)


def _devices() -> list[Component]:
    threads = torch.get_num_threads()
    components = [Component("device", "cpu", True, f"{threads} thread{'s' * (threads > 1)}")]
    if torch.cuda.is_available():
        return components + [
            Component("device", f"cuda:{i}", True, _gpu(torch.cuda.get_device_properties(i)))
            for i in range(torch.cuda.device_count())
        ]
    built = torch.backends.cuda.is_built()
    reason = "torch sees no CUDA device" if built else "this torch is built without CUDA"
    return [*components, Component("device", "cuda", False, reason)]


def _gpu(properties: Any) -> str:
    memory = f"{properties.total_memory / 2**30:.0f} GiB"
    return f"{properties.name}, compute capability {properties.major}.{properties.minor}, {memory}"


def _kernels() -> list[Component]:
    components = []
    for name in PROVIDERS:
        is_here, detail = abilities(name, "cpu" if name in ON_CPU else "cuda")
        suffix = f"; {_flash_version()}" if name == "cuda" and is_here else ""
        components.append(Component("kernel", name, is_here, detail + suffix))
    return components


def _flash_version() -> str:
    """Return which flash attention the cuda kernel is, and which others it can be rerouted to."""
    active = attention.current_flash_attention_impl() or "FA2"
    # torch's adapter of FA4 does not fit its package: that is a kernel of its own
    implementations = attention.list_flash_attention_impls()
    other_names = ", ".join(x for x in implementations if x not in (active, "FA4"))
    return f"runs {active}; activate_flash_attention_impl can make it {other_names}"


def _transports() -> list[Component]:
    components = [Component("transport", "loopback", True, "ranks as threads of one process")]
    available = dist.is_available()
    has_gloo = available and dist.is_gloo_available()
    use = "CPU tensors" if has_gloo else "this torch is built without gloo"
    components.append(Component("transport", "gloo", has_gloo, use))
    has_nccl, has_cuda = available and dist.is_nccl_available(), torch.cuda.is_available()
    use = "CUDA tensors" if has_cuda else "no CUDA device here"
    use = use if has_nccl else "this torch is built without NCCL"
    return [*components, Component("transport", "nccl", has_nccl and has_cuda, use)]


def _extras() -> list[Component]:
    return [
        Component("extra", x.module, x.is_here, x.use if x.is_here else f"{x.use}: {x.install}")
        for x in EXTRAS
    ]


def _peers() -> list[Component]:
    components = []
    for name, use in PEERS.items():
        try:
            components.append(Component("peer", name, True, f"{metadata.version(name)}, {use}"))
        except metadata.PackageNotFoundError:
            components.append(Component("peer", name, False, f"{use}: pip install {name}"))
    return components
