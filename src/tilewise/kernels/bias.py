"""Biases of scores: numbers that are added to a pair's score by its positions and its query head.

score = cap(scale q k^T) + bias, before the mask. A bias takes part where scores are made, so it
travels nowhere: a kernel reads its call's rows and columns of a dense one, and computes ALiBi.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor

from tilewise.arguments import check_count, listed, real_number, require_dense
from tilewise.opaque import OpaqueValue


@dataclass(frozen=True)
class Alibi(OpaqueValue):
    """The bias -slope |i - j| of query i and key j; `alibi` makes it.

    Attributes:
        slopes: of all query heads.
    """

    slopes: tuple[float, ...]


class DenseBias(NamedTuple):
    """A bias as a tensor, in one pass.

    Attributes:
        values: [num_heads, num_tokens, num_kv_tokens] of the whole attention; None: of a call
            whose tensors are not there yet.
        grad: where backward adds this rank's share of its gradient; None: nobody asks for it.
    """

    values: Tensor | None = None
    grad: Tensor | None = None


Bias: TypeAlias = Alibi | DenseBias


class BiasPlaces(NamedTuple):
    """Positions of the pairs of one kernel call in the whole attention.

    Attributes:
        q_positions, k_positions: int64 [m] and [n].
        heads: of all query heads, half-open.
    """

    q_positions: Tensor
    k_positions: Tensor
    heads: tuple[int, int]


def alibi(slopes: Tensor | Sequence[float]) -> Alibi:
    """Attention with linear biases: -slope |i - j| is added to the score of query i and key j.

        out = tw.attention(q, k, v, ..., bias=tw.alibi([2 ** (-8 * (h + 1) / 8) for h in range(8)]))

    i and j are positions in the whole sequence. Each tile computes its own numbers, so there is no
    table of all pairs. Slopes are constants and get no gradient.

    Args:
        slopes: one a query head, [num_heads].
    Raises:
        ValueError: if they are not finite numbers in one dimension, or require a gradient.
    Source: Press, Smith and Lewis 2021, Train Short, Test Long.
    """
    if isinstance(slopes, Tensor):
        require_dense("slopes", slopes)
        if slopes.ndim != 1:
            raise ValueError(
                f"slopes is {list(slopes.shape)}, but must be [num_heads], the same for every "
                "batch entry"
            )
        if slopes.requires_grad:
            raise ValueError(
                "slopes require a gradient, which alibi does not give; pass slopes.detach(), or a "
                "dense bias made of them"
            )
        if slopes.is_meta:
            raise ValueError("slopes is on the meta device, where it has no numbers")
        check_count("slopes", slopes, len(slopes))
        slopes = slopes.tolist()
    numbers = tuple(real_number("slopes", x) for x in listed("slopes", slopes, "numbers"))
    for head, number in enumerate(numbers):
        if not math.isfinite(number):
            raise ValueError(f"slopes[{head}] ({number}) must be finite")
    return Alibi(numbers)


def expanded(bias: Tensor, shape: tuple[int, int, int]) -> Tensor:
    """Return a bias with all heads and queries, which share one row of it where it has size 1.

    What does not fit is returned as it is: `check_bias` refuses it.

    Args:
        bias: [1 or num_heads, 1 or num_tokens, num_kv_tokens], or of each batch entry.
        shape: (num_heads, num_tokens, num_kv_tokens).
    """
    *batch, heads, queries, keys = bias.shape if bias.ndim in (3, 4) else (0, 0, 0)
    fits = heads in (1, shape[0]) and queries in (1, shape[1]) and keys == shape[2]
    whole = bias.expand(*batch, *shape) if fits else bias
    return whole[0] if batch == [1] else whole


def bias_of_pairs(bias: Bias, places: BiasPlaces, dtype: torch.dtype) -> Tensor:
    """The bias of one kernel call, [query heads of the call, m, n]."""
    rows, keys, (first, stop) = places.q_positions[:, None], places.k_positions, places.heads
    if isinstance(bias, Alibi):
        slopes = torch.tensor(bias.slopes[first:stop], dtype=dtype, device=keys.device)
        return slopes[:, None, None] * -(rows - keys).abs().to(dtype)
    assert bias.values is not None
    table = bias.values[first:stop]  # rows that pad a leaf have positions beyond it, and no pairs
    q, k = rows.clamp(max=table.shape[1] - 1), keys.clamp(max=table.shape[2] - 1)
    return table[:, q, k].to(dtype)


def add_bias_gradient(bias: Bias, places: BiasPlaces, dscores: Tensor) -> None:
    """Add one kernel call's share of the gradient of a bias, where it is asked for.

    Args:
        dscores: [query heads of the call, m, n], summed over the batch.
    """
    if isinstance(bias, DenseBias) and bias.grad is not None:
        part = bias.grad[slice(*places.heads)]
        part[:, places.q_positions[:, None], places.k_positions] += dscores.to(part.dtype)
