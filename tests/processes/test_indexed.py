"""Indexed attention over gloo: real processes, and a rank whose choice is wrong."""

from __future__ import annotations

from typing import Any

import torch
from support.drawn_layouts import normal

import tilewise as tw
from processes.launcher import run_processes

N, TOKENS, K = 3, 48, 5


def whole_tensors() -> list[torch.Tensor]:
    shapes = (4, 6), (2, 6), (2, 3), (3, 5), (5,), (3,)
    return [normal(TOKENS, *shape, seed=i) for i, shape in enumerate(shapes)]


def layer(cp: tw.ContextParallel) -> tuple[list[torch.Tensor], torch.Tensor]:
    """out and gradients of q, k and v, and the choice, of this rank's rows."""
    q, k, v, *indexer = (cp.shard(x, 0) for x in whole_tensors())
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    chosen = cp.index(*indexer, k=K)
    for _ in range(2):  # again, when the kind of call is known
        out = cp.attention(*leaves, mask=tw.Chosen(chosen))
    out.pow(2).sum().backward()
    return [out.detach(), *(x.grad for x in leaves if x.grad is not None)], chosen


def on_rank(rank: int) -> tuple[list[torch.Tensor], torch.Tensor, str]:
    cp = tw.ContextParallel(num_tokens=TOKENS, mask=tw.Causal(), layout=tw.zigzag(TOKENS, N))
    found, chosen = layer(cp)
    wrong = chosen.clone()
    if rank == 1:
        wrong[0, 0] = TOKENS - 1
    q, k, v, *_ = (cp.shard(x, 0) for x in whole_tensors())
    try:
        cp.attention(q, k, v, mask=tw.Chosen(wrong))
    except ValueError as error:
        message = str(error)
    else:
        message = "no error"
    again, _ = layer(cp)  # the group goes on
    assert all(map(torch.equal, found, again))
    return found, chosen, message


def test_processes_have_the_result_of_one():
    def alone(rank: int, group: Any) -> tuple[list[torch.Tensor], torch.Tensor]:
        return layer(tw.ContextParallel(group, num_tokens=TOKENS, mask=tw.Causal()))

    ((want, choice),) = tw.loopback(1, alone)
    layout = tw.zigzag(TOKENS, N)
    found, chosen, messages = zip(*run_processes(N, on_rank), strict=True)
    assert torch.equal(layout.unshard(chosen, 0), choice)
    for x, parts in zip(want, zip(*found, strict=True), strict=True):
        assert (layout.unshard(parts, 0) - x).abs().max() < 1e-12
    assert len({*messages}) == 1
    assert messages[0].startswith("rank 1: the query at position")
    assert "Causal() hides" in messages[0]
