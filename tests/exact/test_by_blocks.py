"""Layers on fixed blocks of tokens: the same bits at any split, of rows and of summed gradients."""

from __future__ import annotations

from random import Random

import pytest
import torch
from torch import Tensor, nn

import tilewise as tw
from tilewise.exact.by_blocks import BLOCK, GradientSums, run_by_blocks
from tilewise.tokens.gradients import OwnGradients, sum_gradients
from tilewise.transport.resolve import transport_for

WIDTH, WORDS = 24, 11


class Layer(nn.Module):
    """An embedding, a norm and a linear layer, whose weights are used in two calls."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.embedding = nn.Embedding(WORDS, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 2 * WIDTH)
        self.unused = nn.Parameter(torch.zeros(3))
        self.to(dtype)

    def forward(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        a, b = self.up(self.norm(self.embedding(tokens))).chunk(2, -1)
        return a * torch.nn.functional.silu(b), b


class Head(nn.Module):
    """The first layer's embedding again, as a head."""

    def __init__(self, layer: Layer) -> None:
        super().__init__()
        self.embedding = layer.embedding

    def forward(self, x: Tensor) -> Tensor:
        return (x @ self.embedding.weight.T).log_softmax(-1)


def whole_blocks(num_tokens: int, n: int, seed: int) -> tw.Layout:
    """Blocks dealt out at random; some ranks may have none."""
    draw, parts = Random(seed), [list[int]() for _ in range(n)]
    for start in range(0, num_tokens, BLOCK):
        draw.choice(parts).extend(range(start, min(start + BLOCK, num_tokens)))
    return tw.Layout.from_positions(parts)


def trained(layout: tw.Layout, dtype: torch.dtype, binned: bool = True) -> dict[str, Tensor]:
    """Rows and gradients of one backward pass, of the whole sequence, split by a layout."""
    make = torch.Generator().manual_seed(1)
    tokens = torch.randint(WORDS, (layout.num_tokens,), generator=make)
    dout = torch.randn(layout.num_tokens, WORDS, generator=make).to(dtype)

    def step(rank: int, group: object) -> tuple[Tensor, dict[str, Tensor]]:
        transport, sums, layer = transport_for(group), GradientSums(), Layer(dtype)
        head, mine = Head(layer), layout.shard(tokens, rank)
        if binned:
            a, b = run_by_blocks(layer, [mine], layout, transport, sums, 0)
            out = run_by_blocks(head, [a + b], layout, transport, sums, 0)
        else:
            out = head(sum(layer(mine)))
        out.backward(layout.shard(dout, rank))
        sum_gradients(layer, transport, sums if binned else OwnGradients())
        assert layer.unused.grad is None
        grads = {n: p.grad for n, p in layer.named_parameters() if p.grad is not None}
        return out.detach(), grads

    results = tw.loopback(layout.world_size, step)
    for _, grads in results:
        assert all(torch.equal(grads[name], results[0][1][name]) for name in grads)
    return {"out": layout.unshard([out for out, _ in results]), **results[0][1]}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_bits_are_those_of_one_rank_at_any_split(dtype: torch.dtype):
    for num_tokens in (1, 64, 300, 641):
        alone = trained(tw.contiguous(num_tokens, 1), dtype)
        assert set(alone) == {"out"} | {n for n, _ in Layer(dtype).named_parameters()} - {"unused"}
        for seed in range(4):
            layout = whole_blocks(num_tokens, 2 + seed, seed)
            split = trained(layout, dtype)
            for name, x in alone.items():
                assert torch.equal(split[name], x), (name, layout)


@pytest.mark.parametrize("binned", [True, False])
def test_sums_over_ranks_are_the_gradients_of_the_whole(binned: bool):
    layout = whole_blocks(500, 3, 7)
    split = trained(layout, torch.float64, binned)
    layer, make = Layer(torch.float64), torch.Generator().manual_seed(1)
    tokens = torch.randint(WORDS, (500,), generator=make)
    dout = torch.randn(500, WORDS, generator=make).double()
    out = Head(layer)(sum(layer(tokens)))
    out.backward(dout)
    assert (split["out"] - out).abs().max() < 1e-14
    for name, p in layer.named_parameters():
        if p.grad is not None:
            assert (split[name] - p.grad).abs().max() < 1e-13 * p.grad.abs().max(), name


def test_what_depends_on_the_split_is_refused_on_every_rank():
    def cut(rank: int, group: object) -> None:
        layout = tw.contiguous(100, 2)
        run_by_blocks(
            nn.Linear(4, 4), [torch.zeros(50, 4)], layout, transport_for(group), GradientSums(), 0
        )

    with pytest.raises(ValueError, match=r"splits the block of tokens 0 to 63.*ContextParallel"):
        tw.loopback(2, cut)

    def apart(rank: int, group: object) -> None:
        layer = nn.Linear(4, 4)
        layer(torch.ones(2, 4)).sum().backward()
        sum_gradients(layer, transport_for(group), GradientSums())

    with pytest.raises(
        ValueError, match=r"weight has a gradient that was not made by cp\.by_blocks"
    ):
        tw.loopback(2, apart)

    def other_rows(rank: int, group: object) -> None:
        layout, transport = tw.contiguous(128, 2), transport_for(group)
        x = torch.zeros(64 - rank, 4)
        run_by_blocks(nn.Linear(4, 4), [x], layout, transport, GradientSums(), 0)

    with pytest.raises(ValueError, match=r"\(63, 4\), but must have this rank's 64 tokens along"):
        tw.loopback(2, other_rows)


def test_a_mean_of_losses_has_the_same_bits_at_any_split():
    make = torch.Generator().manual_seed(2)
    losses = torch.randn(500, generator=make).exp() * torch.logspace(-8, 8, 500)

    def mean(rank: int, group: object, layout: tw.Layout) -> tuple[Tensor, Tensor]:
        cp = tw.ContextParallel(group, num_tokens=500, layout=layout, reduction="canonical")
        mine = layout.shard(losses, rank).requires_grad_()
        found = cp.mean(mine, len(mine))
        found.backward()
        return found.detach(), mine.grad

    (alone,) = tw.loopback(1, lambda r, g: mean(r, g, tw.contiguous(500, 1)))
    assert abs(alone[0] / losses.double().mean() - 1) < 1e-7
    for layout in (tw.striped(500, 7), tw.zigzag(500, 3), whole_blocks(500, 5, 1)):
        results = tw.loopback(layout.world_size, lambda r, g, to=layout: mean(r, g, to))
        assert all(torch.equal(found, alone[0]) for found, _ in results)
        assert torch.equal(layout.unshard([grad for _, grad in results]), alone[1])


def test_the_layout_that_is_not_given_has_whole_blocks():
    def run(rank: int, group: object) -> tuple[tw.Layout, Tensor]:
        cp = tw.ContextParallel(group, num_tokens=900, mask=tw.Causal(), reduction="canonical")
        return cp.layout, cp.by_blocks(
            nn.Linear(3, 2), torch.ones(1, len(cp.position_ids), 3), dim=1
        )

    (layout, _), *others = results = tw.loopback(4, run)
    assert all(
        edge % BLOCK == 0 or edge == 900
        for r in range(4)
        for part in layout.ranges(r)
        for edge in part
    )
    assert [rows.shape for _, rows in results] == [(1, layout.size(r), 2) for r in range(4)]
    assert max(layout.sizes) - min(layout.sizes) <= 2 * BLOCK and all(
        x == layout for x, _ in others
    )
