"""Rows that each kernel call of a tile reads, of which shard, and which of them need copying."""

from collections.abc import Iterable, Iterator, Sequence, Sized
from functools import lru_cache
from itertools import accumulate, pairwise
from typing import Any, Generic, NamedTuple, TypeAlias, TypeGuard, TypeVar

import numpy as np

from tilewise.layouts.layout import Layout
from tilewise.masks.base import Causal, Full, Mask
from tilewise.plan.builder import partial
from tilewise.plan.ir import Item, Rows, Side, Tile
from tilewise.plan.payload import HeadGroups
from tilewise.plan.row_ranges import Ranges, count_rows, row_index, to_ranges
from tilewise.tiles.calls import KernelCall, Kind
from tilewise.tiles.cover import tile_calls

Numbers = TypeVar("Numbers")
Held: TypeAlias = tuple[tuple[Rows, ...], tuple[Rows, ...]]
MAX_PIECES = 8  # a part in more pieces is gathered by index
MAX_CALLS = 16  # that a kernel for whole tiles is asked to make of one


class RowSelection(NamedTuple, Generic[Numbers]):
    """Rows of one shard in one side of a call, selected in the call, in the block and in the shard.

    None selects all rows, in order.

    Attributes:
        shard: number among the tile's shards of this side.
        item: the partial to which the rows' results are added.
    """

    shard: int
    item: Item
    call: slice | Numbers | None
    block: slice | Numbers | None
    local: slice | Numbers | None


class CallParts(NamedTuple, Generic[Numbers]):
    """A call with the selections of its rows, and the group's heads that it is for (None: all)."""

    call: KernelCall
    q: tuple[RowSelection[Numbers], ...]
    k: tuple[RowSelection[Numbers], ...]
    q_heads: slice | None
    kv_heads: slice | None


class CallStyle(NamedTuple):
    """Requirements of a kernel on how tiles are cut; see `tile_calls`.

    Attributes:
        whole_rows: a tile is one call of all its rows, whatever the mask: the kernel reads it.
    """

    square_causal: bool = False
    whole_tile: bool = False
    whole_rows: bool = False


class TileCalls(NamedTuple):
    """Table of the calls of tiles, which follow from the layouts of both sides, the mask and the
    heads.
    """

    layouts: tuple[Layout, Layout]
    mask: Mask
    groups: HeadGroups
    cut: CallStyle

    def calls(self, tile: Tile, held: Held) -> Iterator[CallParts[np.ndarray]]:
        """The calls of a tile whose blocks hold these rows, query side first."""
        if self.cut.whole_rows:
            yield self._whole_call(tile, held)
            return
        blocks = tuple(
            tuple((layout, *rows_of_side) for rows_of_side in zip(shards, rows, strict=True))
            for layout, shards, rows in zip(self.layouts, tile[:2], held, strict=True)
        )
        for mask, q_heads, kv_heads in self.masks(tile.heads):
            for call, *rows_by_side in _calls(blocks, mask, self.cut):
                q, k = (
                    tuple(
                        x._replace(item=partial(side, shards[x.shard], tile.heads))
                        for x in rows_of_side
                    )
                    for side, shards, rows_of_side in zip(Side, tile[:2], rows_by_side, strict=True)
                )
                yield CallParts(call, q, k, q_heads, kv_heads)

    def _whole_call(self, tile: Tile, held: Held) -> CallParts[np.ndarray]:
        """One call of all rows and heads of a tile, in the order of its shards."""
        sides: list[tuple[RowSelection[np.ndarray], ...]] = []
        sizes: list[int] = []
        for side, layout, shards, rows in zip(Side, self.layouts, tile[:2], held, strict=True):
            counts = [count_rows(rows_of_shard) for rows_of_shard in rows]
            starts = [*accumulate(counts, initial=0)]
            sizes.append(starts[-1])
            sides.append(
                tuple(
                    RowSelection(
                        number,
                        partial(side, shard, tile.heads),
                        None if len(shards) == 1 else slice(start, start + count),
                        None,
                        _index(row_index(of_shard), layout.size(shard)),
                    )
                    for number, (shard, start, count, of_shard) in enumerate(
                        zip(shards, starts, counts, rows, strict=False)
                    )
                )
            )
        call = KernelCall(((0, sizes[0]),), ((0, sizes[1]),), Kind.FULL)
        return CallParts(call, sides[0], sides[1], None, None)

    def masks(self, group: int) -> Iterator[tuple[Mask, slice | None, slice | None]]:
        """The masks of a head group, and which of its heads each is for."""
        by_head: Sequence[Mask] | None = getattr(self.mask, "heads", None)
        if by_head is None:
            yield self.mask, None, None
            return
        first_heads = self.groups.slice(Side.KV, group)
        shared = self.groups.size[0] // (first_heads.stop - first_heads.start)
        for i, mask in enumerate(by_head[first_heads]):
            yield mask, slice(i * shared, (i + 1) * shared), slice(i, i + 1)


Blocks: TypeAlias = tuple[tuple[tuple[Layout, int, Rows], ...], ...]
"""For each side the shards that a tile reads, and the rows of them that are held."""
Placed: TypeAlias = tuple[
    tuple[KernelCall, tuple[RowSelection[np.ndarray], ...], tuple[RowSelection[np.ndarray], ...]],
    ...,
]
"""Calls and their rows by side; the items are those of shard 0."""


class _Block(NamedTuple):
    """Held rows of a shard: their positions, their local numbers, and the shard's size."""

    positions: np.ndarray
    local: np.ndarray
    size: int

    @classmethod
    def of(cls, layout: Layout, shard: int, rows: Rows) -> "_Block":
        local = row_index(rows)
        return cls(layout.rows(shard)[local], local, layout.size(shard))


def _calls(blocks: Blocks, mask: Mask, cut: CallStyle) -> Placed:
    """The calls of a tile of these blocks; tiles share them whose positions have one order.

    A full or a causal mask asks for no more than the order.
    """
    # Plain tuples: what is kept of them is not the layout's.
    runs = ((tuple(map(tuple, x.runs[shard])), rows) for side in blocks for x, shard, rows in side)
    spans = [_spans(*one) for one in runs]
    ranges_found = [span for span in spans if span is not None]
    if mask in (Full(), Causal()) and len(ranges_found) == len(spans):
        closed_up_ranges = iter(_closed_up(ranges_found))
        sides = ([(next(closed_up_ranges), x[2], x[0].size(x[1])) for x in side] for side in blocks)
        return _shared(tuple(map(tuple, sides)), mask, cut)
    return _made([[_Block.of(*block) for block in side] for side in blocks], mask, cut)


@lru_cache(maxsize=4096)
def _spans(runs: tuple[tuple[int, int, int], ...], rows: Rows) -> Ranges | None:
    """Positions of some rows of these runs, if they are a few ranges."""
    if len(runs) + len(rows) > MAX_PIECES or any(stride != 1 for _, _, stride in runs):
        return None
    positions = row_index(tuple((start, start + count) for start, count, _ in runs))
    return to_ranges(positions[row_index(rows)])


def _closed_up(parts: Sequence[Ranges]) -> list[Ranges]:
    """Positions without the gaps between them."""
    table = np.array([span for part in parts for span in part], np.int64).reshape(-1, 2)
    edges, edge_indices = np.unique(table, return_inverse=True)
    starts, stops = edge_indices.reshape(-1, 2).T
    depth = np.bincount(starts, minlength=len(edges)) - np.bincount(stops, minlength=len(edges))
    sizes = np.diff(edges) * (np.cumsum(depth)[:-1] > 0)
    new_positions = np.concatenate([[0], np.cumsum(sizes)])
    new_ranges = iter(
        zip(new_positions[starts].tolist(), new_positions[stops].tolist(), strict=True)
    )
    return [tuple(next(new_ranges) for _ in part) for part in parts]


@lru_cache(maxsize=256)
def _shared(
    ranged: tuple[tuple[tuple[Ranges, Rows, int], ...], ...], mask: Mask, cut: CallStyle
) -> Placed:
    sides = [
        [
            _Block(row_index(positions), row_index(local_rows), num_rows)
            for positions, local_rows, num_rows in side
        ]
        for side in ranged
    ]
    return _made(sides, mask, cut)


def _made(sides: Sequence[Sequence[_Block]], mask: Mask, cut: CallStyle) -> Placed:
    q, k = (np.concatenate([block.positions for block in side]) for side in sides)
    return tuple(
        (call, _parts(Side.Q, call.q, sides[0]), _parts(Side.KV, call.k, sides[1]))
        for call in _cut(q, k, mask, cut)
    )


def _parts(
    side: Side, ranges: Ranges, blocks: Sequence[_Block]
) -> tuple[RowSelection[np.ndarray], ...]:
    """Return which rows of which block a call reads, in the order of the call."""
    starts = [*accumulate((len(block.local) for block in blocks), initial=0)]
    parts: list[tuple[int, RowSelection[np.ndarray]]] = []
    for i, in_call, in_block in _rows_by_block(ranges, starts):
        _, local, size = blocks[i]
        limits = count_rows(ranges), len(local), size
        for row_groups in _pieces((in_call, in_block, local[in_block])):
            index = (_index(x, n) for x, n in zip(row_groups, limits, strict=True))
            part = RowSelection(i, partial(side, 0), *index)
            parts.append((int(row_groups[0][0]), part))
    return tuple(part for _, part in sorted(parts, key=lambda placed: placed[0]))


def _rows_by_block(
    ranges: Ranges, starts: Sequence[int]
) -> Iterator[tuple[int, np.ndarray, np.ndarray]]:
    """Yield each block of which a call reads rows: which of the call's they are, and which of its.

    Args:
        starts: rows of all blocks before each one, and of all.
    """
    if len(ranges) == 1:
        ((first, last),) = ranges
        for i, (start, stop) in enumerate(pairwise(starts)):
            low, high = max(first, start), min(last, stop)
            if low < high:
                rows = np.arange(low, high)
                yield i, rows - first, rows - start
        return
    rows = row_index(ranges)
    which = np.searchsorted(starts, rows, side="right") - 1
    for i in np.unique(which).tolist():
        in_call = np.flatnonzero(which == i)
        yield i, in_call, rows[in_call] - starts[i]


def is_range(index: object) -> TypeGuard[slice | None]:
    """Return whether an index selects neighbouring rows."""
    return index is None or (isinstance(index, slice) and index.step in (None, 1))


def num_rows(index: slice | Sized | None, size: int) -> int:
    """Return the number of rows that an index selects, of a size."""
    if isinstance(index, slice):
        return len(range(*index.indices(size)))
    return size if index is None else len(index)


def span(
    parts: Sequence[RowSelection[Any]], sizes: Sequence[int], starts: Sequence[int | None]
) -> tuple[int, int] | None:
    """The rows of a buffer in which all parts lie side by side, in order; None if they do not.

    Args:
        sizes, starts: rows of each of the tile's blocks of this side, and where in the buffer its
            first is; None: it is not there.
    """
    span_start = span_end = None
    for part in parts:
        start = starts[part.shard]
        if start is None or not (is_range(part.call) and is_range(part.block)):
            return None
        first_row, stop_row = (
            (0, sizes[part.shard]) if part.block is None else (part.block.start, part.block.stop)
        )
        if span_end not in (None, start + first_row):
            return None
        span_start = start + first_row if span_start is None else span_start
        span_end = start + stop_row
    return None if span_start is None or span_end is None else (span_start, span_end)


def _cut(q: np.ndarray, k: np.ndarray, mask: Mask, style: CallStyle) -> Sequence[KernelCall]:
    """A tile's calls.

    Those whose rows must be in the order of their positions, but do not lie so, are cut into
    rectangles and squares, of which less is to copy. All kernels then copy the same.
    """
    calls = tile_calls(q, k, mask, square_causal=style.square_causal, whole_tile=style.whole_tile)
    ordered_calls = (c for c in calls if style.whole_tile or c.kind is Kind.CAUSAL)
    if all(len(call.q) == len(call.k) == 1 for call in ordered_calls):
        return calls
    square_calls = tile_calls(q, k, mask, square_causal=True)
    return square_calls if len(square_calls) <= max(MAX_CALLS, len(calls)) else calls


def _pieces(row_columns: tuple[np.ndarray, ...]) -> Iterable[tuple[np.ndarray, ...]]:
    """Rows of one shard in as few pieces as can each be selected by slices, if those are few."""
    steps = [np.diff(x) for x in row_columns]
    if all(len(step) == 0 or (step[0] > 0 and (step == step[0]).all()) for step in steps):
        return [row_columns]
    breaks = np.flatnonzero(np.logical_or.reduce([step != 1 for step in steps])) + 1
    if len(breaks) >= MAX_PIECES:
        return [row_columns]
    return zip(*(np.split(x, breaks) for x in row_columns), strict=True)


def _index(rows: np.ndarray, limit: int) -> slice | np.ndarray | None:
    """The fastest index that selects these rows: None for all, a slice, or an array."""
    step = int(rows[1] - rows[0]) if len(rows) > 1 else 1
    if step < 1 or (len(rows) > 2 and (np.diff(rows) != step).any()):
        return rows
    is_whole = step == 1 and len(rows) == limit
    return None if is_whole else slice(int(rows[0]), int(rows[-1]) + 1, step)
