"""Give rows to ranks: the rank that computes a row's diagonal first, then others that read it."""

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from tilewise.strategies.tiling.regions import PlacedRegion, Prices


class Segment(NamedTuple):
    """Rows [start, stop) that the same ranks read: all lie in the same regions."""

    start: int
    stop: int
    q: tuple[int, ...]
    kv: tuple[int, ...]
    diagonal: int  # the rank that had best own them


Owned = tuple[int, int, int]  # start, stop, rank
STRIDE = 1024  # rows given away at a time, to level who gets them
Span = tuple[int, int]  # first and last + 1 row of a component


def segments(pieces: Sequence[PlacedRegion], spans: Mapping[int, Span]) -> list[Segment]:
    """Cut the rows of the pieces' components at every edge of a region.

    Args:
        spans: the rows of components whose pieces may leave some out.
    """
    found = []
    by_component: dict[int, list[PlacedRegion]] = {}
    for p in pieces:
        by_component.setdefault(p.component, []).append(p)
    for component, own in by_component.items():
        region, only = own[0].region, own[0].rank
        if len(own) == 1 and region[:2] == region[2:] and component not in spans:
            found.append(Segment(*region[:2], (only,), (only,), only))
            continue
        box = np.array([p.region for p in own])
        rank = np.array([p.rank for p in own])
        edges = np.unique([*box.ravel(), *spans.get(component, ())])
        start = edges[:-1, None]
        q = (box[:, 0] <= start) & (start < box[:, 1])
        kv = (box[:, 2] <= start) & (start < box[:, 3])
        for i, (a, b) in enumerate(pairwise(edges.tolist())):
            readers = tuple(dict.fromkeys(rank[q[i]].tolist()))
            keys = tuple(dict.fromkeys(rank[kv[i]].tolist()))
            home = rank[q[i] & kv[i]].tolist() or readers or keys or (own[0].rank,)
            found.append(Segment(a, b, readers, keys, int(home[0])))
    return found


def own(
    pieces: list[PlacedRegion], rooms: list[int], prices: Prices, spans: Mapping[int, Span]
) -> list[Owned]:
    """Owners of all rows of the pieces' components, at most rooms rows a rank."""
    cut = segments(pieces, spans)
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
    return owned


def _loads(cut: list[Segment], n: int, prices: Prices) -> list[float]:
    load = [0.0] * n
    for s in cut:
        for r in s.q:
            load[r] += (s.stop - s.start) * prices.q
        for r in s.kv:
            load[r] += (s.stop - s.start) * prices.kv
    return load


class Reading(NamedTuple):
    """Rows [start, stop), their owner, and the other ranks that compute with q, and with k, v."""

    start: int
    stop: int
    owner: int
    q: tuple[int, ...]
    kv: tuple[int, ...]


def readings(
    pieces: Sequence[PlacedRegion],
    owned: Sequence[Owned],
    spans: Mapping[int, Span],
    *,
    beside_owner: bool = True,
) -> list[Reading]:
    """All owned rows, cut where their owner or their readers change, ascending.

    Args:
        beside_owner: leave the owner out of the readers.
    """
    cut = sorted(segments(pieces, spans))
    found: list[Reading] = []
    i = 0
    for start, stop, owner in owned:
        at = start
        while at < stop:
            while cut[i].stop <= at:
                i += 1
            end, q, kv = min(stop, cut[i].stop), cut[i].q, cut[i].kv
            if beside_owner:
                q, kv = (tuple(r for r in readers if r != owner) for readers in (q, kv))
            found.append(Reading(at, end, owner, q, kv))
            at = end
    return found
