"""What one rank reads and computes while steps are laid out: a table of its pieces.

Stands alone because it knows only what is here and what would be unlocked, not who sends it.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from typing import NamedTuple

import numpy as np

from tilewise.plan.ir import Side
from tilewise.strategies.tiling.causal.rects import Blocks, Rect, cells

Cell = tuple[tuple[int, ...], tuple[int, ...]]
"""Pieces of Q by pieces of KV, all pairs: one tile."""


class Piece(NamedTuple):
    """Neighbouring chunks of one side with one owner and the same readers; they travel together."""

    side: Side
    start: int
    stop: int
    owner: int
    readers: tuple[int, ...]


def pieces_of(blocks: Blocks, owner: Sequence[int], max_chunks: int) -> tuple[Piece, ...]:
    """Group the chunks of each side by owner and readers, cut at the rectangles' edges.

    The owner itself is no reader.

    Args:
        max_chunks: the longest piece.
    """
    found, chunks = [], range(len(owner))
    for side in Side:
        reads = np.zeros((len(owner), len(blocks)), bool)
        for rank, share in enumerate(blocks):
            for rect in share:
                reads[rect[2 * side] : rect[2 * side + 1], rank] = True
        reads[chunks, owner] = False
        edges = {
            edge for share in blocks for rect in share for edge in rect[2 * side : 2 * side + 2]
        }
        part = np.cumsum([i in edges or i % max_chunks == 0 for i in chunks]).tolist()
        keys = [(owner[i], part[i], reads[i].tobytes()) for i in chunks]
        for _, run in groupby(chunks, key=keys.__getitem__):
            first, *rest = run
            readers = tuple(np.flatnonzero(reads[first]).tolist())
            found.append(Piece(side, first, first + len(rest) + 1, owner[first], readers))
    return tuple(found)


class Reader:
    """A rank's Q pieces (first in ids) by its KV pieces: which are here, what can run.

    Args:
        ids: pieces.
        area: of each Q piece by each KV piece; 0 where nothing is computed.
        mine: which of the ids are here from the start.
        costs: bytes of each id's operand.
    """

    def __init__(self, ids: np.ndarray, area: np.ndarray, mine: np.ndarray, costs: np.ndarray):
        self.ids, self.area, self.costs = ids.tolist(), area, costs
        self.place = {piece: i for i, piece in enumerate(self.ids)}
        self.todo = area > 0
        self.have = mine.copy()  # operands that are here
        self.missing = ~mine  # and those not even on their way
        self.whole = np.concatenate([area.sum(1), area.sum(0)])
        self.gain = np.concatenate([area @ mine[len(area) :], mine[: len(area)] @ area])
        self.finished: set[int] = set()

    def wishes(self) -> list[int]:
        """Missing pieces, the most unlocked area per byte first, then the most area."""
        order = np.argsort(-(self.gain + 1e-3 * self.whole) / self.costs, kind="stable")
        return [self.ids[i] for i in order[self.missing[order]].tolist()]

    def expect(self, piece: int) -> None:
        """Count a piece as coming: it unlocks its row or column."""
        i, rows = self.place[piece], len(self.area)
        self.missing[i] = False
        if i < rows:
            self.gain[rows:] += self.area[i]
        else:
            self.gain[:rows] += self.area[:, i - rows]

    def arrive(self, piece: int) -> None:
        self.have[self.place[piece]] = True

    def compute(self) -> tuple[Cell, ...]:
        """Run what can run: columns with the same rows make one tile."""
        rows = len(self.area)
        ready = self.todo & self.have[:rows, None] & self.have[None, rows:]
        if not ready.any():
            return ()
        self.todo &= ~ready
        over = np.concatenate([~self.todo.any(1), ~self.todo.any(0)])
        self.finished = {self.ids[i] for i in np.flatnonzero(over).tolist()}
        columns: dict[bytes, list[int]] = {}
        for k in np.flatnonzero(ready.any(0)).tolist():
            columns.setdefault(ready[:, k].tobytes(), []).append(k)
        return tuple(
            (
                tuple(self.ids[i] for i in np.flatnonzero(np.frombuffer(key, bool)).tolist()),
                tuple(self.ids[rows + k] for k in ks),
            )
            for key, ks in columns.items()
        )


def readers_of(blocks: Blocks, pieces: Sequence[Piece], costs: np.ndarray) -> list[Reader]:
    """The ranks' tables; costs are bytes of each piece's operand."""
    at = np.zeros((2, max(p.stop for p in pieces)), np.int64)
    for i, p in enumerate(pieces):
        at[p.side, p.start : p.stop] = i
    edges = np.array([p[1:3] for p in pieces], np.int64)
    owners = np.array([p.owner for p in pieces])
    return [_reader(rank, share, at, edges, owners, costs) for rank, share in enumerate(blocks)]


def _reader(
    rank: int,
    share: Sequence[Rect],
    at: np.ndarray,
    edges: np.ndarray,
    owners: np.ndarray,
    costs: np.ndarray,
) -> Reader:
    spans = [tuple(_distinct(at[s, r[2 * s] : r[2 * s + 1]]) for s in Side) for r in share]
    rows, cols = (np.unique(np.concatenate([span[side] for span in spans])) for side in Side)
    here = np.zeros((len(rows), len(cols)), bool)
    for qs, ks in spans:
        here[np.ix_(np.searchsorted(rows, qs), np.searchsorted(cols, ks))] = True
    (q0, q1), (k0, k1) = edges[rows].T[:, :, None], edges[cols].T[:, None]
    ids = np.concatenate([rows, cols])
    return Reader(ids, here * cells(q0, q1, k0, k1), owners[ids] == rank, costs[ids])


def _distinct(ascending: np.ndarray) -> np.ndarray:
    return ascending[np.flatnonzero(np.diff(ascending, prepend=-1))]
