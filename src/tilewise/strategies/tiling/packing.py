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
    row_limits = [int(cu[-1]) // n + (r < int(cu[-1]) % n) for r in range(n)]
    packed = divide(
        lengths, areas, row_limits, slack, scale * lengths * (mean / np.maximum(areas, 1))
    )
    area_left = np.full(n, (1 + slack) * mean)
    owned: list[Owned] = []
    for d, start, stop, r in packed.parts:
        area_left[r] -= (stop - start) * (stop + start + 1) / 2
        owned.append((int(cu[d]) + start, int(cu[d]) + stop, r))
    for d, kept in sorted(packed.kept.items(), key=lambda x: (-areas[x[0]], x[0])):
        owned += [
            (int(cu[d]) + a, int(cu[d]) + b, r)
            for a, b, r in _split(int(lengths[d]), kept, area_left)
        ]
    return sorted(owned)


def _split(length: int, kept: dict[int, int], gap: np.ndarray):
    """Rows of one document: a run for the small shares, both ends at once for the large ones."""
    rows = np.arange(length)
    document_area = length * (length + 1) / 2
    ranks = sorted(kept, key=lambda r: (kept[r], r))
    for i, r in enumerate(ranks):
        num_rows = kept[r]
        area_of_later = sum(max(0.0, gap[x]) for x in ranks[i + 1 :])
        area_before = np.concatenate([[0.0], np.cumsum(rows + 1.0)])
        if num_rows < kept[ranks[-1]] // 2:
            sizes = area_before[num_rows:] - area_before[: len(area_before) - num_rows]
            first_row = min(
                int(np.searchsorted(sizes, document_area - area_of_later)), len(sizes) - 1
            )
            rank_rows = rows[first_row : first_row + num_rows]
            rows = np.delete(rows, slice(first_row, first_row + num_rows))
        else:
            later_ranks = ranks[i:]
            target = document_area * max(gap[r], 1.0) / sum(max(gap[x], 1.0) for x in later_ranks)
            first_counts = np.arange(num_rows + 1)
            sizes = (
                area_before[first_counts]
                + area_before[-1]
                - area_before[len(rows) - (num_rows - first_counts)]
            )
            first_count = int(np.abs(sizes - target).argmin())
            second_start = len(rows) - (num_rows - first_count)
            rank_rows = np.concatenate([rows[:first_count], rows[second_start:]])
            rows = rows[first_count:second_start]
        size = float(rank_rows.sum() + len(rank_rows))
        document_area -= size
        gap[r] -= size
        edges = [0, *(np.flatnonzero(np.diff(rank_rows) != 1) + 1).tolist(), len(rank_rows)]
        for a, b in pairwise(edges):
            if b > a:
                yield int(rank_rows[a]), int(rank_rows[b - 1]) + 1, r


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
    n, rows_left, kept_rows = len(rooms), np.array(rooms), np.zeros(len(rooms), np.int64)
    mean = float(areas.sum()) / n
    order = np.argsort(-areas, kind="stable")
    lighter = areas.sum() - areas[order].cumsum()
    lighter /= np.maximum(1, lengths.sum() - lengths[order].cumsum())
    is_full = (
        areas[order] + np.maximum(0, rooms[-1] - lengths[order]) * lighter > (1 + slack) * mean
    )
    # a component without any pair has no area to share out, however long it is
    long_documents = order[(is_full | (lengths[order] > rooms[-1])) & (areas[order] > 0)].tolist()
    rows_of_long: dict[int, dict[int, int]] = {}
    next_rank = 0
    for d in long_documents:
        unit = max(1, min(rooms[-1], int(units[d])))
        first_rank, next_rank = next_rank, min(next_rank + int(lengths[d]) // unit, n)
        rows_of_long[d] = dict.fromkeys(range(first_rank, next_rank), unit)
        kept_rows[first_rank:next_rank] = unit
    rows_left -= kept_rows
    parts = _short(
        lengths,
        areas,
        rows_left,
        np.where(np.arange(n) < next_rank, 0.0, fill * mean),
        kept_rows,
        rows_of_long,
    )
    area_left = np.full(n, (1 + slack) * mean)
    for p in parts:
        area_left[p.rank] -= _triangular(areas[p.document], lengths[p.document], p.start, p.stop)
    shares = _long(
        {d: float(areas[d]) for d in long_documents}, rows_of_long, area_left, SLIVER * mean
    )
    return Packed(parts, shares, kept_rows.tolist(), rows_of_long)


def _short(lengths, areas, rows_left, area_left, kept_rows, rows_of_long) -> list[DocumentPart]:
    """Best fit, longest first, of short documents and of the last rows of long ones.

    A rank stays open to a document if the area left serves the rest of its tokens, too, at what
    the documents still to come need on average.
    """
    tokens = np.array(
        [int(m) - sum(rows_of_long.get(d, {}).values()) for d, m in enumerate(lengths)]
    )
    order = np.argsort(-tokens, kind="stable")
    sizes = areas[order] * (tokens[order] / np.maximum(1, lengths[order])) ** 2
    density = (sizes.sum() - sizes.cumsum()) / np.maximum(1, tokens.sum() - tokens[order].cumsum())
    parts: list[DocumentPart] = []
    for d, size, area_per_row in zip(order.tolist(), sizes.tolist(), density.tolist(), strict=True):
        start, stop = 0, int(tokens[d])
        while start < stop:
            spare_area = area_left - size - (rows_left - stop + start) * area_per_row
            has_room = rows_left >= stop - start
            if (has_room & (spare_area >= 0)).any():
                r = int(
                    np.argmin(
                        np.where(has_room & (spare_area >= 0), rows_left, np.iinfo(np.int64).max)
                    )
                )
            elif has_room.any():
                r = int(np.argmax(np.where(has_room, spare_area, -np.inf)))
            else:
                r = int(rows_left.argmax())
            part_stop = min(stop, start + int(rows_left[r]))
            rows_left[r] -= part_stop - start
            area_left[r] -= _triangular(size, stop, start, part_stop)
            if d in rows_of_long:
                rows_of_long[d][r] = rows_of_long[d].get(r, 0) + part_stop - start
                kept_rows[r] += part_stop - start
            else:
                parts.append(DocumentPart(d, start, part_stop, r))
            start = part_stop
    return parts


def _triangular(area: float, length: int, start: int, stop: int) -> float:
    """About the area of rows [start, stop) of a component, as if it were causal."""
    return float(area) * (stop * stop - start * start) / (length * length)


def _long(
    areas: dict[int, float], rows_of_long, area_left: np.ndarray, slack: float
) -> list[Share]:
    """Areas of long documents into the gaps: first where their rows are, then as few as will do."""
    area_by_rank: dict[int, dict[int, float]] = {d: {} for d in areas}
    area_needed = dict(areas)

    def take(d: int, r: int, size: float) -> None:
        area_by_rank[d][r] = area_by_rank[d].get(r, 0.0) + size
        area_left[r] -= size
        area_needed[d] -= size

    for d in areas:
        for r in rows_of_long[d]:
            take(d, r, max(0.0, min(float(area_left[r]), area_needed[d])))
    for d in sorted(areas, key=lambda d: (-area_needed[d], d)):
        while area_needed[d] > slack or not any(area_by_rank[d].values()):
            is_close = np.abs(area_left - area_needed[d]) <= slack
            if is_close.any():
                r = int(np.argmin(np.where(is_close, np.abs(area_left - area_needed[d]), np.inf)))
                take(d, r, area_needed[d])
            elif area_left.max() <= area_needed[d]:
                r = int(area_left.argmax())
                take(d, r, area_left[r] if area_left[r] > slack else area_needed[d])
            else:
                take(
                    d,
                    int(np.argmin(np.where(area_left >= area_needed[d], area_left, np.inf))),
                    area_needed[d],
                )
    shares = []
    for d in sorted(areas):
        scale = areas[d] / sum(area_by_rank[d].values())
        parts, ranks = zip(
            *sorted((a * scale, r) for r, a in area_by_rank[d].items() if a > 0), strict=True
        )
        shares.append(Share(d, ranks, parts, tuple(rows_of_long[d].get(r, 0) for r in ranks)))
    return shares


def level(shares: list[Share], other_load: np.ndarray, limit: float) -> list[Share]:
    """Move area within long documents from ranks that exceed the limit to ranks that do not."""
    parts = [np.array(s.areas) for s in shares]
    ranks = [np.array(s.ranks) for s in shares]
    for _ in range(20):
        load = other_load.copy()
        for r, a in zip(ranks, parts, strict=True):
            np.add.at(load, r, a)
        if load.max() <= limit:
            break
        for r, a in zip(ranks, parts, strict=True):
            excess = np.minimum(np.maximum(load[r] - limit, 0.0), a / 2)
            room = np.maximum(limit - load[r], 0.0)
            if excess.any() and room.any():
                moved_area = min(excess.sum(), room.sum())
                a += room * (moved_area / room.sum()) - excess * (moved_area / excess.sum())
    return [s._replace(areas=tuple(a.tolist())) for s, a in zip(shares, parts, strict=True)]
