"""The keys that each query sees under a mask, as intervals of positions."""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from tilewise.layouts.layout import Layout
from tilewise.masks import strips
from tilewise.masks.base import Mask


class VisibleKeys(NamedTuple):
    """Intervals of the keys that this rank's queries see, [depth, rows] each.

    Attributes:
        low, high: query i sees the keys of [low[d, i], high[d, i]) for each d.
    """

    low: Tensor
    high: Tensor

    def of_rows(self, rows: slice) -> VisibleKeys:
        return VisibleKeys(self.low[:, rows], self.high[:, rows])

    def contain(self, keys: Tensor) -> Tensor:
        """Return which keys [keys], or [rows, keys] of each row, are visible: bool [rows, keys]."""
        pairs = zip(self.low[:, :, None], self.high[:, :, None], strict=True)
        found = [(keys >= low) & (keys < high) for low, high in pairs]
        return torch.stack(found).any(0)

    def blocks(self, num_keys: int, size: int) -> list[int]:
        """Return the first keys of the blocks that hold a key which some row sees.

        Args:
            size: keys of a block.
        """
        start = torch.arange(0, num_keys, size)
        meets = (self.low[..., None] < start + size) & (self.high[..., None] > start)
        return start[meets.flatten(0, 1).any(0)].tolist()


@lru_cache(maxsize=16)
def visible_keys(mask: Mask, layout: Layout, rank: int) -> VisibleKeys:
    """The keys that a rank's queries see, on the CPU."""
    rows, num_tokens = layout.rows(rank), layout.num_tokens
    order = np.argsort(rows)
    inside = strips.intersect(mask.strips(), strips.make(0, num_tokens, 0, num_tokens))
    row, low, high = strips.of_queries(inside, rows[order])
    tables = strips.interval_table(order[row], low, high, len(rows))
    return VisibleKeys(*map(torch.from_numpy, tables))
