"""Which rank computes which region: an assignment of regions to ranks, chosen among several."""

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise, permutations
from math import inf
from operator import itemgetter
from typing import NamedTuple

import numpy as np

from tilewise.layouts.balanced import deal, running
from tilewise.masks.base import Mask
from tilewise.masks.components import documents
from tilewise.strategies.tiling.ownership import Owned, Reading, own, readings
from tilewise.strategies.tiling.packing import Share, divide, level, own_rows_apart
from tilewise.strategies.tiling.regions import (
    Cut,
    PlacedRegion,
    Prices,
    Region,
    RegionTable,
    TooSmallError,
    Triangle,
    apply,
    search,
    tables,
)
from tilewise.strategies.tiling.routing import LSE, RowReaders, received

Array = np.ndarray


def assign(worth: Array) -> Array:
    """A different column for every row so that the sum of worth[row, column] is largest.

    Args:
        worth: [num_rows, num_columns], at least as many columns as rows.
    Source: Kuhn 1955; shortest augmenting paths as in Jonker and Volgenant 1987. O(n^3).
    """
    cost = worth.max(initial=0) - worth
    num_rows, num_columns = cost.shape
    of_row, of_column = np.zeros(num_rows), np.zeros(num_columns + 1)
    row_at = np.full(num_columns + 1, -1)  # the last column stands for the row to be placed
    for row in range(num_rows):
        row_at[num_columns] = row
        column, path = num_columns, np.full(num_columns, num_columns)
        least, seen = np.full(num_columns, np.inf), np.zeros(num_columns + 1, bool)
        while row_at[column] >= 0:
            seen[column] = True
            i = row_at[column]
            reduced = cost[i] - of_row[i] - of_column[:-1]
            nearer = ~seen[:-1] & (reduced < least)
            least[nearer], path[nearer] = reduced[nearer], column
            following = int(np.where(seen[:-1], np.inf, least).argmin())
            step = least[following]
            of_row[row_at[seen]] += step
            of_column[seen] -= step
            least[~seen[:-1]] -= step
            column = following
        while column != num_columns:
            row_at[column] = row_at[path[column]]
            column = path[column]
    columns = np.empty(num_rows, np.int64)
    taken = np.flatnonzero(row_at[:-1] >= 0)
    columns[row_at[taken]] = taken
    return columns


@dataclass(frozen=True)
class Placement:
    """Who computes which pieces, and who owns which rows: (start, stop, rank), ascending.

    spans: the rows of components whose pieces may leave some out.
    """

    world_size: int
    pieces: tuple[PlacedRegion, ...]
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
        return float(self.areas.max() / self.areas.mean()) if self.areas.any() else 1.0

    @cached_property
    def readings(self) -> list[Reading]:
        """All rows, by who owns and who else reads them."""
        return readings(self.pieces, self.owned, self.spans)

    def flows(self) -> list[RowReaders]:
        """What has to travel."""
        return [
            RowReaders(r.stop - r.start, r.owner, r.q, r.kv) for r in self.readings if r.q or r.kv
        ]


class Balance(NamedTuple):
    """How level ranks are to be: largest over mean work - 1, and the work of a token in pairs."""

    slack: float = 0.03
    linear: float = 0.0

    def __str__(self) -> str:
        """As arguments that follow others; empty if they are the defaults."""
        return "" if self == LEVEL else f", slack={self.slack}, linear={self.linear}"

    def limit(self, area: float, tokens: float) -> float:
        """Largest over mean area of ranks that own equally many tokens; area, tokens: means."""
        return 1 + self.slack * (1 + self.linear * tokens / max(area, 1.0))


LEVEL = Balance()


class PackingLimits(NamedTuple):
    """How to pack components into ranks, areas as shares of the mean."""

    slack: float  # over the mean that a rank's area may be
    scale: float  # rows kept for one rank of a long component, of the most that it may want
    fill: float = 1.0  # area up to which ranks are filled at first


def attempt(
    tables: Sequence[RegionTable], n: int, kv_bytes: float, variant: PackingLimits
) -> Placement:
    """Place the components of any mask, given in the order of their rows.

    Args:
        kv_bytes: bytes of a row's k and v beside those of its q.
    """
    slack, scale, fill = variant
    lengths = np.array([t.length for t in tables])
    areas = np.array([float(t.size(t.whole())) for t in tables])
    starts = (np.cumsum(lengths) - lengths).tolist()
    num_tokens, mean = int(lengths.sum()), float(areas.sum()) / n
    rooms = [num_tokens // n + (r < num_tokens % n) for r in range(n)]
    prices = Prices(2 + LSE, kv_bytes, mean)
    units = scale * np.minimum(rooms[-1], lengths * np.sqrt(fill * mean / np.maximum(areas, 1)))
    packed = divide(lengths, areas, rooms, slack, units, fill)
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


def _piece(component: int, rank: int, at: int, region: Region, size: float) -> PlacedRegion:
    return PlacedRegion(component, rank, Region(*(x + at for x in region)), size)


def _cut(share: Share, table: RegionTable, prices: Prices) -> tuple[Share, Cut | None]:
    """The cheapest cut of a document over some orders of its shares."""
    shares = (_permuted(share, order) for order in _orders(share))
    found = [(*search(table, x.areas, x.rooms, prices), x) for x in shares]
    cost, tree, ordered = min(found, key=lambda f: f[0])
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
    return Share(share.document, *(tuple(values[i] for i in order) for values in share[1:]))


def _seat(share: Share, tree: Cut | None, table: RegionTable, mean: float) -> Share:
    """Ranks with room for rows take the regions on the diagonal, among those of like area."""
    regions = apply(tree, table, share.areas, mean)
    diagonal = [min(r.q1, r.k1) - max(r.q0, r.k0) for r, _ in regions]
    whole = [i for i, a in enumerate(share.areas) if a > 0.75 * max(share.areas)]
    order = list(range(len(regions)))
    ranks = sorted(whole, key=lambda i: (-share.rooms[i], i))
    for seat, i in zip(sorted(whole, key=lambda i: (-diagonal[i], i)), ranks, strict=True):
        order[seat] = i
    return _permuted(share, order)


VARIANTS = tuple(
    PackingLimits(*x)
    for x in (
        *((0.018, 0.9), (0.018, 0.8), (0.018, 1.0), (0.005, 0.9), (0.018, 0.7), (0.005, 0.8)),
        *((0.018, 0.6), (0.005, 1.0), (0.005, 0.7), (0.018, 0.5), (0.005, 0.6), (0.018, 0.4)),
        *((0.025, 0.9), (0.025, 0.8), (0.025, 1.0), (0.025, 0.7), (0.025, 0.6)),
        *((0.0, 0.9), (0.0, 0.8)),
    )
)
SCALES = (1.0, 0.8, 0.6, 0.4)  # tried with a given slack
APART = (1.0, 0.95, 0.9, 0.8, 0.7)  # rows that fill a rank, of what its area would allow
TRIES = 152  # of all ranks together: the more ranks, the less is left to chance
FEW = 16  # ranks up to which all of these are tried
MARGIN = 0.012  # of the mean area, by which lines may miss
BUSIEST = 0.35  # what the busiest rank counts beside the mean


def place(
    mask: Mask, num_tokens: int, n: int, kv_bytes: float, balance: Balance
) -> Placement | None:
    """Place a mask's blocks and rows on n ranks: equal tokens, level work, few rows moved.

    None if it can't be cut for so many ranks (few tokens, or a coarse mask).
    """
    cu = documents(mask, num_tokens)
    if cu is None:
        return place_tables(tables(mask, num_tokens), n, kv_bytes, balance)
    return place_documents(cu, n, kv_bytes, balance)


def place_documents(cu: np.ndarray, n: int, kv_bytes: float, balance: Balance) -> Placement:
    """Place causal documents with these boundaries."""
    total = running(np.arange(1.0, cu[-1] + 1) - np.repeat(cu[:-1], np.diff(cu)))
    limit = balance.limit(float(total[-1]) / n, cu[-1] / n)
    rows = [deal(total, cu, n)]
    if n <= FEW:
        rows += [own_rows_apart(cu, n, VARIANTS[0].slack, x) for x in APART]
    if balance != LEVEL:
        edges = [int(cu[-1]) * r // n for r in range(n + 1)]
        rows.append([(a, b, r) for r, (a, b) in enumerate(pairwise(edges))])
    own = (
        (_score(p, kv_bytes * keys_read(p), limit), p) for p in (own_rows(cu, x, n) for x in rows)
    )
    best, simple = min(own, key=itemgetter(0))
    triangles = [Triangle(m) for m in np.diff(cu).tolist()]
    tiled = place_tables(triangles, n, kv_bytes, balance, max(2, TRIES // n))
    if tiled is None or best < _score(tiled, received(tiled.flows(), n, kv_bytes), limit):
        return simple
    return tiled


def place_tables(
    tables: Sequence[RegionTable], n: int, kv_bytes: float, balance: Balance, tries: int = 2
) -> Placement | None:
    """Place the components of any mask; tables in the order of their rows.

    None if they have too few rows, or cells, to be cut for so many ranks.
    """
    area = sum(float(t.size(t.whole())) for t in tables) / n
    limit = balance.limit(area, sum(t.length for t in tables) / n)
    variants, candidates = VARIANTS[:tries], []
    if balance != LEVEL:
        spare = limit - 1
        variants = [PackingLimits(max(0.0, spare - MARGIN), x, 1 + spare / 2) for x in SCALES]
    for variant in variants:
        with suppress(TooSmallError):
            candidates.append(attempt(tables, n, kv_bytes, variant))
    return min(
        candidates, key=lambda p: _score(p, received(p.flows(), n, kv_bytes), limit), default=None
    )


def _score(placement: Placement, load: np.ndarray, limit: float) -> tuple[float, float]:
    """Excess of area beyond the limit, then rows received: mean, and busiest."""
    over = max(0.0, placement.imbalance - limit)
    return over, float(load.mean() + BUSIEST * load.max())


def own_rows(cu: np.ndarray, owned: Sequence[Owned], n: int) -> Placement:
    """Every rank computes the rows it owns of causal documents: only keys and values move."""
    pieces = []
    for start, stop, rank in owned:
        while start < stop:
            d = int(np.searchsorted(cu, start, side="right")) - 1
            end, at = min(stop, int(cu[d + 1])), int(cu[d])
            size = (end - start) * (end + start + 1 - 2 * at) / 2
            pieces.append(PlacedRegion(d, rank, Region(start, end, at, end), size))
            start = end
    return Placement(n, tuple(pieces), tuple(owned))


def keys_read(placement: Placement) -> np.ndarray:
    """Rows of k and v every rank reads but does not own, when it computes its own rows."""
    last: dict[tuple[int, int], int] = {}
    rows = np.zeros(placement.world_size)
    for component, rank, region, _ in sorted(placement.pieces, key=lambda p: p.region):
        rows[rank] += region.q0 - last.get((component, rank), region.k0)
        last[component, rank] = region.q1
    return rows
