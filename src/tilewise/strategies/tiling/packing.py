"""Documents packed into ranks: long ones cut into tiles, short ones whole."""

from itertools import pairwise
from typing import NamedTuple

import numpy as np

from tilewise.strategies.tiling.ownership import Owned


def own_rows_apart(cu: np.ndarray, n: int, slack: float, scale: float) -> list[Owned]:
    """Owners of the rows of causal documents; scale: of the rows that fill a rank's area."""
    lengths = np.diff(cu)
    areas = lengths * (lengths + 1) / 2
    mean = float(areas.sum()) / n
    rooms = [int(cu[-1]) // n + (r < int(cu[-1]) % n) for r in range(n)]
    packed = divide(lengths, areas, rooms, slack, scale * lengths * (mean / np.maximum(areas, 1)))
    gap = np.full(n, (1 + slack) * mean)
    owned: list[Owned] = []
    for d, start, stop, r in packed.parts:
        gap[r] -= (stop - start) * (stop + start + 1) / 2
        owned.append((int(cu[d]) + start, int(cu[d]) + stop, r))
    for d, kept in sorted(packed.kept.items(), key=lambda x: (-areas[x[0]], x[0])):
        owned += [
            (int(cu[d]) + a, int(cu[d]) + b, r) for a, b, r in _split(int(lengths[d]), kept, gap)
        ]
    return sorted(owned)


def _split(length: int, kept: dict[int, int], gap: np.ndarray):
    """Rows of one document: a run for the small shares, both ends at once for the large ones."""
    rows = np.arange(length)
    left = length * (length + 1) / 2
    ranks = sorted(kept, key=lambda r: (kept[r], r))
    for i, r in enumerate(ranks):
        many = kept[r]
        rest = sum(max(0.0, gap[x]) for x in ranks[i + 1 :])
        total = np.concatenate([[0.0], np.cumsum(rows + 1.0)])
        if many < kept[ranks[-1]] // 2:
            sizes = total[many:] - total[: len(total) - many]
            at = min(int(np.searchsorted(sizes, left - rest)), len(sizes) - 1)
            mine, rows = rows[at : at + many], np.delete(rows, slice(at, at + many))
        else:
            same = ranks[i:]
            target = left * max(gap[r], 1.0) / sum(max(gap[x], 1.0) for x in same)
            top = np.arange(many + 1)
            sizes = total[top] + total[-1] - total[len(rows) - (many - top)]
            h = int(np.abs(sizes - target).argmin())
            end = len(rows) - (many - h)
            mine, rows = np.concatenate([rows[:h], rows[end:]]), rows[h:end]
        size = float(mine.sum() + len(mine))
        left -= size
        gap[r] -= size
        edges = [0, *(np.flatnonzero(np.diff(mine) != 1) + 1).tolist(), len(mine)]
        for a, b in pairwise(edges):
            if b > a:
                yield int(mine[a]), int(mine[b - 1]) + 1, r


SLIVER = 0.003  # of the mean area: not worth a region of its own


class Share(NamedTuple):
    """The ranks that compute a document, the area each takes of it and the rows it may own."""

    document: int
    ranks: tuple[int, ...]
    areas: tuple[float, ...]
    rooms: tuple[int, ...]


class DocumentPart(NamedTuple):
    """Rows [start, stop) of a short document on the rank that owns and computes them."""

    document: int
    start: int
    stop: int
    rank: int


class Packed(NamedTuple):
    """Short documents by rank, the shares of the long ones, and the rooms kept for their rows."""

    parts: list[DocumentPart]
    shares: list[Share]
    rooms: list[int]
    kept: dict[int, dict[int, int]]  # of those rooms: long document -> rank -> rows


def divide(
    lengths: np.ndarray, areas: np.ndarray, rooms: list[int], slack: float, units, fill: float = 1.0
) -> Packed:
    """Share components out: exactly `rooms` tokens a rank, at most (1 + slack) mean area.

    Args:
        lengths, areas: rows and allowed pairs of every component.
        units: of every component, if long, the rows kept for each of its ranks.
        fill: of the mean, the area up to which short components fill ranks at first.
    """
    n, room, kept = len(rooms), np.array(rooms), np.zeros(len(rooms), np.int64)
    mean = float(areas.sum()) / n
    order = np.argsort(-areas, kind="stable")
    lighter = areas.sum() - areas[order].cumsum()
    lighter /= np.maximum(1, lengths.sum() - lengths[order].cumsum())
    full = areas[order] + np.maximum(0, rooms[-1] - lengths[order]) * lighter > (1 + slack) * mean
    # a component without any pair has no area to share out, however long it is
    long = order[(full | (lengths[order] > rooms[-1])) & (areas[order] > 0)].tolist()
    bases: dict[int, dict[int, int]] = {}
    free = 0
    for d in long:
        unit = max(1, min(rooms[-1], int(units[d])))
        first, free = free, min(free + int(lengths[d]) // unit, n)
        bases[d] = dict.fromkeys(range(first, free), unit)
        kept[first:free] = unit
    room -= kept
    parts = _short(
        lengths, areas, room, np.where(np.arange(n) < free, 0.0, fill * mean), kept, bases
    )
    gap = np.full(n, (1 + slack) * mean)
    for p in parts:
        gap[p.rank] -= _triangular(areas[p.document], lengths[p.document], p.start, p.stop)
    shares = _long({d: float(areas[d]) for d in long}, bases, gap, SLIVER * mean)
    return Packed(parts, shares, kept.tolist(), bases)


def _short(lengths, areas, room, gap, kept, bases) -> list[DocumentPart]:
    """Best fit, longest first, of short documents and of the last rows of long ones.

    A rank stays open to a document if the area left serves the rest of its tokens, too, at what
    the documents still to come need on average.
    """
    tokens = np.array([int(m) - sum(bases.get(d, {}).values()) for d, m in enumerate(lengths)])
    order = np.argsort(-tokens, kind="stable")
    sizes = areas[order] * (tokens[order] / np.maximum(1, lengths[order])) ** 2
    density = (sizes.sum() - sizes.cumsum()) / np.maximum(1, tokens.sum() - tokens[order].cumsum())
    parts: list[DocumentPart] = []
    for d, size, rest in zip(order.tolist(), sizes.tolist(), density.tolist(), strict=True):
        at, stop = 0, int(tokens[d])
        while at < stop:
            spare = gap - size - (room - stop + at) * rest
            fits = room >= stop - at
            if (fits & (spare >= 0)).any():
                r = int(np.argmin(np.where(fits & (spare >= 0), room, np.iinfo(np.int64).max)))
            elif fits.any():
                r = int(np.argmax(np.where(fits, spare, -np.inf)))
            else:
                r = int(room.argmax())
            end = min(stop, at + int(room[r]))
            room[r] -= end - at
            gap[r] -= _triangular(size, stop, at, end)
            if d in bases:
                bases[d][r] = bases[d].get(r, 0) + end - at
                kept[r] += end - at
            else:
                parts.append(DocumentPart(d, at, end, r))
            at = end
    return parts


def _triangular(area: float, length: int, start: int, stop: int) -> float:
    """About the area of rows [start, stop) of a component, as if it were causal."""
    return float(area) * (stop * stop - start * start) / (length * length)


def _long(areas: dict[int, float], bases, gap: np.ndarray, slack: float) -> list[Share]:
    """Areas of long documents into the gaps: first where their rows are, then as few as will do."""
    taken: dict[int, dict[int, float]] = {d: {} for d in areas}
    need = dict(areas)

    def take(d: int, r: int, size: float) -> None:
        taken[d][r] = taken[d].get(r, 0.0) + size
        gap[r] -= size
        need[d] -= size

    for d in areas:
        for r in bases[d]:
            take(d, r, max(0.0, min(float(gap[r]), need[d])))
    for d in sorted(areas, key=lambda d: (-need[d], d)):
        while need[d] > slack or not any(taken[d].values()):
            near = np.abs(gap - need[d]) <= slack
            if near.any():
                r = int(np.argmin(np.where(near, np.abs(gap - need[d]), np.inf)))
                take(d, r, need[d])
            elif gap.max() <= need[d]:
                r = int(gap.argmax())
                take(d, r, gap[r] if gap[r] > slack else need[d])
            else:
                take(d, int(np.argmin(np.where(gap >= need[d], gap, np.inf))), need[d])
    shares = []
    for d in sorted(areas):
        whole = areas[d] / sum(taken[d].values())
        parts, ranks = zip(
            *sorted((a * whole, r) for r, a in taken[d].items() if a > 0), strict=True
        )
        shares.append(Share(d, ranks, parts, tuple(bases[d].get(r, 0) for r in ranks)))
    return shares


def level(shares: list[Share], other: np.ndarray, limit: float) -> list[Share]:
    """Move area within long documents from ranks that exceed the limit to ranks that do not."""
    parts = [np.array(s.areas) for s in shares]
    ranks = [np.array(s.ranks) for s in shares]
    for _ in range(20):
        load = other.copy()
        for r, a in zip(ranks, parts, strict=True):
            np.add.at(load, r, a)
        if load.max() <= limit:
            break
        for r, a in zip(ranks, parts, strict=True):
            over = np.minimum(np.maximum(load[r] - limit, 0.0), a / 2)
            free = np.maximum(limit - load[r], 0.0)
            if over.any() and free.any():
                moved = min(over.sum(), free.sum())
                a += free * (moved / free.sum()) - over * (moved / over.sum())
    return [s._replace(areas=tuple(a.tolist())) for s, a in zip(shares, parts, strict=True)]
