"""Dropout of rows whose choice is a function of each row's global position, whoever holds it."""

from __future__ import annotations

import torch
from torch import Tensor

from tilewise.arguments import real_number, require_dense, require_type, whole_number
from tilewise.execution.validation import MOST_SEEDS
from tilewise.kernels.dropout import philox_words, threshold

APART = 1 << 31
"""A word of the counter that dropout of attention has not: there it is a row of the batch."""
_COUNTERS_AT_ONCE = 1 << 19


def dropped(x: Tensor, p: float, seed: int, positions: Tensor, dim: int) -> Tensor:
    """Return x with a share p of its numbers 0, and the others times 1 / (1 - p).

    Number i of a row, in the order of its other dimensions, is dropped if word i % 4 of
    Philox(counter=(i // 4, position, 0, 2^31), key=seed) is below p 2^32.

    Args:
        positions: [rows], the global position of each row of x.
        dim: of the rows.
    """
    if p == 0 or x.numel() == 0:
        return x
    rows = x.movedim(dim, 0)
    keeps = kept(rows.shape, p, seed, positions.to(x.device)).movedim(0, dim)
    return torch.where(keeps, x * (1 / (1 - p)), 0)


def kept(shape: torch.Size, p: float, seed: int, positions: Tensor) -> Tensor:
    """Return which numbers of [rows, ...] stay, bool."""
    width = shape[1:].numel()
    quads = torch.arange(-(-width // 4), device=positions.device)
    at_once = max(1, _COUNTERS_AT_ONCE // max(1, len(quads)))
    parts = []
    for part in positions.split(at_once):
        words = philox_words((quads, part[:, None], 0, APART), seed)
        stays = torch.stack([word >= threshold(p) for word in words], -1)
        parts.append(stays.flatten(1)[:, :width])
    return torch.cat(parts).view(shape)


def check_dropout(
    x: Tensor, p: float, seed: int, num_rows: int, dim: int, *, training: bool
) -> None:
    """Raise ValueError for arguments of ContextParallel.dropout that do not fit."""
    require_type(Tensor, "x", x)
    require_dense("x", x)
    if not x.is_floating_point() or x.itemsize < 2:  # torch multiplies no float8
        raise ValueError(f"x ({x.dtype}) must have a floating-point dtype, such as torch.float32")
    if not -x.ndim <= whole_number("dim", dim, None) < x.ndim:
        raise ValueError(
            f"dim ({dim}) must be in {-x.ndim}..{x.ndim - 1} for a tensor {tuple(x.shape)}; name "
            "the one of its tokens"
        )
    if x.shape[dim] != num_rows:
        raise ValueError(
            f"x has {x.shape[dim]} tokens along dim {dim}, but the layout gives this rank "
            f"{num_rows}; pass this rank's rows, and dim= where others stand first"
        )
    if not 0 <= real_number("p", p) < 1:
        raise ValueError(f"p ({p}) must be at least 0 and below 1")
    whole_number("seed", seed, 0, MOST_SEEDS - 1)
    require_type(bool, "training", training, "True")
