"""The weights of attention, read from its result, which is linear in the values.

One-hot values read the weights themselves, and values that number their columns tell which column
each number of the result comes from. Values are [num_tokens, width], results [num_tokens, numbers].
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

Read = Callable[[Tensor], Tensor]
"""The result for values; raises UnreadableError if there is none."""

BASE = 16  # of the digits in which columns are numbered: coarse dtypes tell so many apart
SAME = 1e-4  # of the largest value: columns of one head


class UnreadableError(Exception):
    """A run that gives no result, or none that attention could give."""


class Heads(NamedTuple):
    """The result's columns by head, and which of a head's columns each column of v is."""

    groups: tuple[Tensor, ...]
    slots: Tensor


class Weights(NamedTuple):
    """Weights [num_heads, num_tokens, num_tokens], and the columns of v that each head reads."""

    weights: Tensor
    sources: tuple[tuple[int, ...], ...]

    def allowed(self, least: float) -> Tensor:
        """Which weights are more than a share of the row's largest."""
        return self.weights > self.weights.amax(-1, keepdim=True).clamp(min=1e-30) * least


def find_heads(read: Read, num_tokens: int, width: int) -> Heads:
    """The heads of an unknown function: columns of one are equal if all columns of v are."""
    ones = torch.ones(num_tokens, width, dtype=torch.float64)
    nothing = read(0 * ones)
    make = torch.Generator().manual_seed(4)
    marks = read(ones * torch.randn(num_tokens, 1, generator=make, dtype=torch.float64)) - nothing
    groups: list[list[int]] = []
    for column, mark in enumerate(marks.T):
        last = marks[:, groups[-1][0]] if groups else None
        if last is not None and float((mark - last).abs().max()) <= SAME * float(last.abs().max()):
            groups[-1].append(column)
        else:
            groups.append([column])
    source = _sources(read, nothing, ones)
    if not 0 <= int(source.min()) <= int(source.max()) < width:
        raise UnreadableError("its result is no weighted sum of columns of v")
    found = Heads(tuple(map(torch.tensor, groups)), torch.zeros(width, dtype=torch.int64))
    for group in found.groups:
        found.slots[source[group]] = torch.arange(len(group))
    return found


def read_weights(read: Read, num_tokens: int, heads: Heads) -> Weights:
    """The weights of every head, as many keys a run as a head has columns."""
    width, size = len(heads.slots), min(map(len, heads.groups))
    ones = torch.ones(num_tokens, width, dtype=torch.float64)
    nothing = read(0 * ones)
    source = _sources(read, nothing, ones)
    weights = torch.zeros(len(heads.groups), num_tokens, num_tokens, dtype=torch.float64)
    for start in range(0, num_tokens, size):
        kept = heads.slots < min(size, num_tokens - start)
        values = 0 * ones
        values[(start + heads.slots)[kept], kept.nonzero().flatten()] = 1
        got = read(values) - nothing
        for table, group in zip(weights, heads.groups, strict=True):
            own = source[group].clamp(0, width - 1)
            known = kept[own]
            table[:, start + heads.slots[own[known]]] = got[:, group[known]]
    return Weights(weights, tuple(tuple(source[group].tolist()) for group in heads.groups))


def _sources(read: Read, nothing: Tensor, ones: Tensor) -> Tensor:
    """The column of v that each column of the result reads; -1 for none."""
    width = ones.shape[1]
    sums, source, scale = read(ones) - nothing, torch.zeros(nothing.shape[1]).long(), 1
    while scale < width:
        digits = torch.arange(width) // scale % BASE
        read_digits = (read(ones * (1 + digits)) - nothing) / sums - 1
        found = read_digits.nanmedian(0).values.nan_to_num(nan=-1, posinf=-1, neginf=-1).round()
        source = torch.where((found < 0) | (source < 0), -1, source + scale * found.long())
        scale *= BASE
    return source
