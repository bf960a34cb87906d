"""Fixed blocks of documents: the order in which whole rows are summed.

A document is a part of the sequence that no allowed pair connects with others. The side whose rows
a rank has is its *own* side, the other one is *walked*. Walked rows stand in blocks at places that
the document's length fixes. Own rows may stand anywhere: they are packed into blocks of one size.

    walked    | block 0 | block 1 | block 2 |      absent rows are zero and masked
    own rows  -> -> -> -> -> -> -> -> -> ->       each meets the blocks in this order
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tilewise.masks.base import Mask
from tilewise.masks.components import components
from tilewise.plan.ir import Side

LEAST_ROWS = 64
"""Rows of a walked block of a short document."""

USUAL_BLOCKS = 8
"""Blocks of a document of medium length."""

MOST_ROWS = 512
"""Rows of a walked block at most: of a larger one a causal mask hides more, which is computed too.
"""

MOST_OWN_ROWS = 256
"""Rows of an own block at most: its scores of one walked block fit in a processor's cache."""

Positions = NDArray[np.int64]


def walked_rows(length: int) -> int:
    """Rows of each walked block of a document of so many tokens, a power of two."""
    usual = min(-(-length // USUAL_BLOCKS), MOST_ROWS)
    return 1 << (max(LEAST_ROWS, usual) - 1).bit_length()


def own_rows(length: int) -> int:
    """Rows of each own block of a document of so many tokens, a power of two."""
    return min(walked_rows(length), MOST_OWN_ROWS)


@lru_cache(maxsize=64)
def document_edges(mask: Mask, num_tokens: tuple[int, int]) -> tuple[Positions, Positions]:
    """Where documents begin among the queries and among the keys, with the ends of both.

    Where queries and keys are of different sequences, each side is one document.
    """
    if num_tokens[0] == num_tokens[1]:
        edges = components(mask, num_tokens[0])
        return edges, edges
    q, k = (np.array([0, n], np.int64) for n in num_tokens)
    return q, k


class Meeting(NamedTuple):
    """A walked block that an own block meets.

    Attributes:
        block: its number in the document.
        allowed: bool [own rows, walked rows]; None: all pairs.
    """

    block: int
    allowed: Tensor | None


class Document(NamedTuple):
    """One document's rows of a call, and the blocks that they meet.

    Attributes:
        own, walked: rows of the operands, in the order of their positions.
        slots: places of the walked rows in the document.
        own_shape, walked_shape: (blocks, rows of a block).
        own_positions: [blocks, rows of a block]; places without a row repeat the last one.
        start: position of the document's first walked token.
        meetings: of each own block, in the order of positions.
    """

    own: Tensor
    walked: Tensor
    slots: Tensor
    own_shape: tuple[int, int]
    walked_shape: tuple[int, int]
    own_positions: Tensor
    start: int
    meetings: tuple[tuple[Meeting, ...], ...]

    def walked_positions(self, block: int) -> Tensor:
        """Positions of a walked block's places, past the document's end too."""
        rows = self.walked_shape[1]
        first = self.start + block * rows
        return torch.arange(first, first + rows)


@lru_cache(maxsize=32)
def documents(
    mask: Mask, edges_of: Mask, num_tokens: tuple[int, int], own: Side, q: bytes, k: bytes
) -> tuple[Document, ...]:
    """The documents of a call's rows.

    Args:
        mask: the same for all heads.
        edges_of: the mask of all heads, whose documents these are.
        q, k: positions of the call's rows and keys, int64.
    """
    edges = document_edges(edges_of, num_tokens)
    positions = tuple(np.frombuffer(x, np.int64) for x in (q, k))
    by_side = [_by_document(x, of_side) for x, of_side in zip(positions, edges, strict=True)]
    found: list[Document] = []
    for number in sorted(by_side[own].keys() & by_side[1 - own].keys()):
        spans = [(int(x[number]), int(x[number + 1])) for x in edges]
        rows = by_side[own][number], by_side[1 - own][number]
        found.append(_document(mask, own, positions, rows, spans))
    return tuple(found)


def _by_document(positions: Positions, edges: Positions) -> dict[int, Positions]:
    """Rows of each document, in the order of their positions."""
    order = np.argsort(positions, kind="stable")
    document = np.searchsorted(edges, positions[order], "right") - 1
    starts = np.flatnonzero(np.diff(document, prepend=-1))
    parts = np.split(order, starts[1:])
    return {int(document[s]): part for s, part in zip(starts, parts, strict=True)}


def _document(
    mask: Mask,
    own: Side,
    positions: Sequence[Positions],
    rows: tuple[Positions, Positions],
    spans: Sequence[tuple[int, int]],
) -> Document:
    own_positions, walked_positions = positions[own][rows[0]], positions[1 - own][rows[1]]
    (own_start, own_stop), (start, stop) = spans[own], spans[1 - own]
    size, walked_size = own_rows(own_stop - own_start), walked_rows(stop - start)
    slots = walked_positions - start
    num_blocks, num_walked = -(-len(own_positions) // size), -(-(stop - start) // walked_size)
    places = np.minimum(np.arange(num_blocks * size), len(own_positions) - 1)
    placed = own_positions[places].reshape(num_blocks, size)
    present = np.zeros(num_walked * walked_size, bool)
    present[slots] = True
    meetings = tuple(
        tuple(_meetings(mask, own, block, start, stop, present.reshape(-1, walked_size)))
        for block in placed
    )
    return Document(
        torch.from_numpy(rows[0]),
        torch.from_numpy(rows[1]),
        torch.from_numpy(slots),
        (num_blocks, size),
        (num_walked, walked_size),
        torch.from_numpy(placed),
        start,
        meetings,
    )


def _meetings(
    mask: Mask,
    own: Side,
    block: Positions,
    start: int,
    stop: int,
    present: NDArray[np.bool_],
) -> Iterator[Meeting]:
    """The walked blocks of which a block of own rows sees any row.

    Args:
        present: bool [walked blocks, rows], the rows that are here.
    """
    first, last = int(block.min()), int(block.max()) + 1
    for number, here in enumerate(present):
        begin = start + number * len(here)
        span = begin, min(begin + len(here), stop)
        ranges = ((first, last), span) if own is Side.Q else (span, (first, last))
        if not here.any() or not mask.area(*ranges):
            continue
        walked = np.arange(*span)
        pair = (block, walked) if own is Side.Q else (walked, block)
        table = mask.dense(*pair)
        allowed = np.zeros((len(block), len(here)), bool)
        allowed[:, : len(walked)] = table if own is Side.Q else table.T
        allowed &= here
        if allowed.all():
            yield Meeting(number, None)
        elif allowed.any():
            yield Meeting(number, torch.from_numpy(allowed))
