"""Kernels that might be faster on Hopper than ours: one whole block of rows and keys, no lists.

They are there to be timed; what is not 8 % faster than ours is not taken up. All heads have keys of
their own, and sizes are multiples of the blocks.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from functools import partial
from types import MappingProxyType
from typing import NamedTuple

import torch
from torch import Tensor

from benchmarks.gpu_parts.case import Row
from benchmarks.gpu_parts.session import Run, Session
from tilewise.kernels.registry import kernel_named
from tilewise.tiles.calls import KernelCall, Kind

HEADS, WIDTH, TINY_HEADS, TINY_WIDTH = 16, 128, 1, 16
LOG2_E = 1.4426950408889634


class Variant(NamedTuple):
    """How a kernel loads, and in which order it works.

    Attributes:
        tma: tensors come by descriptors; of backward, dq is added through one.
        ahead: the scores of the next keys are computed before this block's exponentials.
        specialized: other warps load than multiply.
    """

    backward: bool
    rows: int
    keys: int
    warps: int
    stages: int
    tma: bool = False
    ahead: bool = False
    specialized: bool = False


VARIANTS: Mapping[str, Variant] = MappingProxyType(
    {
        "plain": Variant(False, 128, 128, 8, 3),
        "TMA": Variant(False, 128, 128, 8, 3, tma=True),
        "TMA, warps specialized": Variant(False, 128, 128, 4, 2, tma=True, specialized=True),
        "scores ahead": Variant(False, 128, 64, 8, 3, ahead=True),
        "TMA, scores ahead": Variant(False, 128, 128, 8, 2, tma=True, ahead=True),
        "backward": Variant(True, 64, 128, 8, 3),
        "backward, dq by TMA": Variant(True, 64, 128, 8, 3, tma=True),
    }
)


class Inputs(NamedTuple):
    """q, k, v, dout [tokens, heads, head_dim]; of backward also lse and delta [tokens, heads]."""

    q: Tensor
    k: Tensor
    v: Tensor
    dout: Tensor
    lse: Tensor
    delta: Tensor


def run(session: Session, options: Row) -> Row:
    """ms and TFLOP/s of a variant and of our kernel, in turns, and how far their results differ."""
    variant = VARIANTS[options["variant"]]
    if not session.on_cuda:
        os.environ["TRITON_INTERPRET"] = "1"  # triton has not been imported in this process
        if variant.backward and variant.tma:
            return {"skipped": "Triton's interpreter does not add through descriptors"}
    n, heads, width = options["num_tokens"], HEADS, WIDTH
    if session.tiny:
        heads, width = TINY_HEADS, TINY_WIDTH
    dtype = torch.bfloat16 if session.on_cuda else torch.float16  # the interpreter's bf16 is wrong
    q, k, v, dout = session.normal(4, n, heads, width).to(dtype)
    ours, call, scale = (
        kernel_named("triton"),
        KernelCall(((0, n),), ((0, n),), Kind.FULL),
        width**-0.5,
    )
    batched = [x[:, None] for x in (q, k, v, dout)]
    out, lse = ours.forward(*batched[:3], call, scale)
    delta = (out * batched[3]).sum(-1)
    inputs = Inputs(q, k, v, dout, lse[:, 0].contiguous(), delta[:, 0].contiguous())
    launch = backward if variant.backward else forward
    results, variant_run = launch(variant, inputs)
    if variant.backward:
        our_run = partial(ours.backward, *batched, lse, delta, call, scale)
    else:
        our_run = partial(ours.forward, *batched[:3], call, scale)
    variant_run()
    difference = max(map(_difference, results, (x[:, 0] for x in our_run())))
    times = session.compare({"it": variant_run, "ours": our_run})
    flops = (10 if variant.backward else 4) * n * n * heads * width
    return {
        **times["it"].row("it"),
        **times["it"].share("it", times["ours"]),
        "ms": round(1e3 * times["it"].median, 4),
        "tflops": times["it"].tflops(flops),
        "ours_tflops": times["ours"].tflops(flops),
        "difference": float(f"{difference:.2g}"),
        "right": difference < 0.02,
    }


def _difference(x: Tensor, y: Tensor) -> float:
    """RMS of the difference over RMS of the second."""
    return float((x.float() - y.float()).norm() / y.float().norm())


def forward(variant: Variant, inputs: Inputs) -> tuple[list[Tensor], Run]:
    """out and lse, and what writes them."""
    from benchmarks.gpu_parts import variant_kernels as kernels

    q, k, v = inputs[:3]
    n, heads, width = q.shape
    out, lse = torch.empty_like(q), torch.empty_like(inputs.lse)
    given = q, k, v
    if variant.tma:
        blocks = variant.rows, variant.keys, variant.keys
        given = [kernels.described(x, rows) for x, rows in zip(given, blocks, strict=True)]

    def run() -> None:
        kernels.forward[(n // variant.rows, heads)](
            *(*given, out, lse, n, heads, width**-0.5 * LOG2_E),
            **settings(variant, width),
            AHEAD=variant.ahead,
            SPECIALIZED=variant.specialized,
        )

    return [out, lse], run


def backward(variant: Variant, inputs: Inputs) -> tuple[list[Tensor], Run]:
    """dq, dk and dv, and what writes them; dq is cleared each time, as it is added to."""
    from benchmarks.gpu_parts import variant_kernels as kernels

    n, heads, width = inputs.q.shape
    dq, dk, dv = (torch.empty_like(inputs.q, dtype=torch.float32) for _ in range(3))
    sums = kernels.described(dq, variant.rows) if variant.tma else dq

    def run() -> None:
        dq.zero_()
        kernels.backward[(n // variant.keys, heads)](
            *(*inputs, sums, dk, dv, n, heads, width**-0.5), **settings(variant, width)
        )

    return [dq, dk, dv], run


def settings(variant: Variant, width: int) -> Row:
    """Constants and options of a launch."""
    blocks = {"ROWS": variant.rows, "KEYS": variant.keys, "WIDTH": width, "TMA": variant.tma}
    options = {"num_warps": variant.warps, "num_stages": variant.stages, "enable_fp_fusion": True}
    return {**blocks, **options}
