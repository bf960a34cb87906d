"""Which rows of which shard each kernel call of a tile reads, and which of them need copying."""

from collections.abc import Iterable, Iterator, Sequence, Sized
from typing import Generic, NamedTuple, TypeAlias, TypeGuard, TypeVar

import numpy as np

from tilewise.layouts.layout import Layout
from tilewise.masks.base import Mask
from tilewise.plan.builder import partial
from tilewise.plan.ir import Item, Rows, Side, Tile
from tilewise.plan.payload import HeadGroups
from tilewise.plan.row_ranges import Ranges, row_index
from tilewise.tiles.calls import KernelCall, Kind
from tilewise.tiles.cover import tile_calls

Numbers = TypeVar("Numbers")
Held: TypeAlias = tuple[tuple[Rows, ...], tuple[Rows, ...]]
MAX_PIECES = 8  # a part in more pieces is gathered by index
MAX_CALLS = 16  # that a kernel for whole tiles is asked to make of one


class RowSelection(NamedTuple, Generic[Numbers]):
    """Rows of one shard in one side of a call: in the call, in its block, in the whole shard.

    None stands for all rows, in order. shard counts the tile's shards of this side; item is the
    partial that the rows' results add to.
    """

    shard: int
    item: Item
    call: slice | Numbers | None
    block: slice | Numbers | None
    local: slice | Numbers | None


class CallParts(NamedTuple, Generic[Numbers]):
    """A call with its rows' places, and which of the group's heads it is for (None: all)."""

    call: KernelCall
    q: tuple[RowSelection[Numbers], ...]
    k: tuple[RowSelection[Numbers], ...]
    q_heads: slice | None
    kv_heads: slice | None


class CallStyle(NamedTuple):
    """How a kernel wants tiles cut; see `tile_calls`."""

    square_causal: bool = False
    whole_tile: bool = False


class TileCalls(NamedTuple):
    """What a tile's calls follow from, beside the tile: layouts of both sides, mask, heads."""

    layouts: tuple[Layout, Layout]
    mask: Mask
    groups: HeadGroups
    cut: CallStyle

    def calls(self, tile: Tile, held: Held) -> Iterator[CallParts[np.ndarray]]:
        """The calls of a tile whose blocks hold these rows, query side first."""
        local = [[row_index(rows) for rows in side] for side in held]
        q_positions, k_positions = (
            np.concatenate([layout.rows(s)[x] for s, x in zip(shards, rows, strict=True)])
            for layout, shards, rows in zip(self.layouts, tile[:2], local, strict=True)
        )
        for mask, q_heads, kv_heads in self._masks(tile.heads):
            for call in _cut(q_positions, k_positions, mask, self.cut):
                q = self._parts(Side.Q, tile, call.q, local[0])
                k = self._parts(Side.KV, tile, call.k, local[1])
                yield CallParts(call, q, k, q_heads, kv_heads)

    def _masks(self, group: int) -> Iterator[tuple[Mask, slice | None, slice | None]]:
        """The masks of a head group, and which of its heads each is for."""
        by_head: Sequence[Mask] | None = getattr(self.mask, "heads", None)
        if by_head is None:
            yield self.mask, None, None
            return
        first = self.groups.slice(Side.KV, group)
        shared = self.groups.size[0] // (first.stop - first.start)
        for i, mask in enumerate(by_head[first]):
            yield mask, slice(i * shared, (i + 1) * shared), slice(i, i + 1)

    def _parts(
        self, side: Side, tile: Tile, ranges: Ranges, local: Sequence[np.ndarray]
    ) -> tuple[RowSelection[np.ndarray], ...]:
        rows = row_index(ranges)
        starts = np.cumsum([0, *map(len, local)])
        which = np.searchsorted(starts, rows, side="right") - 1
        parts: list[tuple[int, RowSelection[np.ndarray]]] = []
        for i in np.unique(which).tolist():
            shard = (tile.q, tile.kv)[side][i]
            in_call = np.flatnonzero(which == i)
            in_block = rows[in_call] - starts[i]
            limits = len(rows), len(local[i]), self.layouts[side].size(shard)
            for places in _pieces((in_call, in_block, local[i][in_block])):
                index = (_index(x, n) for x, n in zip(places, limits, strict=True))
                part = RowSelection(i, partial(side, shard, tile.heads), *index)
                parts.append((int(places[0][0]), part))
        return tuple(part for _, part in sorted(parts, key=lambda placed: placed[0]))


def is_range(index: object) -> TypeGuard[slice | None]:
    """Whether an index selects neighbouring rows."""
    return index is None or (isinstance(index, slice) and index.step in (None, 1))


def num_rows(index: slice | Sized | None, size: int) -> int:
    """How many of so many rows an index selects."""
    if isinstance(index, slice):
        return len(range(*index.indices(size)))
    return size if index is None else len(index)


def span(
    parts: Sequence[RowSelection], sizes: Sequence[int], starts: Sequence[int | None]
) -> tuple[int, int] | None:
    """The rows of a buffer in which all parts lie side by side, in order; None if they do not.

    Args:
        sizes, starts: rows of each of the tile's blocks of this side, and where in the buffer its
            first is; None: it is not there.
    """
    begin = end = None
    for part in parts:
        start = starts[part.shard]
        if start is None or not (is_range(part.call) and is_range(part.block)):
            return None
        first, stop = (
            (0, sizes[part.shard]) if part.block is None else (part.block.start, part.block.stop)
        )
        if end not in (None, start + first):
            return None
        begin = start + first if begin is None else begin
        end = start + stop
    return None if begin is None or end is None else (begin, end)


def _cut(q: np.ndarray, k: np.ndarray, mask: Mask, cut: CallStyle) -> Sequence[KernelCall]:
    """A tile's calls.

    Those whose rows must be in the order of their positions, but do not lie so, are cut into
    rectangles and squares, of which less is to copy. All kernels then copy the same.
    """
    calls = tile_calls(q, k, mask, square_causal=cut.square_causal, whole_tile=cut.whole_tile)
    ordered = (c for c in calls if cut.whole_tile or c.kind is Kind.CAUSAL)
    if all(len(call.q) == len(call.k) == 1 for call in ordered):
        return calls
    several = tile_calls(q, k, mask, square_causal=True)
    return several if len(several) <= max(MAX_CALLS, len(calls)) else calls


def _pieces(places: tuple[np.ndarray, ...]) -> Iterable[tuple[np.ndarray, ...]]:
    """Rows of one shard in as few pieces as can each be selected by slices, if those are few."""
    steps = [np.diff(x) for x in places]
    if all(len(step) == 0 or (step[0] > 0 and (step == step[0]).all()) for step in steps):
        return [places]
    breaks = np.flatnonzero(np.logical_or.reduce([step != 1 for step in steps])) + 1
    if len(breaks) >= MAX_PIECES:
        return [places]
    return zip(*(np.split(x, breaks) for x in places), strict=True)


def _index(rows: np.ndarray, limit: int) -> slice | np.ndarray | None:
    """Rows as what selects them fastest, of a tensor of so many rows."""
    step = int(rows[1] - rows[0]) if len(rows) > 1 else 1
    if step < 1 or (len(rows) > 2 and (np.diff(rows) != step).any()):
        return rows
    whole = step == 1 and len(rows) == limit
    return None if whole else slice(int(rows[0]), int(rows[-1]) + 1, step)
