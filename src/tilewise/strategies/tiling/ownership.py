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
    segments_found = []
    by_component: dict[int, list[PlacedRegion]] = {}
    for p in pieces:
        by_component.setdefault(p.component, []).append(p)
    for component, component_pieces in by_component.items():
        region, only_rank = component_pieces[0].region, component_pieces[0].rank
        if len(component_pieces) == 1 and region[:2] == region[2:] and component not in spans:
            segments_found.append(Segment(*region[:2], (only_rank,), (only_rank,), only_rank))
            continue
        box = np.array([p.region for p in component_pieces])
        rank = np.array([p.rank for p in component_pieces])
        edges = np.unique([*box.ravel(), *spans.get(component, ())])
        start = edges[:-1, None]
        q = (box[:, 0] <= start) & (start < box[:, 1])
        kv = (box[:, 2] <= start) & (start < box[:, 3])
        for i, (a, b) in enumerate(pairwise(edges.tolist())):
            readers = tuple(dict.fromkeys(rank[q[i]].tolist()))
            keys = tuple(dict.fromkeys(rank[kv[i]].tolist()))
            home = rank[q[i] & kv[i]].tolist() or readers or keys or (component_pieces[0].rank,)
            segments_found.append(Segment(a, b, readers, keys, int(home[0])))
    return segments_found


def own(
    pieces: list[PlacedRegion], rooms: list[int], prices: Prices, spans: Mapping[int, Span]
) -> list[Owned]:
    """Owners of all rows of the pieces' components, at most rooms rows a rank."""
    row_segments = segments(pieces, spans)
    load = _loads(row_segments, len(rooms), prices)
    rows_left = list(rooms)
    for s in row_segments:
        rows_left[s.diagonal] -= s.stop - s.start
        load[s.diagonal] -= (s.stop - s.start) * (prices.q + prices.kv)
    stop_by_segment = {i: s.stop for i, s in enumerate(row_segments)}
    owned: list[Owned] = []
    for reading_ranks in (lambda s: s.q, lambda s: s.kv, lambda s: range(len(rooms))):
        order = sorted(
            range(len(row_segments)),
            key=lambda i: (len(reading_ranks(row_segments[i])), i),
            reverse=True,
        )
        for i in order:
            s = row_segments[i]
            while rows_left[s.diagonal] < 0 and stop_by_segment[i] > s.start:
                takers = [r for r in reading_ranks(s) if rows_left[r] > 0]
                if not takers:
                    break
                taker = max(takers, key=lambda r: (load[r], rows_left[r], -r))
                rows = min(
                    -rows_left[s.diagonal], stop_by_segment[i] - s.start, rows_left[taker], STRIDE
                )
                owned.append((stop_by_segment[i] - rows, stop_by_segment[i], taker))
                stop_by_segment[i] -= rows
                rows_left[taker] -= rows
                rows_left[s.diagonal] += rows
                saved_price = prices.q * (taker in s.q) + prices.kv * (taker in s.kv)
                load[taker] -= rows * saved_price
                load[s.diagonal] += rows * (prices.q + prices.kv)
    owned += [
        (s.start, stop_by_segment[i], s.diagonal)
        for i, s in enumerate(row_segments)
        if stop_by_segment[i] > s.start
    ]
    return owned


def _loads(row_segments: list[Segment], n: int, prices: Prices) -> list[float]:
    load = [0.0] * n
    for s in row_segments:
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
    row_segments = sorted(segments(pieces, spans))
    row_readings: list[Reading] = []
    i = 0
    for start, stop, owner in owned:
        start_row = start
        while start_row < stop:
            while row_segments[i].stop <= start_row:
                i += 1
            stop_row, q, kv = min(stop, row_segments[i].stop), row_segments[i].q, row_segments[i].kv
            if beside_owner:
                q, kv = (tuple(r for r in readers if r != owner) for readers in (q, kv))
            row_readings.append(Reading(start_row, stop_row, owner, q, kv))
            start_row = stop_row
    return row_readings
