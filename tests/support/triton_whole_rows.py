"""Canonical calls by Triton: the bits of one rank at any split; for test_triton_whole_rows.

    TRITON_INTERPRET=1 python tests/support/triton_whole_rows.py quick | more

A process of its own, because Triton reads TRITON_INTERPRET when its kernels are defined. Prints one
JSON line: of each case the largest error of each result against fp64, over the largest value.
"""

from __future__ import annotations

import json
import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

import tilewise as tw
from tilewise.masks.base import Mask

NAMES = "out", "lse", "dq", "dk", "dv"


@dataclass(frozen=True)
class Case:
    """An attention and its splits.

    Args:
        heads: query and KV heads.
        widths: head_dim and v_head_dim.
        plans: beside one rank, each with its layout of the tokens.
        options: of tw.attention.
    """

    mask: Mask
    num_tokens: int = 150
    heads: tuple[int, int] = (4, 2)
    widths: tuple[int, int] = (24, 40)
    batch: int | None = None
    plans: Sequence[tuple[tw.Plan, Callable[[int, int], tw.Layout]]] = (
        (tw.all_gather(3), tw.zigzag),
        (tw.ulysses(2), tw.striped),
    )
    options: Mapping[str, Any] = field(default_factory=dict)


DOCUMENTS = tw.Document([0, 50, 61, 150]) & tw.Causal()
FIRST_KEYS = tw.Causal() & (tw.Window(20, 0) | tw.Document([0, 9, 150]))
PER_HEAD = tw.PerHead([tw.Causal() & tw.Window(30, 0), tw.Full()])
QUICK = {
    "causal": Case(tw.Causal()),
    "documents, dropout, softcap": Case(
        DOCUMENTS, options={"dropout_p": 0.2, "dropout_seed": 5, "softcap": 3.0}
    ),
}
MORE = {
    "window and first keys": Case(
        FIRST_KEYS, plans=((tw.needed(FIRST_KEYS, tw.zigzag(150, 2)), tw.zigzag),)
    ),
    "a mask for each head": Case(PER_HEAD, plans=((tw.all_gather(2), tw.striped),)),
    "sinks, a batch": Case(tw.Full(), 70, batch=2, options={"sink": [0.3, -0.2, 1.0, 0.0]}),
    "a head each": Case(DOCUMENTS, heads=(3, 3), plans=((tw.ulysses(3), tw.zigzag),)),
    "wide": Case(tw.Causal(), 70, (2, 1), (200, 16), plans=((tw.all_gather(2), tw.zigzag),)),
}


def found(case: Case, plan: tw.Plan, layout: tw.Layout, like: Tensor, kernel: str) -> list[Tensor]:
    """out, lse, dq, dk and dv of whole sequences.

    Args:
        like: its dtype and device are those of the operands.
    """
    make = torch.Generator().manual_seed(3)
    batch = () if case.batch is None else (case.batch,)
    dim = len(batch)

    def normal(heads: int, width: int) -> Tensor:
        shape = *batch, case.num_tokens, heads, width
        return torch.randn(shape, generator=make).half().to(like)

    (q_heads, kv_heads), (width, v_width) = case.heads, case.widths
    sizes = (q_heads, width), (kv_heads, width), (kv_heads, v_width), (q_heads, v_width)
    *operands, dout = (normal(*x) for x in sizes)
    dlse = torch.randn(*batch, case.num_tokens, q_heads, generator=make).to(like.device)
    options = {**case.options}
    if "sink" in options:
        options["sink"] = torch.tensor(options["sink"], dtype=like.dtype, device=like.device)

    def on_rank(rank: int, group: Any) -> list[Tensor]:
        own = [layout.shard(x, rank, dim).clone().requires_grad_() for x in operands]
        given = {"plan": plan, "layout": layout, "mask": case.mask, "group": group, **options}
        out, lse = tw.attention(
            *own, **given, kernel=kernel, reduction="canonical", return_lse=True
        )
        sums = layout.shard(dlse, rank, dim).to(lse)
        grads = torch.autograd.grad((out, lse), own, (layout.shard(dout, rank, dim), sums))
        return [out.detach(), lse.detach(), *grads]

    parts = tw.loopback(plan.world_size, on_rank)
    return [layout.unshard([*shards], dim) for shards in zip(*parts, strict=True)]


def errors(case: Case, like: Tensor) -> dict[str, float]:
    """Errors of one rank's results, over the largest value; ranks must have its bits."""
    one = tw.ring(1), tw.contiguous(case.num_tokens, 1)
    whole = found(case, *one, like, "triton")
    for plan, layout in case.plans:
        split = found(case, plan, layout(case.num_tokens, plan.world_size), like, "triton")
        for name, x, want in zip(NAMES, split, whole, strict=True):
            assert torch.equal(x, want), (plan, name)
    wanted = found(case, *one, torch.empty(0, dtype=torch.float64), "cpu")
    return {
        name: float((x.cpu() - want).abs().max() / want.abs().max())
        for name, x, want in zip(NAMES, whole, wanted, strict=True)
    }


def refusals() -> list[str]:
    """What a canonical call says that Triton cannot serve."""
    x = torch.zeros(8, 2, 16)
    given: dict[str, Any] = {"plan": tw.ring(1), "layout": tw.contiguous(8, 1), "mask": tw.Full()}
    given |= {"reduction": "canonical", "kernel": "triton"}
    said = []
    bias: dict[str, Any] = {"bias": torch.zeros(2, 8, 8)}
    for operand, more in ((x, bias), (x.double(), {}), (torch.zeros(8, 2, 320), {})):
        try:
            tw.attention(operand, operand, operand, **given, **more)
        except ValueError as error:
            said.append(str(error))
    return said


def main() -> None:
    warnings.simplefilter("ignore")
    quick = sys.argv[1] == "quick"
    table: dict[str, Any] = {}
    for name, case in (QUICK if quick else MORE).items():
        for dtype in (torch.float32,) if quick else (torch.float16,):
            table[f"{name}, {dtype}"] = errors(case, torch.empty(0, dtype=dtype))
    if quick:
        table["refusals"] = refusals()
    sys.stdout.write(json.dumps(table))


if __name__ == "__main__":
    main()
