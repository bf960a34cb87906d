"""Which kernel serves a device, dtype and head_dim: one rule, decided before any tensor moves."""

from __future__ import annotations

import torch

from tilewise.kernels.cpu import CpuFlash
from tilewise.kernels.cuda import CudaFlash
from tilewise.kernels.protocol import Kernel
from tilewise.kernels.reference import Reference


def kernel_for(device_type: str, dtype: torch.dtype, head_dim: int) -> Kernel:
    """The kernel of a device: on cpu the cpu kernel, on cuda flash attention for bf16 and fp16.

    fp32 and fp64 on cuda, which flash attention lacks, take the reference (quadratic in memory).

    Raises:
        ValueError: if that kernel cannot; another is never taken in its place.
    """
    full_width = dtype in (torch.float32, torch.float64)
    match device_type:
        case "cpu":
            kernel: Kernel = CpuFlash()
        case "cuda":
            kernel = Reference() if full_width else CudaFlash()
        case _:
            raise ValueError(
                f"no kernel runs on {device_type}; use cpu or cuda tensors, not {device_type} ones"
            )
    reason = kernel.supports(device_type, dtype, head_dim)
    if reason is not None:
        raise ValueError(f"kernel {kernel.name!r} cannot serve this: {reason}")
    return kernel
