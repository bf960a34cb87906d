"""Canonical results of the Triton kernel at several splits, in Triton's interpreter or on a GPU.

    TRITON_INTERPRET=1 python tests/support/triton_canonical.py

A process of its own, because Triton reads TRITON_INTERPRET when its kernels are defined. Prints one
JSON line: for every case the results whose bits differ from those of one rank, and the largest
error against fp64.
"""

import json
import sys
from itertools import chain
from typing import Any

import torch
from torch import Tensor

import tilewise as tw

TOKENS, HEADS, KV_HEADS = 100, 4, 2
NAMES = "out", "lse", "dq", "dk", "dv"
DOCUMENTS = tw.Causal() & tw.Document([0, 70, TOKENS])
CASES: dict[str, tuple[tw.Plan, tw.Layout, torch.dtype, dict[str, Any]]] = {
    "keys": (tw.all_gather(3), tw.zigzag(TOKENS, 3), torch.float32, {"mask": DOCUMENTS}),
    "needed": (
        tw.needed(tw.Causal(), tw.striped(TOKENS, 2)),
        tw.striped(TOKENS, 2),
        torch.float32,
        {"softcap": 2.0},
    ),
    "heads": (tw.ulysses(2), tw.striped(TOKENS, 2), torch.float16, {}),
    "both": (
        tw.ulysses(2, tw.all_gather(2)),
        tw.zigzag(TOKENS, 4),
        torch.float16,
        {"mask": tw.Full()},
    ),
    "dropout": (
        tw.all_gather(2),
        tw.contiguous(TOKENS, 2),
        torch.float32,
        {"dropout_p": 0.3, "dropout_seed": 3},
    ),
}


def results(
    plan: tw.Plan, layout: tw.Layout, tensors: list[Tensor], options: dict[str, Any]
) -> list[Tensor]:
    given = {"mask": tw.Causal(), "reduction": "canonical", "kernel": "triton", **options}

    def attend(rank: int, group: Any) -> list[Tensor]:
        *inputs, dout = (layout.shard(x, rank).clone() for x in tensors)
        inputs = [x.requires_grad_() for x in inputs]
        shared = {"plan": plan, "layout": layout, "group": group}
        out, lse = tw.attention(*inputs, return_lse=True, **shared, **given)
        return [out.detach(), lse.detach(), *torch.autograd.grad(out, inputs, dout)]

    parts = tw.loopback(plan.world_size, attend)
    dims = -3, -2, -3, -3, -3
    return [
        layout.unshard(x, dim=dim) for x, dim in zip(zip(*parts, strict=True), dims, strict=True)
    ]


def found(
    plan: tw.Plan, layout: tw.Layout, dtype: torch.dtype, options: Any, device: str = "cpu"
) -> list[Any]:
    """Names of results with other bits than those of one rank, and the largest error."""
    make = torch.Generator().manual_seed(0)
    heads = HEADS, KV_HEADS, KV_HEADS, HEADS
    tensors = [torch.randn(TOKENS, h, 20, generator=make).to(device, dtype) for h in heads]
    alone = tw.all_gather(1), tw.contiguous(TOKENS, 1)
    expected = results(*alone, tensors, options)
    split = results(plan, layout, tensors, options)
    exact = {**options, "kernel": "reference", "reduction": "fast"}
    wide = results(*alone, [x.double() for x in tensors], exact)
    differ = [n for n, x, y in zip(NAMES, split, expected, strict=True) if not torch.equal(x, y)]
    errors = [
        float((x.double() - y).nan_to_num(0.0).abs().max() / y.nan_to_num(0.0).abs().max())
        for x, y in zip(split, wide, strict=True)
    ]
    return [differ, max(chain([0.0], errors))]


if __name__ == "__main__":
    sys.stdout.write(json.dumps({name: found(*case) for name, case in CASES.items()}))
