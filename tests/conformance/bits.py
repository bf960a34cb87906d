"""The results of a canonical call, whole, to compare them bit by bit."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

import tilewise as tw

TOKENS, HEADS, KV_HEADS, WIDTH = 300, 4, 2, 8
NAMES = ("out", "lse", "dq", "dk", "dv")


class Case(NamedTuple):
    """Whole tensors of a call [(batch,) tokens, heads, width], and its options beside plan and
    layout."""

    q: Tensor
    k: Tensor
    v: Tensor
    dout: Tensor
    dlse: Tensor
    sink: Tensor | None = None
    options: dict[str, Any] = {}  # noqa: RUF012 - never changed


def made(
    dtype: torch.dtype = torch.float32,
    batch: tuple[int, ...] = (),
    heads: tuple[int, int] = (HEADS, KV_HEADS),
    v_width: int = WIDTH,
    sink: Tensor | None = None,
    tokens: int = TOKENS,
    **options: Any,
) -> Case:
    g = torch.Generator().manual_seed(sum(map(ord, str((dtype, batch, heads, v_width, tokens)))))
    shapes = ((heads[0], WIDTH), (heads[1], WIDTH), (heads[1], v_width), (heads[0], v_width))
    tensors = [torch.randn(*batch, tokens, *x, generator=g).to(dtype) for x in shapes]
    statistics = torch.float64 if dtype == torch.float64 else torch.float32
    dlse = torch.randn(*batch, tokens, heads[0], generator=g).to(statistics)
    return Case(*tensors, dlse, sink, options)


def results(case: Case, plan: tw.Plan, layout: tw.Layout, **more: Any) -> dict[str, Tensor]:
    """Results and gradients of all rows, of one canonical call."""
    options = {"mask": tw.Causal(), "reduction": "canonical", **case.options, **more}

    def main(rank: int, group: Any) -> list[Tensor]:
        inputs = [layout.shard(x, rank, dim=-3).clone().requires_grad_() for x in case[:3]]
        sink = [] if case.sink is None else [case.sink.clone().requires_grad_()]
        given = {"plan": plan, "layout": layout, "group": group, "sink": sink[0] if sink else None}
        out, lse, *largest = tw.attention(*inputs, return_lse=True, **given, **options)
        dout, dlse = layout.shard(case.dout, rank, dim=-3), layout.shard(case.dlse, rank, dim=-2)
        grads = torch.autograd.grad((out, lse), [*inputs, *sink], (dout, dlse))
        return [out.detach(), lse.detach(), *grads, *largest]

    parts = tw.loopback(plan.world_size, main)
    dims = (-3, -2, -3, -3, -3)
    found = {
        name: layout.unshard([part[i] for part in parts], dim=dim)
        for i, (name, dim) in enumerate(zip(NAMES, dims, strict=True))
    }
    rest = [torch.stack([part[i] for part in parts]) for i in range(5, len(parts[0]))]
    if case.sink is not None:
        found["dsink"] = rest.pop(0).sum(0)
    if rest:
        found["largest"] = rest.pop().amax(0)
    return found


def alone(case: Case, **more: Any) -> dict[str, Tensor]:
    """The results of one rank."""
    return results(case, tw.ring(1), tw.contiguous(case.q.shape[-3], 1), **more)


def assert_same(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    different = [name for name, x in expected.items() if not torch.equal(found[name], x)]
    assert not different
    assert all(x.isfinite().all() for name, x in expected.items() if name != "lse")
