"""Without a GPU: flash-attn's functions on the CPU. Where flash-attn is installed, it is taken."""

from tilewise_verify import flash_attn_shim

flash_attn_shim.provide()
