"""Ranks compute the rows they own, but as few ranks as possible share a long document.

Beside balancing.deal, which mixes heavy and light documents on every rank, this keeps ranks for
one document each where its length allows, and uses up what an area may exceed the mean by.
"""

from __future__ import annotations

from itertools import pairwise

import numpy as np

from tilewise.strategies.tiling.ownership import Owned
from tilewise.strategies.tiling.packing import divide


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
