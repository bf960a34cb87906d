"""Layouts of all kinds with documents, drawn by a seed, and the tensors that are split by them."""

from __future__ import annotations

from itertools import pairwise
from random import Random
from typing import NamedTuple

import torch
from torch import Tensor

import tilewise as tw


class Split(NamedTuple):
    """A layout, and the documents of its tokens."""

    layout: tw.Layout
    cu_seqlens: tuple[int, ...]

    @property
    def documents(self) -> list[tuple[int, int]]:
        return [*pairwise(self.cu_seqlens)]


def drawn(seed: int) -> Split:
    """One of all kinds of layouts, some with empty shards; borders lie inside shards."""
    draw = Random(seed)
    n, num_tokens = draw.randint(1, 8), draw.choice((1, 5, 13, 24, 40))
    inside = sorted({draw.randrange(num_tokens + 1) for _ in range(draw.randint(0, 4))})
    cu = tuple(sorted({0, *inside, num_tokens}))
    kind = draw.choice(("contiguous", "zigzag", "striped", "documents", "uneven", "any", "one"))
    if kind == "documents":
        return Split(tw.zigzag_documents(cu, n), cu)
    if kind in ("contiguous", "zigzag", "striped"):
        return Split(getattr(tw, kind)(num_tokens, n), cu)
    order = list(range(num_tokens))
    if kind == "any":
        draw.shuffle(order)
    edges = sorted(draw.randrange(num_tokens + 1) for _ in range(n - 1))
    edges = [0] * (n - 1) if kind == "one" else edges
    spans = pairwise([0, *edges, num_tokens])
    return Split(tw.Layout.from_positions([order[a:b] for a, b in spans]), cu)


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def drawn_mask(draw: Random, num_tokens: int) -> tw.masks.Mask:
    inside = sorted({draw.randrange(num_tokens + 1) for _ in range(3)})
    return draw.choice(
        [
            tw.Full(),
            tw.Causal(),
            tw.Window(draw.randrange(6), draw.choice([0, 2, None])),
            tw.Causal() & tw.Document((0, *inside, num_tokens)),
            tw.Window(4, 0) | tw.Document((0, num_tokens // 2, num_tokens)),
        ]
    )
