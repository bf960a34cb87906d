"""Ulysses on a transport that takes teams' exchanges as wholes, and what is kept between calls."""

from itertools import product
from typing import Any

import pytest
import torch
from support.teams import results
from support.thinned import thinned

import tilewise as tw
from tilewise.execution.run import BoundCode

WORLD = 4


@pytest.fixture
def whole_exchanges(monkeypatch) -> list[str]:
    """The rank and pass of every pass that ran and exchanged heads by one buffer each way."""
    found: list[str] = []
    run_code = BoundCode.run

    def noted(bound: BoundCode, *given: Any) -> Any:
        if any(label.startswith("pack heads") for label in bound.code.labels):
            found.append(f"{bound.code.rank} {bound.code.backward}")
        return run_code(bound, *given)

    monkeypatch.setattr(BoundCode, "run", noted)
    return found


HEADS = (8, 8), (8, 4), (8, 2), (4, 1)


@pytest.mark.parametrize(
    ("num_tokens", "heads", "batch", "save"),
    thinned(product((24, 23, 3), HEADS, ((), (2,)), ("replay", "gathered")), 3),
    ids=repr,
)
def test_whole_exchanges_are_exact(num_tokens, heads, batch, save, whole_exchanges):
    shapes = ((heads[0], 8), (heads[1], 8), (heads[1], 6), (heads[0], 6))
    whole = [torch.randn(*batch, num_tokens, *shape, dtype=torch.float64) for shape in shapes]
    mask, layout = tw.Causal(), tw.zigzag(num_tokens, WORLD)
    want = results(tw.ring(1), tw.contiguous(num_tokens, 1), mask, whole)
    got = results(tw.ulysses(WORLD), layout, mask, whole, save=save)
    # A rank without rows neither sends nor receives: then all go message by message.
    assert len({*whole_exchanges}) == (2 * WORLD if num_tokens >= WORLD else 0)
    for name, ours, theirs in zip(("out", "lse", "dq", "dk", "dv"), got, want, strict=True):
        assert torch.allclose(ours, theirs, rtol=0, atol=1e-12), name


def test_what_hooks_keep_may_lie_anywhere_in_its_memory():
    def moved(x: torch.Tensor) -> torch.Tensor:
        return torch.cat([x.new_zeros(64), x.flatten()])[64:].view(x.shape)

    whole = [torch.randn(16, 4, 8, dtype=torch.float64) for _ in range(4)]
    given = tw.contiguous(16, WORLD), tw.Causal(), whole
    want = results(tw.ulysses(WORLD), *given)
    got = results(tw.ulysses(WORLD), *given, unpack=moved)
    assert all(torch.equal(x, y) for x, y in zip(got, want, strict=True))


@pytest.mark.parametrize("plan", [tw.ulysses(WORLD), tw.all_gather(WORLD)], ids=repr)
def test_what_a_mask_leaves_out_is_exchanged_message_by_message(plan, whole_exchanges):
    num_tokens, heads = 24, (4, 8)
    whole = [torch.randn(num_tokens, *heads, dtype=torch.float64) for _ in range(4)]
    layout = tw.contiguous(num_tokens, WORLD)
    # Nobody sees the last keys.
    mask = tw.Slices([((0, num_tokens), (0, 15), "full")])
    want = results(tw.ring(1), tw.contiguous(num_tokens, 1), mask, whole)
    got = results(plan, layout, mask, whole)
    assert not whole_exchanges
    assert all(torch.allclose(x, y, rtol=0, atol=1e-12) for x, y in zip(got, want, strict=True))


@pytest.mark.parametrize("inner", [None, tw.ring(4)], ids=repr)
def test_heads_that_are_not_split_are_exchanged_with_nobody(inner):
    plan = tw.ulysses(1, inner)
    layout, whole = tw.contiguous(24, plan.world_size), list(torch.randn(4, 24, 2, 8))
    found = results(plan, layout, tw.Full(), whole, prune=False)
    for x, y in zip(
        found, results(tw.ring(1), tw.contiguous(24, 1), tw.Full(), whole), strict=True
    ):
        assert torch.allclose(x, y, atol=1e-5)
