"""A tape: the buffers that a pass takes, in order, each with its place in one slab of memory.

Buffers that are never needed together may share a place. It stands alone because it knows sizes
and times only.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

_ALIGNMENT = 256


class Request(NamedTuple):
    """A buffer of a tape, needed from one moment to before another."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    begin: int
    end: int

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


class Tape:
    """The buffers of one pass in the order in which it takes them, each with its place in a slab.

    Attributes:
        num_bytes: of the slab.
    """

    def __init__(self, requests: Sequence[Request]):
        self.requests = tuple(requests)
        self.offsets, self.num_bytes = places(self.requests)

    def views(self, slab: Tensor) -> list[Tensor]:
        return [
            slab[offset : offset + request.num_bytes].view(request.dtype).view(request.shape)
            for request, offset in zip(self.requests, self.offsets, strict=True)
        ]


def places(requests: Sequence[Request]) -> tuple[list[int], int]:
    """The first byte of each request, such that requests of one time do not overlap; bytes in all.

    Largest first, each at the lowest place that is free for as long as it is needed.

    Source: Pisarchyk and Lee 2020, "greedy by size for offset calculation".
    """
    sizes = np.array([-(-r.num_bytes // _ALIGNMENT) * _ALIGNMENT for r in requests], np.int64)
    begin, end = (np.array([getattr(r, x) for r in requests], np.int64) for x in ("begin", "end"))
    offsets, placed = np.zeros(len(sizes), np.int64), np.zeros(len(sizes), bool)
    for i in np.argsort(-sizes, kind="stable").tolist():
        rivals = np.flatnonzero(placed & (begin < end[i]) & (begin[i] < end))
        rivals = rivals[np.argsort(offsets[rivals], kind="stable")]
        tops = np.maximum.accumulate(np.concatenate([[0], offsets[rivals] + sizes[rivals]]))
        gaps = np.append(offsets[rivals], np.iinfo(np.int64).max) - tops
        offsets[i] = tops[np.argmax(gaps >= sizes[i])]
        placed[i] = True
    return offsets.tolist(), int(np.max(offsets + sizes, initial=0))
