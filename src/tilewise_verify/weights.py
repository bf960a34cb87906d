"""The weights of attention, read from its result, which is linear in the values.

Values are [num_tokens, width], results [num_tokens, numbers]; heads lie side by side in both.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

Read = Callable[[Tensor], Tensor]
"""The result for values; raises UnreadableError if there is none."""

SAME = 1e-4  # of the largest value: columns of one head


class UnreadableError(Exception):
    """A run that gives no result, or none that attention could give."""


class Weights(NamedTuple):
    """Weights [num_heads, num_tokens, num_tokens], and the head of v that each reads, or -1.

    Attributes:
        row_sources: the same for each row, [num_heads, num_tokens].
    """

    weights: Tensor
    sources: list[int]
    row_sources: Tensor


def above(weights: Tensor, share: float) -> Tensor:
    """Return which weights are more than a share of the row's largest."""
    return weights > weights.amax(-1, keepdim=True).clamp(min=1e-30) * share


def width_of_head(read: Read, num_tokens: int, width: int) -> int:
    """Return the width of a head of an attention function whose heads are unknown.

    If all columns of v are equal, so are all columns of one head of the result.
    """
    generator = torch.Generator().manual_seed(4)
    marks = torch.randn(num_tokens, 1, generator=generator, dtype=torch.float64).expand(-1, width)
    result = read(marks) - read(0 * marks)
    difference = (result - result[:, :1]).abs().amax(0)
    head_width = int((difference <= SAME * result[:, 0].abs().max()).long().cumprod(0).sum())
    if result.shape[1] % head_width or width % head_width:
        raise UnreadableError("its result is not made of heads as wide as those of v")
    return head_width


def read_weights(read: Read, num_tokens: int, width: int, head_dim: int) -> Weights:
    """One-hot values read the weights themselves, head_dim keys a run."""
    all_ones = torch.ones(num_tokens, width, dtype=torch.float64)
    column, result_of_zeros = torch.arange(width), read(0 * all_ones)
    slot = column % head_dim

    def by_head(values: Tensor) -> Tensor:
        return (read(values) - result_of_zeros).unflatten(1, (-1, head_dim))

    # Each head's values are its number: what a query gets of them says which it reads.
    numbers = by_head(all_ones * (1 + column // head_dim)) / by_head(all_ones) - 1
    numbers = numbers.transpose(0, 1)  # [num_heads, num_tokens, head_dim]
    row_sources, sources = (
        x.nan_to_num(nan=-1, posinf=-1, neginf=-1).round().clamp(min=-1).int()
        for x in (numbers.nanmedian(2).values, numbers.flatten(1).nanmedian(1).values)
    )
    weights = []
    for start in range(0, num_tokens, head_dim):
        values = torch.zeros_like(all_ones)
        in_range = slot < num_tokens - start
        values[(start + slot)[in_range], column[in_range]] = 1
        weights.append(by_head(values)[..., : num_tokens - start])
    return Weights(torch.cat(weights, 2).transpose(0, 1), sources.tolist(), row_sources)
