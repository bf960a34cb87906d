"""The placement of blocks on ranks that moves least: the best of a few, built in different ways."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import suppress

import numpy as np

from tilewise.layouts.balanced import deal
from tilewise.masks.base import Mask
from tilewise.masks.components import documents, tables
from tilewise.strategies.tiling.apart import own_rows_apart
from tilewise.strategies.tiling.guillotine import TooSmallError
from tilewise.strategies.tiling.ownership import Owned
from tilewise.strategies.tiling.placement import Placement, Variant, attempt
from tilewise.strategies.tiling.regions import Piece, Region, Table, Triangle
from tilewise.strategies.tiling.routing import received

VARIANTS = (
    *((0.018, 0.9), (0.018, 0.8), (0.018, 1.0), (0.005, 0.9), (0.018, 0.7), (0.005, 0.8)),
    *((0.018, 0.6), (0.005, 1.0), (0.005, 0.7), (0.018, 0.5), (0.005, 0.6), (0.018, 0.4)),
    *((0.025, 0.9), (0.025, 0.8), (0.025, 1.0), (0.025, 0.7), (0.025, 0.6), (0.0, 0.9), (0.0, 0.8)),
)
APART = (1.0, 0.95, 0.9, 0.8, 0.7)  # rows that fill a rank, of what its area would allow
TRIES = 152  # of all ranks together: the more ranks, the less is left to chance
FEW = 16  # ranks up to which all of these are tried
LIMIT = 1.03  # of the largest area over the mean: what goes beyond it is chosen last
BUSIEST = 0.35  # what the busiest rank counts beside the mean


def place(mask: Mask, num_tokens: int, n: int, kv_bytes: float) -> Placement | None:
    """Place a mask's blocks and rows on n ranks: equal tokens, equal areas, few rows moved.

    None if it can't be cut for so many ranks (few tokens, or a coarse mask).
    """
    cu = documents(mask, num_tokens)
    if cu is None:
        return place_tables(tables(mask, num_tokens), n, kv_bytes)
    return place_documents(cu, n, kv_bytes)


def place_documents(cu: np.ndarray, n: int, kv_bytes: float) -> Placement:
    """Place causal documents with these boundaries."""
    dealt = deal(np.arange(1.0, cu[-1] + 1) - np.repeat(cu[:-1], np.diff(cu)), cu, n)
    rows = [own_rows(cu, dealt, n)]
    for scale in APART if n <= FEW else ():
        rows.append(own_rows(cu, own_rows_apart(cu, n, VARIANTS[0][0], scale), n))
    scored = [(_score(p, kv_bytes * keys_read(p)), i, p) for i, p in enumerate(rows)]
    best, _, simple = min(scored, key=lambda s: s[:2])
    tiled = place_tables(
        [Triangle(m) for m in np.diff(cu).tolist()], n, kv_bytes, max(2, TRIES // n)
    )
    if tiled is None or best < _score(tiled, received(tiled.flows(), n, kv_bytes)):
        return simple
    return tiled


def place_tables(
    tables: Sequence[Table], n: int, kv_bytes: float, tries: int = 2
) -> Placement | None:
    """Place the components of any mask; tables in the order of their rows.

    None if they have too few rows, or cells, to be cut for so many ranks.
    """
    candidates = []
    for variant in VARIANTS[:tries]:
        with suppress(TooSmallError):
            candidates.append(attempt(tables, n, kv_bytes, Variant(*variant)))
    return best(candidates, kv_bytes)


def best(candidates: Iterable[Placement], kv_bytes: float) -> Placement | None:
    """The one that exceeds the limit of area least, then moves least."""
    return min(
        candidates,
        key=lambda p: _score(p, received(p.flows(), p.world_size, kv_bytes)),
        default=None,
    )


def _score(placement: Placement, load: np.ndarray) -> tuple[float, float]:
    """Excess of area beyond the limit, then rows received: mean, and busiest."""
    over = max(0.0, placement.imbalance - LIMIT)
    return over, float(load.mean() + BUSIEST * load.max())


def own_rows(cu: np.ndarray, owned: Sequence[Owned], n: int) -> Placement:
    """Every rank computes the rows it owns of causal documents: only keys and values move."""
    pieces = []
    for start, stop, rank in owned:
        while start < stop:
            d = int(np.searchsorted(cu, start, side="right")) - 1
            end, at = min(stop, int(cu[d + 1])), int(cu[d])
            size = (end - start) * (end + start + 1 - 2 * at) / 2
            pieces.append(Piece(d, rank, Region(start, end, at, end), size))
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
