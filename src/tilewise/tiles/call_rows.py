"""Rows that each kernel call of a tile reads, of which shard, and which of them need copying."""

from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence, Sized
from functools import lru_cache
from itertools import accumulate, pairwise
from math import gcd
from types import MappingProxyType
from typing import Any, Generic, NamedTuple, TypeAlias, TypeGuard, TypeVar

import numpy as np

from tilewise.layouts.layout import Layout, positions_of_runs
from tilewise.masks.base import Causal, Full, Mask
from tilewise.plan.ir import Rows, Side, Tile
from tilewise.plan.kept import KeptWith, RecentValues
from tilewise.plan.payload import HeadGroups
from tilewise.plan.row_ranges import Ranges, count_rows, row_index, to_ranges
from tilewise.tiles.calls import KernelCall, Kind
from tilewise.tiles.cover import tile_calls

Numbers = TypeVar("Numbers")
Held: TypeAlias = tuple[tuple[Rows, ...], tuple[Rows, ...]]
MAX_PIECES = 8  # a part in more pieces is gathered by index
LONG = 512  # rows of a unit in which tiles are counted: more cells than the cover spares for a call
MAX_CALLS = 16  # that a kernel for whole tiles is asked to make of one


class RowSelection(NamedTuple, Generic[Numbers]):
    """Rows of one shard in one side of a call, selected in the call, in the block and in the shard.

    None selects all rows, in order.

    Attributes:
        shard: number among the tile's shards of this side.
    """

    shard: int
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
        square_causal: causal calls must have as many rows as keys.
        whole_tile: a tile is best one call, however many slices it has.
        lists: with whole_tile, the kernel takes calls of LISTS: rows and keys where they lie.
        whole_rows: a tile is one call of all its rows, whatever the mask: the kernel reads it.
    """

    square_causal: bool = False
    whole_tile: bool = False
    whole_rows: bool = False
    lists: bool = False


LIBRARY_STYLE = CallStyle(square_causal=True)
"""Of kernels of a library, such as cudnn's: rectangles, and squares at the diagonal."""

KERNEL_STYLES: Mapping[str, CallStyle] = MappingProxyType(
    {
        "cpu": LIBRARY_STYLE,
        "cudnn": LIBRARY_STYLE,
        "efficient": LIBRARY_STYLE,
        "flash_attn_4_lists": CallStyle(whole_tile=True),
        "flex": CallStyle(whole_tile=True),
        "triton": CallStyle(whole_tile=True, lists=True),
        "triton_deterministic": CallStyle(whole_tile=True, lists=True),
        **dict.fromkeys(("cuda", "flash_attn", "flash_attn_3", "flash_attn_4"), CallStyle()),
        **dict.fromkeys(("flashinfer", "reference"), CallStyle()),
    }
)
"""How the kernels of this package want tiles cut, by name: what needs no torch reads it here."""


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
        blocks = self._blocks(tile, held)
        for mask, q_heads, kv_heads in self.masks(tile.heads):
            for call, q, k in _calls(blocks, mask, self.cut, _placed):
                yield CallParts(call, q, k, q_heads, kv_heads)

    def kernel_calls(self, tile: Tile, held: Held) -> Iterator[KernelCall]:
        """The calls of `calls` without their rows, which takes a fraction of the time."""
        if self.cut.whole_rows:
            yield self._whole_call(tile, held).call
            return
        blocks = self._blocks(tile, held)
        for mask, _, _ in self.masks(tile.heads):
            for call, _, _ in _calls(blocks, mask, self.cut, _without_rows):
                yield call

    def _blocks(self, tile: Tile, held: Held) -> "Blocks":
        return tuple(
            tuple((layout, *rows_of_side) for rows_of_side in zip(shards, rows, strict=True))
            for layout, shards, rows in zip(self.layouts, tile[:2], held, strict=True)
        )

    def _whole_call(self, tile: Tile, held: Held) -> CallParts[np.ndarray]:
        """One call of all rows and heads of a tile, in the order of its shards."""
        sides: list[tuple[RowSelection[np.ndarray], ...]] = []
        sizes: list[int] = []
        for layout, shards, rows in zip(self.layouts, tile[:2], held, strict=True):
            counts = [count_rows(rows_of_shard) for rows_of_shard in rows]
            starts = [*accumulate(counts, initial=0)]
            sizes.append(starts[-1])
            sides.append(
                tuple(
                    RowSelection(
                        number,
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
RangedBlocks: TypeAlias = tuple[tuple[tuple[Ranges, Rows, int], ...], ...]
"""For each side the positions, rows and sizes of shards."""
Placed: TypeAlias = tuple[
    tuple[KernelCall, tuple[RowSelection[np.ndarray], ...], tuple[RowSelection[np.ndarray], ...]],
    ...,
]
"""Calls and their rows by side."""


class _Block(NamedTuple):
    """Held rows of a shard: their positions, their local numbers, and the shard's size."""

    positions: np.ndarray
    local: np.ndarray
    size: int

    @classmethod
    def of(cls, runs: Sequence[Sequence[int]], rows: Rows, size: int) -> "_Block":
        """Some rows of a shard whose positions are runs of (start, count, stride)."""
        local = row_index(rows)
        return cls(positions_of_runs(runs)[local], local, size)


class _HeldRows(NamedTuple):
    """The arguments of `_Block.of`, as plain tuples: what is kept of them is not a layout's."""

    runs: tuple[tuple[int, ...], ...]
    rows: Rows
    size: int


Place: TypeAlias = Callable[[Sequence[KernelCall], Sequence[Sequence[_Block]]], Placed]
"""_placed or _without_rows."""


def _calls(blocks: Blocks, mask: Mask, cut: CallStyle, place: Place) -> Placed:
    """The calls of a tile of these blocks; tiles share them whose positions have one order.

    A full or a causal mask asks for no more than the order.
    """
    found = tuple(
        tuple(
            _HeldRows(tuple(map(tuple, layout.runs[shard])), rows, layout.size(shard))
            for layout, shard, rows in side
        )
        for side in blocks
    )
    if mask not in (Full(), Causal()):
        return _recent(found, mask, cut, place)
    spans = [_spans(*block[:2]) for side in found for block in side]
    ranges_found = [span for span in spans if span is not None]
    if len(ranges_found) < len(spans):
        return _recent(found, mask, cut, place)
    closed_up_ranges = iter(_closed_up(ranges_found))
    sides = ([(next(closed_up_ranges), x.rows, x.size) for x in side] for side in found)
    return _long(tuple(map(tuple, sides)), mask, cut, place)


_RECENT: KeptWith[RecentValues[Hashable, Placed]] = KeptWith(lambda _: RecentValues(16))
"""The calls of tiles under a mask, for as long as the mask lives."""


def _recent(
    sides: tuple[tuple[_HeldRows, ...], ...], mask: Mask, cut: CallStyle, place: Place
) -> Placed:
    """Find the calls of a tile; ranks that share its heads, and the backward pass, ask again."""

    def made() -> Placed:
        return _made([[_Block.of(*block) for block in side] for side in sides], mask, cut, place)

    return _RECENT.of(mask).get((sides, cut, place), made)


@lru_cache(maxsize=4096)
def _spans(runs: tuple[tuple[int, ...], ...], rows: Rows) -> Ranges | None:
    """Return the positions of some rows of runs as ranges, or None if they would be many ranges."""
    if len(runs) + len(rows) > MAX_PIECES or any(stride != 1 for _, _, stride in runs):
        return None
    positions = row_index(tuple((start, start + count) for start, count, _ in runs))
    return to_ranges(positions[row_index(rows)])


def _closed_up(parts: Sequence[Ranges]) -> list[Ranges]:
    """Renumber the positions of several ranges without the gaps between them."""
    moved: dict[tuple[int, int], tuple[int, int]] = {}
    end = gaps = 0
    for start, stop in sorted({span for part in parts for span in part}):
        if start > end:
            gaps += start - end
        end = max(end, stop)
        moved[start, stop] = start - gaps, stop - gaps
    return [tuple([moved[span] for span in part]) for part in parts]


class _UnevenError(Exception):
    """Rows cannot be counted in units."""


def _resized(x: Any, unit: int, size: int) -> Any:
    """Scale all row numbers in a call, selection or range: unit rows become size rows.

    Raises:
        _UnevenError: if something begins or ends inside a unit.
    """
    match x:
        case None | Kind():
            return x
        case int() if x % unit == 0:
            return x // unit * size
        case slice(step=None | 1):
            return slice(_resized(x.start, unit, size), _resized(x.stop, unit, size), x.step)
        case RowSelection(shard):
            return RowSelection(shard, *(_resized(index, unit, size) for index in x[1:]))
        case KernelCall(q, k, kind, ()):
            return KernelCall(_resized(q, unit, size), _resized(k, unit, size), kind)
        case KernelCall():
            raise _UnevenError
        case tuple():
            return tuple([_resized(part, unit, size) for part in x])
        case _:
            raise _UnevenError


def _numbers(x: Any) -> Iterator[int]:
    """Yield the numbers in nested tuples."""
    if isinstance(x, int):
        yield x
        return
    for part in x:
        yield from _numbers(part)


@lru_cache(maxsize=1024)
def _long(ranged: RangedBlocks, mask: Mask, cut: CallStyle, place: Place) -> Placed:
    """Find the calls of a tile of long runs by those of a similar, shorter tile.

    How a tile is cut does not depend on how long its runs are, if they are multiples of one unit.
    """
    unit = gcd(*_numbers(ranged))
    if unit > LONG:
        try:
            return _resized(_shared(_resized(ranged, unit, LONG), mask, cut, place), LONG, unit)
        except _UnevenError:
            pass
    return _shared(ranged, mask, cut, place)


@lru_cache(maxsize=256)
def _shared(ranged: RangedBlocks, mask: Mask, cut: CallStyle, place: Place) -> Placed:
    sides = [
        [
            _Block(row_index(positions), row_index(local_rows), num_rows)
            for positions, local_rows, num_rows in side
        ]
        for side in ranged
    ]
    return _made(sides, mask, cut, place)


def _made(sides: Sequence[Sequence[_Block]], mask: Mask, cut: CallStyle, place: Place) -> Placed:
    q, k = (np.concatenate([block.positions for block in side]) for side in sides)
    return place(_cut(q, k, mask, cut), sides)


def _placed(calls: Sequence[KernelCall], sides: Sequence[Sequence[_Block]]) -> Placed:
    q_blocks, k_blocks = sides
    return tuple((call, _parts(call.q, q_blocks), _parts(call.k, k_blocks)) for call in calls)


def _without_rows(calls: Sequence[KernelCall], sides: Sequence[Sequence[_Block]]) -> Placed:
    return tuple((call, (), ()) for call in calls)


def _parts(ranges: Ranges, blocks: Sequence[_Block]) -> tuple[RowSelection[np.ndarray], ...]:
    """Return which rows of which block a call reads, in the order of the call."""
    starts = [*accumulate((len(block.local) for block in blocks), initial=0)]
    parts: list[tuple[int, RowSelection[np.ndarray]]] = []
    for i, in_call, in_block in _rows_by_block(ranges, starts):
        _, local, size = blocks[i]
        limits = count_rows(ranges), len(local), size
        for row_groups in _pieces((in_call, in_block, local[in_block])):
            index = (_index(x, n) for x, n in zip(row_groups, limits, strict=True))
            part = RowSelection(i, *index)
            parts.append((int(row_groups[0][0]), part))
    return tuple(part for _, part in sorted(parts, key=lambda placed: placed[0]))


def _rows_by_block(
    ranges: Ranges, starts: Sequence[int]
) -> Iterator[tuple[int, np.ndarray, np.ndarray]]:
    """Yield the rows that a call reads, block by block.

    Args:
        ranges: of the call, into the rows of all blocks one after the other.
        starts: first row of each block among those, and the number of all.
    Yields:
        the block; indices of its rows in the call; and their indices in the block.
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
    by_block = np.argsort(which, kind="stable")
    blocks, firsts = np.unique(which[by_block], return_index=True)
    ends = [*firsts[1:].tolist(), len(rows)]
    for i, first, end in zip(blocks.tolist(), firsts.tolist(), ends, strict=True):
        in_call = by_block[first:end]
        yield i, in_call, rows[in_call] - starts[i]


def is_range(index: object) -> TypeGuard[slice | None]:
    """Return whether an index selects neighbouring rows."""
    return index is None or (isinstance(index, slice) and index.step in (None, 1))


def num_rows(index: slice | Sized | None, size: int) -> int:
    """Return the number of rows that an index selects, of a size."""
    if isinstance(index, slice):
        return len(range(*index.indices(size)))
    return size if index is None else len(index)


def _cut(q: np.ndarray, k: np.ndarray, mask: Mask, style: CallStyle) -> Sequence[KernelCall]:
    """A tile's calls.

    Those whose rows must be in the order of their positions, but do not lie so, are cut into
    rectangles and squares, of which less is to copy. All kernels then copy the same, but for those
    that read rows where they lie.
    """
    calls = tile_calls(q, k, mask, square_causal=style.square_causal, whole_tile=style.whole_tile)
    if style.lists:
        return calls
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
