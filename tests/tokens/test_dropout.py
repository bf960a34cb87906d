"""cp.dropout drops by each row's global position: the same numbers at any split."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import tilewise as tw
from tilewise.kernels.dropout import ROUNDS

N = 23
LAYOUTS = {
    "one rank": tw.contiguous(N, 1),
    "contiguous": tw.contiguous(N, 3),
    "zigzag": tw.zigzag(N, 4),
    "striped": tw.striped(N, 2),
    "a rank without rows": tw.Layout.from_positions([[*range(N)], []]),
}


def word(counter: list[int], seed: int, which: int) -> int:
    """Philox4x32 by its paper, with Python's whole numbers."""
    (a, b, c, d), (k0, k1) = counter, (seed % 2**32, seed >> 32)
    for _ in range(ROUNDS):
        left, right = a * 0xD2511F53, c * 0xCD9E8D57
        a, b, c, d = right >> 32 ^ b ^ k0, right % 2**32, left >> 32 ^ d ^ k1, left % 2**32
        k0, k1 = (k0 + 0x9E3779B9) % 2**32, (k1 + 0xBB67AE85) % 2**32
    return (a, b, c, d)[which]


def by_hand(x: torch.Tensor, p: float, seed: int) -> torch.Tensor:
    """Of [tokens, ...], number by number."""
    rows, out = x.reshape(len(x), -1), torch.zeros_like(x).reshape(len(x), -1)
    for t, row in enumerate(rows):
        for i, number in enumerate(row):
            if word([i // 4, t, 0, 2**31], seed, i % 4) >= int(p * 2**32):
                out[t, i] = number / (1 - p)
    return out.view_as(x)


@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize("shape, dim", [((N, 5), 0), ((2, N, 3, 2), 1), ((N,), 0), ((3, N), -1)])
def test_the_same_numbers_and_gradients_at_any_split(name: str, shape: tuple[int, ...], dim: int):
    layout, seed, p = LAYOUTS[name], (1 << 40) + 7, 0.3
    make = torch.Generator().manual_seed(0)
    x, grad = (torch.randn(shape, generator=make, dtype=torch.float64) for _ in range(2))
    ones = torch.ones_like(x).movedim(dim, 0)
    scale = by_hand(ones, p, seed).movedim(0, dim)

    def on_rank(rank: int, group: Any) -> tuple[torch.Tensor, torch.Tensor]:
        cp = tw.ContextParallel(group, num_tokens=N, layout=layout)
        mine = cp.shard(x, dim).clone().requires_grad_()
        out = cp.dropout(mine, p, seed, dim)
        out.backward(cp.shard(grad, dim))
        assert mine.grad is not None
        return out.detach(), mine.grad

    outs, grads = zip(*tw.loopback(layout.world_size, on_rank), strict=True)
    assert (layout.unshard(list(outs), dim) - x * scale).abs().max() < 1e-12
    assert (layout.unshard(list(grads), dim) - grad * scale).abs().max() < 1e-12
    assert 0.1 < float((scale == 0).double().mean()) < 0.6


def test_seeds_rows_and_columns_drop_apart():
    cp = tw.ContextParallel(num_tokens=512)
    x = torch.ones(512, 256)
    one, other = (cp.dropout(x, 0.25, seed) == 0 for seed in (0, 1))
    assert abs(float(one.float().mean()) - 0.25) < 0.01
    agree = float((one == other).float().mean())  # of independent choices: 0.625
    assert abs(agree - 0.625) < 0.01
    for moved in (one.roll(1, 0), one.roll(1, 1), one.roll(4, 1)):
        assert abs(float((one == moved).float().mean()) - 0.625) < 0.01


def test_no_numbers_are_dropped_outside_of_training_or_by_none():
    cp, x = tw.ContextParallel(num_tokens=N), torch.randn(N, 4)
    assert cp.dropout(x, 0.5, 0, training=False) is x
    assert cp.dropout(x, 0.0, 0) is x


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "all of it": ({"p": 1.0}, r"p \(1.0\) must be at least 0 and below 1"),
    "a text": ({"p": "half"}, "p "),
    "no seed": ({"seed": None}, "seed "),
    "a negative seed": ({"seed": -1}, "seed "),
    "whole rows": ({"x": torch.ones(N, 4)}, "23 tokens along dim 0, but the layout gives this"),
    "another dim": ({"dim": 2}, r"dim \(2\) must be in -2..1"),
    "tokens": ({"x": torch.ones(12, 4, dtype=torch.int64)}, "must have a floating-point dtype"),
    "a list": ({"x": [1.0]}, "x "),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_one_rank_passes_wrong_every_rank_hears(name: str):
    changes, message = WRONG[name]

    def on_rank(rank: int, group: Any) -> str:
        cp = tw.ContextParallel(group, num_tokens=N)
        given = {"x": torch.ones(cp.layout.size(rank), 4), "p": 0.1, "seed": 0}
        try:
            cp.dropout(**(given | (changes if rank == 0 else {})))
            cp.gather(torch.ones(cp.layout.size(rank), 4))
        except ValueError as error:
            return str(error)
        return "taken"

    first, second = tw.loopback(2, on_rank)
    assert first == second
    with pytest.raises(ValueError, match=message):
        raise ValueError(first)
