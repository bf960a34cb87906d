"""The next tokens of several growing sequences: who holds which, and what their queries may see.

Rank r of n holds the tokens t of every sequence with t mod n = r. So whatever the lengths, ranks
differ by at most one row a sequence, causal work levels itself, no token ever moves, and the keys
of a window are one range of a rank's rows.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate

import numpy as np
import torch
from torch import Tensor

from tilewise.layouts.layout import Layout, Run
from tilewise.masks.base import Mask
from tilewise.masks.sequences import Growing
from tilewise.masks.tables import PerHead

Array = np.ndarray


def num_held(length: int, rank: int, world_size: int) -> int:
    """Return how many of a sequence's first tokens a rank holds."""
    return max(0, -(-(length - rank) // world_size))


@dataclass(frozen=True)
class Chunk:
    """The next counts[b] tokens of each sequence b, packed one sequence after the other."""

    starts: tuple[int, ...]  # tokens that each sequence has already
    counts: tuple[int, ...]  # how many it gets now; 0 for some, but not for all
    world_size: int  # ranks that they are spread over

    @property
    def ends(self) -> tuple[int, ...]:
        """Tokens that each sequence has afterwards."""
        return tuple(a + b for a, b in zip(self.starts, self.counts, strict=True))

    @cached_property
    def layout(self) -> Layout:
        """The layout of the chunk's tokens: shard tokens, q, k and v by it."""
        return self._layout(self.starts)

    @cached_property
    def kv_layout(self) -> Layout:
        """The layout of all tokens afterwards, the sequences one after the other."""
        return self._layout((0,) * len(self.starts))

    def mask(self, mask: Mask) -> Mask:
        """A mask of positions within each sequence, as one of the chunk's tokens x all tokens."""
        heads: Sequence[Mask] | None = getattr(mask, "heads", None)
        if heads is not None:
            return PerHead(Growing(head, self.starts, self.counts) for head in heads)
        return Growing(mask, self.starts, self.counts)

    def position_ids(self, rank: int) -> Tensor:
        """Positions of a rank's rows within their own sequences, a LongTensor [num_rows]."""
        return torch.from_numpy(self._whole_position_ids[self.layout.rows(rank)])

    @cached_property
    def _whole_position_ids(self) -> Array:
        return np.concatenate(
            [np.arange(a, b) for a, b in zip(self.starts, self.ends, strict=True)]
        )

    def _layout(self, starts: Sequence[int]) -> Layout:
        """The positions of every sequence from starts on, packed, and their ranks."""
        counts = [end - start for start, end in zip(starts, self.ends, strict=True)]
        places, n = [0, *accumulate(counts)], self.world_size

        def run(rank: int, b: int) -> Run:
            skipped = (rank - starts[b]) % n
            return Run(places[b] + skipped, num_held(counts[b], skipped, n), n)

        runs = [[run(rank, b) for b in range(len(counts))] for rank in range(n)]
        return Layout(places[-1], runs, "every n-th of each sequence")
