"""Rows that a tile's calls copy together since they lie apart, and results added from aside.

It stands alone because the footprint asks for it by numbers of rows alone. Under a causal mask on
equal shards these follow from the order of the shards, whatever their size: such tiles are looked
at in small, once for all that are alike.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from itertools import accumulate, pairwise
from typing import NamedTuple, TypeAlias

import numpy as np

from tilewise.layouts.layout import contiguous, zigzag
from tilewise.masks.base import Causal
from tilewise.plan.builder import partial
from tilewise.plan.ir import Rows, Side, Tile
from tilewise.plan.payload import HeadGroups
from tilewise.plan.row_ranges import count
from tilewise.tiles.call_rows import (
    CallParts,
    CallStyle,
    RowSelection,
    TileCalls,
    is_range,
    num_rows,
    span,
)

Places: TypeAlias = tuple[Sequence["Place"], Sequence["Place"]]
InHalves: TypeAlias = tuple[int, int, int, int | None, int | None]
SMALL = 320
"""Rows of a small shard's half: as few as a tile is cut like one of large shards."""


class Place(NamedTuple):
    """One of a tile's operands: rows that are held of it, and its first one in an arena, and its
    partial's among others (None: it lies alone, or cannot be told)."""

    rows: Rows
    start: int | None
    total: int | None


class _Pattern(NamedTuple):
    """A tile of zigzag or contiguous shards under a causal mask, whatever their size.

    Attributes:
        q, kv: per operand its shard's number among the tile's; first and end of the rows held, and
            its and its partial's place, in halves of a shard.
    """

    zigzagged: bool
    q: tuple[InHalves, ...]
    kv: tuple[InHalves, ...]
    cut: CallStyle


class Copies(NamedTuple):
    """Rows of one call, or at most of any: copied operands, results from aside, by side.

    Attributes:
        copied: rows of each operand's fields.
        aside: rows of results that a kernel cannot add to the partials by itself.
        merged: rows of partials that are copied to be merged.
        heads: share of the heads that results are of.
    """

    copied: tuple[int, int] = (0, 0)
    aside: tuple[int, int] = (0, 0)
    merged: tuple[int, int] = (0, 0)
    heads: float = 1.0

    def scaled(self, times: float) -> Copies:
        """Of so many times as large shards."""
        copied, aside, merged = ((round(q * times), round(k * times)) for q, k in self[:3])
        return Copies(copied, aside, merged, self.heads)


def alike(table: TileCalls) -> bool | None:
    """Whether tiles of these shards can be looked at in small: True on zigzag shards, False on
    contiguous ones, None if they cannot."""
    layout = table.layouts[0]
    size = layout.size(0)
    if table.mask != Causal() or table.layouts[1] != layout or len({*layout.sizes}) > 1:
        return None
    if size <= 2 * SMALL or size % 2:
        return None
    for make in (zigzag, contiguous):
        if layout == make(layout.num_tokens, layout.world_size):
            return make is zigzag
    return None


def copies(
    table: TileCalls,
    tile: Tile,
    places: Places,
    zigzagged: bool | None,
) -> Sequence[Copies]:
    """What each call of a tile copies.

    Args:
        zigzagged: `alike` of the table.
    """
    small = None if zigzagged is None else _small(zigzagged, table, tile, places)
    if small is not None:
        pattern, scale = small
        return [one.scaled(scale) for one in _in_small(pattern)]
    return _counted(table, tile, places)


def whole(table: TileCalls, tile: Tile, places: Places) -> Copies:
    """What the call of a tile copies whose rows all see all keys."""
    found = []
    for side, layout, shards in zip(places, table.layouts, tile[:2], strict=True):
        ends = accumulate((count(place.rows, 0) for place in side), initial=0)
        parts: list[RowSelection[np.ndarray]] = [
            RowSelection(
                i, partial(Side.Q, shard), slice(*ends_of), None, None
            )  # no item is looked at
            for i, (shard, ends_of) in enumerate(zip(shards, pairwise(ends), strict=True))
        ]
        if len(parts) == 1:
            parts = [parts[0]._replace(call=None)]
        found.append(_of_side(parts, None, side, [layout.size(shard) for shard in shards]))
    copied, aside, merged = zip(*found, strict=True)
    return Copies(copied, aside, merged)


def _counted(table: TileCalls, tile: Tile, places: Places) -> list[Copies]:
    held = tuple(tuple(place.rows for place in side) for side in places)
    sizes = [
        [layout.size(shard) for shard in shards]
        for layout, shards in zip(table.layouts, tile[:2], strict=True)
    ]
    found = []
    for call in table.calls(tile, (held[0], held[1])):
        sides = [
            _of_side(parts, heads, side, whole)
            for parts, heads, side, whole in zip(
                (call.q, call.k), (call.q_heads, call.kv_heads), places, sizes, strict=True
            )
        ]
        copied, aside, merged = zip(*sides, strict=True)
        found.append(Copies(copied, aside, merged, _share(call, table.groups)))
    return found


def _of_side(
    parts: Sequence[RowSelection[np.ndarray]],
    heads: slice | None,
    places: Sequence[Place],
    sizes: Sequence[int],
) -> tuple[int, int, int]:
    """Copied rows, rows of results from aside, and rows copied to merge those."""
    held = [count(place.rows, 0) for place in places]
    rows = [num_rows(part.block, held[part.shard]) for part in parts]
    copied = 0
    if len(parts) == 1:
        copied = rows[0] * isinstance(parts[0].block, np.ndarray)
    elif span(parts, held, [place.start for place in places]) is None:
        copied = sum(rows)
        direct = (is_range(part.call) for part in parts)
        picked = zip(parts, rows, direct, strict=True)
        copied += sum(n for p, n, d in picked if isinstance(p.block, np.ndarray) and not d)
    whole = [part._replace(block=part.local) for part in parts]
    if len(parts) == 1:
        one = parts[0]
        in_place = one.call is None and not isinstance(one.local, np.ndarray)
    else:
        in_place = span(whole, sizes, [place.total for place in places]) is not None
    if in_place and heads is None:
        return copied, 0, 0
    merged = sum(
        n * (isinstance(part.call, np.ndarray) + isinstance(part.local, np.ndarray))
        for part, n in zip(parts, rows, strict=True)
    )
    return copied, sum(rows), merged


def _share(call: CallParts, groups: HeadGroups) -> float:
    heads = call.q_heads
    return 1.0 if heads is None else (heads.stop - heads.start) / groups.size[0]


def _small(
    zigzagged: bool,
    table: TileCalls,
    tile: Tile,
    places: Places,
) -> tuple[_Pattern, float] | None:
    """A tile alike of few and small shards, and how much smaller these are."""
    size = table.layouts[0].size(0)
    half = size // 2
    known: dict[Rows, tuple[int, int]] = {
        ((0, size),): (0, 2),
        ((0, half),): (0, 1),
        ((half, size),): (1, 2),
    }
    order = {shard: i for i, shard in enumerate(sorted({*tile.q, *tile.kv}))}
    sides = []
    for shards, side in zip(tile[:2], places, strict=True):
        least = min(p.start or 0 for p in side), min(p.total or 0 for p in side)
        rows = []
        for shard, place in zip(shards, side, strict=True):
            if place.rows not in known:
                return None
            moved = (
                None if x is None else (x - first) // half
                for x, first in zip(place[1:], least, strict=True)
            )
            rows.append((order[shard], *known[place.rows], *moved))
        sides.append(tuple(rows))
    return _Pattern(zigzagged, sides[0], sides[1], table.cut), size / (2 * SMALL)


@lru_cache(maxsize=4096)
def _in_small(pattern: _Pattern) -> tuple[Copies, ...]:
    n = 1 + max(row[0] for row in (*pattern.q, *pattern.kv))
    layout = (zigzag if pattern.zigzagged else contiguous)(2 * SMALL * n, n)
    table = TileCalls((layout, layout), Causal(), HeadGroups(1, 1, 1), pattern.cut)

    def rows(halves: int | None) -> int | None:
        return None if halves is None else halves * SMALL

    q, kv = (
        [
            Place(((first * SMALL, last * SMALL),), rows(start), rows(total))
            for _, first, last, start, total in side
        ]
        for side in (pattern.q, pattern.kv)
    )
    tile = Tile(tuple(row[0] for row in pattern.q), tuple(row[0] for row in pattern.kv))
    return tuple(_counted(table, tile, (q, kv)))
