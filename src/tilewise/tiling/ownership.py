"""Give rows to ranks: the rank that computes a row's diagonal first, then others that read it."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from tilewise.tiling.cutting import Prices
from tilewise.tiling.geometry import Piece


class Segment(NamedTuple):
    """Rows [start, stop) that the same ranks read: all lie in the same regions."""

    start: int
    stop: int
    q: tuple[int, ...]
    kv: tuple[int, ...]
    diagonal: int  # the rank that had best own them


Owned = tuple[int, int, int]  # start, stop, rank


def segments(pieces: list[Piece]) -> list[Segment]:
    """Cut the rows of the pieces' documents at every edge of a region."""
    found = []
    by_component: dict[int, list[Piece]] = {}
    for p in pieces:
        by_component.setdefault(p.component, []).append(p)
    for own in by_component.values():
        box = np.array([p.region for p in own])
        rank = np.array([p.rank for p in own])
        edges = np.unique(box)
        start = edges[:-1, None]
        q = (box[:, 0] <= start) & (start < box[:, 1])
        kv = (box[:, 2] <= start) & (start < box[:, 3])
        for i, (a, b) in enumerate(zip(edges[:-1].tolist(), edges[1:].tolist())):
            readers = tuple(dict.fromkeys(rank[q[i]].tolist()))
            keys = tuple(dict.fromkeys(rank[kv[i]].tolist()))
            home = rank[q[i] & kv[i]].tolist() or readers or keys or (own[0].rank,)
            found.append(Segment(a, b, readers, keys, int(home[0])))
    return found


def own(pieces: list[Piece], rooms: list[int], prices: Prices) -> tuple[list[Owned], list[int]]:
    """Owners of all rows of the pieces, at most rooms rows a rank; and the rooms left over."""
    cut = segments(pieces)
    load = _loads(cut, len(rooms), prices)
    room = list(rooms)
    for s in cut:
        room[s.diagonal] -= s.stop - s.start
        load[s.diagonal] -= (s.stop - s.start) * (prices.q + prices.kv)
    kept = {i: s.stop for i, s in enumerate(cut)}
    owned: list[Owned] = []
    for chosen in (lambda s: s.q, lambda s: s.kv, lambda s: range(len(rooms))):
        near = sorted(range(len(cut)), key=lambda i: (len(chosen(cut[i])), i), reverse=True)
        for i in near:
            s = cut[i]
            while room[s.diagonal] < 0 and kept[i] > s.start:
                others = [r for r in chosen(s) if room[r] > 0]
                if not others:
                    break
                to = max(others, key=lambda r: (load[r], room[r], -r))
                rows = min(-room[s.diagonal], kept[i] - s.start, room[to], STRIDE)
                owned.append((kept[i] - rows, kept[i], to))
                kept[i] -= rows
                room[to] -= rows
                room[s.diagonal] += rows
                saved = prices.q * (to in s.q) + prices.kv * (to in s.kv)
                load[to] -= rows * saved
                load[s.diagonal] += rows * (prices.q + prices.kv)
    owned += [(s.start, kept[i], s.diagonal) for i, s in enumerate(cut) if kept[i] > s.start]
    return owned, room


STRIDE = 1024  # rows given away at a time, to level who gets them


def _loads(cut: list[Segment], n: int, prices: Prices) -> list[float]:
    load = [0.0] * n
    for s in cut:
        for r in s.q:
            load[r] += (s.stop - s.start) * prices.q
        for r in s.kv:
            load[r] += (s.stop - s.start) * prices.kv
    return load
