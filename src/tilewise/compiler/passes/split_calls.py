"""A kernel call of rows that do not lie side by side: a copy of them, or a call for each piece.

What is copied is read and written once more. Calls of pieces copy nothing, but have more results to
combine. Of both sides of a call, each is copied or cut, whichever moves fewer bytes in all.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise, product

import numpy as np

from tilewise.compiler.draft import AttendTile, Draft, Held
from tilewise.compiler.facts import Facts
from tilewise.plan.ir import Side
from tilewise.plan.row_ranges import Ranges, joined_ranges, packed_ranges
from tilewise.tiles.call_rows import CallParts, RowSelection, is_range, num_rows
from tilewise.tiles.calls import KernelCall, Kind

CALL_BYTES = 34 << 20
"""Bytes that a GPU's memory reads and writes while one more kernel call begins and ends: 8 us."""

FULL_DEVICE = 1 << 16
"""Rows times heads that keep a GPU busy: four waves of 128 rows on 132 multiprocessors."""

Parts = CallParts[np.ndarray]
Selections = Sequence[RowSelection[np.ndarray]]


def split_calls(draft: Draft, facts: Facts, tile: AttendTile, parts: Parts) -> Iterator[Parts]:
    """Yield one call of a tile, or the smaller ones in its place that move fewer bytes."""
    full = parts.call.kind is Kind.FULL and not facts.payload.whole_rows and not facts.latent
    if not full or not facts.combines(draft):
        yield parts
        return
    q, k = (_pieces(draft, tile.operands[side], parts[1 + side]) for side in Side)  # pyright: ignore
    cuts = _cheapest(draft, facts, tile, (q, k))
    if not any(cuts):
        yield parts
        return
    queries, keys = (
        [_call_of(piece, ranges) for piece in pieces] if cut else [(whole, ranges)]
        for pieces, cut, whole, ranges in (
            (q, cuts[Side.Q], parts.q, parts.call.q),
            (k, cuts[Side.KV], parts.k, parts.call.k),
        )
    )
    for (q_parts, q_ranges), (k_parts, k_ranges) in product(queries, keys):
        call = KernelCall(q_ranges, k_ranges, Kind.FULL)
        yield CallParts(call, q_parts, k_parts, parts.q_heads, parts.kv_heads)


def _pieces(
    draft: Draft, held: Sequence[Held], selections: Selections
) -> list[list[RowSelection[np.ndarray]]]:
    """Group the rows of one side of a call into runs that lie side by side in one buffer."""
    if not all(is_range(x.call) and is_range(x.block) for x in selections):
        return [[*selections]]
    pieces = [[selections[0]]]
    for before, one in pairwise(selections):
        beside = all(
            draft.side_by_side([draft.rows(a, before.block), draft.rows(b, one.block)])  # pyright: ignore
            for a, b in zip(held[before.shard].views, held[one.shard].views, strict=True)
        )
        if beside:
            pieces[-1].append(one)
        else:
            pieces.append([one])
    return pieces


def _cheapest(
    draft: Draft, facts: Facts, tile: AttendTile, pieces: Sequence[Sequence[Selections]]
) -> tuple[bool, ...]:
    """Return for each side whether to cut it, so that the fewest bytes move; a call counts as
    CALL_BYTES.
    """
    numbers = [len(x) for x in pieces]
    if max(numbers) == 1:
        return False, False
    rows = [
        [sum(_num_rows(draft, tile.operands[side], x) for x in one) for one in pieces[side]]
        for side in Side
    ]
    heads = facts.payload.heads(Side.Q)
    found: list[tuple[float, tuple[bool, ...]]] = []
    for cuts in product(*((False, True) if number > 1 else (False,) for number in numbers)):
        num_calls, moved = 1, 0
        for side in Side:
            other = Side(1 - side)
            if cuts[side]:
                num_calls *= numbers[side]
                results = sum(rows[other]) * _result_bytes(draft, facts, tile, other)
                moved += 2 * (numbers[side] - 1) * results
            elif numbers[side] > 1:
                operand = sum(
                    draft.num_bytes(draft.rows(x, (0, 1))) for x in tile.operands[side][0].views
                )
                moved += 2 * sum(rows[side]) * operand
        # Kernels share out blocks of the rows that have results: queries, in backward keys too.
        alone = (side for side in Side if cuts[side] and (side is Side.Q or facts.payload.backward))
        if all(min(rows[side]) * heads >= FULL_DEVICE for side in alone):
            found.append((moved + (num_calls - 1) * CALL_BYTES, cuts))
    return min(found)[1]


def _num_rows(draft: Draft, held: Sequence[Held], one: RowSelection[np.ndarray]) -> int:
    return num_rows(one.block, draft.num_rows(held[one.shard].views[0]))


def _result_bytes(draft: Draft, facts: Facts, tile: AttendTile, side: Side) -> int:
    """Bytes of a row of a side's results, as kernels make them."""
    if not tile.partials[side]:
        return 0
    row = draft.rows(tile.partials[side][0], (0, 1))
    return draft.made_bytes(row, facts.payload.dtype)


def _call_of(
    selections: Selections, ranges: Ranges
) -> tuple[tuple[RowSelection[np.ndarray], ...], Ranges]:
    """Make a call of its own of some rows of a call.

    Returns:
        the selections of its rows; and the ranges of the tile's rows that they are.
    """
    if len(selections) == 1 and selections[0].call is None:
        return tuple(selections), ranges
    found: list[RowSelection[np.ndarray]] = []
    mine: list[tuple[int, int]] = []
    begin = 0
    for one in selections:
        assert isinstance(one.call, slice)
        end = begin + one.call.stop - one.call.start
        found.append(one._replace(call=slice(begin, end)))
        for (start, _), (first, last) in packed_ranges(ranges):
            low, high = max(first, one.call.start), min(last, one.call.stop)
            if low < high:
                mine.append((start + low - first, start + high - first))
        begin = end
    if len(found) == 1:
        found = [found[0]._replace(call=None)]
    return tuple(found), joined_ranges(mine)
