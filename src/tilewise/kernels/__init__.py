"""Attention kernels: each computes one call of a tile, both passes, behind one protocol.

registry: their names and the choice of one; merge: partial results merged; call_masks, delta: what
several kernels need. The other files are named by the library that computes; triton is our own.
"""

from tilewise.kernels.protocol import Kernel
from tilewise.kernels.registry import kernel_for
from tilewise.kernels.registry import kernel_named as kernel

__all__ = ["Kernel", "kernel", "kernel_for"]
