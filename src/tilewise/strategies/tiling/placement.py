"""Placement of regions on ranks: several assignments are made, and the best one is chosen."""

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise, permutations
from math import inf
from operator import itemgetter
from typing import NamedTuple

import numpy as np

from tilewise.layouts.balanced import assign_rows, running
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
    row_potentials, column_potentials = np.zeros(num_rows), np.zeros(num_columns + 1)
    row_of_column = np.full(num_columns + 1, -1)  # the last column stands for the row to be placed
    for row in range(num_rows):
        row_of_column[num_columns] = row
        column, path = num_columns, np.full(num_columns, num_columns)
        lowest_cost, visited = np.full(num_columns, np.inf), np.zeros(num_columns + 1, bool)
        while row_of_column[column] >= 0:
            visited[column] = True
            i = row_of_column[column]
            reduced = cost[i] - row_potentials[i] - column_potentials[:-1]
            is_lower = ~visited[:-1] & (reduced < lowest_cost)
            lowest_cost[is_lower], path[is_lower] = reduced[is_lower], column
            next_column = int(np.where(visited[:-1], np.inf, lowest_cost).argmin())
            step = lowest_cost[next_column]
            row_potentials[row_of_column[visited]] += step
            column_potentials[visited] -= step
            lowest_cost[~visited[:-1]] -= step
            column = next_column
        while column != num_columns:
            row_of_column[column] = row_of_column[path[column]]
            column = path[column]
    columns = np.empty(num_rows, np.int64)
    filled_columns = np.flatnonzero(row_of_column[:-1] >= 0)
    columns[row_of_column[filled_columns]] = filled_columns
    return columns


@dataclass(frozen=True)
class Placement:
    """An assignment of pieces to the ranks that compute them, and of rows to their owners.

    Attributes:
        owned: (start, stop, rank), ascending.
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
        """All rows, with their owner and the other ranks that read them."""
        return readings(self.pieces, self.owned, self.spans)

    def flows(self) -> list[RowReaders]:
        """Return the rows that have to travel, with owner and readers."""
        return [
            RowReaders(r.stop - r.start, r.owner, r.q, r.kv) for r in self.readings if r.q or r.kv
        ]


class Balance(NamedTuple):
    """Limit of unequal work: largest over mean work - 1, and the work of a token in pairs."""

    slack: float = 0.03
    linear: float = 0.0

    def __str__(self) -> str:
        """Return it as arguments that follow others in a call; empty if they are the defaults."""
        return "" if self == LEVEL else f", slack={self.slack}, linear={self.linear}"

    def limit(self, area: float, tokens: float) -> float:
        """Largest over mean area of ranks that own equally many tokens; area, tokens: means."""
        return 1 + self.slack * (1 + self.linear * tokens / max(area, 1.0))


LEVEL = Balance()


class PackingLimits(NamedTuple):
    """Parameters of packing components into ranks; areas are shares of a rank's mean area."""

    slack: float  # over the mean that a rank's area may be
    scale: float  # rows kept for one rank of a long component, of the most that it may want
    fill: float = 1.0  # area up to which ranks are filled at first


def attempt(
    tables: Sequence[RegionTable], n: int, kv_bytes: float, variant: PackingLimits
) -> Placement:
    """Place the components of any mask on n ranks.

    Args:
        tables: of the components, in the order of their rows.
        kv_bytes: bytes of a row's k and v relative to those of its q.
        variant: limits within which components are packed.
    """
    slack, scale, fill = variant
    lengths = np.array([t.length for t in tables])
    areas = np.array([float(t.size(t.whole())) for t in tables])
    starts = (np.cumsum(lengths) - lengths).tolist()
    num_tokens, mean = int(lengths.sum()), float(areas.sum()) / n
    row_limits = [num_tokens // n + (r < num_tokens % n) for r in range(n)]
    prices = Prices(2 + LSE, kv_bytes, mean)
    units = scale * np.minimum(
        row_limits[-1], lengths * np.sqrt(fill * mean / np.maximum(areas, 1))
    )
    packed = divide(lengths, areas, row_limits, slack, units, fill)
    short_pieces, kept_rows, loads = [], [], np.zeros(n)
    for d, start, stop, r in packed.parts:
        short_pieces.append(_piece(d, r, starts[d], *tables[d].strip(start, stop)))
        kept_rows.append((starts[d] + start, starts[d] + stop, r))
        loads[r] += short_pieces[-1].area
    pieces, spans = [], {}
    for share in level(packed.shares, loads, (1 + slack) * mean):
        d = share.document
        table, spans[d] = tables[d], (starts[d], starts[d] + int(lengths[d]))
        seated_share, tree = _cut(share, table, prices)
        regions = apply(tree, table, seated_share.areas, mean)
        for r, (region, size) in zip(seated_share.ranks, regions, strict=True):
            pieces.append(_piece(d, r, starts[d], region, size))
    owned = own(pieces, packed.rooms, prices, spans)
    return Placement(n, (*pieces, *short_pieces), tuple(sorted(owned + kept_rows)), spans)


def _piece(component: int, rank: int, at: int, region: Region, size: float) -> PlacedRegion:
    return PlacedRegion(component, rank, Region(*(x + at for x in region)), size)


def _cut(share: Share, table: RegionTable, prices: Prices) -> tuple[Share, Cut | None]:
    """The cheapest cut of a document over some orders of its shares."""
    shares = (_permuted(share, order) for order in _orders(share))
    results = [(*search(table, x.areas, x.rooms, prices), x) for x in shares]
    cost, tree, ordered = min(results, key=lambda f: f[0])
    if cost == inf:
        raise TooSmallError(f"{table.length} rows cannot be cut for {len(share.ranks)} ranks")
    return _seat(ordered, tree, table, prices.area), tree


def _orders(share: Share) -> list[tuple[int, ...]]:
    """Orders of shares to try: all orders of up to three shares, of more a few sorted ones."""
    size = share.areas[-1]
    kinds = [(round(4 * a / size), m > 0) for a, m in zip(share.areas, share.rooms, strict=True)]
    indices = range(len(kinds))
    if len(kinds) <= 3:
        return list({tuple(kinds[i] for i in p): p for p in permutations(indices)}.values())
    mixed_order = sorted(indices, key=lambda i: (kinds[i][0] > 2, share.rooms[i]))
    orders = [
        tuple(indices),
        tuple(reversed(indices)),
        tuple(mixed_order),
        tuple(reversed(mixed_order)),
    ]
    orders = orders if len(kinds) <= 8 else orders[:2]
    return list({tuple(kinds[i] for i in p): p for p in orders}.values())


def _permuted(share: Share, order) -> Share:
    """Return the same share with its ranks in another order."""
    return Share(share.document, *(tuple(values[i] for i in order) for values in share[1:]))


def _seat(share: Share, tree: Cut | None, table: RegionTable, mean: float) -> Share:
    """Assign a document's regions so that ranks with room for more rows get regions on the
    diagonal.

    Only shares of about the same area are exchanged.
    """
    regions = apply(tree, table, share.areas, mean)
    diagonal = [min(r.q1, r.k1) - max(r.q0, r.k0) for r, _ in regions]
    large_shares = [i for i, a in enumerate(share.areas) if a > 0.75 * max(share.areas)]
    order = list(range(len(regions)))
    ranks = sorted(large_shares, key=lambda i: (-share.rooms[i], i))
    for region_index, i in zip(
        sorted(large_shares, key=lambda i: (-diagonal[i], i)), ranks, strict=True
    ):
        order[region_index] = i
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
    owner_choices = [assign_rows(total, cu, n)]
    if n <= FEW:
        owner_choices += [own_rows_apart(cu, n, VARIANTS[0].slack, x) for x in APART]
    if balance != LEVEL:
        edges = [int(cu[-1]) * r // n for r in range(n + 1)]
        owner_choices.append([(a, b, r) for r, (a, b) in enumerate(pairwise(edges))])
    own_row_results = (
        (_score(p, kv_bytes * keys_read(p), limit), p)
        for p in (own_rows(cu, x, n) for x in owner_choices)
    )
    best, own_rows_placement = min(own_row_results, key=itemgetter(0))
    triangles = [Triangle(m) for m in np.diff(cu).tolist()]
    tiled = place_tables(triangles, n, kv_bytes, balance, max(2, TRIES // n))
    if tiled is None or best < _score(tiled, received(tiled.flows(), n, kv_bytes), limit):
        return own_rows_placement
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
        allowed_excess = limit - 1
        variants = [
            PackingLimits(max(0.0, allowed_excess - MARGIN), x, 1 + allowed_excess / 2)
            for x in SCALES
        ]
    for variant in variants:
        with suppress(TooSmallError):
            candidates.append(attempt(tables, n, kv_bytes, variant))
    return min(
        candidates, key=lambda p: _score(p, received(p.flows(), n, kv_bytes), limit), default=None
    )


def _score(placement: Placement, load: np.ndarray, limit: float) -> tuple[float, float]:
    """Excess of area beyond the limit, then rows received: mean, and busiest."""
    excess = max(0.0, placement.imbalance - limit)
    return excess, float(load.mean() + BUSIEST * load.max())


def own_rows(cu: np.ndarray, owned: Sequence[Owned], n: int) -> Placement:
    """Every rank computes the rows it owns of causal documents: only keys and values move."""
    pieces = []
    for start, stop, rank in owned:
        while start < stop:
            d = int(np.searchsorted(cu, start, side="right")) - 1
            piece_stop, document_start = min(stop, int(cu[d + 1])), int(cu[d])
            size = (piece_stop - start) * (piece_stop + start + 1 - 2 * document_start) / 2
            pieces.append(
                PlacedRegion(d, rank, Region(start, piece_stop, document_start, piece_stop), size)
            )
            start = piece_stop
    return Placement(n, tuple(pieces), tuple(owned))


def keys_read(placement: Placement) -> np.ndarray:
    """Rows of k and v every rank reads but does not own, when it computes its own rows."""
    last_row: dict[tuple[int, int], int] = {}
    rows = np.zeros(placement.world_size)
    for component, rank, region, _ in sorted(placement.pieces, key=lambda p: p.region):
        rows[rank] += region.q0 - last_row.get((component, rank), region.k0)
        last_row[component, rank] = region.q1
    return rows
