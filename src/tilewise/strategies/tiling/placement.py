"""Place the components of a mask on ranks: short ones whole, long ones cut into regions.

Tokens and areas are divided first (packing), then the lines are drawn (cutting), then rows that
several ranks read get the owner that saves most (ownership).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import permutations
from math import inf
from typing import NamedTuple

import numpy as np

from tilewise.strategies.tiling.guillotine import Cut, Prices, TooSmallError, apply, search
from tilewise.strategies.tiling.ownership import Owned, Reading, own, readings
from tilewise.strategies.tiling.packing import Share, divide, level
from tilewise.strategies.tiling.regions import Piece, Region, Table
from tilewise.strategies.tiling.routing import LSE, Flow


@dataclass(frozen=True)
class Placement:
    """Who computes which pieces, and who owns which rows: (start, stop, rank), ascending.

    spans: the rows of components whose pieces may leave some out.
    """

    world_size: int
    pieces: tuple[Piece, ...]
    owned: tuple[Owned, ...]
    spans: Mapping[int, tuple[int, int]] = field(default_factory=dict)

    @cached_property
    def areas(self) -> np.ndarray:
        """Allowed pairs that every rank computes."""
        total = np.zeros(self.world_size)
        for piece in self.pieces:
            total[piece.rank] += piece.area
        return total

    @property
    def imbalance(self) -> float:
        """Largest over mean area; 1 of an empty mask."""
        areas = self.areas
        return float(areas.max() / areas.mean()) if areas.any() else 1.0

    @cached_property
    def readings(self) -> list[Reading]:
        """All rows, by who owns and who else reads them."""
        return readings(self.pieces, self.owned, self.spans)

    def flows(self) -> list[Flow]:
        """What has to travel."""
        return [Flow(r.stop - r.start, r.owner, r.q, r.kv) for r in self.readings if r.q or r.kv]


class Variant(NamedTuple):
    """slack: of a rank's area over the mean; scale: rows kept for one rank of a long component, of
    the most that it may want."""

    slack: float
    scale: float


def attempt(tables: Sequence[Table], n: int, kv_bytes: float, variant: Variant) -> Placement:
    """Place the components of any mask, given in the order of their rows.

    Args:
        kv_bytes: bytes of a row's k and v beside those of its q.
    """
    slack, scale = variant
    lengths = np.array([t.length for t in tables])
    areas = np.array([float(t.size(t.whole())) for t in tables])
    starts = (np.cumsum(lengths) - lengths).tolist()
    num_tokens, mean = int(lengths.sum()), float(areas.sum()) / n
    rooms = [num_tokens // n + (r < num_tokens % n) for r in range(n)]
    prices = Prices(2 + LSE, kv_bytes, mean)
    units = scale * np.minimum(rooms[-1], lengths * np.sqrt(mean / np.maximum(areas, 1)))
    packed = divide(lengths, areas, rooms, slack, units)
    short, kept, loads = [], [], np.zeros(n)
    for d, start, stop, r in packed.parts:
        short.append(_piece(d, r, starts[d], *tables[d].strip(start, stop)))
        kept.append((starts[d] + start, starts[d] + stop, r))
        loads[r] += short[-1].area
    pieces, spans = [], {}
    for share in level(packed.shares, loads, (1 + slack) * mean):
        d = share.document
        table, spans[d] = tables[d], (starts[d], starts[d] + int(lengths[d]))
        seated, tree = _cut(share, table, prices)
        regions = apply(tree, table, seated.areas, mean)
        for r, (region, size) in zip(seated.ranks, regions, strict=True):
            pieces.append(_piece(d, r, starts[d], region, size))
    owned = own(pieces, packed.rooms, prices, spans)
    return Placement(n, (*pieces, *short), tuple(sorted(owned + kept)), spans)


def _piece(component: int, rank: int, at: int, region: Region, size: float) -> Piece:
    return Piece(component, rank, Region(*(x + at for x in region)), size)


def _cut(share: Share, table: Table, prices: Prices) -> tuple[Share, Cut | None]:
    """The cheapest cut of a document over some orders of its shares."""
    found = []
    for i, order in enumerate(_orders(share)):
        ordered = _permuted(share, order)
        cost, tree = search(table, ordered.areas, ordered.rooms, prices)
        found.append((cost, i, ordered, tree))
    cost, _, ordered, tree = min(found, key=lambda f: f[:2])
    if cost == inf:
        raise TooSmallError(f"{table.length} rows cannot be cut for {len(share.ranks)} ranks")
    return _seat(ordered, tree, table, prices.area), tree


def _orders(share: Share) -> list[tuple[int, ...]]:
    """Orders of shares worth a try: all of a few, small ones first and last of many."""
    size = share.areas[-1]
    kind = [(round(4 * a / size), m > 0) for a, m in zip(share.areas, share.rooms, strict=True)]
    some = range(len(kind))
    if len(kind) <= 3:
        return list({tuple(kind[i] for i in p): p for p in permutations(some)}.values())
    mixed = sorted(some, key=lambda i: (kind[i][0] > 2, share.rooms[i]))
    orders = [tuple(some), tuple(reversed(some)), tuple(mixed), tuple(reversed(mixed))]
    orders = orders if len(kind) <= 8 else orders[:2]
    return list({tuple(kind[i] for i in p): p for p in orders}.values())


def _permuted(share: Share, order) -> Share:
    """The same share with its ranks in another order."""
    ranks, areas, rooms = (
        tuple(values[i] for i in order) for values in (share.ranks, share.areas, share.rooms)
    )
    return Share(share.document, ranks, areas, rooms)


def _seat(share: Share, tree: Cut | None, table: Table, mean: float) -> Share:
    """Ranks with room for rows take the regions on the diagonal, among those of like area."""
    regions = apply(tree, table, share.areas, mean)
    diagonal = [min(r.q1, r.k1) - max(r.q0, r.k0) for r, _ in regions]
    whole = [i for i, a in enumerate(share.areas) if a > 0.75 * max(share.areas)]
    order = list(range(len(regions)))
    ranks = sorted(whole, key=lambda i: (-share.rooms[i], i))
    for seat, i in zip(sorted(whole, key=lambda i: (-diagonal[i], i)), ranks, strict=True):
        order[seat] = i
    return _permuted(share, order)
