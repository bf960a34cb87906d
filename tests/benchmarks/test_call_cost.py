"""The benchmark of small calls: the floor beside Ulysses computes what Ulysses does."""

import torch
from processes.launcher import run_processes

import tilewise as tw
from benchmarks.bare_ulysses import bare_ulysses


def furthest_from_ours(rank: int) -> float:
    """Of out, dq, dk and dv."""
    layout = tw.contiguous(48, 2)
    whole = torch.randn(4, 48, 4, 8, generator=torch.Generator().manual_seed(0))
    q, k, v, dout = (layout.shard(x, rank).clone() for x in whole)
    operands = [x.requires_grad_() for x in (q, k, v)]
    found = [
        (out := attend(*operands), *torch.autograd.grad(out, operands, dout))
        for attend in (
            bare_ulysses,
            lambda *qkv: tw.attention(*qkv, plan=tw.ulysses(2), layout=layout, mask=tw.Causal()),
        )
    ]
    return max(float((a - b).detach().abs().max()) for a, b in zip(*found, strict=True))


def test_the_floor_under_ulysses_computes_the_same():
    assert max(run_processes(2, furthest_from_ours)) < 1e-5
