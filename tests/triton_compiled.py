"""Compiles the Triton kernels for a GPU that need not be here; run by test_triton_slices.

Prints one JSON line: shared memory and matrix products of every kernel at the head_dims it is for.
The environment's ARCH is the GPU's compute capability, as 90.
"""

import json
import os
import sys
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from tilewise.kernels.triton_backward import keys_backward, rows_backward
from tilewise.kernels.triton_forward import forward
from tilewise.kernels.triton_slices import Blocks, tuning_for

OPERANDS = ("q", "k", "v", "dout")
LISTS = ("items", "full", "masked", "intervals")
STRIDES = ("_row", "_batch", "_head")


def compiled(kernel: Any, blocks: Blocks, head_dim: int, arch: int) -> dict[str, int]:
    given = {"HEAD_DIM": head_dim, "WIDTH": head_dim, "ROWS": blocks.rows, "KEYS": blocks.keys}
    types, aligned = {}, {}
    for i, name in enumerate(kernel.arg_names):
        if name.isupper():
            types[name] = "constexpr"
        elif name in OPERANDS:
            types[name] = "*bf16"
        elif name in LISTS:
            types[name] = "*i32"
        elif name == "scale":
            types[name] = "fp32"
        elif name.endswith(STRIDES) or name.startswith(("num_", "group")):
            types[name] = "i32"
        else:
            types[name] = "*fp32"
        if types[name].startswith("*") or name.endswith(STRIDES):
            aligned[(i,)] = [["tt.divisibility", 16]]
    source = ASTSource(kernel, types, {**given, "ADD": True}, aligned)
    options = {
        "num_warps": blocks.warps,
        "num_stages": blocks.stages,
        "enable_fp_fusion": True,
    }
    made = triton.compile(source, target=GPUTarget("cuda", arch, 32), options=options)
    products = made.asm["ptx"].count("wgmma.mma_async" if arch == 90 else "mma.sync")
    return {"shared": made.metadata.shared, "products": products}


def main() -> None:
    arch, found = int(os.environ["ARCH"]), {}
    for head_dim in (64, 128, 256):
        tuning = tuning_for(head_dim, torch.bfloat16)
        kernels = forward, rows_backward, keys_backward
        for name, kernel, blocks in zip(tuning._fields, kernels, tuning, strict=True):
            found[f"{name} {head_dim}"] = compiled(kernel, blocks, head_dim, arch)
    json.dump(found, sys.stdout)


if __name__ == "__main__":
    main()
