"""Cut one component of a mask into regions of given areas that read few rows.

Recursive cuts by whole lines reach every guillotine partition; the tree of cuts is chosen by a
search that looks a few cuts ahead, and can be applied again to other areas.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import accumulate
from math import inf
from typing import NamedTuple

from tilewise.strategies.tiling.regions import TOLERANCE, Box, Region, RegionTable

EXHAUSTIVE = 4  # up to so many parts every tree of cuts is tried


class TooSmallError(ValueError):
    """A component cannot be cut into so many parts: another placement must be found."""


class Prices(NamedTuple):
    """What a row costs to move (one unit: a row of q), and the mean area of a rank."""

    q: float
    kv: float
    area: float


class Cut(NamedTuple):
    """A line through a box: parts before `at` lie above a row, or left of a key."""

    by_rows: bool
    at: int
    one: Cut | None
    two: Cut | None


def search(
    table: RegionTable,
    shares: tuple[float, ...],
    owns: tuple[int, ...],
    prices: Prices,
    depth: int = 2,
) -> tuple[float, Cut | None]:
    """Choose the lines that cut a table into parts of the given shares, `depth` cuts ahead.

    Args:
        owns: rows each part's rank may own of it.
    Returns:
        The price (infinite if the table is too coarse), and the tree of cuts.
    """
    best = _searcher(table, shares, owns, prices)

    def walk(box: Box, lo: int, hi: int) -> tuple[float, Cut | None]:
        deep = depth if hi - lo > EXHAUSTIVE else hi - lo
        cost, choice = best(box, lo, hi, deep)
        if choice is None:
            return cost, None
        by_rows, at, one, two = choice
        (a, first), (b, second) = walk(one, lo, at), walk(two, at, hi)
        return a + b, Cut(by_rows, at, first, second)

    return walk(table.whole(), 0, len(shares))


def _searcher(table: RegionTable, shares, owns, prices: Prices) -> Callable:
    ends = (0.0, *accumulate(shares))
    known: dict = {}
    line = TOLERANCE * prices.area

    def best(box: Box, lo: int, hi: int, depth: int):
        key = (box, lo, hi, depth)
        if key in known:
            return known[key]
        found, choice = inf, None
        if hi - lo == 1:
            found = _price(table, box, owns[lo], prices)
        elif depth == 0:
            found = _guess(table, box, hi - lo, prices)
        else:
            scale = table.size(box) / (ends[hi] - ends[lo])
            for at in _splits(lo, hi):
                target = scale * (ends[at] - ends[lo])
                for by_rows in (True, False):
                    halves = table.halves(box, target, by_rows, line)
                    if halves is None:
                        continue
                    cost = best(halves[0], lo, at, depth - 1)[0]
                    cost += best(halves[1], at, hi, depth - 1)[0]
                    if cost < found:
                        found, choice = cost, (by_rows, at, *halves)
        known[key] = found, choice
        return found, choice

    return best


def _price(table: RegionTable, box: Box, own: int, prices: Prices) -> float:
    """Rows moved to the rank of a box, which may own so many of those it reads both ways."""
    q, kv, both = table.reads(box)
    return prices.q * q + prices.kv * kv - (prices.q + prices.kv) * min(both, own)


def _guess(table: RegionTable, box: Box, parts: int, prices: Prices) -> float:
    """About what parts equal regions of this one cost: rectangles of the best shape that fits."""
    q, kv, both = table.reads(box)
    part = table.size(box) / parts
    keys = min(part / min((part * prices.kv / prices.q) ** 0.5, q), kv)
    cost = parts * (prices.q * part / keys + prices.kv * keys)
    return cost - 0.3 * (prices.q + prices.kv) * both


def _splits(lo: int, hi: int) -> tuple[int, ...]:
    parts = hi - lo
    if parts < 6:
        return tuple(range(lo + 1, hi))
    half, third = parts // 2, parts // 3
    near = {1, parts - 1, half, parts - half, half - 1, half + 1, third, parts - third}
    return tuple(sorted(lo + c for c in near))


def apply(
    tree: Cut | None, table: RegionTable, shares: tuple[float, ...], mean: float
) -> list[tuple[Region, float]]:
    """The regions that a tree's lines give for these shares, in their order, and their areas."""
    ends = (0.0, *accumulate(shares))
    regions: list[tuple[Region, float]] = []

    def walk(tree: Cut | None, box: Box, lo: int, hi: int) -> None:
        if tree is None:
            regions.append((table.region(box), table.size(box)))
            return
        target = table.size(box) * (ends[tree.at] - ends[lo]) / (ends[hi] - ends[lo])
        halves = table.halves(box, target, tree.by_rows, TOLERANCE * mean)
        if halves is None:
            raise TooSmallError(f"region {table.region(box)} cannot be cut for {hi - lo} ranks")
        walk(tree.one, halves[0], lo, tree.at)
        walk(tree.two, halves[1], tree.at, hi)

    walk(tree, table.whole(), 0, len(shares))
    return regions
