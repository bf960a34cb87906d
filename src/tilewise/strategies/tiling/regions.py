"""Regions of a table of attention: what they hold, which rows they read, and where to cut them.

A region is a rectangle (query range) x (key range) met with the mask. Two kinds of tables: the
causal triangle of a document, in closed form, and any mask, by the areas of a grid of cells.
Recursive cuts by whole lines reach every guillotine partition; the tree of cuts is chosen by a
search that looks a few cuts ahead, and can be applied again to other areas.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import accumulate
from math import inf, isqrt
from typing import NamedTuple

import numpy as np

from tilewise.masks.base import Mask
from tilewise.masks.components import components, documents

TOLERANCE = 0.01  # of the mean area, what a line may miss by at most half of
Box = tuple[int, int, int, int]  # q0, q1, k0, k1, in the table's own units


class Region(NamedTuple):
    """Rows [q0, q1) of the queries and [k0, k1) of the keys."""

    q0: int
    q1: int
    k0: int
    k1: int


class PlacedRegion(NamedTuple):
    """One region of one component, in global positions, who computes it, and its allowed pairs."""

    component: int
    rank: int
    region: Region
    area: float


class Reads(NamedTuple):
    """Rows of a region: of queries, of keys, and those that are both and may be owned."""

    q: int
    kv: int
    both: int


class Triangle:
    """A causal document: boxes are rows themselves, areas in closed form, lines anywhere."""

    def __init__(self, length: int) -> None:
        self.length = length

    def whole(self) -> Box:
        return 0, self.length, 0, self.length

    def size(self, box: Box) -> float:
        """Allowed pairs."""
        q0, q1, k0, k1 = box
        a, b, c, d = q1 - k0, q0 - k0, q1 - k1, q0 - k1
        total = a * (a + 1) if a > 0 else 0
        total -= b * (b + 1) if b > 0 else 0
        total -= c * (c + 1) if c > 0 else 0
        total += d * (d + 1) if d > 0 else 0
        return total // 2

    def reads(self, box: Box) -> Reads:
        q0, q1, k0, k1 = box
        return Reads(q1 - q0, k1 - k0, k1 - q0 if k1 > q0 else 0)

    def halves(
        self, box: Box, target: float, by_rows: bool, tolerance: float
    ) -> tuple[Box, Box] | None:
        """Cut the target area off, above a row or left of a key, to within half the tolerance."""
        q0, q1, k0, k1 = box
        tolerance /= k1 - k0 if by_rows else q1 - q0
        grain = 128 if tolerance >= 128 else 1 << max(0, int(tolerance).bit_length() - 1)
        if by_rows:
            cut_row = round(_row_at(q0, k0, k1, target) / grain) * grain
            return (
                ((q0, cut_row, k0, min(k1, cut_row)), (cut_row, q1, k0, k1))
                if q0 < cut_row < q1
                else None
            )
        # reflected in the antidiagonal keys become rows, the last one first
        cut_key = -round(_row_at(-k1, -q1, -q0, self.size(box) - target) / grain) * grain
        return (
            ((q0, q1, k0, cut_key), (max(q0, cut_key), q1, cut_key, k1))
            if k0 < cut_key < k1
            else None
        )

    def region(self, box: Box) -> Region:
        """The rows of a box, counted from the start of the component."""
        return Region(*box)

    def strip(self, start: int, stop: int) -> tuple[Region, float]:
        """Rows [start, stop) with all keys they read, and their area."""
        return Region(start, stop, 0, stop), self.size((start, stop, 0, stop))


def _row_at(q0: int, k0: int, k1: int, target: float) -> float:
    """The row q where the part of the triangle in [q0, q) x [k0, k1) has the target area."""
    x0, width = q0 - k0, k1 - k0
    if x0 >= width:
        return q0 + target / width
    area_before = x0 * (x0 + 1) / 2
    whole_triangle = width * (width + 1) / 2
    if target <= whole_triangle - area_before:
        return k0 + (isqrt(int(1 + 8 * (target + area_before))) - 1) / 2
    return k1 + (target - whole_triangle + area_before) / width


class AreaGrid:
    """Any mask: boxes are cells of a grid, areas come from sums over the cells above and left."""

    def __init__(self, areas: np.ndarray, edges: np.ndarray) -> None:
        self.edges = edges - edges[0]
        self.length = int(self.edges[-1])
        self.sums = np.zeros((len(edges), len(edges)))
        np.cumsum(np.cumsum(areas, axis=0), axis=1, out=self.sums[1:, 1:])

    def whole(self) -> Box:
        return self._shrunk(0, len(self.edges) - 1, 0, len(self.edges) - 1)

    def size(self, box: Box) -> float:
        q0, q1, k0, k1 = box
        s = self.sums
        return float(s[q1, k1] - s[q0, k1] - s[q1, k0] + s[q0, k0])

    def reads(self, box: Box) -> Reads:
        q0, q1, k0, k1 = box
        rows, keys = self._lines(box)
        q = np.diff(self.edges[q0 : q1 + 1])[np.diff(rows) > 0].sum()
        kv = np.diff(self.edges[k0 : k1 + 1])[np.diff(keys) > 0].sum()
        num_both = (
            self.edges[min(q1, k1)] - self.edges[max(q0, k0)] if min(q1, k1) > max(q0, k0) else 0
        )
        return Reads(int(q), int(kv), int(num_both))

    def halves(
        self, box: Box, target: float, by_rows: bool, tolerance: float
    ) -> tuple[Box, Box] | None:
        q0, q1, k0, k1 = box
        sums = self._lines(box)[0 if by_rows else 1]
        cut_index = int(np.searchsorted(sums, target))
        cut_index -= int(
            cut_index > 0
            and target - sums[cut_index - 1] < sums[min(cut_index, len(sums) - 1)] - target
        )
        if not 0 < sums[min(cut_index, len(sums) - 1)] < sums[-1]:
            return None
        if by_rows:
            return self._shrunk(q0, q0 + cut_index, k0, k1), self._shrunk(
                q0 + cut_index, q1, k0, k1
            )
        return self._shrunk(q0, q1, k0, k0 + cut_index), self._shrunk(q0, q1, k0 + cut_index, k1)

    def region(self, box: Box) -> Region:
        return Region(*(int(self.edges[i]) for i in box))

    def strip(self, start: int, stop: int) -> tuple[Region, float]:
        a, b = np.interp([start, stop], self.edges, self.sums[:, -1])
        return Region(start, stop, 0, self.length), float(b - a)

    def _lines(self, box: Box) -> tuple[np.ndarray, np.ndarray]:
        """Areas above every row edge, and left of every key edge, of a box."""
        q0, q1, k0, k1 = box
        rows = self.sums[q0 : q1 + 1, k1] - self.sums[q0 : q1 + 1, k0]
        keys = self.sums[q1, k0 : k1 + 1] - self.sums[q0, k0 : k1 + 1]
        return rows - rows[0], keys - keys[0]

    def _shrunk(self, q0: int, q1: int, k0: int, k1: int) -> Box:
        """Without empty rows and keys at the borders."""
        rows, keys = self._lines((q0, q1, k0, k1))
        q, k = np.flatnonzero(np.diff(rows) > 0), np.flatnonzero(np.diff(keys) > 0)
        if not len(q):
            return q0, q1, k0, k1
        return q0 + int(q[0]), q0 + int(q[-1]) + 1, k0 + int(k[0]), k0 + int(k[-1]) + 1


RegionTable = Triangle | AreaGrid
"""One component of a mask, to be cut into regions."""
CELLS = 1024  # of the grid's lines on either side, over all components
LEAST = 8  # lines of a component, if it has so many rows


def tables(mask: Mask, num_tokens: int) -> list[RegionTable]:
    """Every component as a table that can be cut: closed forms for causal documents, else grids."""
    cu = documents(mask, num_tokens)
    if cu is not None:
        return [Triangle(m) for m in np.diff(cu).tolist()]
    edges = components(mask, num_tokens)
    region_tables: list[RegionTable] = []
    for start, stop in zip(edges[:-1].tolist(), edges[1:].tolist(), strict=True):
        lines = min(stop - start, max(LEAST, CELLS * (stop - start) // num_tokens))
        grid_lines = np.unique(np.linspace(start, stop, lines + 1).astype(np.int64))
        region_tables.append(
            AreaGrid(np.asarray(mask.areas(grid_lines, grid_lines), float), grid_lines)
        )
    return region_tables


EXHAUSTIVE = 4  # parts, up to which every tree of cuts is tried


class TooSmallError(ValueError):
    """Raised if a component cannot be cut into the wanted parts: another placement is needed."""


class Prices(NamedTuple):
    """Price of moving a row of each side, a row of q being 1, and the mean area of a rank."""

    q: float
    kv: float
    area: float


class Cut(NamedTuple):
    """A line through a box, and the cuts of both halves: parts before `at` lie above or left."""

    by_rows: bool
    at: int
    before: Cut | None
    after: Cut | None


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
        cuts_ahead = depth if hi - lo > EXHAUSTIVE else hi - lo
        cost, choice = best(box, lo, hi, cuts_ahead)
        if choice is None:
            return cost, None
        by_rows, at, first_box, second_box = choice
        (a, first_cut), (b, second_cut) = walk(first_box, lo, at), walk(second_box, at, hi)
        return a + b, Cut(by_rows, at, first_cut, second_cut)

    return walk(table.whole(), 0, len(shares))


def _searcher(table: RegionTable, shares, owns, prices: Prices) -> Callable:
    ends = (0.0, *accumulate(shares))
    best_known: dict = {}
    line = TOLERANCE * prices.area

    def best(box: Box, lo: int, hi: int, depth: int):
        key = (box, lo, hi, depth)
        if key in best_known:
            return best_known[key]
        lowest_cost, choice = inf, None
        if hi - lo == 1:
            lowest_cost = _price(table, box, owns[lo], prices)
        elif depth == 0:
            lowest_cost = _guess(table, box, hi - lo, prices)
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
                    if cost < lowest_cost:
                        lowest_cost, choice = cost, (by_rows, at, *halves)
        best_known[key] = lowest_cost, choice
        return lowest_cost, choice

    return best


def _price(table: RegionTable, box: Box, own: int, prices: Prices) -> float:
    """Price of the rows moved to a box's rank, which may own `own` of the rows it reads twice."""
    q, kv, both = table.reads(box)
    return prices.q * q + prices.kv * kv - (prices.q + prices.kv) * min(both, own)


def _guess(table: RegionTable, box: Box, parts: int, prices: Prices) -> float:
    """Estimate the price of cutting a box into equal parts, as rectangles of the best shape."""
    q, kv, both = table.reads(box)
    part_area = table.size(box) / parts
    keys = min(part_area / min((part_area * prices.kv / prices.q) ** 0.5, q), kv)
    cost = parts * (prices.q * part_area / keys + prices.kv * keys)
    return cost - 0.3 * (prices.q + prices.kv) * both


def _splits(lo: int, hi: int) -> tuple[int, ...]:
    parts = hi - lo
    if parts < 6:
        return tuple(range(lo + 1, hi))
    middle, third = parts // 2, parts // 3
    cuts = {1, parts - 1, middle, parts - middle, middle - 1, middle + 1, third, parts - third}
    return tuple(sorted(lo + c for c in cuts))


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
        walk(tree.before, halves[0], lo, tree.at)
        walk(tree.after, halves[1], tree.at, hi)

    walk(tree, table.whole(), 0, len(shares))
    return regions
