"""Masks within several sequences that grow."""

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tilewise.masks import strips
from tilewise.masks.base import Mask, as_ints, digest, positions
from tilewise.masks.strips import Strips

Array = NDArray[np.int64]


@dataclass(frozen=True, eq=False, repr=False)
class Growing(Mask):
    """A mask within each of several sequences packed end to end; queries are their last tokens.

    Query i of sequence b stands at position starts[b] + i; keys are all its tokens from 0 on.

    Args:
        within: acts on positions within a sequence.
        starts, counts: of the queries of each sequence.
    """

    within: Mask
    starts: tuple[int, ...]
    counts: tuple[int, ...]

    def __init__(self, within: Mask, starts: Any, counts: Any):
        object.__setattr__(self, "within", within)
        object.__setattr__(self, "starts", as_ints(starts))
        object.__setattr__(self, "counts", as_ints(counts))

    def check_tokens(self, num_tokens: int, num_keys: int | None = None) -> None:
        q_edges, k_edges = self._edges
        have = num_tokens, num_tokens if num_keys is None else num_keys
        if have != (q_edges[-1], k_edges[-1]):
            raise ValueError(
                f"the mask is for {q_edges[-1]} queries and {k_edges[-1]} keys, but there are "
                f"{have[0]} and {have[1]}; make the mask by the chunk that they belong to"
            )

    def dense(self, q_positions: Any, k_positions: Any) -> NDArray[np.bool_]:
        (q_edges, k_edges), starts = self._edges, np.asarray([*self.starts, 0], np.int64)
        q, k = positions(q_positions), positions(k_positions)
        q_of, k_of = (
            np.searchsorted(edges, x, "right") - 1 for edges, x in ((q_edges, q), (k_edges, k))
        )
        within = self.within.dense(q - q_edges[q_of] + starts[q_of], k - k_edges[k_of])
        return within & (q_of[:, None] == k_of) & (q < q_edges[-1])[:, None]

    @cached_property
    def _edges(self) -> tuple[Array, Array]:
        """Return where each sequence's queries and its keys begin, and where the last ones end."""
        counts = np.asarray(self.counts, np.int64)
        ends = counts + np.asarray(self.starts, np.int64)
        return np.cumsum([0, *counts]), np.cumsum([0, *ends])

    def _strips(self) -> Strips:
        everything = self.within.strips()
        moved: list[tuple[Array, ...]] = []
        for start, count, q_edge, k_edge in zip(
            self.starts, self.counts, *self._edges, strict=False
        ):
            rows = strips.make(start, start + count, 0, start + count)
            q0, q1, lo, lo_slope, hi, hi_slope = strips.intersect(everything, rows).columns
            down = int(q_edge) - start
            low, high = (x + k_edge - slope * down for x, slope in ((lo, lo_slope), (hi, hi_slope)))
            moved.append((q0 + down, q1 + down, low, high, lo_slope, hi_slope))
        q0, q1, low, high, lo_slope, hi_slope = (
            np.concatenate(column) for column in zip(*moved, strict=True)
        )
        return strips.make(q0, q1, low, high, lo_slope=lo_slope, hi_slope=hi_slope)

    def __repr__(self) -> str:
        sequences = f"{len(self.starts)} sequences, {digest([*self.starts, *self.counts])}"
        return f"Growing({self.within!r}, {sequences})"
