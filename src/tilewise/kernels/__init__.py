"""Attention kernels: each computes one call of a tile, both passes, behind one protocol."""

from tilewise.kernels.protocol import Kernel as Kernel
from tilewise.kernels.registry import kernel_for as kernel_for
