"""All kernels by name, and why each can or cannot run on this machine."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType

import torch

from tilewise.kernels.flash_attn import FlashAttn2
from tilewise.kernels.flashinfer import FlashInfer
from tilewise.kernels.flex import Flex
from tilewise.kernels.protocol import Kernel
from tilewise.kernels.reference import Reference
from tilewise.kernels.torch_cpu import CpuFlash
from tilewise.kernels.torch_flash import CudaFlash
from tilewise.kernels.torch_sdpa import CudnnSdpa, EfficientSdpa
from tilewise.kernels.triton.kernel import DeterministicTritonSlices, TritonSlices

PROVIDERS: Mapping[str, Callable[[], Kernel]] = MappingProxyType(
    {
        "cpu": CpuFlash,
        "cuda": CudaFlash,
        "triton": TritonSlices,
        "triton_deterministic": DeterministicTritonSlices,
        "cudnn": CudnnSdpa,
        "efficient": EfficientSdpa,
        "flex": Flex,
        "flash_attn": FlashAttn2,
        "flashinfer": FlashInfer,
        "reference": Reference,
    }
)
DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
HEAD_DIMS = (64, 128, 256, 512)


def kernel_named(name: str) -> Kernel:
    """A kernel by its name.

    Raises:
        ValueError: with the names that are known.
    """
    if name not in PROVIDERS:
        raise ValueError(f"kernel {name!r} is not known; take one of {', '.join(PROVIDERS)}")
    return PROVIDERS[name]()


def abilities(name: str, device_type: str) -> tuple[bool, str]:
    """Whether a kernel runs on this machine's device, and what it can there, or why it cannot."""
    kernel = kernel_named(name)
    forward = [x for x in DTYPES if _why_not(kernel, device_type, x, False) is None]
    both = [x for x in forward if _why_not(kernel, device_type, x, True) is None]
    if not forward:
        return False, str(_why_not(kernel, device_type, torch.bfloat16, False))
    dtypes = ", ".join(str(x).removeprefix("torch.") for x in forward)
    sizes = [d for d in HEAD_DIMS if kernel.supports(device_type, forward[0], d, False) is None]
    passes = "forward and backward" if both == forward else "forward only"
    ability = f"all masks, {passes}; {dtypes}; head_dim {', '.join(map(str, sizes))}"
    if device_type == "cuda" and not torch.cuda.is_available():
        return False, f"no CUDA device here; on one: {ability}"
    return True, ability


def _why_not(kernel: Kernel, device_type: str, dtype: torch.dtype, backward: bool) -> str | None:
    return kernel.supports(device_type, dtype, 64, backward)
