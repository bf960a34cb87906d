"""Choosing for those who do not: a layout that levels a mask's work."""

from __future__ import annotations

from tilewise.layouts.balanced import balanced
from tilewise.layouts.layout import Layout, contiguous, zigzag
from tilewise.layouts.support import cells
from tilewise.masks.base import Causal, Full, Mask

LEVEL = 1.03
"""max / mean of the ranks' work up to which a layout counts as level."""


def default_layout(mask: Mask, num_tokens: int, world_size: int) -> Layout:
    """Contiguous for Full; zigzag for Causal, and where it is level; else balanced."""
    if isinstance(mask, Full):
        return contiguous(num_tokens, world_size)
    layout = zigzag(num_tokens, world_size)
    if isinstance(mask, Causal):
        return layout
    work = [0] * world_size
    for (rank, _), cell in cells(mask, layout, layout).items():
        work[rank] += cell.area
    if max(work) * world_size <= LEVEL * sum(work):
        return layout
    return balanced(mask, num_tokens, world_size, chunk=max(1, min(128, num_tokens // world_size)))
