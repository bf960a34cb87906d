"""Fewer calls from many pieces: rectangles that share rows or keys, then small neighbours.

Stands alone because it decides by cost only: no step here changes which cells are covered.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

import numpy as np

from tilewise.tiles.calls import Kind, Ranges, Slice, count_rows
from tilewise.tiles.pieces import CALL_CELLS, MAX_CELLS, WASTE_CELLS, Piece

Span = tuple[int, int]
Rectangle = tuple[Span, Span]  # rows, keys


def group(pieces: Iterable[Piece]) -> list[Piece]:
    """The same cells in as few and large pieces as pay, in order of their first rows and keys."""
    rectangles, others = [], []
    for piece in pieces:
        if piece.kind is Kind.FULL:
            rectangles += [(q, k) for q in piece.q for k in piece.k]
        else:
            others.append(piece)
    return _join_small(sorted(merge_rectangles(rectangles) + others, key=lambda p: (p.q, p.k)))


def merge_rectangles(rectangles: list[Rectangle]) -> list[Piece]:
    """Disjoint rectangles as FULL pieces, rows x keys of several ranges, as few as found.

    Rectangles of the same rows are one piece, whatever their keys, and so are those of the same
    keys. Tried as they are, cut at every row where one begins or ends, and cut at every such key.
    """
    flipped = [(k, q) for q, k in rectangles]
    by_rows = _by_rows(rectangles)
    by_rows_cut = _by_rows(_cut(rectangles))
    by_keys_cut = [(q, k) for k, q in _by_rows(_cut(flipped))]
    best = min((by_rows, by_rows_cut, by_keys_cut), key=len)
    return [Piece(Kind.FULL, q, k) for q, k in best]


def _by_rows(rectangles: list[Rectangle]) -> list[tuple[Ranges, Ranges]]:
    keys_of, rows_of = defaultdict(list), defaultdict(list)
    for rows, keys in rectangles:
        keys_of[rows].append(keys)
    for rows, keys in keys_of.items():
        rows_of[union(keys)].append(rows)
    return [(union(rows), keys) for keys, rows in rows_of.items()]


def _cut(rectangles: list[Rectangle]) -> list[Rectangle]:
    """Cut at every row where a rectangle begins or ends, unless that makes too many."""
    edges = sorted({row for rows, _ in rectangles for row in rows})
    spans = np.searchsorted(edges, np.array([q for q, _ in rectangles], int).reshape(-1, 2))
    if np.diff(spans).sum() > 4 * len(rectangles) + 64:
        return rectangles
    return [
        ((edges[i], edges[i + 1]), keys)
        for (first, last), (_, keys) in zip(spans.tolist(), rectangles, strict=True)
        for i in range(first, last)
    ]


def _join_small(pieces: list[Piece]) -> list[Piece]:
    """Join small pieces to SLICES where a call saved outweighs the cells wasted."""
    done: list[Piece] = []
    members: list[Piece] = []
    q, k, cells, apart = (), (), 0, 0  # the open call: rows, keys, its cells, those of its members
    for piece in pieces:
        computed = piece.computed
        if computed > 2 * WASTE_CELLS:
            done.append(piece)
            continue
        wide_q, wide_k = _widen(q, piece.q), _widen(k, piece.k)
        wide, apart = count_rows(wide_q) * count_rows(wide_k), apart + computed
        if members and wide <= min(cells + computed + CALL_CELLS, apart + WASTE_CELLS, MAX_CELLS):
            members.append(piece)
            q, k, cells = wide_q, wide_k, wide
        else:
            done += _joined(members, q, k)
            members, q, k, cells, apart = [piece], piece.q, piece.k, computed, computed
    return sorted(done + _joined(members, q, k), key=lambda p: (p.q, p.k))


def _joined(members: list[Piece], q: Ranges, k: Ranges) -> list[Piece]:
    if len(members) < 2:
        return members
    return [Piece(Kind.SLICES, q, k, tuple(s for piece in members for s in _slices(piece)))]


def _slices(piece: Piece) -> tuple[Slice, ...]:
    match piece.kind:
        case Kind.FULL:
            return tuple(Slice(*q, k0, 0, k1, 0) for q in piece.q for k0, k1 in piece.k)
        case Kind.CAUSAL:
            ((q0, q1),), ((k0, k1),) = piece.q, piece.k
            return (Slice(q0, q1, k0, 0, k1 - q1 + 1, 1),)
        case Kind.SLICES:
            return piece.slices


def _widen(ranges: Ranges, more: Ranges) -> Ranges:
    """Their union; at once where one range goes on where another ends, the common case."""
    if len(ranges) == len(more) == 1 and ranges[0][1] == more[0][0]:
        return ((ranges[0][0], more[0][1]),)
    return more if not ranges or ranges == more else union((*ranges, *more))


def union(ranges: Iterable[Span]) -> Ranges:
    """Half-open ranges sorted, those that touch or overlap joined."""
    ordered = sorted(ranges)
    if len(ordered) == 1:
        return tuple(ordered)
    joined: list[Span] = []
    for start, stop in ordered:
        if joined and start <= joined[-1][1]:
            joined[-1] = joined[-1][0], max(stop, joined[-1][1])
        else:
            joined.append((start, stop))
    return tuple(joined)
