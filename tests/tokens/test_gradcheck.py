"""torch.autograd.gradcheck of every verb on several ranks: all rows in, all ranks' results out."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd.gradcheck import GradcheckError, gradcheck

import tilewise as tw

NUM_TOKENS, CU = 7, (0, 3, 7)
UNEVEN = tw.Layout.from_positions([[5, 6, 0], [], [1, 2, 4, 3]])
LAYOUTS = {
    "contiguous on 2": tw.contiguous(NUM_TOKENS, 2),
    "zigzag on 3": tw.zigzag(NUM_TOKENS, 3),
    "uneven on 3": UNEVEN,
    "striped on 4": tw.striped(NUM_TOKENS, 4),
}
OnRank = Callable[..., Tensor]


class _AllRanks(torch.autograd.Function):
    """The results of all ranks, one after the other; each pass runs on all of them at once."""

    @staticmethod
    def forward(
        ctx: Any, on_rank: OnRank, layout: tw.Layout, num_sharded: int, *leaves: Tensor
    ) -> Tensor:
        ctx.given = on_rank, layout, num_sharded
        ctx.save_for_backward(*leaves)
        outs = tw.loopback(layout.world_size, partial(_run, *ctx.given, leaves))
        ctx.sizes = [len(out) for out in outs]
        return torch.cat([out.detach() for out in outs])

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:  # pyright: ignore
        on_rank, layout, num_sharded = ctx.given
        leaves = [x.detach().requires_grad_() for x in ctx.saved_tensors]
        grads = grad.split(ctx.sizes)

        def both(rank: int, group: Any) -> list[Tensor]:
            mine = [x.detach().clone().requires_grad_() for x in leaves]
            with torch.enable_grad():
                out = _run(on_rank, layout, num_sharded, mine, rank, group)
                (out * grads[rank]).sum().backward()
            return [torch.zeros_like(x) if x.grad is None else x.grad for x in mine]

        by_rank = tw.loopback(layout.world_size, both)
        return None, None, None, *(sum(parts) for parts in zip(*by_rank, strict=True))


def _run(
    on_rank: OnRank, layout: tw.Layout, num_sharded: int, leaves: Any, rank: int, group: Any
) -> Tensor:
    """One rank's results, flat."""
    cp = tw.ContextParallel(group, num_tokens=NUM_TOKENS, layout=layout)
    mine = [cp.shard(x, 0) if place < num_sharded else x for place, x in enumerate(leaves)]
    return on_rank(cp, *mine).flatten()


def normal(*shape: int, seed: int = 0) -> Tensor:
    make = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=make, dtype=torch.float64).requires_grad_()


def scan(cp: tw.ContextParallel, decay: Tensor, update: Tensor, *, matrix: bool) -> Tensor:
    """Pieces of which the first token says what they do to a state."""
    firsts, begin = list[int](), 0
    for start, stop in cp.pieces(CU):
        firsts.append(begin)
        begin += stop - start
    at = torch.tensor(firsts, dtype=torch.long)
    return cp.scan(decay[at], update[at], matrix=matrix, cu_seqlens=CU, dim=0)


def attend(cp: tw.ContextParallel, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """On a layout of its own."""
    other = tw.ContextParallel(
        cp.group,
        num_tokens=NUM_TOKENS,
        mask=tw.Causal() & tw.Document(CU),
        layout=cp.layout,
        attention_layout=tw.zigzag(NUM_TOKENS, cp.world_size),
        strategy=tw.ring(cp.world_size),
    )
    return other.attention(q, k, v)


WEIGHTS = normal(NUM_TOKENS, NUM_TOKENS, seed=9).detach()
X = (normal(NUM_TOKENS, 2),)
VERBS: dict[str, tuple[OnRank, tuple[Tensor, ...], int]] = {
    "halo": (
        lambda cp, x: torch.cat([x[:0], *cp.halo(x, 2, 1, cu_seqlens=CU, fill=0.5)]),
        X,
        1,
    ),
    "conv1d": (
        lambda cp, x, w, b: cp.conv1d(x, w, b, "silu", CU),
        (*X, normal(2, 3, seed=1), normal(2, seed=2)),
        1,
    ),
    "relayout": (lambda cp, x: cp.relayout(x, tw.zigzag(NUM_TOKENS, cp.world_size)), X, 1),
    "gather": (lambda cp, x: cp.shard(WEIGHTS, 0) @ cp.gather(x), X, 1),
    "gather by a mask": (
        lambda cp, x: cp.shard(WEIGHTS, 0) @ cp.gather(x, mask=tw.Causal() & tw.Window(2, 0)),
        X,
        1,
    ),
    "scan": (
        partial(scan, matrix=False),
        (normal(NUM_TOKENS, 2, 1, seed=3), normal(NUM_TOKENS, 2, 2, seed=4)),
        2,
    ),
    "scan by matrices": (
        partial(scan, matrix=True),
        (normal(NUM_TOKENS, 2, 2, seed=5), normal(NUM_TOKENS, 2, 1, seed=6)),
        2,
    ),
    "roll": (lambda cp, x: cp.roll(x, -1, 0, CU), X, 1),
    "roll and wrap": (lambda cp, x: cp.roll(x, 2, 0, CU, wrap=True), X, 1),
    "attention": (attend, tuple(normal(NUM_TOKENS, 1, 2, seed=s) for s in (0, 7, 8)), 3),
}


def check(verb: str, layout: str, *, fast_mode: bool) -> bool:
    on_rank, leaves, num_sharded = VERBS[verb]

    def whole(*x: Tensor) -> Any:
        return _AllRanks.apply(on_rank, LAYOUTS[layout], num_sharded, *x)

    return gradcheck(whole, leaves, atol=1e-7, fast_mode=fast_mode)


@pytest.mark.parametrize("layout", ["zigzag on 3", "uneven on 3"])
@pytest.mark.parametrize("verb", VERBS)
def test_gradients_are_those_of_differences_on_several_ranks(verb: str, layout: str):
    """Along a random direction."""
    assert check(verb, layout, fast_mode=True)


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("verb", VERBS)
def test_each_entry_of_the_jacobian_is_that_of_differences_on_several_ranks(verb: str, layout: str):
    assert check(verb, layout, fast_mode=False)


@pytest.mark.parametrize("fast_mode", [False, True])
def test_a_gradient_that_is_dropped_on_one_rank_is_found(fast_mode: bool, monkeypatch: Any):
    """The check sees what travels."""

    def drops(cp: tw.ContextParallel, x: Tensor) -> Tensor:
        rows = cp.roll(x, -1, 0, CU)
        return rows.detach() + 0 * rows if cp.rank == 1 else rows

    monkeypatch.setitem(VERBS, "roll", (drops, X, 1))
    with pytest.raises(GradcheckError):
        check("roll", "zigzag on 3", fast_mode=fast_mode)
