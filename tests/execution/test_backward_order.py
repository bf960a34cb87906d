"""Ranks that run their passes in another order hear of it before a tensor moves."""

from __future__ import annotations

import re
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from processes.launcher import run_processes

import tilewise as tw
from tilewise.transport import watch

RANKS = 3
LAYOUT = tw.contiguous(12, RANKS)
REFUSED = "ranks (disagree on pass|are in different calls)"
WINDOWS = (3, 3, 0)  # masks of the calls: two alike, one that sends less


def losses(rank: int, group: Any) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """A loss of each call, and the keys whose gradients tell the calls apart."""
    made = torch.Generator().manual_seed(0)
    results, keys = [], []
    for window in WINDOWS:
        x = torch.randn(3, 12, 1, 4, dtype=torch.float64, generator=made)
        q, k, v = (LAYOUT.shard(t, rank).requires_grad_() for t in x)
        together = {"plan": tw.ring(RANKS), "layout": LAYOUT, "group": group}
        out = tw.attention(q, k, v, mask=tw.Window(window, 0), **together)
        results.append(out.square().sum())
        keys.append(k)
    return results, keys


def passes(rank: int, group: Any, order: tuple[int, ...]) -> list[torch.Tensor | None]:
    results, keys = losses(rank, group)
    for number in order if rank == 1 else range(len(WINDOWS)):
        results[number].backward()
    return [k.grad for k in keys]


@pytest.mark.parametrize("order", [(1, 0, 2), (0, 2, 1), (2, 1, 0)])
def test_backward_passes_in_another_order_are_refused(order: tuple[int, ...]):
    with pytest.raises(ValueError, match=f"^{REFUSED}: .* in the same order on every"):
        tw.loopback(RANKS, lambda rank, group: passes(rank, group, order))


def test_all_ranks_may_choose_any_order():
    def swapped(rank: int, group: Any) -> list[torch.Tensor | None]:
        results, keys = losses(rank, group)
        for number in (2, 0, 1):
            results[number].backward()
        return [k.grad for k in keys]

    wanted = tw.loopback(RANKS, lambda rank, group: passes(rank, group, (0, 1, 2)))
    for got, want in zip(tw.loopback(RANKS, swapped), wanted, strict=True):
        for x, y in zip(got, want, strict=True):
            assert x is not None and y is not None and torch.equal(x, y)


def refused(rank: int) -> list[str]:
    """What a rank hears of another order, and of forward beside backward, in a group each."""
    heard = []
    with mock.patch.object(watch, "PATIENCE_SECONDS", 0.3):
        for order in ((1, 0, 2), (2, 0, 1)):
            with pytest.raises(ValueError) as caught:
                passes(rank, dist.new_group(), order)
            heard.append(str(caught.value))
        group = dist.new_group()
        results, _ = losses(rank, group)
        with pytest.raises(ValueError) as caught:
            results[0].backward() if rank else losses(rank, group)
        heard.append(str(caught.value))
    passes(rank, None, (0, 1, 2))
    return heard


def test_processes_refuse_another_order():
    first, *others = run_processes(RANKS, refused)
    assert others == [first] * (RANKS - 1)
    assert all(re.match(f"{REFUSED}: .* in the same order on every rank", text) for text in first)
