"""gather_rows: rows that each rank names, and their gradients, against indexing the whole."""

from __future__ import annotations

from random import Random
from typing import Any

import numpy as np
import pytest
import torch
from support.drawn_layouts import drawn, normal
from torch import Tensor

import tilewise as tw
from tilewise.simulation.row_moves import simulate_moves
from tilewise.tokens.moves import named_moves


def named(draw: Random, num_tokens: int, shape: tuple[int, ...]) -> Tensor:
    """Positions of which some are -1, and some stand there several times."""
    few = [draw.randrange(num_tokens) for _ in range(draw.randint(1, 6))]
    found = [
        draw.choice([-1, *few, draw.randrange(num_tokens)]) for _ in range(int(np.prod(shape)))
    ]
    return torch.tensor(found, dtype=torch.int64).reshape(shape)


def taken(whole: Tensor, positions: Tensor) -> Tensor:
    """Rows of [tokens, ...] at positions, 0 at -1."""
    rows = whole[positions.clamp(min=0)]
    return rows * (positions >= 0).reshape(*positions.shape, *[1] * (whole.ndim - 1))


@pytest.mark.parametrize("seed", range(40))
def test_rows_and_gradients(seed: int):
    layout = drawn(seed).layout
    draw, n, num_tokens = Random(seed), layout.world_size, layout.num_tokens
    batch = draw.choice([None, 1, 3])
    shared = batch is not None and draw.random() < 0.3  # one list for all entries
    before = () if batch is None else (batch,)
    x = normal(*before, num_tokens, 2, 3, seed=seed)
    shapes = [
        (*(() if shared else before), *draw.choice([(5,), (4, 3), (0,), (2, 1, 2)]))
        for _ in range(n)
    ]
    if shared:
        shapes = [shape[:1] for shape in shapes]
    positions = [named(draw, num_tokens, shape) for shape in shapes]
    leaf = x.clone().requires_grad_()
    entries = [leaf] if batch is None else [*leaf]
    want, total = [], leaf.sum() * 0
    for mine in positions:
        lists = [mine] * len(entries) if shared or batch is None else [*mine]
        rows = torch.stack([taken(*pair) for pair in zip(entries, lists, strict=True)])
        want.append(rows[0] if batch is None else rows)
        total = total + (want[-1] * normal(*want[-1].shape, seed=7)).sum()
    total.backward()
    dim = len(before)
    named_dim = dim if draw.random() < 0.5 else dim - x.ndim

    def run(rank: int, group: Any) -> tuple[Tensor, Tensor]:
        cp = tw.ContextParallel(group, num_tokens=num_tokens, layout=layout)
        own = cp.shard(x, dim).clone().requires_grad_()
        rows = cp.gather_rows(own, positions[rank], dim=named_dim)
        (rows * normal(*rows.shape, seed=7)).sum().backward()
        assert own.grad is not None
        return rows.detach(), own.grad

    found, grads = zip(*tw.loopback(n, run), strict=True)
    for rows, expected in zip(found, want, strict=True):
        assert torch.equal(rows, expected.detach())
    assert leaf.grad is not None
    assert (layout.unshard(grads, dim) - leaf.grad).abs().max() < 1e-13


def test_second_derivatives():
    layout, positions = tw.zigzag(8, 2), torch.tensor([[3, 3, -1], [6, 0, 3]])
    x = normal(8, 2)

    def run(rank: int, group: Any) -> Tensor:
        cp = tw.ContextParallel(group, num_tokens=8, layout=layout)
        own = cp.shard(x, 0).clone().requires_grad_()
        (grad,) = torch.autograd.grad(
            cp.gather_rows(own, positions).pow(3).sum(), own, create_graph=True
        )
        grad.pow(2).sum().backward()
        assert own.grad is not None
        return own.grad

    leaf = x.clone().requires_grad_()
    (grad,) = torch.autograd.grad(2 * taken(leaf, positions).pow(3).sum(), leaf, create_graph=True)
    grad.pow(2).sum().backward()
    assert leaf.grad is not None
    assert (layout.unshard(tw.loopback(2, run), 0) - leaf.grad).abs().max() < 1e-11


@pytest.mark.parametrize("share", [0.2, 0.9])
def test_bytes_are_those_of_the_rows_named(share: float):
    """Each row once a rank and pass, 4 bytes for its place, or all rows as in gather."""
    n, num_tokens, width = 4, 64, 8
    layout = tw.zigzag(num_tokens, n)
    draw = Random(3)
    lists = [draw.sample(range(num_tokens), int(share * num_tokens)) for _ in range(n)]

    def run(rank: int, group: Any) -> tuple[int, int]:
        cp = tw.ContextParallel(group, num_tokens=num_tokens, layout=layout)
        x = torch.zeros(layout.size(rank), width, requires_grad=True)
        rows = cp.gather_rows(x, torch.tensor(lists[rank] * 2))
        forward = group.bytes_sent
        rows.sum().backward()
        return forward, group.bytes_sent - forward

    found = tw.loopback(n, run)
    moves = named_moves(layout, [np.array(mine) for mine in lists])
    forward, backward = moves.volume(4 * width)
    if share > 0.75:
        own = 4 * width * num_tokens // n * (n - 1)
        assert found == [(own + 8 * n * (n - 1), own)] * n
        return
    for rank in range(n):
        asked = int(moves.num_rows[:, rank].sum())
        assert found[rank] == (forward[rank] + 4 * asked + 8 * n * (n - 1), backward[rank])
    seconds = simulate_moves([moves], 32, tw.Machine.preset("h100x8")).seconds
    assert seconds > 0


WRONG = (
    (lambda p: p.double(), "positions is torch.float64"),
    (lambda p: p * 0 + 8, "positions has 8, but must be global positions of 8 tokens"),
    (lambda p: p * 0 - 2, "positions has -2"),
    (lambda p: p.sum(), r"positions is \[\]"),
    (lambda p: p.tolist(), "positions .* must be a Tensor"),
)


@pytest.mark.parametrize(("change", "message"), WRONG)
def test_a_wrong_rank_is_named_on_all(change: Any, message: str):
    errors = []

    def run(rank: int, group: Any) -> None:
        cp = tw.ContextParallel(group, num_tokens=8, layout=tw.contiguous(8, 2))
        positions = torch.tensor([1, 7])
        with pytest.raises(ValueError, match=f"(rank 1: )?{message}") as raised:
            cp.gather_rows(torch.zeros(4, 2), change(positions) if rank else positions)
        errors.append(str(raised.value))
        assert group.bytes_sent == 0

    tw.loopback(2, run)
    assert len(errors) == 2


def test_a_list_for_each_entry_has_the_batch_before_it():
    def run(rank: int, group: Any) -> None:
        cp = tw.ContextParallel(group, num_tokens=8, layout=tw.contiguous(8, 2))
        with pytest.raises(ValueError, match=r"a list for each entry of the batch, \[3, '...'\]"):
            cp.gather_rows(torch.zeros(3, 4, 2), torch.zeros(2, 5, dtype=torch.int64), dim=1)

    tw.loopback(2, run)


def test_ranks_compare_what_they_gather():
    def run(rank: int, group: Any) -> None:
        cp = tw.ContextParallel(group, num_tokens=8, layout=tw.contiguous(8, 2))
        with pytest.raises(ValueError, match="ranks disagree on shape"):
            cp.gather_rows(torch.zeros(4, 2 + rank), torch.tensor([1]))

    tw.loopback(2, run)
