"""Pieces: the contiguous tokens of a rank, cut at the borders of documents."""

from __future__ import annotations

from collections.abc import Hashable
from typing import NamedTuple

import numpy as np

from tilewise.layouts.layout import Layout
from tilewise.plan.kept import RecentValues

MOST_PIECES = 64
"""Most pieces of a rank: what layers do for each would take longer than to move the tokens."""


class Piece(NamedTuple):
    """Tokens [start, stop) of the sequence, which lie side by side on one rank."""

    start: int
    stop: int


def pieces_of(layout: Layout, rank: int, cu_seqlens: tuple[int, ...]) -> list[Piece]:
    """Return a rank's pieces in the order of its rows.

    Args:
        cu_seqlens: boundaries of the documents, of the whole sequence.
    """
    rows = layout.rows(rank)
    if not len(rows):
        return []
    document = np.searchsorted(np.array(cu_seqlens), rows, "right")
    ends = np.flatnonzero((np.diff(rows) != 1) | (np.diff(document) != 0)) + 1
    starts = np.concatenate([[0], ends])
    stops = np.concatenate([ends, [len(rows)]])
    pairs = zip(rows[starts].tolist(), (rows[stops - 1] + 1).tolist(), strict=True)
    return [Piece(*pair) for pair in pairs]


_KEPT: RecentValues[Hashable, list[list[Piece]]] = RecentValues(16)


def few_pieces(layout: Layout, cu_seqlens: tuple[int, ...], verb: str) -> list[list[Piece]]:
    """Return the pieces of every rank; they are found once and kept.

    Raises:
        ValueError: if a rank has more than MOST_PIECES.
    """

    def find() -> list[list[Piece]]:
        pieces = [pieces_of(layout, rank, cu_seqlens) for rank in range(layout.world_size)]
        rank = max(range(len(pieces)), key=lambda rank: len(pieces[rank]))
        if len(pieces[rank]) > MOST_PIECES:
            raise ValueError(
                f"{verb} on {layout!r}: rank {rank} has {len(pieces[rank])} pieces of neighbouring "
                f"tokens, more than {MOST_PIECES}; move the tokens to a layout with fewer before, "
                f"cp.relayout(x, tw.contiguous({layout.num_tokens}, {layout.world_size})), and "
                "back after"
            )
        return pieces

    return _KEPT.get((layout, cu_seqlens), find)


class Entries(NamedTuple):
    """The pieces of all ranks, numbered in the order of their tokens.

    Attributes:
        layout: which rank has which.
        first: of each piece the first one of its document.
        most: pieces of the document that has most.
    """

    layout: Layout
    first: tuple[int, ...]
    most: int


def entries_of(pieces: list[list[Piece]], cu_seqlens: tuple[int, ...]) -> Entries:
    """Number the pieces of all ranks in the order of their tokens."""
    order = sorted(piece for mine in pieces for piece in mine)
    number = {piece: place for place, piece in enumerate(order)}
    starts = np.array([piece.start for piece in order])
    document = np.searchsorted(np.array(cu_seqlens), starts, "right")
    first = np.searchsorted(document, document, "left")
    positions = [[number[piece] for piece in mine] for mine in pieces]
    layout = Layout.from_positions(positions, name="pieces")
    return Entries(layout, tuple(first.tolist()), int(np.bincount(document).max()))
