"""Cells: for each pair of shards the number of allowed pairs of tokens, and the rows they need."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from tilewise.layouts.layout import Layout
from tilewise.masks.base import Mask
from tilewise.masks.strips import Strips, clipped, expand, overlaps
from tilewise.plan.ir import Rows

Array = NDArray[np.int64]
MAX_JOIN = (
    5_000_000  # strips x runs x runs beyond which rows of striped shards are not distinguished
)


class Cell(NamedTuple):
    """The rows that query shard i needs of key shard j, half-open ranges of local rows.

    area: allowed pairs (the mean over heads, rounded up, of a mask that differs by head).
    q_rows: rows of the query shard that see some key of the key shard.
    k_rows: rows of the key shard that some query of the query shard sees.
    """

    area: int
    q_rows: Rows
    k_rows: Rows


def cells(mask: Mask, q_layout: Layout, k_layout: Layout) -> dict[tuple[int, int], Cell]:
    """Every pair (query shard, key shard) with an allowed pair of tokens, by ascending shards.

    Areas are exact, and rows too, but for masks of very many strips on striped keys: there the
    whole of both shards is reported.
    """
    counts = _search(mask.strips(), q_layout, k_layout)
    heads: Sequence[Mask] = getattr(mask, "heads", ())
    if heads:
        total = sum(_search(head.strips(), q_layout, k_layout).area for head in heads)
        counts.area[:] = -(-total // len(heads))
    pairs = np.flatnonzero(counts.area)
    q_rows, k_rows = (_by_pair(pairs, ranges) for ranges in counts.ranges)
    q_shards, k_shards = (x.tolist() for x in np.divmod(pairs, k_layout.world_size))
    values = zip(counts.area[pairs].tolist(), q_rows, k_rows, strict=True)
    return {
        key: Cell(*cell)
        for key, cell in zip(zip(q_shards, k_shards, strict=True), values, strict=True)
    }


def _search(strips: Strips, q_layout: Layout, k_layout: Layout) -> CellCounts:
    q, k = runs_of(q_layout), runs_of(k_layout)
    counts = CellCounts(q_layout.world_size, k_layout.world_size)
    if not (len(strips) and len(q.start) and len(k.start)):
        return counts
    sloped = bool(strips.lo_slope.any() or strips.hi_slope.any())
    blocks = bool((k.stride == 1).all())
    strides = np.unique(np.concatenate([x.stride[x.size > 1] for x in (q, k)]))
    if sloped and (len(strides) > 1 or (blocks and (q.stride > 1).any())):
        q = rows_of(q)
    limit = MAX_JOIN // len(k.start)
    by_residue = not blocks and _is_striped(k, k_layout.num_tokens)
    if by_residue and (q.stride > 1).any() and len(strips) * len(q.start) > limit:
        rows = int((np.minimum(strips.q1, q_layout.num_tokens) - strips.q0).sum())
        q = rows_of(q) if rows <= len(strips) * len(q.start) else q
    ends = np.cumsum(_num_pieces(strips, q))
    by_residue = by_residue and ends[-1] > limit
    for a, b in _groups_of(ends, AT_ONCE):
        pieces = pieces_of(strips.take(slice(a, b)), q)
        if by_residue and len(pieces.run):
            _count_residues(pieces, q, k, k_layout.num_tokens, counts)
            continue
        for group in parts(pieces, AT_ONCE if blocks else max(1, AT_ONCE // len(k.start))):
            if blocks:
                join_blocks(group, q, k, counts)
                continue
            first_runs = np.zeros_like(group.run)
            join(group, q, k, expand(first_runs, first_runs + len(k.start)), counts)
    if by_residue:
        pairs = np.flatnonzero(counts.area)
        for side, layout in enumerate((q_layout, k_layout)):
            shard = (pairs // k_layout.world_size, pairs % k_layout.world_size)[side]
            counts.add(side, pairs, np.zeros_like(pairs), np.asarray(layout.sizes)[shard])
    return counts


def _num_pieces(strips: Strips, q: Runs) -> Array:
    """Upper bound of the pieces of each strip, which is exact if the runs do not interleave."""
    if (q.stride == 1).all():
        first_run = np.searchsorted(q.start + q.size, strips.q0, "right")
        return np.maximum(np.searchsorted(q.start, strips.q1) - first_run, 0)
    return np.minimum(strips.q1 - strips.q0, len(q.start))


def _groups_of(ends: Array, size: int) -> list[tuple[int, int]]:
    """Group neighbours so that each group totals at most size, or is a single one.

    Args:
        ends: running totals.
    """
    cuts = np.searchsorted(ends, np.arange(0, int(ends[-1]) + size, size))
    return list(pairwise(np.unique(np.append(cuts, len(ends))).tolist()))


def _is_striped(k: Runs, num_tokens: int) -> bool:
    """Return whether run r holds the tokens t with t mod len(runs) = r."""
    run_numbers = np.arange(len(k.start))
    counts = -((run_numbers - num_tokens) // len(run_numbers))
    strides = np.where(k.size == 1, len(run_numbers), k.stride)
    return bool(
        (k.start == run_numbers).all()
        and (k.size == counts).all()
        and (strides == len(run_numbers)).all()
    )


def _count_residues(
    pieces: StripPieces, q: Runs, k: Runs, num_keys: int, counts: CellCounts
) -> None:
    """Count areas only, on striped keys: rank r holds the keys of residue r mod n.

    Of w neighbouring keys, w // n have each residue, and the w mod n residues from the first key's
    on have one more. Flat pieces are counted at once, others row by row.
    """
    n, num_q = len(k.start), counts.num_q_shards
    marks = np.zeros(num_q * 2 * n, np.int64)
    flat = (pieces.lines[1] == 0) & (pieces.lines[3] == 0)
    times = np.where(flat, pieces.rows, 1)
    pieces = pieces._replace(rows=np.where(flat, 1, pieces.rows))
    for a, b in _groups_of(np.cumsum(pieces.rows), AT_ONCE):
        group = pieces.take(slice(a, b))
        index, i = expand(group.first, group.first + group.rows)
        (lo, lo_slope, hi, hi_slope), _, _, run = group.take(index)
        i, count = i * q.stride[run], times[a:b][index]
        lo, hi = np.clip(lo + lo_slope * i, 0, num_keys), np.clip(hi + hi_slope * i, 0, num_keys)
        keys, first_residue, row = hi - lo, lo % n, q.shard[run] * 2 * n
        np.add.at(marks, row, keys // n * count)
        np.subtract.at(marks, row + n, keys // n * count)
        np.add.at(marks, row + first_residue, count)
        np.subtract.at(marks, row + first_residue + keys % n, count)
    running_counts = np.cumsum(marks.reshape(num_q, 2 * n), axis=1)
    table = np.zeros((num_q, counts.num_k_shards), np.int64)
    table[:, k.shard] = running_counts[:, :n] + running_counts[:, n:]
    counts.area += table.reshape(-1)


def _by_pair(pairs: Array, ranges_found: list[PairRows]) -> list[Rows]:
    """The ranges of each of the (ascending) pairs."""
    if not len(pairs):
        return []
    pair, start, stop = merged(
        *(np.concatenate(column) for column in zip(*ranges_found, strict=True))
    )
    ranges = list(zip(start.tolist(), stop.tolist(), strict=True))
    cuts = np.append(np.searchsorted(pair, pairs), len(pair)).tolist()
    return [tuple(ranges[a:b]) for a, b in pairwise(cuts)]


AT_ONCE = 2**20  # bounds the memory of one pass
FEW_RUNS = 8  # up to this many runs between the lines of a piece are counted one by one


class Runs(NamedTuple):
    """All runs of a layout as columns, by ascending start; offset: local row of the first."""

    start: Array
    size: Array
    stride: Array
    shard: Array
    offset: Array


class StripPieces(NamedTuple):
    """Strips within query runs: rows [first, first + rows) of a run, lines over the run's rows."""

    lines: tuple[Array, Array, Array, Array]
    first: Array
    rows: Array
    run: Array

    def take(self, index: Array | NDArray[np.bool_] | slice) -> StripPieces:
        lo, lo_slope, hi, hi_slope = (line[index] for line in self.lines)
        return StripPieces(
            (lo, lo_slope, hi, hi_slope), self.first[index], self.rows[index], self.run[index]
        )


PairRows = tuple[Array, Array, Array]
"""Columns: a pair, and the half-open range of its rows from start to stop."""


class CellCounts:
    """Collects areas and row ranges of shard pairs; a pair is the number i * num_k_shards + j."""

    def __init__(self, num_q_shards: int, num_k_shards: int):
        self.num_q_shards, self.num_k_shards = num_q_shards, num_k_shards
        self.area = np.zeros(num_q_shards * num_k_shards, np.int64)
        self.ranges: tuple[list[PairRows], list[PairRows]] = ([], [])

    def add(self, side: int, pair: Array, start: Array, stop: Array) -> None:
        """Rows [start, stop) of side 0 (queries) or 1 (keys) of each pair are needed."""
        self.ranges[side].append(merged(pair, start, stop))


def runs_of(layout: Layout) -> Runs:
    """A layout's runs; runs of one row count as neighbouring keys."""
    rows: list[tuple[int, int, int, int, int]] = []
    for shard, runs in enumerate(layout.runs):
        offset = 0
        for run in runs:
            rows.append((run.start, run.count, run.stride if run.count > 1 else 1, shard, offset))
            offset += run.count
    return Runs(*np.array(sorted(rows), np.int64).reshape(-1, 5).T)


def rows_of(runs: Runs) -> Runs:
    """Make every row a run of its own, so that strips are flat in any coordinates."""
    index, i = expand(np.zeros_like(runs.size), runs.size)
    start, one = runs.start[index] + runs.stride[index] * i, np.ones_like(i)
    order = np.argsort(start, kind="stable")
    return Runs(start[order], one, one, runs.shard[index][order], (runs.offset[index] + i)[order])


def pieces_of(strips: Strips, q: Runs) -> StripPieces:
    """Cut every strip at the runs of queries that it meets."""
    index, run = overlaps(strips.q0, strips.q1, q.start, q.start + (q.size - 1) * q.stride + 1)
    strips = strips.take(index)
    start, stride = q.start[run], q.stride[run]
    first = np.maximum(-((start - strips.q0) // stride), 0)
    count = np.minimum(-((start - strips.q1) // stride), q.size[run]) - first
    lo, hi = strips.lo + strips.lo_slope * start, strips.hi + strips.hi_slope * start
    pieces = StripPieces((lo, strips.lo_slope, hi, strips.hi_slope), first, count, run)
    return pieces.take(count > 0)


def parts(pieces: StripPieces, size: int) -> list[StripPieces]:
    """The pieces in groups of at most size."""
    return [pieces.take(slice(a, a + size)) for a in range(0, len(pieces.run), size)]


def join(
    pieces: StripPieces, q: Runs, k: Runs, pairs: tuple[Array, Array], counts: CellCounts
) -> None:
    """Count piece pairs[0][n] against key run pairs[1][n], for every n."""
    index, run = pairs
    lines, first, rows, q_run = pieces.take(index)
    lo, lo_slope, hi, hi_slope = lines
    stride = np.where(k.size[run] == 1, q.stride[q_run], k.stride[run])
    lo, hi = -((k.start[run] - lo) // stride), -((k.start[run] - hi) // stride)
    keys = k.size[run]
    # the rows that see some key: lo' < hi', lo' < keys and 0 < hi', each an interval
    start, stop = first, first + rows
    start = np.where(hi_slope > lo_slope, np.maximum(start, lo - hi + 1), start)
    stop = np.where(hi_slope < lo_slope, np.minimum(stop, hi - lo), stop)
    start = np.where(hi_slope == 1, np.maximum(start, 1 - hi), start)
    stop = np.where(lo_slope == 1, np.minimum(stop, keys - lo), stop)
    is_empty = (hi_slope == lo_slope) & (lo >= hi)
    is_empty |= ((lo_slope == 0) & (lo >= keys)) | ((hi_slope == 0) & (hi <= 0))
    nonempty = np.flatnonzero((start < stop) & ~is_empty)
    start, stop, run, q_run, keys = (x[nonempty] for x in (start, stop, run, q_run, keys))
    lo, lo_slope, hi, hi_slope = (x[nonempty] for x in (lo, lo_slope, hi, hi_slope))
    pair = q.shard[q_run] * counts.num_k_shards + k.shard[run]
    area = clipped((lo, lo_slope, hi, hi_slope), start, stop - start, 0, keys)
    np.add.at(counts.area, pair, area)
    counts.add(0, pair, q.offset[q_run] + start, q.offset[q_run] + stop)
    k_start = np.maximum(lo + lo_slope * start, 0)
    k_stop = np.minimum(hi + hi_slope * (stop - 1), keys)
    counts.add(1, pair, k.offset[run] + k_start, k.offset[run] + k_stop)


def join_blocks(pieces: StripPieces, q: Runs, k: Runs, counts: CellCounts) -> None:
    """Count pieces against runs of neighbouring keys.

    Runs that a line crosses are counted one by one. Runs between the lines, whose keys are all seen
    by every row of the piece, are counted together.
    """
    (lo, lo_slope, hi, hi_slope), first, rows, _ = pieces
    last, stops = first + rows - 1, k.start + k.size
    first_touched = np.searchsorted(stops, lo + lo_slope * first, "right")
    after_last = np.maximum(np.searchsorted(k.start, hi + hi_slope * last, "left"), first_touched)
    full = np.clip(
        np.searchsorted(k.start, lo + lo_slope * last, "left"), first_touched, after_last
    )
    full_end = np.searchsorted(stops, hi + hi_slope * first, "right")
    full_end = np.clip(full_end, full, after_last)
    full_end = np.where(full_end - full <= FEW_RUNS, full, full_end)
    for first_run, end_run in ((first_touched, full), (full_end, after_last)):
        join(pieces, q, k, expand(first_run, end_run), counts)
    with_full_runs = np.flatnonzero(full_end > full)
    if len(with_full_runs):
        pieces = pieces.take(with_full_runs)
        full_runs = (full[with_full_runs], full_end[with_full_runs])
        shard, start = q.shard[pieces.run], q.offset[pieces.run] + pieces.first
        _full_keys(shard, pieces.rows, full_runs, k, counts)
        _full_rows(shard, (start, start + pieces.rows), full_runs, k, counts)


def _full_keys(
    shard: Array, rows: Array, run_bounds: tuple[Array, Array], k: Runs, counts: CellCounts
) -> None:
    """Count areas and key rows where query rows see whole runs of keys.

    Args:
        shard, rows: query shard of each piece, and its number of rows.
        run_bounds: (first, stop) run of keys that all of a piece's rows see.
        k: all runs of keys.
        counts: is added to.
    """
    width = len(k.start) + 1
    height = max(1, AT_ONCE // width)
    for top in range(0, counts.num_q_shards, height):
        pieces_near = np.flatnonzero((shard >= top) & (shard < top + height))
        if not len(pieces_near):
            continue
        marks = np.zeros(height * width, np.int64)
        row_starts = (shard[pieces_near] - top) * width
        np.add.at(marks, row_starts + run_bounds[0][pieces_near], rows[pieces_near])
        np.subtract.at(marks, row_starts + run_bounds[1][pieces_near], rows[pieces_near])
        num_rows = np.cumsum(marks.reshape(height, width), axis=1)[:, :-1]
        i, run = np.nonzero(num_rows)
        pair = (i + top) * counts.num_k_shards + k.shard[run]
        np.add.at(counts.area, pair, num_rows[i, run] * k.size[run])
        counts.add(1, pair, k.offset[run], k.offset[run] + k.size[run])


def _full_rows(
    shard: Array,
    rows: tuple[Array, Array],
    run_bounds: tuple[Array, Array],
    k: Runs,
    counts: CellCounts,
) -> None:
    """Note the query rows that see whole runs of keys.

    Args:
        shard: query shard of each piece.
        rows: (first, stop) local row of each piece.
        run_bounds: (first, stop) run of keys that all of a piece's rows see.
        k: all runs of keys.
        counts: is added to.
    """
    width = max(1, AT_ONCE // (len(k.start) + 1))
    for first_shard in range(0, counts.num_k_shards, width):
        columns = min(width, counts.num_k_shards - first_shard)
        runs_here = np.flatnonzero((k.shard >= first_shard) & (k.shard < first_shard + columns))
        runs_before = np.zeros(
            (len(k.start) + 1, columns), np.int32
        )  # runs of a key shard up to here
        runs_before[runs_here + 1, k.shard[runs_here] - first_shard] = 1
        np.cumsum(runs_before, axis=0, out=runs_before)
        height = max(1, AT_ONCE // columns)
        for a in range(0, len(shard), height):
            group = slice(a, a + height)
            piece, j = np.nonzero(
                runs_before[run_bounds[1][group]] > runs_before[run_bounds[0][group]]
            )
            pair = shard[group][piece] * counts.num_k_shards + j + first_shard
            counts.add(0, pair, rows[0][group][piece], rows[1][group][piece])


def merged(pair: Array, start: Array, stop: Array) -> PairRows:
    """Rows of the same pair that overlap or touch, joined; sorted by pair, then start."""
    if not len(pair):
        return pair, start, stop
    order = np.lexsort((start, pair))
    pair, start, stop = pair[order], start[order], stop[order]
    pair_stride = stop.max() + 1  # moves every pair's ranges past the pair before
    reach = np.maximum.accumulate(pair * pair_stride + stop)
    first = np.append(True, pair[1:] * pair_stride + start[1:] > reach[:-1])
    last = np.append(first[1:], True)
    return pair[first], start[first], (reach - pair * pair_stride)[last]
