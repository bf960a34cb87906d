"""What of tilewise can run here, and why the rest cannot: asked of this machine, at the call."""

from __future__ import annotations

import platform
import sys
from importlib import metadata
from importlib.util import find_spec
from typing import NamedTuple

import torch
import torch.distributed as dist

from tilewise.kernels.cpu import CpuFlash
from tilewise.kernels.cuda import CudaFlash
from tilewise.kernels.protocol import Kernel
from tilewise.kernels.reference import Reference

__all__ = ["Finding", "examine"]

# What an extra adds: extra's name in pyproject.toml, the module that it brings, what that is for.
EXTRAS = (
    ("partition", "mtkahypar", "hypergraph partitioning, to compare plans with"),
    ("solver", "ortools", "exact placement, to compare plans with"),
    ("hf", "transformers", "Hugging Face models"),
)


class Finding(NamedTuple):
    """One thing that is here or not.

    Attributes:
        detail: its version or use; if it is not here, the reason and the fix.
    """

    part: str
    name: str
    is_here: bool
    detail: str


def examine() -> list[Finding]:
    """Versions, devices, kernels, transports and extras. Asking touches no device's memory."""
    return [*_versions(), *_devices(), *_kernels(), *_transports(), *_extras()]


def _versions() -> list[Finding]:
    found = [Finding("version", "python", True, f"{platform.python_version()}, {sys.platform}")]
    for name in ("tilewise", "torch", "numpy", "rich", "typer"):
        try:
            found.append(Finding("version", name, True, metadata.version(name)))
        except metadata.PackageNotFoundError:
            reason = "not installed as a package: pip install -e ."
            found.append(Finding("version", name, False, reason))
    return found


def _devices() -> list[Finding]:
    found = [Finding("device", "cpu", True, f"{torch.get_num_threads()} threads")]
    if torch.cuda.is_available():
        return found + [
            Finding("device", f"cuda:{i}", True, torch.cuda.get_device_name(i))
            for i in range(torch.cuda.device_count())
        ]
    built = torch.backends.cuda.is_built()
    reason = "torch sees no CUDA device" if built else "this torch is built without CUDA"
    return [*found, Finding("device", "cuda", False, reason)]


def _kernels() -> list[Finding]:
    has_cuda = torch.cuda.is_available()
    wanted: list[tuple[Kernel, str, str]] = [
        (CpuFlash(), "cpu", "all masks; float64, float32, bfloat16, float16"),
        (CudaFlash(), "cuda", "all masks; bfloat16, float16"),
        (Reference(), "cpu", "all masks and dtypes, memory quadratic in tokens; the oracle"),
    ]
    found = []
    for kernel, device, use in wanted:
        reason = kernel.supports(device, torch.bfloat16, 128)
        if device == "cuda" and not has_cuda:
            reason = "no CUDA device here"
        found.append(Finding("kernel", kernel.name, reason is None, reason or use))
    return found


def _transports() -> list[Finding]:
    found = [Finding("transport", "loopback", True, "ranks as threads of one process")]
    available = dist.is_available()
    has_gloo = available and dist.is_gloo_available()
    use = "CPU tensors" if has_gloo else "this torch is built without gloo"
    found.append(Finding("transport", "gloo", has_gloo, use))
    if not (available and dist.is_nccl_available()):
        nccl, use = False, "this torch is built without NCCL"
    else:
        nccl = torch.cuda.is_available()
        use = "CUDA tensors" if nccl else "no CUDA device here"
    return [*found, Finding("transport", "nccl", nccl, use)]


def _extras() -> list[Finding]:
    found = []
    for extra, module, use in EXTRAS:
        is_here = find_spec(module) is not None
        detail = use if is_here else f"{use}: pip install tilewise[{extra}]"
        found.append(Finding("extra", module, is_here, detail))
    return found
