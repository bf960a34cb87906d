"""A call's slices as lists of work for blocks of its rows, or of its keys: built once, on the host.

keys of a block of rows            An item is one block; the others' indices that it meets come
. o o|o o o o|o o .  .             in runs: full ones, whole blocks without any mask, and masked
.  o|o o o o|o o o  .              ones, with the interval of each of the block's own indices.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from tilewise.masks.strips import expand
from tilewise.plan.row_ranges import without
from tilewise.tiles.calls import KernelCall, Kind

FAR = 1 << 30  # farther than any index: an end that does not bind
UNIT = 2  # rows at which runs of blocks of keys begin: their statistics are loaded in pairs


class WorkList(NamedTuple):
    """Work of blocks of `own` indices that meet `others`, both of one call; all arrays int32.

    Attributes:
        items: [num_blocks, 7] first index of a block, end of its indices, its full runs [begin,
            end), its masked runs [begin, end), and the end of the indices whose results may be
            added; most work first, so that the last to start are the shortest.
        full: [num_full, 2] first and end of others, a multiple of `others` long, without any mask.
        masked: [num_masked, 2] first and end of others. Of blocks of keys, runs of both kinds begin
            at multiples of `unit_of`.
        intervals: [num_masked, 2, own] first and end of the others that each own index meets,
            within its run; 0, 0 where it meets none.
    """

    items: np.ndarray
    num_busy: int  # items that have work; they come first
    full: np.ndarray
    masked: np.ndarray
    intervals: np.ndarray


class _Blocks(NamedTuple):
    """Blocks of own indices, ascending: first index, end, and the end of those whose results may
    be added: all or none.
    """

    first: np.ndarray
    end: np.ndarray
    old_end: np.ndarray

    @classmethod
    def of(cls, call: KernelCall, own: int, of_keys: bool) -> _Blocks:
        """Blocks of a call: those of lists end where its rows do, and where rows are fresh."""
        if call.kind is not Kind.LISTS:
            size = call.num_k if of_keys else call.num_q
            first = np.arange(0, size, own)
            end = np.minimum(first + own, size)
            return cls(first, end, end)
        ranges, fresh = call.sides[of_keys], call.fresh[of_keys]
        spans = sorted(
            [(start, stop, 0) for start, stop in fresh]
            + [(start, stop, 1) for start, stop in without(ranges, fresh)]
        )
        start, stop, adds = np.asarray(spans, np.int64).reshape(-1, 3).T
        index, block = expand(np.zeros_like(start), -(-(stop - start) // own))
        first = start[index] + block * own
        end = np.minimum(first + own, stop[index])
        return cls(first, end, np.where(adds[index], end, first))


class _Bands(NamedTuple):
    """Slices seen from one side: index x in [start, stop) meets [low(x), high(x)).

    low(x) = max(low, x + low_line), high(x) = min(high, x + high_line): both never descend.
    """

    start: np.ndarray
    stop: np.ndarray
    low: np.ndarray
    low_line: np.ndarray
    high: np.ndarray
    high_line: np.ndarray

    def at(self, x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        return np.maximum(self.low, x + self.low_line), np.minimum(self.high, x + self.high_line)

    def take(self, index: np.ndarray) -> _Bands:
        return _Bands(*(column[index] for column in self))


def work_list(call: KernelCall, own: int, others: int, of_keys: bool = False) -> WorkList:
    """The work of a call, for blocks of so many rows that meet so many keys at a time.

    Args:
        own, others: indices per block of the side that is cut into items, and of the other.
        of_keys: items are blocks of keys, which meet rows.
    """
    blocks = _Blocks.of(call, own, of_keys)
    bands = (_by_key if of_keys else _by_row)(call)
    first, last = (
        np.searchsorted(blocks.first, x, "right") - 1 for x in (bands.start, bands.stop - 1)
    )
    count = last - first + 1
    index = np.repeat(np.arange(len(count)), count)
    block = np.arange(len(index)) + (first - np.cumsum(count) + count)[index]
    bands = bands.take(index)
    begin, end = blocks.first[block], blocks.end[block]
    covers = (bands.start <= begin) & (bands.stop >= end)
    bands = bands._replace(start=np.maximum(bands.start, begin), stop=np.minimum(bands.stop, end))
    left, full_end = bands.at(bands.start)
    full_start, right = bands.at(bands.stop - 1)
    left -= left % (unit_of(call) if of_keys else 1)
    full_start = left + -(-(full_start - left) // others) * others
    full_end = full_start + np.maximum(full_end - full_start, 0) // others * others
    whole = covers & (full_end > full_start)
    full = np.stack([block, full_start, full_end], 1)[whole]
    full_start, full_end = np.where(whole, full_start, right), np.where(whole, full_end, right)
    edges = np.arange(len(block))
    edges = np.concatenate([edges, edges])
    runs = np.stack([np.tile(block, 2), np.append(left, full_end), np.append(full_start, right)], 1)
    kept = runs[:, 1] < runs[:, 2]
    runs, bands = runs[kept], bands.take(edges[kept])
    together = np.zeros(len(runs), np.int64)
    if call.kind is Kind.LISTS:  # what lies between two ranges of a call may be nowhere
        starts = [start for start, _ in call.sides[not of_keys]]
        together = np.searchsorted(starts, runs[:, 1], "right")
    masked, intervals = _merged(runs, bands, together, blocks.first, own, others)
    return _listed(full, masked, intervals, blocks)


def unit_of(call: KernelCall) -> int:
    """Return a number of which the first row of every run of a block of keys is a multiple."""
    lists = call.kind is Kind.LISTS
    return 1 if lists and any(start % UNIT for start, _ in call.q) else UNIT


def _by_row(call: KernelCall) -> _Bands:
    q0, q1, lo, lo_slope, hi, hi_slope = _columns(call)
    return _Bands(
        q0,
        q1,
        np.where(lo_slope, -FAR, lo),
        np.where(lo_slope, lo, -2 * FAR),
        np.where(hi_slope, FAR, hi),
        np.where(hi_slope, hi, 2 * FAR),
    )


def _by_key(call: KernelCall) -> _Bands:
    """Key j meets row a of a slice if lo + lo_slope a <= j < hi + hi_slope a."""
    q0, q1, lo, lo_slope, hi, hi_slope = _columns(call)
    return _Bands(
        lo + lo_slope * q0,
        hi + hi_slope * (q1 - 1),
        q0,
        np.where(hi_slope, 1 - hi, -2 * FAR),
        q1,
        np.where(lo_slope, 1 - lo, 2 * FAR),
    )


def _columns(call: KernelCall) -> np.ndarray:
    return np.asarray(call.as_slices, np.int64).reshape(-1, 6).T


def _merged(
    runs: np.ndarray,
    bands: _Bands,
    together: np.ndarray,
    first: np.ndarray,
    own: int,
    others: int,
) -> tuple[np.ndarray, np.ndarray]:
    """Masked runs and their intervals; neighbours of disjoint indices are one where that is less.

    Args:
        runs: int64 [num_runs, 3] block, first and end; bands: of each.
        together: of each, a number that only runs which may be one have in common.
        first: the first index of every block.
    """
    order = np.lexsort((runs[:, 1], runs[:, 0]))
    runs, bands = runs[order], bands.take(order)
    x = first[runs[:, :1]] + np.arange(own)
    low, high = _Bands(*(column[:, None] for column in bands)).at(x)
    inside = (x >= bands.start[:, None]) & (x < bands.stop[:, None])
    low, high = np.maximum(low, runs[:, 1:2]), np.minimum(high, runs[:, 2:])
    inside &= low < high
    intervals = np.where(inside[:, None], np.stack([low, high], 1), 0)
    starts = _group_starts(runs, bands, together[order], others)
    if not len(starts):
        return runs, intervals
    runs = np.stack(
        [
            runs[starts, 0],
            np.minimum.reduceat(runs[:, 1], starts),
            np.maximum.reduceat(runs[:, 2], starts),
        ],
        1,
    )
    return runs, np.add.reduceat(intervals, starts, axis=0)


def _group_starts(runs: np.ndarray, bands: _Bands, together: np.ndarray, others: int) -> np.ndarray:
    """Return where each new group of runs begins: a group costs no more blocks than its members."""
    starts = []
    block, k0, k1, x0, x1, cost = (-1, 0), 0, 0, 0, 0, 0
    columns = *runs.T, bands.start, bands.stop, together
    for i, (b, a0, a1, y0, y1, near) in enumerate(np.stack(columns, 1).tolist()):
        alone, end = -(-(a1 - a0) // others), max(k1, a1)
        in_one = -(-(end - k0) // others)
        if (b, near) == block and (y0 >= x1 or y1 <= x0) and in_one <= cost + alone:
            k1, x0, x1, cost = end, min(x0, y0), max(x1, y1), in_one
        else:
            starts.append(i)
            block, k0, k1, x0, x1, cost = (b, near), a0, a1, y0, y1, alone
    return np.asarray(starts, np.int64)


def _listed(
    full: np.ndarray, masked: np.ndarray, intervals: np.ndarray, blocks_of: _Blocks
) -> WorkList:
    num_blocks = len(blocks_of.first)
    full = full[np.lexsort((full[:, 1], full[:, 0]))]
    blocks = np.arange(num_blocks)
    ends = [np.searchsorted(x[:, 0], blocks, side) for x in (full, masked) for side in SIDES]
    work = np.zeros(num_blocks, np.int64)
    for x in (full, masked):
        np.add.at(work, x[:, 0], x[:, 2] - x[:, 1])
    order = np.argsort(-work, kind="stable")
    return WorkList(
        np.stack([*blocks_of[:2], *ends, blocks_of.old_end], 1)[order].astype(np.int32),
        int(np.count_nonzero(work)),
        full[:, 1:].astype(np.int32),
        masked[:, 1:].astype(np.int32),
        intervals.astype(np.int32),
    )


SIDES = ("left", "right")
